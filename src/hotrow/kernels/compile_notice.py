"""Show a message in a terminal while a kernel compiles for the first time."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

DELAY_SECONDS = 1.0  # longer than it takes to load a compiled kernel from disk

_compiled_kernels: set[Hashable] = set()


@contextmanager
def show_compile_notice(kernel: Hashable, name: str) -> Iterator[None]:
    """Show a message if the first call to `kernel`, which compiles or loads it, is slow."""
    if kernel in _compiled_kernels:
        yield
        return
    begin = time.monotonic()
    timer = threading.Timer(DELAY_SECONDS, _print_notice, [name])
    timer.daemon = True
    if sys.stderr is not None and sys.stderr.isatty():
        timer.start()
    try:
        yield
        _compiled_kernels.add(kernel)
        if time.monotonic() - begin > DELAY_SECONDS:
            gc.collect()  # the compiler leaves reference cycles that keep its arguments alive
    finally:
        timer.cancel()


def _print_notice(name: str) -> None:
    print(
        f"{name}: compiling once for this machine (a few seconds)",
        file=sys.stderr,
        flush=True,
    )
