"""Where it was measured, and records as JSON files."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import hotrow
from benchmarks.workload import Record
from hotrow.inputs import files

ROOT = Path(__file__).parents[1]  # of the repository, where this is run from one
# Huge pages for torch, and for everybody else (JAX's dense step takes two thirds of its time with
# them); and glibc keeps what a step frees for the next one, up to 64 MB a tensor: whether it does
# so by itself depends on the order of the last two.
SETTINGS = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
PACKAGES = ("hotrow", "torch", "numba", "numpy", "fbgemm-gpu-cpu", "jax", "optax")


def environment(threads: int) -> dict[str, Any]:
    """The commit, the versions and the machine."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(ROOT),
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in PACKAGES},
        "cpu": _line("/proc/cpuinfo", "model name") or platform.processor(),
        "cpu_family_and_model": f"{_line('/proc/cpuinfo', 'cpu family')}, "
        f"{_line('/proc/cpuinfo', 'model')}",
        "cores": os.cpu_count(),
        "memory": _line("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
        "threads": threads,
        "transparent_hugepage": _text("/sys/kernel/mm/transparent_hugepage/enabled"),
        "settings": SETTINGS,
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def write(record: Record, name: str, folder: Path) -> Path:
    """Write a record beside its place, then rename: a reader sees the old one or the new."""
    path = folder / f"{name}.json"
    files.write_text(path, json.dumps(record, indent=1) + "\n")
    return path


def read(folder: Path) -> dict[str, Record]:
    """All records of a folder by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def commit(root: Path) -> str:
    """Of a working tree of hotrow's; of an installed hotrow, its version."""
    if not (root / "src" / "hotrow" / "bench").is_dir():
        return f"none: hotrow {hotrow.__version__}, installed"

    def git(*command: str) -> str:
        try:
            done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    # What the run itself changes, or is made from the records.
    outside = ("--", ":!benchmarks/records", ":!docs", ":!README*.md")
    changed = git("status", "--porcelain", *outside)
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + " with changes" * bool(changed)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _line(path: str, key: str) -> str:
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""
