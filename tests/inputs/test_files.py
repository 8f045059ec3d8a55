"""Test reading tables, texts and ids from files, writing text files, and error messages."""

import ast
import json
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import hotrow
from hotrow import HotrowError
from hotrow.inputs import files
from hotrow.inputs.loader import load_inputs
from hotrow.inputs.tokenizer import open_tokenizer
from tests.support.exhaustive import exhaustive

MIB = 1 << 20


def table(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(3)).to(dtype)


# --- tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_single_table_in_a_file_needs_no_name(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": table(dtype), "bias": torch.zeros(3), "steps": torch.zeros(2, 2).int()}, path)
    name, values = files.read_table(path)
    assert name == "w"
    assert values.dtype == dtype
    assert torch.equal(values, table(dtype))


def test_one_of_several_tables_is_read_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"wte": table(), "wpe": torch.zeros(2, 5)}, path)
    name, values = files.read_table(str(path), "wte")
    assert name == "wte"
    assert torch.equal(values, table())


def write_sparse(path: Path, rows: int) -> None:
    """Write a sparse file: a table of zeros with 384 columns, and a table of 4 rows."""
    columns = 384
    end = rows * columns * 4
    header = {
        "big": {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, end]},
        "small": {"dtype": "F32", "shape": [4, 5], "data_offsets": [end, end + 80]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.seek(end, os.SEEK_CUR)
        file.write(table().numpy().tobytes())


@pytest.fixture
def huge(tmp_path: Path) -> Iterator[Path]:
    """Create a sparse file that is larger than the memory."""
    path = tmp_path / "huge.safetensors"
    memory = psutil.virtual_memory().total + psutil.swap_memory().total
    write_sparse(path, 2 * memory // (384 * 4))
    yield path
    path.unlink()


def test_table_is_memory_mapped_and_the_rest_of_the_file_is_never_read(huge: Path) -> None:
    assert huge.stat().st_size > psutil.virtual_memory().total
    assert huge.stat().st_blocks * 512 < MIB, "this test needs a sparse file"
    process = psutil.Process()
    before = process.memory_info().rss
    _, small = files.read_table(huge, "small")
    assert torch.equal(small, table())
    _, big = files.read_table(huge, "big")
    assert big[1_234_567].shape == (384,)
    assert big[-1].sum() == 0
    big[1] = 1  # changes only the memory
    assert files.read_table(huge, "big")[1][1].sum() == 0
    assert process.memory_info().rss - before < 32 * MIB


def test_a_table_without_rows_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.zeros(0, 5), "other": torch.ones(3)}, path)
    name, values = files.read_table(path)
    assert (name, values.shape) == ("w", (0, 5))


def test_a_file_that_changes_after_its_header_was_checked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": table()}, path)
    data = path.read_bytes()

    def choose(*_: object) -> str:
        path.write_bytes(data.replace(b"[0,80]", b"[0,90]"))
        return "w"

    monkeypatch.setattr(files, "_choose_table", choose)
    with pytest.raises(HotrowError, match="the file has changed while it was read"):
        files.read_table(path)


def test_sparse_inputs_are_refused(tmp_path: Path) -> None:
    paths = tmp_path / "x.pt", tmp_path / "x.safetensors"
    torch.save(torch.ones(3), paths[0])
    os.truncate(paths[0], 1 << 30)
    write_sparse(paths[1], 1_000_000)
    for path in paths:
        with pytest.raises(HotrowError, match="is a sparse file: only"):
            load_inputs(str(path))


