"""Read tables, texts and ids from files, and write text files. No file is ever unpickled."""

from __future__ import annotations

import difflib
import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.inputs.text import elide, escape_unprintable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Valid table dtypes, as safetensors names them.
_TABLE_DTYPES = ("F64", "F32", "F16", "BF16")
_MAX_LISTED = 40  # maximum number of candidates in an error message
_ID = re.compile("-?[0-9]{1,18}")  # 18 digits fit in an int64


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text, as ids and as strings."""

    ids: list[int]
    texts: tuple[str, ...]


def read_table(path: str | Path, tensor: str | None = None) -> tuple[str, Tensor]:
    """Return the name and values of one 2-D floating-point tensor in a safetensors file.

    The file is memory-mapped, so rows are read only when they are used. Other tensors are never
    read.

    Args:
        path: the safetensors file.
        tensor: the tensor's name; may be None if exactly one tensor in the file is a table.

    Raises:
        HotrowError: the file can't be read, it has no table with this name, or `tensor` is None and
            the file doesn't have exactly one table.
    """
    from safetensors import SafetensorError, safe_open

    path = _check_readable(path, "the table")
    _check_settled(path)
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            name = _choose_table(
                {key: (tuple(s.get_shape()), s.get_dtype()) for key, s in slices.items()},
                tensor,
                path,
            )
            return name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise HotrowError(
            f"{path} cannot be read as a safetensors file ({error})",
            fix="is the file complete? hotrow never opens pickled files (.pt, .bin); "
            "save the tensor with safetensors.torch.save_file",
        ) from None


def _check_settled(path: Path) -> None:
    """Raise `HotrowError` if the file is from a `hotrow.disk` folder and some rows are stale."""
    run = path.with_name("run.json")
    unfinished = path.with_name("journal").exists()
    if unfinished or (run.exists() and json.loads(run.read_bytes()).get("behind")):
        raise HotrowError(
            f"{path} is in a hotrow.disk folder, and some rows of its table are not up to date",
            fix="open the folder with hotrow.disk.open, then call store.table.settle() and "
            "store.save()",
        )


def _choose_table(
    tensors: dict[str, tuple[tuple[int, ...], str]], wanted: str | None, path: Path
) -> str:
    """Return the name of the tensor to read, or raise an error that lists the candidates."""
    tables = {
        name: shape
        for name, (shape, dtype) in tensors.items()
        if len(shape) == 2 and dtype in _TABLE_DTYPES
    }
    largest_first = sorted(tables.items(), key=lambda item: -item[1][0])
    listing = "".join(
        f"\n  {escape_unprintable(name)}  {' x '.join(f'{n:,}' for n in shape)}"
        for name, shape in largest_first[:_MAX_LISTED]
    )
    if len(tables) > _MAX_LISTED:
        listing += f"\n  and {len(tables) - _MAX_LISTED} more"
    others = f"the tables in this file are:{listing}" if tables else "this file has no table"
    if wanted in tables:
        return wanted
    if wanted in tensors:
        shape, dtype = tensors[wanted]
        raise HotrowError(
            f"tensor {wanted} in {path} is {dtype} of shape {shape}, but a table must be 2-D with "
            f"one of the dtypes {', '.join(_TABLE_DTYPES)}; {others}"
        )
    if wanted is not None:
        matches = difflib.get_close_matches(wanted, tables, n=1)
        guess = f" (did you mean {matches[0]}?)" if matches else ""
        raise HotrowError(f"there is no tensor {wanted} in {path}{guess}; {others}")
    if len(tables) == 1:
        return next(iter(tables))
    if not tables:
        raise HotrowError(
            f"{path} has no table: none of its tensors is 2-D with one of the dtypes "
            f"{', '.join(_TABLE_DTYPES)}"
        )
    raise HotrowError(f"{path} has {len(tables)} tables; name one with --tensor:{listing}")


def read_text(path: str | Path) -> str:
    """Return the text of a UTF-8 file, or of standard input for "-"."""
    name = "standard input" if str(path) == "-" else str(path)
    try:
        with open(0 if str(path) == "-" else path, "rb", closefd=str(path) != "-") as file:
            data = file.read()
    except OSError as error:
        raise _unreadable_error("the text", name, error) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise HotrowError(
            f"{name} is not UTF-8 text: byte {error.start:,} is 0x{data[error.start]:02x}",
            fix="convert it with iconv -f ENCODING -t UTF-8",
        ) from None


def parse_ids(text: str, source: str) -> list[int]:
    """Parse decimal ids separated by commas or whitespace; error messages name the `source`."""
    ids = []
    for number, line in enumerate(text.split("\n"), 1):
        for word in line.replace(",", " ").split():
            if not _ID.fullmatch(word):
                raise HotrowError(
                    f"{source}, line {number}: {elide(word, 40)!r} is not an id",
                    fix="ids must be whole numbers of at most 18 digits, separated by commas or "
                    "spaces",
                )
            ids.append(int(word))
    return ids


def read_tokenizer(path: str | Path, rows: int | None, table: str) -> Tokenizer:
    """Read a tokenizer.json file. If `rows` isn't None, check that the table has a row for each id.

    Truncation and padding are turned off, so the tokens cover the whole text and nothing else.
    """
    from tokenizers import Tokenizer

    path = _check_readable(path, "the tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises a plain Exception
        raise HotrowError(
            f"{path} cannot be read as a tokenizer ({error})",
            fix="pass a tokenizer.json file written by the tokenizers library",
        ) from None
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if rows is not None and largest >= rows:
        raise HotrowError(
            f"{path} has ids up to {largest:,}, but {table} has {rows:,} rows "
            f"(valid ids: 0..{rows - 1:,})",
            fix="use a table and a tokenizer from the same model",
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenize(tokenizer: Tokenizer, text: str) -> Tokens:
    """Return the tokens of a text, including special tokens that the tokenizer adds."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # arguments in invalid UTF-8 contain surrogates
        raise HotrowError(
            f"the text is not valid Unicode: character {error.start:,} is {text[error.start]!r}",
            fix="pass UTF-8 text",
        ) from None
    encoding: Any = tokenizer.encode(text)
    return Tokens(list(encoding.ids), tuple(encoding.tokens))


