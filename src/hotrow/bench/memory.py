"""The peak memory of a step (Linux with glibc only), and how much memory the peers need.

The peak is of the process's resident memory during the step (VmHWM, reset just before by writing 5
to /proc/self/clear_refs), less what is resident between steps, when gradients are released.
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
# What `mallopt` sets, and the variables that set it for the whole process.
THRESHOLDS = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1}
RETURN_BYTES = 128 << 10  # what is larger goes back to the system when it is freed


def is_supported() -> bool:
    """Whether this system shows the peak, and its allocator can return memory at once."""
    try:
        CLEAR.write_text("5")
        return bool(ctypes.CDLL(None).mallopt and ctypes.CDLL(None).malloc_trim)
    except (OSError, AttributeError):
        return False


@contextmanager
def return_freed_memory() -> Iterator[None]:
    """Return freed memory to the system at once, which is not done while time is measured."""
    libc = ctypes.CDLL(None)
    for option in THRESHOLDS.values():
        libc.mallopt(option, RETURN_BYTES)
    try:
        yield
    finally:
        for name, option in THRESHOLDS.items():
            libc.mallopt(option, int(os.environ.get(name, RETURN_BYTES)))


def measure_peak(work: Callable[[], object]) -> int:
    """The most bytes that the work needs over what is in use when it begins."""
    with return_freed_memory():
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = resident_bytes("VmRSS")
        CLEAR.write_text("5")
        work()
        return resident_bytes("VmHWM") - before


def make_state_resident(peer: Peer) -> None:
    """Write to all of the state: zeros that were never written to may not be resident."""
    for state in peer.state():
        state.view(-1)[::PAGE_FLOATS].add_(0)


def resident_bytes(field: str, status: str | None = None) -> int:
    """VmRSS (now) or VmHWM (the peak) of this process, or of the one with this status."""
    for line in (status or STATUS.read_text()).splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no {field}")


class MemoryBudget:
    """Free memory for all peers: each keeps table and state, one at a time makes a step."""

    def __init__(self, free_bytes: float) -> None:
        self.free_bytes, self.step_bytes = free_bytes, 0.0

    def check(self, table_and_state_bytes: float, step_bytes: float) -> None:
        """Raise if there is not enough for one more peer.

        Raises:
            MemoryError: with what it needs and what is left.
        """
        # The largest step of the others needs its memory as well.
        left = self.free_bytes - max(self.step_bytes - step_bytes, 0.0)
        if table_and_state_bytes + step_bytes > left:
            needed = format_size(table_and_state_bytes + step_bytes)
            raise MemoryError(f"it needs about {needed}, but {format_size(max(left, 0))} are free")

    def reserve(self, table_and_state_bytes: float, step_bytes: float) -> None:
        """Set memory aside for one more peer."""
        self.free_bytes -= table_and_state_bytes
        self.step_bytes = max(self.step_bytes, step_bytes)
