"""`hotrow disk`: check the folder of a table on disk."""

from __future__ import annotations

from typing import Annotated

import typer

from hotrow.cli import terminal
from hotrow.inputs.text import escape_unprintable

DISK_HELP = """\
Check a folder in which hotrow.disk stores a table.
"""

VERIFY_HELP = """\
Compare all files in a table's folder with their checksums.

The command reads the table and its optimizer state once. If a crash
interrupted a save, the command first finishes the save.

\b
Example:
  hotrow disk verify users

\b
Exit code:
  0 no damage found, 2 damaged or invalid folder, 3 internal error
"""

disk_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=DISK_HELP)


@disk_app.command("verify", help=VERIFY_HELP, short_help="Compare all files with their checksums.")
def verify_command(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="The table's folder.")],
) -> None:
    """Verify the folder and print the number of verified bytes; `run_app` reports any damage."""
    from hotrow import disk  # deferred, because the other commands don't need it

    size = disk.verify(folder)
    terminal.write_output(f"{escape_unprintable(folder)}: {size:,} bytes match their checksums")
