"""Read tables, texts and ids from files, and write text files; nothing is ever unpickled."""

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

# safetensors' names of the dtypes that a table may have
_TABLE_DTYPES = ("F64", "F32", "F16", "BF16")
_MAX_LISTED = 40  # candidates named in an error
_ID = re.compile("-?[0-9]{1,18}")  # each fits an int64


@dataclass(frozen=True)
class Tokens:
    """Ids and the texts of their tokens."""

    ids: list[int]
    texts: tuple[str, ...]


def read_table(path: str | Path, tensor: str | None = None) -> tuple[str, Tensor]:
    """The name and values of one 2-D floating tensor of a safetensors file.

    The file is mapped, not read: other tensors are never touched, and of this one only
    the rows that are used.

    Args:
        path: of the file.
        tensor: its name; may be None if just one tensor of the file qualifies.

    Raises:
        HotrowError: no such file, not a safetensors file, no such tensor, or no single one.
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
            fix="is it complete? Pickled files (.pt, .bin) are never opened; "
            "save the tensor with safetensors.torch.save_file",
        ) from None


def _check_settled(path: Path) -> None:
    """Raise if the file is one of a folder of `hotrow.disk` whose rows lag."""
    run = path.with_name("run.json")
    unfinished = path.with_name("journal").exists()
    if unfinished or (run.exists() and json.loads(run.read_bytes()).get("behind")):
        raise HotrowError(
            f"{path} is a table in training, whose rows lag behind",
            fix="open its folder with hotrow.disk.open, and settle and save it: "
            "store.table.settle(), store.save()",
        )


def _choose_table(
    tensors: dict[str, tuple[tuple[int, ...], str]], wanted: str | None, path: Path
) -> str:
    """The name of the tensor to read, or an error that lists the candidates."""
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
    others = f"the tables in it are:{listing}" if tables else "no tensor in it is a table"
    if wanted in tables:
        return wanted
    if wanted in tensors:
        shape, dtype = tensors[wanted]
        raise HotrowError(
            f"tensor {wanted} in {path} is {dtype} of shape {shape}, but a table is 2-D and one "
            f"of {', '.join(_TABLE_DTYPES)}; {others}"
        )
    if wanted is not None:
        matches = difflib.get_close_matches(wanted, tables, n=1)
        guess = f" (did you mean {matches[0]}?)" if matches else ""
        raise HotrowError(f"no tensor {wanted} in {path}{guess}; {others}")
    if len(tables) == 1:
        return next(iter(tables))
    if not tables:
        raise HotrowError(
            f"{path} holds no table: no tensor in it is 2-D and one of {', '.join(_TABLE_DTYPES)}"
        )
    raise HotrowError(f"{path} holds {len(tables)} tables; name one with --tensor:{listing}")


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, or of standard input for "-"."""
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
            fix="convert it, with iconv -f ENCODING -t UTF-8",
        ) from None


def parse_ids(text: str, source: str) -> list[int]:
    """Ids written in decimal, separated by commas or white space; `source` is for the error."""
    ids = []
    for number, line in enumerate(text.split("\n"), 1):
        for word in line.replace(",", " ").split():
            if not _ID.fullmatch(word):
                raise HotrowError(
                    f"{source}, line {number}: {elide(word, 40)!r} is not an id",
                    fix="ids are whole numbers of at most 18 digits, separated by commas or spaces",
                )
            ids.append(int(word))
    return ids


def read_tokenizer(path: str | Path, rows: int | None, table: str) -> Tokenizer:
    """A tokenizer.json whose ids all have a row in the table; any, where `rows` is None.

    Its truncation and padding are switched off, so that every token of a text counts once.
    """
    from tokenizers import Tokenizer

    path = _check_readable(path, "the tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise HotrowError(
            f"{path} cannot be read as a tokenizer ({error})",
            fix="give a tokenizer.json, as the tokenizers library writes it",
        ) from None
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if rows is not None and largest >= rows:
        raise HotrowError(
            f"{path} has ids up to {largest:,}, but {table} has {rows:,} rows "
            f"(valid 0..{rows - 1:,})",
            fix="the table and the tokenizer belong to different models",
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenize(tokenizer: Tokenizer, text: str) -> Tokens:
    """The ids of a text, the tokenizer's special tokens included."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # how Python passes on an argument that is not UTF-8
        raise HotrowError(
            f"the text is not Unicode: character {error.start:,} is {text[error.start]!r}",
            fix="give it as UTF-8",
        ) from None
    encoding: Any = tokenizer.encode(text)
    return Tokens(list(encoding.ids), tuple(encoding.tokens))


def token_texts(tokenizer: Tokenizer, ids: list[int]) -> tuple[str, ...]:
    """The token of each id; "?" for an id that the vocabulary leaves out."""
    tokens = {id: token for token, id in tokenizer.get_vocab().items()}
    return tuple(tokens.get(id, "?") for id in ids)


def check_writable(path: str | Path) -> None:
    """Raise `HotrowError` unless a file can be written there, before any work is done for it."""
    target = Path(path).absolute()
    folder = target.parent
    if target.is_dir():
        raise HotrowError(f"{path} is a folder", fix="name a file in it")
    if not folder.is_dir():
        raise HotrowError(
            f"{path} cannot be written: there is no folder {folder}", fix="make it first"
        )
    # A device or a pipe would be replaced by a file.
    if target.exists() and not target.is_file():
        raise HotrowError(f"{path} is not a regular file", fix="name one that is, or a new one")
    if not all(os.access(each, os.W_OK) for each in (folder, target) if each.exists()):
        raise HotrowError(
            f"{path} cannot be written: no permission", fix="name a file that you may write"
        )


def write_text(path: str | Path, text: str) -> None:
    """Write a temporary file in the same folder and rename it, so that it is never half written."""
    check_writable(path)
    target = Path(path).resolve()  # of a symbolic link, the file that it names
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=target.parent, prefix=".hotrow-", delete=False
        ) as file:
            temporary = Path(file.name)
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                # A temporary file is private; give it what a new file here would have.
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
    """The path, after checking that its file opens."""
    try:
        with open(path, "rb"):
            return Path(path)
    except OSError as error:
        raise _unreadable_error(what, path, error) from None


def _unreadable_error(what: str, path: str | Path, error: OSError) -> HotrowError:
    return HotrowError(
        f"{what}: {path} cannot be read ({error.strerror})", fix="name a file that you may read"
    )
