"""Terminal output, progress bars and exit codes."""

from __future__ import annotations

import ctypes
import io
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hotrow.errors import HotrowError

EQUAL, DIFFERENT, UNUSABLE, BROKEN = 0, 1, 2, 3
PROGRESS_DELAY = 2.0  # seconds
_STDOUT, _STDERR = 1, 2
_MIN_COLUMNS, _MAX_COLUMNS = 40, 240  # limits for the width of a report


def check_output_is_open() -> None:
    """Raise `HotrowError` if standard output is closed; call this before a command starts."""
    if sys.stdout is None:
        raise HotrowError("standard output is closed", fix="redirect it to a file or to /dev/null")


def write_output(text: str) -> None:
    """Write to standard output; escape unencodable characters, and ignore a closed pipe.

    Raises:
        OSError: standard output can't be written.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Redirect stdout; otherwise, Python's flush at exit fails and changes the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def redirect_output() -> Iterator[None]:
    """Send to standard error what other code writes to standard output, also C code and processes.

    The caller has checked that standard output is open.
    """
    with ExitStack() as stack:
        errors = sys.stderr
        if errors is None:  # it is closed, and another file may have its descriptor
            errors = stack.enter_context(open(os.devnull, "w"))
            if not _is_open(_STDERR):  # else, the copy of standard output would get this number
                os.dup2(errors.fileno(), _STDERR)
        stack.enter_context(redirect_stdout(errors))
        with suppress(OSError):  # without descriptors, only Python's output is redirected
            original = os.dup(_STDOUT)
            stack.callback(os.close, original)
            os.dup2(errors.fileno(), _STDOUT)
            stack.callback(os.dup2, original, _STDOUT)
            stack.callback(_flush_output)
        yield


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _flush_output() -> None:
    if sys.__stdout__ is not None:
        sys.__stdout__.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)


def _make_console(*, stderr: bool = False) -> Console:
    """Return a console whose width is within the limits.

    Without limits, rich would use any value of the environment variables COLUMNS and LINES. It
    would print nothing if the width is 0, and fail for digits that `int` doesn't accept.
    """
    columns, lines = shutil.get_terminal_size()
    width = min(max(columns, _MIN_COLUMNS), _MAX_COLUMNS)
    return Console(stderr=stderr, highlight=stderr, width=width, height=lines)


def render(show: Callable[[Console], None]) -> str:
    """Return the text that `show` prints to a console."""
    console = _make_console()
    with console.capture() as found:
        show(console)
    return "\n".join(line.rstrip() for line in found.get().rstrip().split("\n"))


@contextmanager
def show_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar after two seconds, if standard error is a terminal."""
    console = _make_console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} of {task.total}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,  # the bar may start and end while other code has redirected them
        redirect_stderr=False,
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
            timer.join()  # the timer may just be starting the bar
            bar.stop()
