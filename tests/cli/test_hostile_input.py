"""The command line exits with code 2 and a message for hostile files, names and streams."""

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

import hotrow
from hotrow import disk
from tests.support.command_line import Run, save_tokenizer
from tests.support.exhaustive import exhaustive, grid

TABLE = "compare --table one.safetensors"
LONG = "n" * 300


@pytest.fixture
def run(run_hotrow: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    save_file({"w": torch.randn(4, 5)}, tmp_path / "one.safetensors")
    save_tokenizer({"[UNK]": 0, "the": 1}, tmp_path / "words.json")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "full").symlink_to("/dev/full")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "models.py").write_text(
        "import torch\ndef build(): return torch.nn.Embedding(3, 2)\n"
        "def batch(): return torch.tensor([1, 2])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return run_hotrow


READERS = {
    "table": "compare --ids 1 --table",
    "ids": f"{TABLE} --ids-file",
    "text": f"{TABLE} --tokenizer words.json --text-file",
    "tokenizer": f"{TABLE} --ids 1 --tokenizer",
    "inputs": "compare models:build --inputs",
    "lesson's table": "learn --no-open --table",
    "lesson's tokenizer": "learn --no-open --text x --tokenizer",
    "lesson's times": "learn --no-open --times",
}
REASONS = {
    "fifo": "is a pipe, not a regular file",
    "endless": "is a device, not a regular file",
    "full": "is a device, not a regular file",
    "folder": "is a folder, not a regular file",
    "loop": "cannot be read (Too many levels of symbolic links)",
    LONG: "cannot be read (File name too long)",
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", REASONS, ids=[name[:8] for name in REASONS])
def test_only_regular_files_are_read(run: Run, tmp_path: Path, reader: str, name: str) -> None:
    path = name
    if reader == "inputs":  # the name must end with .pt
        path = f"{name}.pt"
        if name == "fifo":
            os.mkfifo(path)
        else:
            (tmp_path / path[:200]).symlink_to(tmp_path / name)
            path = path if name == LONG else path[:200]
    found = run(*READERS[reader].split(), path)
    assert (found.code, found.out) == (2, "")
    assert f"{path} {REASONS[name]}\n" in found.err


@pytest.mark.parametrize(
    ("reader", "limit"),
    [
        ("ids", "64 MB"),
        ("text", "64 MB"),
        ("tokenizer", "256 MB"),
        ("lesson's tokenizer", "256 MB"),
        ("lesson's times", "16 MB"),
    ],
)
def test_file_that_is_too_large_is_an_error_that_names_the_limit(
    run: Run, reader: str, limit: str
) -> None:
    before = psutil.Process().memory_info().rss
    found = run(*READERS[reader].split(), "huge")
    assert (found.code, found.out) == (2, "")
    assert f"huge is larger than {limit}, the limit for this kind of file\n" in found.err
    assert psutil.Process().memory_info().rss - before < 10_000_000


RUN_FILES: dict[str, Callable[[Path], object]] = {
    "invalid": lambda path: path.write_text("{"),
    "null": lambda path: path.write_text("null"),
    "list": lambda path: path.write_text("[1]"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "long number": lambda path: path.write_text("9" * 5000),
    "not UTF-8": lambda path: path.write_bytes(b'{"behind": "\xff"}'),
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "loop": lambda path: path.symlink_to("run.json"),
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("command", [f"{TABLE} --ids 1", "learn --no-open --table one.safetensors"])
@pytest.mark.parametrize("kind", RUN_FILES)
def test_damaged_run_file_beside_a_table_of_a_folder_is_an_error(
    run: Run, tmp_path: Path, kind: str, command: str
) -> None:
    RUN_FILES[kind](tmp_path / "run.json")
    mark = {"format": "hotrow.disk 2", "save": "1"}
    save_file({"w": torch.randn(4, 5)}, tmp_path / "one.safetensors", mark)
    found = run(*command.split())
    assert (found.code, found.out) == (2, "")
    assert f"{tmp_path / 'run.json'}" in found.err
    assert "file next to the table" in found.err


@pytest.mark.parametrize("kind", [*RUN_FILES, "other"])
def test_files_of_other_programs_beside_a_table_are_ignored(
    run: Run, tmp_path: Path, kind: str
) -> None:
    {**RUN_FILES, "other": lambda path: path.write_text('{"behind": 1}')}[kind](
        tmp_path / "run.json"
    )
    (tmp_path / "journal").mkdir()
    assert run(*f"{TABLE} --ids 1".split()).code == 0


def save_like_version_2(path: Path, page: int, **metadata: str) -> None:
    """Write a table in the same form as hotrow 0.2: without a mark, and with a header of a page."""
    header = {"weight": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}}
    if metadata:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode().ljust(page - 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(32))


@pytest.mark.parametrize(("marked", "page"), [(True, 4096), (False, 4096), (False, 1 << 16)])
def test_a_stale_table_is_not_read(run: Run, tmp_path: Path, marked: bool, page: int) -> None:
    mark = {"format": "hotrow.disk 2", "save": "1"} if marked else {}
    save_like_version_2(tmp_path / "weight.safetensors", page, **mark)
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "weight.safetensors")
    found = run("compare", "--ids", "1", "--table", "folder/link")
    assert (found.code, "the record of its save (run.json) is not next to it" in found.err) == (
        2,
        True,
    )
    record = {"rule": "Adam", "behind": True, **({"save": "1"} if marked else {})}
    (tmp_path / "run.json").write_text(json.dumps(record))
    found = run("compare", "--ids", "1", "--table", "folder/link")
    assert (found.code, "some rows of its table are not up to date" in found.err) == (2, True)
    found = run("compare", "torch.nn:Identity", "--inputs", "weight.safetensors")
    assert (found.code, "some rows of its table are not up to date" in found.err) == (2, True)
    (tmp_path / "run.json").write_text(json.dumps(record | {"behind": False}))
    assert run("compare", "--ids", "1", "--table", "folder/link").code == 0


@pytest.mark.parametrize("command", [f"{TABLE} --ids 1 --html", "learn --save", "bench --json"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("loop", "cannot be written (Too many levels of symbolic links)"),
        (LONG, "cannot be written (File name too long)"),
        ("one.safetensors/x", "cannot be written (Not a directory)"),
        ("fifo", "is a pipe, not a regular file"),
        ("full", "is a device, not a regular file"),
        ("folder", "is a folder, not a regular file"),
        ("", "'' is a folder, not a regular file"),
        ("\udcff/\udcfe", "there is no folder"),
        ("page/", "page/ cannot be written: it names a folder, not a file"),
        ("page/.", "page/. cannot be written: it names a folder, not a file"),
        ("folder/page/", "folder/page/ cannot be written: it names a folder, not a file"),
        ("missing/../page", "missing/../page cannot be written: there is no folder missing/.."),
        ("missing/./page", "missing/./page cannot be written: there is no folder missing/."),
    ],
    ids=lambda value: value.encode("ascii", "backslashreplace").decode()[:12],
)
def test_output_with_an_impossible_name_is_an_error(
    run: Run, tmp_path: Path, command: str, name: str, reason: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    found = run(*command.split(), name)
    assert (found.code, found.out) == (2, "")
    assert reason in found.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (f"{TABLE} --ids 1 --html", "one.safetensors"),
        (f"{TABLE} --ids 1 --html", "folder/../one.safetensors"),
        (f"{TABLE} --ids 1 --html", "link"),
        (f"{TABLE} --ids-file ids.txt --html", "ids.txt"),
        (f"{TABLE} --tokenizer words.json --text-file ids.txt --html", "ids.txt"),
        (f"{TABLE} --ids 1 --tokenizer words.json --html", "words.json"),
        ("learn --table one.safetensors --save", "one.safetensors"),
        ("learn --text the --tokenizer words.json --save", "words.json"),
        ("learn --times ids.txt --save", "ids.txt"),
    ],
)
def test_output_that_would_replace_an_input_is_an_error(
    run: Run, tmp_path: Path, command: str, name: str
) -> None:
    (tmp_path / "ids.txt").write_text("1")
    (tmp_path / "link").symlink_to("one.safetensors")
    before = (tmp_path / name).read_bytes()
    result = run(*command.split(), name)
    assert (result.code, result.out) == (2, "")
    assert f"{name} is also an input, so the output would replace it" in result.err
    assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize(
    "command",
    [
        f"{TABLE} --ids-file - --html",
        f"{TABLE} --tokenizer words.json --text-file - --html",
        "learn --times - --save",
    ],
)
def test_output_that_would_replace_standard_input_is_an_error(
    run: Run, tmp_path: Path, command: str
) -> None:
    (tmp_path / "ids.txt").write_text("1")
    before = os.dup(0)
    with (tmp_path / "ids.txt").open() as file:
        os.dup2(file.fileno(), 0)
    try:
        result = run(*command.split(), "ids.txt")
    finally:
        os.dup2(before, 0)
        os.close(before)
    assert (result.code, result.out) == (2, "")
    assert "ids.txt is also an input, so the output would replace it" in result.err
    assert (tmp_path / "ids.txt").read_text() == "1"


@pytest.mark.parametrize("command", ["compare", "learn", "disk verify table"])
def test_argument_cannot_control_the_terminal(run: Run, command: str) -> None:
    found = run(*command.split(), "\x1b]0;title\x07")
    assert (found.code, found.out) == (2, "")
    assert r"\x1b]0;title\x07" in found.err


def test_name_of_a_folder_cannot_control_the_terminal(run: Run, tmp_path: Path) -> None:
    disk.create(tmp_path / "\x1b[2J", 4, 2).close()
    found = run("disk", "verify", "\x1b[2J")
    assert (found.code, found.out) == (0, "\\x1b[2J: 32 bytes match their checksums\n")


# Each command that writes a file, with that file.
WRITERS = {
    "compare": (f"{TABLE} --ids 1 --html out", "out"),
    "learn": ("learn --save out", "out"),
    "lesson": ("learn --no-open", "cache/hotrow/learn.html"),
}


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("writer", WRITERS)
def test_write_that_fails_keeps_the_old_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, step: str
) -> None:
    command, name = WRITERS[writer]
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("old")
    failures = []

    def fail(*_: object) -> None:
        failures.append(step)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        patch.setattr("tempfile.mkdtemp", lambda **_: fail())  # or `learn` uses another folder
        found = run(*command.split())
    assert failures
    assert found.code == 2
    assert "No space left on device" in found.err
    assert path.read_text() == "old"
    assert [each.name for each in path.parent.iterdir() if each.name[:7] == ".hotrow"] == []


