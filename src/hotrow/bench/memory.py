"""The peak memory of a step (Linux with glibc only), and the memory that peers need.

The peak memory of a step is the process's peak resident memory during the step minus its resident
memory between steps, when no gradients exist. Linux reports the process's peak as VmHWM. Writing 5
to /proc/self/clear_refs resets this peak.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hotrow.bench.peers import Peer
from hotrow.inputs.text import format_size

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PAGE_FLOATS = 1024
# Environment variables and the `mallopt` options that they set.
THRESHOLDS = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1}
RETURN_BYTES = 128 << 10  # larger blocks are returned to the system when freed


def is_supported() -> bool:
    """Return whether the system reports peak memory and can take back freed memory immediately."""
    try:
        CLEAR.write_text("5")
        return bool(ctypes.CDLL(None).mallopt and ctypes.CDLL(None).malloc_trim)
    except (OSError, AttributeError):
        return False


@contextmanager
def return_freed_memory() -> Iterator[None]:
    """Return freed memory to the system immediately. This slows down steps, so don't time them."""
    libc = ctypes.CDLL(None)
    for option in THRESHOLDS.values():
        libc.mallopt(option, RETURN_BYTES)
    try:
        yield
    finally:
        for name, option in THRESHOLDS.items():
            libc.mallopt(option, int(os.environ.get(name, RETURN_BYTES)))


def measure_peak(work: Callable[[], object]) -> int:
    """Return the number of bytes that `work` adds to the resident memory at its peak."""
    with return_freed_memory():
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = resident_bytes("VmRSS")
        CLEAR.write_text("5")
        work()
        return resident_bytes("VmHWM") - before


def make_state_resident(peer: Peer) -> None:
    """Write to every page of the state, because unwritten zeros may not be resident."""
    for state in peer.state():
        state.view(-1)[::PAGE_FLOATS].add_(0)


def resident_bytes(field: str, status: str | None = None) -> int:
    """Read VmRSS (current) or VmHWM (peak) in bytes, by default from this process's status."""
    for line in (status or STATUS.read_text()).splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no {field}")


class MemoryBudget:
    """The free memory that all peers share.

    Each peer keeps its table and state in memory. Only one peer at a time runs a step.
    """

    def __init__(self, free_bytes: float) -> None:
        self.free_bytes, self.step_bytes = free_bytes, 0.0

    def check(self, table_and_state_bytes: float, step_bytes: float) -> None:
        """Raise an error unless another peer fits in memory.

        Raises:
            MemoryError: the peer does not fit; the message says how much memory it needs and how
                much is free.
        """
        # Leave room for the largest step of the other peers.
        left = self.free_bytes - max(self.step_bytes - step_bytes, 0.0)
        if table_and_state_bytes + step_bytes > left:
            needed = format_size(table_and_state_bytes + step_bytes)
            raise MemoryError(
                f"the peer needs about {needed}, but only {format_size(max(left, 0))} is free"
            )

    def reserve(self, table_and_state_bytes: float, step_bytes: float) -> None:
        """Reserve memory for another peer."""
        self.free_bytes -= table_and_state_bytes
        self.step_bytes = max(self.step_bytes, step_bytes)
