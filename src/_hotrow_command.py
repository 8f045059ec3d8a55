"""The entry point of the `hotrow` command.

This file is outside the hotrow package, because importing any module of the package first imports
torch. That takes seconds, and Ctrl-C during this time would print the traceback of an import.
"""

from __future__ import annotations

import os
import signal

_INTERRUPTED = 130  # the exit code after Ctrl-C


def main() -> None:
    """Run the command line."""
    # If Ctrl-C is ignored, as in the background of a shell script, it stays ignored.
    is_handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_handled:
        signal.signal(signal.SIGINT, _end)
    from hotrow.cli.main import main as run

    if is_handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _end(*_: object) -> None:
    """End the process at once: an exception would pass through half-imported libraries."""
    os._exit(_INTERRUPTED)
