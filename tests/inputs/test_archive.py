"""Test which zip archives hotrow accepts as .pt files."""

import io
import random
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch.utils.serialization import config

from hotrow import HotrowError
from hotrow.inputs.checkpoint import load_checkpoint
from hotrow.inputs.loader import load_inputs

VALUES = torch.tensor([5, 6])
OTHER = torch.tensor([7, 8])


def saved(contents: object = VALUES) -> bytes:
    file = io.BytesIO()
    torch.save(contents, file)
    return file.getvalue()


def entries(data: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(each.filename, archive.read(each)) for each in archive.infolist()]


def archive_of(pairs: Iterable[tuple[str, bytes]]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile warns about repeated names
        for name, content in pairs:
            archive.writestr(name, content)
    return file.getvalue()


def with_entry(name: str) -> bytes:
    """Return an archive with another program under this name."""
    program = dict(entries(saved(OTHER)))["archive/data.pkl"]
    return archive_of([*entries(saved()), (name, program)])


def with_changed_entry(offset: int, value: bytes, extra: bytes = b"") -> bytes:
    """Return an archive with another value in the directory's first entry."""
    data = bytearray(saved())
    first = data.index(b"PK\1\2")
    data[first + offset : first + offset + len(value)] = value
    (length,) = struct.unpack_from("<H", data, first + 28)
    data[first + 46 + length : first + 46 + length] = extra
    # The size of the directory, twice, and the place after it.
    for number, place in (("<L", -10), ("<Q", -58), ("<Q", -34)):
        (old,) = struct.unpack_from(number, data, len(data) + place)
        struct.pack_into(number, data, len(data) + place, old + len(extra))
    return bytes(data)


def with_two_directories() -> bytes:
    """Return an archive that has a second directory, to which only the locator points."""
    data, other = saved(), saved(OTHER)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, len(other) - 98, 1)
    return other[:-42] + data + data[-98:-42] + locator + data[-22:]


def legacy(contents: object) -> bytes:
    """Return a file as torch 1.5 wrote it."""
    file = io.BytesIO()
    torch.save(contents, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def test_archive_built_by_the_tests_is_read() -> None:
    assert torch.equal(load_checkpoint(io.BytesIO(archive_of(entries(saved()))), "x.pt"), VALUES)


@pytest.mark.parametrize("name", ["model.pt", "model.v2.pt", "词元.pt", "A B.pt"])
@pytest.mark.parametrize(
    "contents",
    [VALUES, {"a": [torch.zeros(0), torch.zeros(70_000)]}, [torch.eye(3).to_sparse()], (1, "x")],
    ids=["tensor", "dict", "sparse", "no tensor"],
)
def test_file_that_torch_saves_is_read(tmp_path: Path, name: str, contents: object) -> None:
    path = tmp_path / name
    torch.save(contents, path)
    assert str(load_inputs(str(path))) == str(contents)
    with path.open("rb") as file:
        assert str(load_checkpoint(file, path)) == str(contents)


def test_flipped_bits_do_not_change_the_contents() -> None:
    values, errors = torch.arange(1000.0), 0
    data = saved({"ids": VALUES, "values": values})
    for place in random.Random(0).sample(range(8 * len(data)), 300):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        try:
            loaded = load_checkpoint(io.BytesIO(changed), "x.pt")
        except HotrowError:
            errors += 1
        else:
            assert torch.equal(loaded["ids"], VALUES)
            assert torch.equal(loaded["values"], values)
    assert errors > 200


@pytest.mark.parametrize(
    "data",
    [
        with_changed_entry(30, b"\6\0", b"\x99\x99\2\0ab"),  # Info-ZIP writes times of files
        with_changed_entry(30, b"\4\0", b"\1\0\0\0"),  # for numbers of 64 bits, but empty
        with_changed_entry(38, b"\x10"),  # the attribute of a folder
    ],
    ids=["times", "long numbers", "folder"],
)
def test_archive_with_other_fields_is_read(data: bytes) -> None:
    assert torch.equal(load_checkpoint(io.BytesIO(data), "x.pt"), VALUES)


@pytest.mark.parametrize("order", [b"little\n", b"Little", b""])
def test_unknown_byte_order_is_an_error(order: bytes) -> None:
    pairs = [
        (name, order if name.endswith("byteorder") else content)
        for name, content in entries(saved())
    ]
    with pytest.raises(HotrowError, match="its byte order is"):
        load_checkpoint(io.BytesIO(archive_of(pairs)), "x.pt")


def test_archive_without_a_byte_order_is_read() -> None:
    """torch 1.6 to 1.13 wrote no byte order."""
    pairs = [pair for pair in entries(saved()) if not pair[0].endswith("byteorder")]
    assert torch.equal(load_checkpoint(io.BytesIO(archive_of(pairs)), "x.pt"), VALUES)


def test_file_without_checksums_is_read() -> None:
    with config.patch("save.compute_crc32", False):
        data = saved()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is not None
    assert torch.equal(load_checkpoint(io.BytesIO(data), "x.pt"), VALUES)


DAMAGE: dict[str, tuple[Callable[[], bytes], str]] = {
    "capitals": (
        lambda: with_entry("archive/DATA.PKL"),
        "it has an entry that torch does not write: 'archive/DATA.PKL'",
    ),
    "repeated name": (
        lambda: with_entry("archive/data.pkl"),
        "it has two entries of the same name",
    ),
    "another folder": (
        lambda: with_entry("other/data.pkl"),
        "it has an entry that torch does not write: 'other/data.pkl'",
    ),
    "null character": (
        lambda: with_entry("archive/data.pkX").replace(b"data.pkX", b"data.pkl"[:-2] + b"l\0"),
        "it has an entry that torch does not write",
    ),
    "another record": (
        lambda: with_entry("archive/constants.pkl"),
        "it has an entry that torch does not write: 'archive/constants.pkl'",
    ),
    "no folder": (
        lambda: archive_of([("data.pkl", b"N.")]),
        "it has an entry that torch does not write: 'data.pkl'",
    ),
    "pickle before the archive": (
        lambda: legacy(OTHER) + saved(),
        "it was not written by torch 1.6 or newer",
    ),
    "archive before the archive": (
        lambda: saved(OTHER) + saved(),
        "its directory is not at its end",
    ),
    "no content": (lambda: with_changed_entry(16, bytes(8)), "it is compressed"),
    "two directories": (with_two_directories, "its directory is not at its end"),
    "bytes after the archive": (lambda: saved() + b"\0", "bytes follow the archive"),
    "a comment": (
        lambda: saved()[:-2] + b"\1\0x",
        "bytes follow the archive",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_archive_that_readers_could_understand_differently_is_an_error(damage: str) -> None:
    make, why = DAMAGE[damage]
    with pytest.raises(HotrowError) as error:
        load_checkpoint(io.BytesIO(make()), "x.pt")
    assert error.value.problem.startswith("x.pt cannot be read as a .pt file (ValueError: " + why)


def test_empty_archive_is_an_error() -> None:
    data = archive_of([])
    with pytest.raises(HotrowError, match=r"x\.pt cannot be read as a \.pt file"):
        load_checkpoint(io.BytesIO(data), "x.pt")