def token_texts(tokenizer: Tokenizer, ids: list[int]) -> tuple[str, ...]:
    """Return the token of each id, or "?" for an id that is not in the vocabulary."""
    tokens = {id: token for token, id in tokenizer.get_vocab().items()}
    return tuple(tokens.get(id, "?") for id in ids)


def check_writable(path: str | Path) -> None:
    """Raise `HotrowError` if the path can't be written. Call this before any expensive work."""
    target = Path(path).absolute()
    folder = target.parent
    if target.is_dir():
        raise HotrowError(f"{path} is a folder", fix="pass the path of a file")
    if not folder.is_dir():
        raise HotrowError(
            f"{path} cannot be written: there is no folder {folder}", fix="create it first"
        )
    # os.replace would replace a device or a pipe with a file.
    if target.exists() and not target.is_file():
        raise HotrowError(
            f"{path} is not a regular file", fix="pass the path of a regular file or a new file"
        )
    if not all(os.access(each, os.W_OK) for each in (folder, target) if each.exists()):
        raise HotrowError(
            f"{path} cannot be written: no permission",
            fix="change the permissions, or choose another path",
        )


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8; see `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file atomically, by renaming a temporary file in the target's folder."""
    check_writable(path)
    target = Path(path).resolve()  # if the path is a symbolic link, write to its target
    try:
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=".hotrow-", delete=False
        ) as file:
            temporary = Path(file.name)
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                # Give the private temporary file the default permissions of a new file.
                umask = os.umask(0)
                os.umask(umask)
                os.chmod(temporary, 0o666 & ~umask)
                os.replace(temporary, target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise HotrowError(f"{path} cannot be written ({error.strerror})") from None


def _check_readable(path: str | Path, what: str) -> Path:
    """Return the path after checking that the file can be opened for reading."""
    try:
        with open(path, "rb"):
            return Path(path)
    except OSError as error:
        raise _unreadable_error(what, path, error) from None


def _unreadable_error(what: str, path: str | Path, error: OSError) -> HotrowError:
    return HotrowError(
        f"{what}: {path} cannot be read ({error.strerror})",
        fix="check the path and the permissions",
    )