def test_only_one_function_opens_files_for_writing() -> None:
    """All other code writes through `files.write_text`, which replaces a file atomically."""
    writes = re.compile(r"""\.write_(text|bytes)\(|open\([^)\n]*["'](w|a|x|r\+)|O_WRONLY|O_RDWR""")
    own_files = {  # these open temporary files, pipes, kernel files or hotrow.disk folders
        *("inputs/files.py", "bench/process.py"),
        *("bench/memory.py", "cli/terminal.py", "disk/folder.py", "disk/journal.py"),
        *("disk/mapped_file.py",),
    }
    root = Path(hotrow.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for line in path.read_text().splitlines()
        if writes.search(line) and "files.write_text(" not in line
    }
    assert found == own_files


@pytest.mark.parametrize("option", ["--threads", "--rows", "--columns", "--ids"])
@pytest.mark.parametrize("digits", [30, 5000])
def test_count_of_many_digits_is_an_error(run: Run, option: str, digits: int) -> None:
    found = run("bench", option, "1" * digits)
    assert (found.code, found.out) == (2, "")
    assert f"{option} '111" in found.err
    assert "is not an integer from 1 to" in found.err


LONG_VALUES = {
    "compare --budget=": "--budget '1111",
    "compare --device=cuda:": "--device 'cuda:1111",
    "check --optimizer SGD --device=cuda:": "--device 'cuda:1111",
    "bench --device=cuda:": "--device 'cuda:1111",
}