@pytest.mark.parametrize(
    "shapes",
    [{"a": (3,)}, {"a": ()}, {"a": (2, 2, 2)}, {}],
    ids=["1-D", "0-D", "3-D", "no tensors"],
)
def test_file_without_a_table_raises(tmp_path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    path = tmp_path / "m.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path)
    with pytest.raises(HotrowError, match="has no table: none of its tensors is 2-D"):
        files.read_table(path)


@pytest.mark.parametrize("cut", [1, 80, 100, 10_000])
def test_file_truncated_at_any_point_raises(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": table()}, path)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(HotrowError, match="cannot be read as a safetensors file"):
        files.read_table(path)


def test_long_list_of_candidates_is_shortened(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({f"layer.{n}": torch.zeros(2, 2) for n in range(57)}, path)
    with pytest.raises(HotrowError, match="has 57 tables") as error:
        files.read_table(path)
    assert error.value.problem.count("  2 x 2") == 40
    assert error.value.problem.endswith("\n  and 17 more")


class Trap:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def read_tokenizer(path: Path) -> None:
    with open_tokenizer(path, None, "it"):
        pass


@pytest.mark.parametrize("read", [files.read_table, read_tokenizer])
def test_pickle_raises_and_is_never_executed(tmp_path: Path, read: object) -> None:
    path, sprung = tmp_path / "model.pt", tmp_path / "sprung"
    torch.save({"w": Trap(sprung)}, path)
    assert callable(read)
    with pytest.raises(HotrowError, match="cannot be read as a"):
        read(path)
    assert not sprung.exists()
    torch.load(path, weights_only=False)
    assert sprung.exists(), "unpickling must create the folder"


UNPICKLERS = {"pickle", "cPickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}


def test_no_source_file_unpickles_anything() -> None:
    """Allow only torch's unpickler that loads nothing but tensors."""
    sources = list(Path(hotrow.__file__).parent.rglob("*.py"))
    assert len(sources) > 10
    unpicklers = []
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            if isinstance(node, ast.ImportFrom):
                imported = {alias.name for alias in node.names}
                names = set() if imported == {"UnpicklingError"} else {node.module}
                unpicklers += [source.name] * ("_weights_only_unpickler" in imported)
            assert not names & UNPICKLERS, f"{source.name}, line {node.lineno}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{node.value.id}.{node.attr}"
                unsafe = name in ("torch.load", "np.load", "numpy.load")
                assert not unsafe, f"{source.name}, line {node.lineno}"
    assert unpicklers == ["checkpoint.py"]


# --- ids --------------------------------------------------------------------------------------

separators = st.text(alphabet=", \t\n", min_size=1, max_size=3)


@given(st.lists(st.tuples(st.integers(-(10**18) + 1, 10**18 - 1), separators)))
def test_ids_are_parsed_with_any_separators(pairs: list[tuple[int, str]]) -> None:
    text = "".join(f"{id}{separator}" for id, separator in pairs)
    assert files.parse_ids(text, "--ids") == [id for id, _ in pairs]


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("1.0", 1, "1.0"),
        ("1 2\n3 4\n\n5 six", 4, "six"),
        ("1\r\n2\r\nx\r\n", 3, "x"),
        ("1e3", 1, "1e3"),
        ("0x10", 1, "0x10"),
        ("1_000", 1, "1_000"),
        ("+1", 1, "+1"),
        ("--1", 1, "--1"),
        ("1\u0663", 1, "1\u0663"),
        ("[1, 2]", 1, "[1"),
        ("nan", 1, "nan"),
        (str(10**18), 1, str(10**18)),
        ("9" * 5000, 1, "9" * 39 + "…"),
    ],
)
def test_error_names_the_word_and_line_that_are_not_an_id(text: str, line: int, word: str) -> None:
    with pytest.raises(HotrowError) as error:
        files.parse_ids(text, "--ids-file")
    assert error.value.problem == f"--ids-file, line {line}: {word!r} is not an id"
    assert error.value.fix is not None


# --- text -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("naïve 词元\n".encode(), "naïve 词元\n"),
        (b"\xef\xbb\xbfmarked", "marked"),
        (b"two\r\nlines", "two\r\nlines"),
        (b"", ""),
    ],
    ids=["UTF-8", "byte order mark", "line endings unchanged", "empty"],
)
def test_text_is_read_as_utf_8(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(data)
    assert files.read_text(path) == text


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b"\xff", "byte 0 is 0xff"),
        (b"abc\xc3", "byte 3 is 0xc3"),
        ("é".encode("utf-16"), "byte 0"),
        ("ab".encode("utf-16-le"), "byte 1 is 0x00"),
    ],
)
def test_error_names_the_first_byte_that_is_not_utf_8(
    tmp_path: Path, data: bytes, place: str
) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(data)
    with pytest.raises(HotrowError, match=f"t.txt is not UTF-8 text: {place}"):
        files.read_text(path)


# --- writing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_written_file_has_the_permissions_of_a_new_file(tmp_path: Path, mask: int) -> None:
    path = tmp_path / "page.html"
    before = os.umask(mask)
    try:
        files.write_text(path, "ä")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    assert path.read_bytes() == "ä".encode()


def test_written_file_is_not_executed_as_another_user(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    path.chmod(0o6757)
    files.write_text(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o757


@pytest.mark.parametrize("step", ["fsync", "fchmod", "replace"])
def test_failed_write_keeps_the_old_file_and_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(HotrowError, match=r"cannot be written \(No space left on device\)"):
        files.write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_interrupted_write_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write_text(tmp_path / "page.html", "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "file"])
@pytest.mark.parametrize("step", ["open", "fchmod", "fsync"])
def test_replaced_temporary_file_is_an_error_and_changes_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, kind: str
) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.write_text("outside")
    outside.chmod(0o600)
    folder.mkdir()
    path = folder / "page.html"
    path.write_text("old")
    path.chmod(0o666)
    real = getattr(os, step)

    def replace_temporary_file(*arguments: Any) -> Any:
        result = real(*arguments)
        for temporary in folder.glob(".hotrow-*"):
            temporary.unlink()
            if kind == "link":
                temporary.symlink_to(outside)
            else:
                temporary.write_text("another")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(os, step, replace_temporary_file)
        with pytest.raises(HotrowError, match="another program replaced hotrow's temporary file"):
            files.write_text(path, "new")
    assert (path.read_text(), outside.read_text()) == ("old", "outside")
    assert stat.S_IMODE(outside.stat().st_mode) == 0o600
    assert list(folder.iterdir()) == [path]


def test_write_follows_a_symbolic_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    target.write_text("old")
    link.symlink_to(target.name)
    files.write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="the system has no /dev/fd")
def test_open_file_without_a_name_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    with path.open("w") as file:
        path.unlink()
        for operation in (files.check_writable, lambda path: files.write_text(path, "new")):
            with pytest.raises(HotrowError, match="it is an open file that was deleted or renamed"):
                operation(f"/dev/fd/{file.fileno()}")
    assert list(tmp_path.iterdir()) == []


@exhaustive
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_file_with_the_output_of_the_command_is_not_replaced(tmp_path: Path, stream: str) -> None:
    path = tmp_path / "page.html"
    program = (
        "import sys; from hotrow.inputs.files import check_writable; "
        f"print('kept', file=sys.{stream}); check_writable(sys.argv[1])"
    )
    for name in [str(path), f"/dev/{stream}"] if os.path.exists("/dev/stdout") else [str(path)]:
        with path.open("w") as file:
            outputs: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            command = [sys.executable, "-c", program, name]
            found = subprocess.run(command, **outputs | {stream: file}, check=False)
        shown = (found.stdout or b"") + (found.stderr or b"") + path.read_bytes()
        assert b"the command's own output goes to this file" in shown
        assert path.read_text().startswith("kept")


def test_pipe_or_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(HotrowError, match="pipe is a pipe, not a regular file"):
        files.write_text(path, "new")
    assert path.is_fifo()
