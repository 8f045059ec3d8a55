"""`hotrow learn`: open the interactive lesson in the browser."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor

from hotrow import lesson
from hotrow.cli import terminal
from hotrow.cli.options import TableFile, TensorName, TokenizerFile
from hotrow.errors import HotrowError
from hotrow.inputs import files
from hotrow.inputs.regular_file import open_regular
from hotrow.inputs.sparse_file import check_not_sparse
from hotrow.inputs.text import escape_unprintable
from hotrow.inputs.tokenizer import open_tokenizer

# A line with only \b keeps the line breaks of the following paragraph.
LEARN_HELP = """Open the interactive lesson: why an embedding is a linear layer over one-hot input.

The lesson is one HTML file in English and Chinese. It works offline and makes no network
requests. --text opens it with your own tokens, and --table with your own rows.

\b
Examples:
  hotrow learn
  hotrow learn --lang zh-CN
  hotrow learn --save lesson.html
  hotrow learn --text "the same numbers" --tokenizer tokenizer.json
  hotrow learn --table model.safetensors --tensor wte.weight \\
      --text "the same numbers" --tokenizer tokenizer.json
  hotrow compare --json > times.json
  hotrow learn --times times.json

\b
Exit code:
  0 page written, 2 invalid input, 3 internal error
"""


def learn_command(
    lang: Annotated[
        str | None,
        typer.Option(
            help="Open the lesson in this language: en or zh-CN. Default: the browser's language.",
            metavar="LANG",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="Open the lesson with the tokens of this text.", metavar="TEXT"),
    ] = None,
    tokenizer: TokenizerFile = None,
    table: TableFile = None,
    tensor: TensorName = None,
    times: Annotated[
        str | None,
        typer.Option(
            help="Chart the times in this file, written by hotrow compare --json, instead of those "
            "saved by hotrow bench.",
            metavar="FILE",
        ),
    ] = None,
    save: Annotated[
        str | None,
        typer.Option(
            help="Write the page to this file instead of opening it. You can share or host "
            "the file.",
            metavar="FILE",
        ),
    ] = None,
    print_path: Annotated[
        bool,
        typer.Option("--print-path", help="Write the page and print only its path; don't open it."),
    ] = False,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Write the page, but don't open it.")
    ] = False,
) -> None:
    """Build the page, write it to a file, and open it."""
    if save is not None:
        files.check_writable(save, inputs=(table, tokenizer, times))
    excerpt = _read_excerpt(text, tokenizer, table, tensor)
    timings = lesson.times.load_times() if times is None else _read_timings(times)
    page = lesson.build_page(lang, excerpt, timings, local_links=save is None)
    if save is None:
        path = lesson.write_page(page, "learn.html" if excerpt is None else "learn-own.html")
    else:
        path = Path(save)
        files.write_text(path, page)
    if print_path:
        terminal.write_output(str(path))
        return
    if save is not None:
        message = "Saved the lesson"
    else:
        opened = not no_open and webbrowser.open(path.as_uri())
        message = "Opened the lesson" if opened else "Open the lesson in a browser"
    terminal.write_output(f"{message}: {escape_unprintable(str(path))}")


def _read_excerpt(
    text: str | None, tokenizer: str | None, table: str | None, tensor: str | None
) -> lesson.Excerpt | None:
    """Return an excerpt of the user's text, table or both; None if neither is given.

    These options can be combined as in `hotrow compare`.
    """
    if text is not None and tokenizer is None:
        raise HotrowError("--text needs a tokenizer", fix="add --tokenizer tokenizer.json")
    if tensor is not None and table is None:
        raise HotrowError("--tensor needs a table", fix="add --table model.safetensors")
    if tokenizer is not None and text is None and table is None:
        raise HotrowError("--tokenizer needs text or a table", fix="add --text or --table")
    if text is None and table is None:
        return None
    name, values = (None, None) if table is None else _read_table(table, tensor)
    title = "" if table is None else f"{name} in {Path(table).name}"
    if tokenizer is None:
        return lesson.user_excerpt(None, values, title=title)
    rows = None if values is None else len(values)
    with open_tokenizer(tokenizer, rows, f"the table {name}") as reader:
        return lesson.user_excerpt(
            None if text is None else reader.encode(text),
            values,
            row_count=reader.largest_id + 1,
            token_texts=reader.token_texts,
            title=title,
        )


def _read_table(path: str, tensor: str | None) -> tuple[str, Tensor]:
    with open_regular(path, "the table") as descriptor:
        check_not_sparse(descriptor, path)  # the excerpt reads all values of the table
    return files.read_table(path, tensor)


def _read_timings(path: str) -> list[lesson.Timing]:
    """Read the times from the output of `hotrow compare --json`."""
    text = files.read_text(path, files.MAX_JSON_BYTES)
    try:
        return lesson.times.from_comparisons(json.loads(text))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = f": {error.problem}" if isinstance(error, HotrowError) else ""
        raise HotrowError(
            f"--times {path} is not the output of hotrow compare --json{why}",
            fix="hotrow compare --json > times.json",
        ) from None
