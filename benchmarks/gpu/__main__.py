"""Run all checks and measurements, and write the records."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import checks, times

RECORDS = Path(__file__).parents[1] / "records" / "gpu"


def describe_machine() -> dict[str, Any]:
    """Return the date, the GPU and the versions."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "capability": f"sm_{properties.major}{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def run_checks() -> dict[str, str]:
    """Run all checks; map the name of each to "passed", to its error, or to why it did not run."""
    results = {}
    for check in checks.CHECKS:
        begin = time.perf_counter()
        try:
            outcome = check() or "passed"
        except checks.NotApplicableError as reason:
            outcome = f"not run: {reason}"
        except Exception as error:
            traceback.print_exc()
            outcome = f"FAILED: {type(error).__name__}: {error}"
        results[check.__name__] = outcome
        print(f"{check.__name__}: {outcome} ({time.perf_counter() - begin:.1f} s)", flush=True)
    return results


def main() -> int:
    """Write the records; return 1 if a check failed, or 2 if there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--only-checks", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch finds no CUDA device, so nothing was checked", file=sys.stderr)
        return 2
    machine = describe_machine()
    print(json.dumps(machine), flush=True)
    arguments.records.mkdir(parents=True, exist_ok=True)
    results = run_checks()
    (arguments.records / "checks.json").write_text(
        json.dumps({"machine": machine, "checks": results}, indent=2) + "\n"
    )
    if not arguments.only_checks:
        for workload in times.WORKLOADS:
            record = times.measure(workload)
            print(json.dumps(record), flush=True)
            (arguments.records / f"{workload.name}.json").write_text(
                json.dumps({"machine": machine, **record}, indent=2) + "\n"
            )
    return int(any(result.startswith("FAILED") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
