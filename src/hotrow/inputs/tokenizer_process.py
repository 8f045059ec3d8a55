"""Run a tokenizer in a separate process, with limits on memory and processor time.

A tokenizer file can crash the tokenizers library, make it run forever, or make it use all memory:
its regular expressions may backtrack, and its normalizers may make the text much longer.
tokenizer.py starts this file as a script. The script imports nothing from hotrow, so it starts in a
tenth of a second.

Each message starts with the length of its content, stored in 8 bytes. The first message contains
the tokenizer file, and all others contain JSON.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from typing import Any, BinaryIO

CPU_SECONDS = 60
MEMORY_BYTES = 4_000_000_000
# hotrow itself needs about 8 bytes of memory for each byte of a reply. Without limits on replies, a
# tokenizer could use gigabytes there. Tokenizers of real models reply with up to 15 bytes for each
# byte of text. With 4 GB of memory, they can convert texts of up to 16 MB.
_MAX_REPLY_BYTES = 128_000_000
_MIN_REPLY_LIMIT = 1_000_000
_REPLY_BYTES_PER_REQUEST_BYTE = 64
_LENGTH = struct.Struct(">Q")


def write_message(file: BinaryIO, message: bytes) -> None:
    """Write a message and flush the file."""
    file.write(_LENGTH.pack(len(message)))
    file.write(message)
    file.flush()


def read_message(file: BinaryIO) -> bytes | None:
    """Read a message; return None if the other process has closed the pipe."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    message = file.read(length)
    return message if len(message) == length else None


def _limit_resources() -> None:
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return
    for kind, limit in (
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        try:
            # Lower only the soft limit: at the hard limit on processor time, the system sends
            # SIGKILL, which hides the cause.
            resource.setrlimit(kind, (soft, hard))
        except (ValueError, OSError):  # macOS has no limit on memory
            continue


def _answer(tokenizer: Any, request: dict[str, Any]) -> dict[str, Any]:
    if "text" in request:
        encoding = tokenizer.encode(request["text"])
        return {"ids": encoding.ids, "tokens": encoding.tokens}
    # Ids outside 0..2**32 - 1 can't be in the vocabulary, and the library rejects them.
    tokens = [tokenizer.id_to_token(id) if 0 <= id < 2**32 else None for id in request["ids"]]
    return {"tokens": ["?" if token is None else token for token in tokens]}


def _load(content: bytes) -> tuple[Any, dict[str, Any]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, {"largest_id": max(tokenizer.get_vocab().values(), default=-1)}


def _encode(reply: dict[str, Any], request: bytes) -> bytes:
    """Encode the reply to a request; raise an error if it is too large for hotrow's process."""
    content = json.dumps(reply, ensure_ascii=False, separators=(",", ":")).encode()
    relative = max(_MIN_REPLY_LIMIT, _REPLY_BYTES_PER_REQUEST_BYTE * len(request))
    limit = min(relative, _MAX_REPLY_BYTES)
    if len(content) > limit:
        raise ValueError(
            f"the tokens take {len(content):,} bytes, but the limit for {len(request):,} bytes of "
            f"input is {limit:,} bytes"
        )
    return content


def _main() -> None:
    _limit_resources()
    requests = sys.stdin.buffer
    # Nothing that the library prints may end up among the replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    tokenizer = None
    while (message := read_message(requests)) is not None:
        try:
            if tokenizer is None:
                tokenizer, reply = _load(message)
            else:
                reply = _answer(tokenizer, json.loads(message))
            content = _encode(reply, message)
        except KeyboardInterrupt:
            raise
        # A panic in Rust code doesn't derive from Exception, and its class can't be imported.
        except BaseException as error:
            content = json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()
        write_message(replies, content)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _main()
