"""Convert text to ids with a tokenizer.json file; the tokenizer runs in another process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hotrow.errors import HotrowError
from hotrow.inputs import tokenizer_process
from hotrow.inputs.regular_file import read_regular
from hotrow.inputs.text import elide, escape_unprintable, format_size

MAX_FILE_BYTES = 256_000_000
_MESSAGE_COLUMNS = 300  # maximum width of the tokenizers library's message


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text, as ids and as strings."""

    ids: list[int]
    texts: tuple[str, ...]


@contextmanager
def open_tokenizer(path: str | Path, rows: int | None, table: str) -> Iterator[Tokenizer]:
    """Read a tokenizer.json file. If `rows` isn't None, check that the table has a row for each id.

    Truncation and padding are turned off, so the tokens represent the whole text and nothing else.

    Raises:
        HotrowError: the file can't be read or isn't a tokenizer, an id is out of range, or the
            tokenizer fails or exceeds its limits. The tokenizer's methods can raise it too.
    """
    content = read_regular(path, "the tokenizer", MAX_FILE_BYTES)
    # `-P` keeps Python from adding the script's folder to its search path. A file in that folder
    # could shadow a library.
    with subprocess.Popen(
        [sys.executable, "-P", tokenizer_process.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # hides the message that a panic in Rust code prints
    ) as process:
        try:
            tokenizer = Tokenizer(path, process, content)
            if rows is not None and tokenizer.largest_id >= rows:
                raise HotrowError(
                    f"{path} has ids up to {tokenizer.largest_id:,}, but {table} has {rows:,} rows "
                    f"(valid ids: 0..{rows - 1:,})",
                    fix="use a table and a tokenizer from the same model",
                )
            yield tokenizer
        finally:
            process.kill()
            assert process.stdin is not None
            with suppress(OSError):  # closing flushes the buffer, which fails if the process ended
                process.stdin.close()


class Tokenizer:
    """A tokenizer in another process.

    Attributes:
        largest_id: the largest id in the vocabulary, or -1 if the vocabulary is empty.
    """

    def __init__(self, path: str | Path, process: subprocess.Popen[bytes], content: bytes) -> None:
        self._path = path
        self._process = process
        reply = self._send(
            content,
            "cannot be read as a tokenizer",
            "pass a tokenizer.json file written by the tokenizers library",
        )
        self.largest_id: int = reply["largest_id"]

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a text, including any special tokens that the tokenizer adds."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # invalid UTF-8 in arguments becomes surrogates
            raise HotrowError(
                f"the text is not valid Unicode: character {error.start:,} is "
                f"{text[error.start]!r}",
                fix="pass UTF-8 text",
            ) from None
        reply = self._ask({"text": text})
        return Tokens(reply["ids"], tuple(reply["tokens"]))

    def token_texts(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Return the token of each id, or "?" for an id that is not in the vocabulary."""
        return tuple(self._ask({"ids": list(ids)})["tokens"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._send(
            json.dumps(request).encode(),
            "cannot convert the text to ids",
            "does the tokenizer work in the tokenizers library?",
        )

    def _send(self, message: bytes, problem: str, fix: str) -> dict[str, Any]:
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        try:
            tokenizer_process.write_message(cast(Any, requests), message)
            answer = tokenizer_process.read_message(cast(Any, replies))
        except OSError:  # the process ended before it read the message
            answer = None
        if answer is None:
            why = _describe_end(self._process.wait())
            raise HotrowError(f"{self._path} {problem}: {why}", fix=fix)
        reply: dict[str, Any] = json.loads(answer)
        if "error" in reply:
            why = elide(escape_unprintable(" ".join(reply["error"].split())), _MESSAGE_COLUMNS)
            raise HotrowError(f"{self._path} {problem} ({why})", fix=fix)
        return reply


def _describe_end(code: int) -> str:
    """Describe why the process ended without a reply."""
    if os.name == "posix" and code == -signal.SIGXCPU:
        return f"it takes more than {tokenizer_process.CPU_SECONDS} seconds"
    return (
        "the tokenizers library crashes, perhaps because it needs more than "
        f"{format_size(tokenizer_process.MEMORY_BYTES)} of memory"
    )
