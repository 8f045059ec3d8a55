"""One measurement in a process of its own: `python -m bench.job '{"kind": ..., ...}'`.

Progress goes to standard output, a JSON line each; the result into the file that is named.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from bench.records import settings
from bench.workloads import WORKLOADS, Workload


def chosen(job: dict[str, Any]) -> Workload:
    """The workload of a job, in the size that was asked for."""
    workload = WORKLOADS[job["workload"]]
    return workload.small() if job["small"] else workload


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The result of a job."""
    for name, value in settings(job["kind"]).items():
        assert os.environ.get(name) == value, f"{name}={value} must be set before torch is loaded"
    import torch

    from bench import memory, startup, timing

    torch.set_num_threads(job["threads"])

    def told(done: float, doing: str) -> None:
        print(json.dumps({"done": done, "doing": doing}), flush=True)

    if job["kind"] == "startup":
        return startup.measure(2 if job["small"] else 7, told)
    workload = chosen(job)
    if job["kind"] == "memory":
        entry = next(e for e in workload.entries if e.name == job["entry"])
        return memory.measure(workload, entry, told)
    return timing.Run(workload, told).measure()


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    Path(job["result"]).write_text(json.dumps(run(job)))
