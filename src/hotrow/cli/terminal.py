"""Terminal output, progress bars and exit codes."""

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
PROGRESS_DELAY = 2.0  # seconds before progress is shown


def write_output(text: str) -> None:
    """Write to standard output, whatever its encoding; a pipe may be closed before the end."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The exit code stays; Python's flush at exit must not meet the broken pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def render(show: Callable[[Console], None]) -> str:
    """The text that `show` prints to a console."""
    console = Console(highlight=False)
    with console.capture() as found:
        show(console)
    return "\n".join(line.rstrip() for line in found.get().rstrip().split("\n"))


@contextmanager
def show_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on standard error, if that is a terminal, after two seconds."""
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
    timer = threading.Timer(PROGRESS_DELAY, bar.start)
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
