"""A workload in a process of its own: `python -m benchmarks.job '{...}'`.

Progress goes to standard output, a JSON line each; the result into the file that is named.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.records import SETTINGS
from benchmarks.workload import Record
from benchmarks.workloads import chosen


def run(job: dict[str, Any]) -> Record:
    """The result of a job."""
    for name, value in SETTINGS.items():
        assert os.environ.get(name) == value, f"{name}={value} must be set before torch is loaded"
    import torch

    torch.set_num_threads(job["threads"])

    def told(done: float, doing: str) -> None:
        print(json.dumps({"done": done, "doing": doing}), flush=True)

    return chosen(job["workload"], job["small"], job["peers"]).run(told)


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    Path(job["result"]).write_text(json.dumps(run(job)))
