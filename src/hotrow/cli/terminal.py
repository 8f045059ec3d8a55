"""What is printed, whoever reads it, and what a command's exit code says."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

EQUAL, DIFFERENT, UNUSABLE, BROKEN = 0, 1, 2, 3
PATIENCE = 2.0  # seconds before progress is shown


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


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error, if that is a terminal, from the second second on."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} of {task.total}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task("starting", total=1)
    timer = threading.Timer(PATIENCE, bar.start)
    timer.daemon = True
    if console.is_terminal:
        timer.start()
    try:
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )
    finally:
        timer.cancel()
        if console.is_terminal:
            timer.join()  # a bar that is just being started can be stopped only then
            bar.stop()
