"""Run hostile command lines, and print "N tried, M wrong".

    python -m tests.attacks.command_lines 500
    python -m tests.attacks.command_lines 500 --seed 7

Each attempt runs a valid command line with hostile values, files, streams or environment
variables. The command must end within the time limit, without a traceback, and with exit code 0, 1
or 2. If a value is certainly invalid, the command must print a message and exit with code 2. It
must not change any existing file.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shlex
import signal
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from hotrow import disk
from hotrow.cli import main as cli
from tests.support.command_line import save_tokenizer

SECONDS = 120  # of processor time for a command line
MEMORY_BYTES = 6_000_000_000  # of address space, in addition to that of this process
LONG = "n" * 300

# Each NO_* constant lists values that no option of its kind accepts.
NO_NUMBER = (
    "",
    " ",
    "x",
    "1.5",
    "1e3",
    "0x1",
    "-",
    "--",
    "NaN",
    "inf",
    "1_",
    "²",
    "9" * 5000,
    "\0",
)
NO_COUNT = (*NO_NUMBER, "0", "-1", str(10**30), "-" + "9" * 40)
NO_FILE = ("", "absent", "folder", "fifo", "loop", "zero", "full", LONG, "\udcff", "a\0b", "one/x")
NO_TABLE = (*NO_FILE, "words.json", "empty", "random", "ids.txt", "deep.json", "/proc/self/mem")
NO_TOKENIZER = (*NO_FILE, "one.safetensors", "empty", "random", "deep.json", "ids.txt")
NO_IDS_FILE = (*NO_FILE, "empty", "random", "words.json", "one.safetensors", "deep.json")
NO_IDS = ("", " ", ",", "x", "1.0", "4", "-1", "99999999999999999999", "1\x1b[31m", "١", "9" * 5000)
NO_OUTPUT = ("", "folder", "fifo", "loop", "full", "absent/x", LONG, "one.safetensors/x", "a\0b")
NO_WORD = ("", "x", "\u202e", "\x1b[2J", LONG, "词元", "\udcff", "\0")
NO_MODEL = (
    *NO_WORD,
    "models",
    "models:",
    ":build",
    "models:absent",
    "models:Net.x",
    "../models:b",
    "models:fails",
    "models:number",
    "models:exits",
    "os:getcwd",
    "models.py:build",
)
NO_INPUTS = (
    "",
    "x",
    "models:fails",
    "models:number",
    "absent.pt",
    "words.json",
    "one.pt",
    "cut.pt",
)
NO_OPTION = (
    "",
    "lr",
    "lr=",
    "=1",
    "lr=x",
    "lr=nan",
    "lr=1e999",
    "momentum=1,2",
    "x=1",
    "fused=true",
    "nesterov=2",
    "lr=\0",
    "lr=-1",
    "momentum=-1",
    "weight_decay=-0.5",
)
NO_SCALES = ("", ",", "x", "0", "-1", "nan", "inf", "1,,2", "1e999", "1;2")
NO_SIZE = ("", "x", "-1", "1XB", "nan", "1e9", "²", "1 2", "\0", "GB", "9" * 5000)
NO_SEED = (*NO_NUMBER, "-1", str(2**64), str(10**30))
NO_DEVICE = (*NO_WORD, "cuda:", "cuda:x", "cuda:-1", "cuda:١", "cuda:" + "9" * 5000)

TABLE = {"--table": NO_TABLE, "--tensor": NO_WORD, "--tokenizer": NO_TOKENIZER}
COUNTS = {"--rows": NO_COUNT, "--columns": NO_COUNT, "--ids": NO_COUNT}
# Each valid command line, and the values that each of its options rejects. "" is the argument.
COMMANDS: list[tuple[str, dict[str, tuple[str, ...]]]] = [
    ("compare --table one.safetensors --ids 1,2,1",
     {**TABLE, "--ids": NO_IDS, "--budget": NO_SIZE, "--html": NO_OUTPUT,
      "--device": NO_DEVICE}),
    ("compare --table one.safetensors --ids-file ids.txt --json",
     {**TABLE, "--ids-file": NO_IDS_FILE}),
    ("compare --table one.safetensors --tokenizer words.json --text the",
     {**TABLE, "--text": ("", "\udcff"), "--html": NO_OUTPUT}),
    ("compare --table one.safetensors --tokenizer words.json --text-file text.txt",
     {**TABLE, "--text-file": (*NO_FILE, "empty", "random")}),
    ("compare models:build --inputs models:batch",
     {"": NO_MODEL, "--inputs": NO_INPUTS, "--seed": NO_SEED,
      "--to": NO_WORD, "--device": NO_DEVICE}),
    ("check --optimizer SGD --steps 3 --rows 8 --columns 2 --ids 3 --scales 1",
     {"--optimizer": NO_WORD, "--set": NO_OPTION, "--steps": NO_COUNT, "--scales": NO_SCALES,
      "--seed": NO_SEED, "--device": NO_DEVICE, **COUNTS}),
    ("learn --no-open",
     {"--lang": NO_WORD, "--save": NO_OUTPUT,
      "--times": (*NO_FILE, "empty", "random", "words.json", "deep.json", "one.safetensors")}),
    ("learn --no-open --table one.safetensors --tokenizer words.json --text the",
     {**TABLE, "--text": ("", "\udcff")}),
    ("learn --print-path --text the --tokenizer words.json", {"--tokenizer": NO_TOKENIZER}),
    ("disk verify table", {"": (*NO_FILE, "words.json", "empty", "link")}),
    ("--version", {}),
    ("compare --help", {}),
]  # fmt: skip
# A valid `hotrow bench` would run for too long, so it gets at least one invalid value.
BENCH = ("bench --rows 100 --columns 2 --ids 3",
         {**COUNTS, "--threads": NO_COUNT, "--dtype": NO_WORD, "--optimizer": NO_WORD,
          "--zipf": ("", "x", "nan", "inf", "-1", "1e999"), "--json": NO_OUTPUT,
          "--device": NO_DEVICE})  # fmt: skip
EXTRA = ("--no-such-option", "--", "extra", "-", "--json=1", "\u202e", "\x1b]0;x\x07", "-h=3")
# Values that may be accepted or rejected.
ODD = (
    "0",
    "1",
    "2",
    "01",
    "+1",
    " 1 ",
    "1_0",
    "the",
    "a" * 100_000,
    "e\u0301" * 500,
    "%s%n{0}",
    "*",
)
ENVIRONMENTS = (
    *({"COLUMNS": value, "LINES": value} for value in ("0", "-1", "²", "9" * 30, "1", "")),
    *({"TERM": "dumb"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}),
    *({"HOME": value, "XDG_CACHE_HOME": value} for value in ("", "/dev/null/x", "fifo", LONG)),
    *({"LANG": "\udcff"}, {"TMPDIR": "absent"}, {"HOTROW_DEBUG": ""}),
)


@dataclass(frozen=True)
class CommandLine:
    """A command line, and the properties that its result must have."""

    arguments: list[str]
    is_refused: bool
    environment: dict[str, str] = field(default_factory=dict)
    output: str = ""  # the path of standard output; "" for a new file

    def __str__(self) -> str:
        short = (
            each if len(each) < 80 else f"{each[:60]}...({len(each)})" for each in self.arguments
        )
        arguments = [each.encode("unicode_escape").decode() for each in short]
        where = f" > {self.output}" if self.output else ""
        return f"{self.environment or ''} {shlex.join(arguments)}{where}".strip()


def command_lines(seed: int) -> Iterator[CommandLine]:
    """Yield hostile command lines endlessly."""
    chance = random.Random(seed)
    while True:
        text, invalid = chance.choice([*COMMANDS, BENCH])
        arguments, is_refused, changed = text.split(), False, set()
        count = chance.choice([1, 1, 2]) if text == BENCH[0] else chance.choice([0, 1, 1, 1, 2])
        for option in chance.sample(sorted(invalid), min(count, len(invalid))):
            value = chance.choice(invalid[option])
            is_refused = True
            changed.add(option)
            if option in arguments:
                arguments[arguments.index(option) + 1] = value
            elif option:
                arguments += [option, value]
            else:
                arguments[-1 if text.startswith("disk") else 1] = value
        kind = chance.randrange(6)
        if kind == 0:
            is_refused |= _add_argument(arguments, chance)
        elif kind == 1 and text != BENCH[0]:
            options = [
                i for i, each in enumerate(arguments) if each[:2] == "--" and each in invalid
            ]
            if options and arguments[options[-1]] not in changed:
                arguments[options[-1] + 1] = chance.choice(ODD)
        environment = chance.choice(ENVIRONMENTS) if chance.random() < 0.2 else {}
        output = "/dev/full" if chance.random() < 0.05 else ""
        if any("\0" in each for each in arguments):  # no operating system can pass such an argument
            continue
        # With these options, the rest of the command line has no effect.
        is_refused &= not {"--help", "--version"} & set(arguments)
        # If an option is repeated, its last value replaces the invalid one.
        is_refused &= not any(
            each.startswith(f"{option}=") for option in changed for each in arguments
        )
        yield CommandLine(arguments, is_refused or bool(output), environment, output)


def _add_argument(arguments: list[str], chance: random.Random) -> bool:
    """Add an unexpected argument, and return whether it is certainly invalid."""
    extra = chance.choice(EXTRA)
    arguments.append(extra)
    return extra not in ("--", "-h=3")


def make_files(folder: Path) -> None:
    """Create the files that the command lines name."""
    save_file({"w": torch.randn(4, 5)}, folder / "one.safetensors")
    save_tokenizer({"[UNK]": 0, "the": 1}, folder / "words.json")
    (folder / "ids.txt").write_text("1, 2\n3")
    (folder / "text.txt").write_text("the the")
    (folder / "empty").touch()
    (folder / "random").write_bytes(random.Random(0).randbytes(500))
    (folder / "deep.json").write_text("[" * 100_000)
    torch.save(3, folder / "one.pt")
    (folder / "cut.pt").write_bytes((folder / "one.pt").read_bytes()[:200])
    (folder / "models.py").write_text(
        "import torch\ndef build(): return torch.nn.Embedding(3, 2)\n"
        "def batch(): return torch.tensor([1, 2])\ndef fails(): raise OSError('x')\n"
        "def number(): return 3\ndef exits(): raise SystemExit(0)\n"
    )
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    disk.create(folder / "table", 10, 3).close()
    for name, to in {"loop": "loop", "zero": "/dev/zero", "full": "/dev/full"}.items():
        (folder / name).symlink_to(to)
    (folder / "link").symlink_to("table")
    (folder / "one").write_text("a file")


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return the contents of all regular files."""
    return {
        str(path): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def run(line: CommandLine, folder: Path, results: Path) -> str | None:
    """Run a command line in a forked process; return what went wrong, or None."""
    child = os.fork()
    if not child:
        _run_child(line, folder, results)
    status = os.wait4(child, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    out, err = (
        (results / name).read_text(errors="replace") if (results / name).exists() else ""
        for name in ("out", "err")
    )
    if code not in (0, 1, 2):
        return f"exit code {code}: {err[-300:]}"
    if "Traceback" in err or "internal error" in err:
        return f"a traceback: {err[-300:]}"
    if line.is_refused and code != 2:
        return f"exit code {code}, but the command line is invalid: {out[:200]}"
    if code == 2 and (out or not err):
        return f"exit code 2 with output {out[:100]!r} and message {err[:100]!r}"
    if code == 0 and not out:
        return "exit code 0 without output"
    if "\x1b]" in out + err or "\x1b[2J" in out + err:
        return "an argument can control the terminal"
    if bad := {c for c in out + err if unicodedata.category(c) == "Cc" and c not in "\n\x1b"}:
        return f"control characters {bad} in the output"
    return None


def _run_child(line: CommandLine, folder: Path, results: Path) -> None:
    code = 99
    try:
        os.chdir(folder)
        sys.path[:] = [path for path in sys.path if path]
        os.environ |= {"COLUMNS": "80", "XDG_CACHE_HOME": str(folder / "cache")} | line.environment
        inputs = os.open(os.devnull, os.O_RDONLY)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(inputs, 0)
        os.dup2(os.open(line.output or results / "out", flags), 1)
        os.dup2(os.open(results / "err", flags), 2)
        if line.output:
            (results / "out").write_text("")
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
        signal.alarm(10 * SECONDS)
        sys.argv = ["hotrow", *line.arguments]
        cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def attack(count: int, seed: int = 0) -> Iterator[str | None]:
    """Run command lines, and yield what went wrong with each, or None."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as parent:
        folder, results = Path(parent, "inside"), Path(parent, "results")
        for each in (folder, results):
            each.mkdir()
        make_files(folder)
        before = snapshot(folder)
        lines = command_lines(seed)
        for _ in range(count):
            line = next(lines)
            problem = run(line, folder, results)
            after = snapshot(folder)
            if problem is None and {name: after.get(name) for name in before} != before:
                problem = "another file has changed"
            if sorted(os.listdir(parent)) != ["inside", "results"]:
                problem = "a file was created outside of the folder"
            if problem:
                print(f"{line}\n    {problem}", file=sys.stderr, flush=True)
            yield problem


def main() -> None:
    """Run hostile command lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int, nargs="?", default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    problems = list(attack(arguments.count, arguments.seed))
    wrong = sum(problem is not None for problem in problems)
    print(f"command lines: {len(problems)} tried, {wrong} wrong", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
