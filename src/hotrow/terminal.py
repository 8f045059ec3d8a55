"""What is printed, whoever reads it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

from rich.console import Console


def put(text: str) -> None:
    """To standard output, whatever its encoding; a pipe's reader may leave before the end."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The verdict stands; Python's own flush at exit must not meet the broken pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def captured(show: Callable[[Console], None]) -> str:
    """What `show` prints, as text."""
    console = Console(highlight=False)
    with console.capture() as found:
        show(console)
    return "\n".join(line.rstrip() for line in found.get().rstrip().split("\n"))
