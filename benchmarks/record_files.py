"""Read and write records as JSON files, and describe the commit and machine of a run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from hotrow.bench import environment
from hotrow.bench.workload import Record
from hotrow.inputs import files

ROOT = Path(__file__).parents[1]  # root of the repository
PACKAGES = (*environment.PACKAGES, "fbgemm-gpu-cpu", "jax", "optax")


def describe_environment(threads: int) -> dict[str, Any]:
    """Describe the commit, the package versions and the machine."""
    return {"commit": commit(), **environment.describe_environment(threads, PACKAGES)}


def write(record: Record, folder: Path) -> Path:
    """Write a record to a file named after its workload, and return the path."""
    path = folder / f"{record['workload']}.json"
    files.write_text(path, json.dumps(record, indent=1) + "\n")
    return path


def read(folder: Path) -> dict[str, Record]:
    """Return all records in a folder, keyed by the names of their workloads."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def commit() -> str:
    """Return the commit of the working tree, and whether there are uncommitted changes."""

    def git(*command: str) -> str:
        try:
            done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    # Ignore files that the run changes or that are generated from the records.
    outside = ("--", ":!benchmarks/records", ":!docs", ":!README*.md")
    changes = git("status", "--porcelain", *outside)
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + " with changes" * bool(changes)