@pytest.mark.parametrize("command", LONG_VALUES)
def test_long_number_in_a_value_is_an_error_that_shows_its_start(run: Run, command: str) -> None:
    found = run(*(command + "1" * 5000).split())
    assert (found.code, found.out) == (2, "")
    assert f"Error: {LONG_VALUES[command]}" in found.err
    assert len(found.err) < 200


SEEDS = {
    "compare models:build --inputs models:batch": 2**64 - 1,
    "check --optimizer Adam --steps 3 --rows 8 --columns 2 --ids 3 --scales 1": 2**53,
}


@pytest.mark.parametrize("command", grid(SEEDS, lambda command: command.startswith("check")))
def test_seed_that_torch_rejects_is_an_error_that_names_the_option(run: Run, command: str) -> None:
    largest = SEEDS[command]
    assert run(*command.split(), "--seed", str(largest)).code == 0
    for seed in (largest + 1, 2**64, 10**30):
        found = run(*command.split(), "--seed", str(seed))
        assert (found.code, found.out) == (2, "")
        assert "Invalid value for '--seed'" in found.err
        assert f"less than or equal to {largest}" in found.err


@pytest.mark.parametrize("columns", ["0", "1", "-5", "²", "", "9" * 30, "x"])
def test_report_is_complete_for_any_width_of_the_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    with monkeypatch.context() as patch:  # pytest reads these variables too
        patch.setenv("COLUMNS", columns)
        patch.setenv("LINES", columns)
        found = run(*TABLE.split(), "--ids", "1")
    assert (found.code, found.err) == (0, "")
    assert "none of the zeros" in " ".join(found.out.split())
    assert max(map(len, found.out.splitlines())) <= 240


