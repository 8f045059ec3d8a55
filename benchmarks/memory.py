"""The memory that a step needs for a while; Linux with glibc only.

Resident memory of the process: its peak during the step (VmHWM, set back just before by writing 5
to /proc/self/clear_refs), less what is resident between steps, when gradients are let go of.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers import Peer

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PAGE_FLOATS = 1024
# What `mallopt` sets, and by which variables it is set for the whole process.
THRESHOLDS = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1}
RETURNED = 128 << 10  # bytes; what is larger goes back to the system when it is freed


def is_seen() -> bool:
    """Whether this system shows the peak, and its allocator can be told to give memory back."""
    try:
        CLEAR.write_text("5")
        return bool(ctypes.CDLL(None).mallopt and ctypes.CDLL(None).malloc_trim)
    except (OSError, AttributeError):
        return False


@contextmanager
def giving_back() -> Iterator[None]:
    """Freed memory goes back to the system at once, which it does not while time is measured."""
    libc = ctypes.CDLL(None)
    for option in THRESHOLDS.values():
        libc.mallopt(option, RETURNED)
    try:
        yield
    finally:
        for name, option in THRESHOLDS.items():
            libc.mallopt(option, int(os.environ.get(name, RETURNED)))


def peak_of(work: Callable[[], object]) -> int:
    """Bytes that the work needs, at most, over what is in use when it begins."""
    with giving_back():
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = resident("VmRSS")
        CLEAR.write_text("5")
        work()
        return resident("VmHWM") - before


def touch(peer: Peer) -> None:
    """Make all of the state resident: zeros that were never written to may not be."""
    for state in peer.state():
        state.view(-1)[::PAGE_FLOATS].add_(0)


def resident(field: str, status: str | None = None) -> int:
    """Bytes of VmRSS (now) or VmHWM (the peak), of this process or of one with that status."""
    for line in (status or STATUS.read_text()).splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no {field}")
