"""Run a measurement in a child process, so that settings take effect before torch is loaded.

The child is `python -m hotrow.bench.process JOB`. It writes its progress to standard output as
JSON lines, and its result to a file named in the job.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from hotrow.bench.environment import SETTINGS
from hotrow.bench.workload import Record, ReportProgress


class JobError(Exception):
    """A child process ended without a result.

    Attributes:
        kind: the name of the exception's type; "" if the process died without an exception.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


def run_job(
    function: str, arguments: dict[str, Any], threads: int, report_progress: ReportProgress
) -> Record:
    """Call `module:function` with `arguments` and a progress callback in a child process.

    Raises:
        JobError: the child failed. The message is the exception's message, or the last line that
            the child wrote to standard error.
    """
    count = str(threads)
    environment = (
        os.environ
        | SETTINGS
        | {"OMP_NUM_THREADS": count, "NPROC": count}  # thread counts of torch and JAX
        | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path))
        }  # lets the child import modules from the same folders as this process
    )
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/errors", "w+") as errors:
        path = Path(folder) / "result"
        job = {"function": function, "arguments": arguments, "threads": threads, "path": str(path)}
        command = [sys.executable, "-P", "-m", "hotrow.bench.process", json.dumps(job)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith('{"progress"'):
                    report_progress(*json.loads(line)["progress"])
        if not path.exists():
            errors.seek(0)
            lines = errors.read().strip().splitlines()
            code = process.returncode
            ending = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise JobError(lines[-1] if lines else f"the process ended with {ending}")
        result: Record = json.loads(path.read_text())
        if "error" in result:
            raise JobError(result["error"], result["kind"])
        return result


def _run(job: dict[str, Any]) -> Record:
    """Run a job in the child process and return its result."""
    for name, value in SETTINGS.items():
        assert os.environ.get(name) == value, f"{name}={value} must be set before torch is loaded"
    torch.set_num_threads(job["threads"])

    def report_progress(share: float, activity: str) -> None:
        print(json.dumps({"progress": [share, activity]}), flush=True)

    module, _, function = job["function"].partition(":")
    call = getattr(importlib.import_module(module), function)
    result: Record = call(**job["arguments"], report_progress=report_progress)
    return result


def _main(job: dict[str, Any]) -> int:
    path = Path(job["path"])
    try:
        result = _run(job)
    except Exception as error:
        traceback.print_exc()
        kind = type(error).__name__
        path.write_text(json.dumps({"error": f"{kind}: {error}", "kind": kind}))
        return 1
    path.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(_main(json.loads(sys.argv[1])))
