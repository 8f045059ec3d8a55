"""A line for those who wait at a terminal while a kernel compiles."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

SECONDS = 1.0  # loading a compiled kernel from disk takes less

_done: set[Hashable] = set()


@contextmanager
def first_time(kernel: Hashable, name: str) -> Iterator[None]:
    """Around a call that compiles `kernel`, or finds it compiled; says so if it takes long."""
    if kernel in _done:
        yield
        return
    begin = time.monotonic()
    timer = threading.Timer(SECONDS, _say, [name])
    timer.daemon = True
    if sys.stderr is not None and sys.stderr.isatty():
        timer.start()
    try:
        yield
        _done.add(kernel)
        if time.monotonic() - begin > SECONDS:
            gc.collect()  # the compiler leaves cycles that hold the arrays it was called with
    finally:
        timer.cancel()


def _say(name: str) -> None:
    print(
        f"{name}: compiling for this machine, once; a few seconds",
        file=sys.stderr,
        flush=True,
    )