# Run several commands in one process, each with different standard streams.
STREAMS = """
import os, sys
from hotrow.cli import main as cli
for line in sys.argv[1].splitlines():
    redirection, _, command = line.partition(" ")
    if os.fork() == 0:
        for stream in filter(None, redirection.split(",")):
            number, _, path = stream.partition(">")
            os.close(int(number))
            if path:
                assert os.open(path, os.O_RDWR) == int(number)
            else:
                setattr(sys, ("stdin", "stdout", "stderr")[int(number)], None)
        sys.argv = ["hotrow", *command.split()]
        cli.main()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@exhaustive
def test_streams_that_cannot_be_used_are_errors(run: Run, tmp_path: Path) -> None:
    full = "output cannot be written (No space left on device)"
    cases = [
        (f"1>/dev/full {TABLE} --ids 1", full),
        (f"1>/dev/full {TABLE} --ids 1 --json", full),
        ("1>/dev/full learn --no-open", full),
        ("1>/dev/full learn --print-path", full),
        ("1>/dev/full --help", full),
        ("1>/dev/full --version", full),
        ("1>/dev/full check --help", full),
        (f"1> {TABLE} --ids 1", "standard output is closed"),
        ("1> --help", "standard output is closed"),
        (f"0> {TABLE} --ids-file -", "standard input is closed"),
        (f"0>/dev/zero {TABLE} --ids-file -", "standard input is larger than 64 MB"),
        ("2>/dev/full compare --table absent", ""),
        ("2>/dev/full compare --no-such-option", ""),
        ("2> compare --table absent", ""),
        ("1>/dev/full,2>/dev/full --help", ""),
    ]
    commands = "\n".join(command for command, _ in cases)
    done = subprocess.run(
        [sys.executable, "-c", STREAMS, commands], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.split() == ["2"] * len(cases), done.stderr
    problems = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    expected = [problem for _, problem in cases if problem]
    assert len(problems) == len(expected), done.stderr
    for problem, reason in zip(problems, expected, strict=True):
        assert reason in problem


@pytest.mark.parametrize(
    "command", ["--help", "", "--version", "compare -h", "disk", "learn --save page.html"]
)
def test_closed_standard_output_is_an_error_before_anything_happens(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        found = run(*command.split())
    assert found.code == 2
    assert found.err.startswith("Error: standard output is closed\n  try: redirect it to a file")
    assert sorted(tmp_path.iterdir()) == before


def test_memory_of_the_lesson_does_not_depend_on_the_largest_id(run: Run, tmp_path: Path) -> None:
    save_tokenizer({"[UNK]": 0, "the": 30_000_000}, tmp_path / "sparse.json")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = run("learn", "--no-open", "--text", "the", "--tokenizer", "sparse.json")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (found.code, found.err) == (0, "")
    assert peak - before < 20_000  # in kB
    page = (tmp_path / "cache" / "hotrow" / "learn-own.html").read_text()
    assert '"V":30000001,' in page
    assert '"tokens":["?","the"]' in page


def test_the_lesson_refuses_a_sparse_table(run: Run, tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [10**9, 25], "data_offsets": [0, 10**11]}})
    path = tmp_path / "big.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    os.truncate(path, 8 + len(header) + 10**11)
    found = run("learn", "--no-open", "--table", path.name)
    assert found.code == 2
    assert found.err.startswith("Error: big.safetensors is a sparse file: only ")


# Kill processes that keep replacing a page with another version, and count damaged pages.
KILLS = """
import os, signal, sys, time
from pathlib import Path
from hotrow.inputs import files
path = Path(sys.argv[1])
pages = ["a" * 3_000_000, "b" * 3_000_000]
lost = temporary = 0
for number in range(30):
    path.write_text(pages[0])
    child = os.fork()
    while child == 0:
        files.write_text(path, pages[1])
        files.write_text(path, pages[0])
    time.sleep(0.005 + 0.001 * number)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    lost += path.read_text() not in pages
    for each in set(path.parent.iterdir()) - {path}:
        temporary += each.name.startswith(".hotrow-")
        each.unlink()
print(f"30 killed, {lost} lost, interrupted: {temporary > 0}")
"""


@exhaustive
def test_killed_write_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLS, tmp_path / "page.html"], capture_output=True, text=True
    )
    assert done.stdout == "30 killed, 0 lost, interrupted: True\n", done.stderr
