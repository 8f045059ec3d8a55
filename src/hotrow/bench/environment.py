"""Settings that make every peer as fast as possible, and descriptions of the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# The first two settings enable huge pages in torch and in other libraries. Huge pages reduce the
# time of JAX's dense step by a third. The last two settings make glibc keep the memory of
# freed tensors, up to 64 MB each, for the next step.
SETTINGS = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
PACKAGES = ("hotrow", "torch", "numba", "numpy")


def describe_environment(threads: int, packages: Iterable[str] = PACKAGES) -> dict[str, Any]:
    """Describe the package versions, the settings and the machine."""
    memory = _line("/proc/meminfo", "MemTotal").split()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in packages},
        "cpu": _line("/proc/cpuinfo", "model name") or platform.processor(),
        "cpu_family_and_model": f"{_line('/proc/cpuinfo', 'cpu family')}, "
        f"{_line('/proc/cpuinfo', 'model')}",
        "cores": os.cpu_count(),
        "memory_bytes": int(memory[0]) * 1024 if memory else None,
        "system": platform.platform(),
        "threads": threads,
        "transparent_hugepage": _text("/sys/kernel/mm/transparent_hugepage/enabled"),
        "settings": SETTINGS,
        "load_average_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


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
