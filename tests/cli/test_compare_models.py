"""Test the output, messages and exit codes of `hotrow compare module:function`."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hotrow
from hotrow.cli import compare as cli_compare
from hotrow.cli import main as cli
from hotrow.inputs import checkpoint, loader
from hotrow.inputs.pickle_program import check_program
from hotrow.onehot.rules import products
from tests.support.exhaustive import exhaustive

pytestmark = pytest.mark.usefixtures("small_tables")

MODELS = """
import collections, ctypes, os, subprocess, sys, torch, typer, warnings, torch.nn.functional as F
from torch import nn

class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.head = nn.Linear(16, 8), nn.Linear(8, 2)

    def forward(self, states, scale=None):
        x = torch.tanh(self.linear(F.one_hot(states, 16).float()))
        return self.head(x if scale is None else x * scale)

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(16, 4)

    def forward(self, states):
        return torch.tanh(self.words(states))

class Short(Words):
    def __init__(self):
        super().__init__()
        self.words.max_norm = 1.0

class Plain(nn.Module):
    def forward(self, states, scale=None):
        return states * 2.0

class Stuck(Policy):
    def __deepcopy__(self, memo):
        raise RuntimeError("[bold]no\\x1b[31m copies")

class Picky(Policy):
    def forward(self, states):
        raise ValueError("expected states\\nof another kind " + "x" * 5000)

class Quitter(Policy):
    def forward(self, states):
        raise SystemExit(0)

class Late(Policy):
    runs = []

    def forward(self, states):
        self.runs.append(1)
        if len(self.runs) > 1:
            errors = typer.Exit(0), EOFError("late"), BrokenPipeError("late")
            raise errors[int(os.environ["LATE"])]
        return super().forward(states)

class Held:
    build = Policy

def build():
    print("building")
    return Policy()

def plain():
    return Plain()

def poisoned():
    model = Policy()
    model.linear.weight.data[0, 9] = torch.nan
    return model

def states():
    return torch.tensor([3, 1, 3, 15])

def pair():
    return states(), torch.rand(4, 1)

def by_name():
    return {"scale": torch.rand(4, 1), "states": states()}

def floats():
    return torch.rand(4)

def noisy():
    print("print")
    print("original", file=sys.__stdout__)
    ctypes.CDLL(None).puts(b"printf")
    os.write(2, b"C error") if "ERROR" in os.environ else None
    subprocess.run([sys.executable, "-c", "print('child')"], check=True)
    return Plain()

def user_dict():
    return collections.UserDict(by_name())

def three():
    return 1, 2, 3

def fails():
    raise KeyError("vocabulary")

def leaves():
    raise SystemExit("usage: train.py")

def takes(size):
    return Policy()

built = Policy()
number = 3

class Silent(Exception):
    def __str__(self):
        raise ValueError("no text")

class Stop(BaseException):
    pass

class Lazy:
    @property
    def model(self):
        raise OSError("no weights")

    @property
    def other(self):
        return self.absent

class Mute(Policy):
    def forward(self, states):
        raise Silent

lazy = Lazy()

def silent():
    raise Silent

def stops():
    raise Stop("too early")

def nested():
    with warnings.catch_warnings(action="ignore"):  # torch warns once about its first nested tensor
        return torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)])
"""


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


class Batch:
    """A class that hotrow must refuse to load from a .pt file."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create modules and input files, and make their folder the current directory."""
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "__init__.py").touch()
    (tmp_path / "nets" / "models.py").write_text(MODELS)
    (tmp_path / "broken.py").write_text("import torch\ndef build(:\n")
    (tmp_path / "needy.py").write_text("import no_such_thing_at_all\n")
    (tmp_path / "stops.py").write_text("from nets.models import Stop\nraise Stop('too early')\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit('usage: exits.py')\n")
    states, scale = torch.tensor([3, 1, 3, 15]), torch.rand(4, 1)
    torch.save(states, tmp_path / "states.pt")
    torch.save((states, scale), tmp_path / "pair.pt")
    torch.save([states, scale], tmp_path / "list.pt")
    torch.save({"states": states, "scale": scale}, tmp_path / "names.PT")
    torch.save({"states": Batch()}, tmp_path / "classes.pt")
    torch.save(3, tmp_path / "number.pt")
    torch.save(states[:0], tmp_path / "none.pt")
    buffer, sizes = torch.rand(3), [torch.tensor([[3]]), torch.tensor([[1]]), torch.tensor([0])]
    torch.save(torch._nested_view_from_buffer(buffer, *sizes), tmp_path / "nested.pt")
    whole = (tmp_path / "states.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.pt").write_text("not tensors at all")
    (tmp_path / "empty.pt").touch()
    save_file({"states": states, "scale": scale}, tmp_path / "names.safetensors")
    save_file({"0": states, "1": scale}, tmp_path / "places.safetensors")
    save_file({"0": states, "scale": scale}, tmp_path / "mixed.safetensors")
    (tmp_path / "text.safetensors").write_text("not tensors at all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.partition(".")[0] in ("nets", "parts", "broken", "needy", "stops", "exits"):
            del sys.modules[name]


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `hotrow compare` without timing; `@` means `nets.models:`."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("HOTROW_DEBUG", raising=False)
    real = cli_compare.compare_models
    monkeypatch.setattr(cli_compare, "compare_models", lambda *a, **kw: real(*a, **kw, seconds=0))

    def run(arguments: str) -> Result:
        words = [word.replace("@", "nets.models:") for word in arguments.split()]
        monkeypatch.setattr(sys, "argv", ["hotrow", "compare", *words])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        captured = capsys.readouterr()
        return Result(int(exit.value.code or 0), captured.out, captured.err)

    return run


def test_the_folder_is_searched_only_for_modules_in_it(run: Run, folder: Path) -> None:
    (folder / "torch.py").touch()  # torch is already imported
    (folder / "colorsys").mkdir()  # Python prefers a module to a folder without modules
    for name in ("torch.nn:Identity", "colorsys:rgb_to_hls"):
        assert run(f"{name} --inputs pair.pt").code == 2  # the wrong number of arguments
        assert str(folder) not in sys.path
    assert run("@build --inputs @states").code == 0
    assert sys.path[0] == str(folder)


def test_a_folder_without_modules_is_searched_even_if_the_path_has_another(
    run: Run,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = tmp_path_factory.mktemp("other")
    for place in (folder, other):
        (place / "parts").mkdir()
    (folder / "parts" / "needy.py").write_text("from nets.models import *\n")
    monkeypatch.setattr(sys, "path", [str(other), *sys.path])
    assert run("parts.needy:build --inputs @states").code == 0


# --- results ----------------------------------------------------------------------------


def test_a_model_is_compared_within_80_columns(run: Run) -> None:
    found = run("@build --inputs @states")
    assert found.code == 0
    assert found.err == "building\n"  # the model prints this line
    lines = found.out.splitlines()
    assert lines[:2] == [
        "nets.models:build, before and after conversion",
        "  inputs int64 (4,); training mode, seed 0",
    ]
    assert f"one_hot, 16 columns, nets{os.sep}models.py:11" in found.out
    assert "      linear(16, 8) looked up\n" in found.out
    assert "  linear.weight was stored as a table, as in training with hotrow.optim\n" in found.out
    assert "  output       equal, 8 of 8 values bit for bit\n" in found.out
    assert "  4 gradients  equal, 154 of 154 values bit for bit\n" in found.out
    assert re.search(r"^  products with one-hots +512 +0$", found.out, re.MULTILINE)
    assert re.search(r"^  products with one-hots +1,024 +0$", found.out, re.MULTILINE)
    assert found.out.endswith("\n  equal: the same numbers, none of the zeros\n")
    assert max(map(len, lines)) <= 80
    assert not re.search(r"[ \t]$", found.out, re.MULTILINE)


def swapped(described: str) -> str:
    """Swap the descriptions of two tensors: .safetensors files store tensors sorted by name."""
    first, _, second = described.partition("), ")
    return f"{second}, {first})"


@pytest.mark.parametrize(
    ("model", "inputs", "described"),
    [
        ("@Policy", "@pair", "int64 (4,), float32 (4, 1)"),
        ("@built", "@by_name", "scale float32 (4, 1), states int64 (4,)"),
        ("@built", "@user_dict", "scale float32 (4, 1), states int64 (4,)"),
        ("@Held.build", "states.pt", "int64 (4,)"),
        ("@build", "./states.pt", "int64 (4,)"),
        ("@build", "pair.pt", "int64 (4,), float32 (4, 1)"),
        ("@build", "list.pt", "int64 (4,), float32 (4, 1)"),
        ("@build", "names.PT", "states int64 (4,), scale float32 (4, 1)"),
        ("@build", "places.safetensors", "int64 (4,), float32 (4, 1)"),
        ("@build", "names.safetensors", "scale float32 (4, 1), states int64 (4,)"),
    ],
)
def test_every_kind_of_model_and_input(run: Run, model: str, inputs: str, described: str) -> None:
    found = run(f"{model} --inputs {inputs} --json")
    assert found.code == 0
    content = json.loads(found.out)
    assert content["inputs"] == described or content["inputs"] == swapped(described)
    assert content["equal"] is True
    assert content["hotrow"] == hotrow.__version__
    assert content["findings"][0]["converted"] is True


def test_the_seed_sets_all_random_numbers(run: Run) -> None:
    def first(seed: str) -> object:
        content = json.loads(run(f"@poisoned --inputs @pair --json {seed}").out)
        return [each["first_difference"] for each in content["agreements"]]

    assert first("") == first("--seed 0") == first("--seed 0")
    assert json.loads(run("@build --inputs @states --json --seed 7").out)["seed"] == 7


def test_a_model_without_one_hots_is_equal(run: Run) -> None:
    found = run("@plain --inputs @states")
    assert (found.code, found.err) == (0, "")
    assert "\n  nothing was converted: the model doesn't multiply by one-hots\n" in found.out
    assert found.out.endswith("\n  equal: nothing was converted, so nothing is saved\n")


def test_converting_to_matmul(run: Run) -> None:
    found = run("@Words --inputs @states --to matmul")
    assert (found.code, found.err) == (0, "")
    assert "\n    words  Embedding(16, 4)\n      one-hot matmul\n" in found.out
    assert "output  " in found.out
    assert "equal, 16 of 16 values bit for bit" in found.out
    assert "products with one-hots" not in found.out
    assert found.out.endswith("\n  equal: the same numbers, with all of the zeros\n")


def test_a_layer_that_cannot_become_a_matmul_is_an_error(run: Run) -> None:
    found = run("@Short --inputs @states --to matmul")
    assert found.code == 2
    assert "an embedding has max_norm=1.0, which a one-hot product does not support" in found.err


def test_a_nan_in_an_unselected_row_exits_1(run: Run) -> None:
    found = run("@poisoned --inputs @states")
    assert (found.code, found.err) == (1, "")
    assert "linear.weight contains inf or NaN. 0 x inf is NaN" in " ".join(found.out.split())
    assert found.out.endswith("\n  NOT equal: the converted model gives different numbers\n")
    assert run("@poisoned --inputs @states --json").code == 1


def test_an_internal_error_exits_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "product", lambda *_: 1 / 0)
    found = run("@built --inputs @states")
    assert (found.code, found.out) == (3, "")
    assert "RuntimeError: only the converted model raises ZeroDivisionError" in found.err


@pytest.mark.parametrize("error", [0, 1, 2])
def test_an_error_after_the_first_run_exits_3(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """typer would exit with 0 or 1, which mean equal and not equal."""
    monkeypatch.setenv("LATE", str(error))
    found = run("@Late --inputs @states")
    assert (found.code, found.out) == (3, "")
    assert "nets.models:Late fails: " in found.err


def compare_in_process(folder: Path, model: str) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "hotrow", "compare", model]
    return subprocess.run(
        [*command, "--inputs", "nets.models:states", "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@exhaustive
def test_the_current_directory_is_importable(folder: Path) -> None:
    done = compare_in_process(folder, "nets.models:plain")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["verdict"].startswith("equal: nothing was converted")


def test_output_of_the_model_does_not_mix_with_the_report(folder: Path) -> None:
    done = compare_in_process(folder, "nets.models:noisy")
    assert done.returncode == 0
    assert json.loads(done.stdout)["equal"] is True
    assert sorted(done.stderr.split()) == ["child", "original", "print", "printf"]


def test_output_of_processes_does_not_mix_with_the_report_if_standard_error_is_closed(
    folder: Path,
) -> None:
    code = "import os, sys; os.close(0); os.close(2); os.execv(sys.argv[1], sys.argv[1:])"
    hotrow = Path(sys.executable).parent / "hotrow"
    command = [sys.executable, "-c", code, hotrow, "compare", "nets.models:noisy"]
    done = subprocess.run(
        [*command, "--inputs", "nets.models:states", "--json"],
        cwd=folder,
        env=os.environ | {"ERROR": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    assert json.loads(done.stdout)["equal"] is True


def test_progress_names_the_current_activity(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[tuple[str, int, int]] = []
    real = cli_compare.compare_models

    def spy(*given: object, progress: Callable[..., None], **options: object) -> object:
        return real(*given, **options, progress=lambda *what: reported.append(what))  # type: ignore[arg-type]

    monkeypatch.setattr(cli_compare, "compare_models", spy)
    assert run("@built --inputs @states").code == 0
    assert [what for what, *_ in reported][:4] == [
        "creating the model",
        "plain",
        "converted",
        "comparing",
    ]
    assert {"timing, forward", "memory, forward and gradient", "done"} <= {w for w, *_ in reported}
    done = [each for _, each, _ in reported]
    assert done == sorted(done)
    assert reported[-1][1] == reported[-1][2]


# --- invalid input ----------------------------------------------------------------

ONE = "run the code in Python to see the full traceback"
AGAIN = (
    "save a tensor, or a tuple or dict of tensors, or pass the name of a function that returns them"
)
COMPLETE = "is the file complete? Write it with torch.save"

# Each case is (arguments, part of the expected message, expected fix).
UNUSABLE: list[tuple[str, str, str]] = [
    # the model's name
    (
        "nots:build --inputs @states",
        "module nots, which nots:build needs, is neither in ",
        "run the command from",
    ),
    (
        "nets.mod:build --inputs @states",
        "module nets.mod, which nets.mod:build needs, is neither in ",
        "run the",
    ),
    (
        "nets/models.py:build --inputs @states",
        "'nets/models.py:build' does not have the form module:function",
        "write it as nets.models:build",
    ),
    (
        "broken.py:build --inputs @states",
        "'broken.py:build' does not have the form module:function",
        "write it as broken:build",
    ),
    (
        ": --inputs @states",
        "':' does not have the form module:function",
        "write it as package.module:function",
    ),
    (".models:build --inputs @states", "'.models:build' does not", "write it as package.module:"),
    (
        "nets.models:build() --inputs @states",
        "'nets.models:build()' does not have the form module:function",
        "write it as package.module:function",
    ),
    (
        "@bild --inputs @states",
        "nets.models:bild: there is no bild in nets.models (",
        "check the name",
    ),
    ("@Held.bild --inputs @states", "there is no bild in Held (did you mean build?)", "check"),
    (
        "@built.hed --inputs @states",
        "nets.models:built.hed: there is no hed in an object of type Policy",
        "check the name",
    ),
    ("@number.x --inputs @states", "there is no x in an object of type int", "check the name"),
    (
        "@lazy.model --inputs @states",
        f"nets.models:lazy.model cannot be read: OSError: no weights (nets{os.sep}models.py, line ",
        ONE,
    ),
    (
        "@lazy.other --inputs @states",
        "nets.models:lazy.other cannot be read: AttributeError: 'Lazy' object has no attribute "
        "'absent'",
        ONE,
    ),
    ("torch:classes.foo.bar --inputs @states", "torch:classes.foo.bar cannot be read: Runti", ONE),
    # its code
    ("broken:build --inputs @states", "broken cannot be imported: SyntaxError: ", ONE),
    (
        "needy:build --inputs @states",
        "needy cannot be imported: ModuleNotFoundError: No module named 'no_such_thing_at_all' "
        "(needy.py, line 1)",
        ONE,
    ),
    ("exits:build --inputs @states", "exits cannot be imported: SystemExit: usage: exits.py", ONE),
    (
        "@fails --inputs @states",
        f"nets.models:fails() fails: KeyError: 'vocabulary' (nets{os.sep}models.py, line 95)",
        ONE,
    ),
    ("@Quitter --inputs @states", "nets.models:Quitter exits Python: SystemExit: 0", "remove sys"),
    ("@leaves --inputs @states", "nets.models:leaves() fails: SystemExit: usage: train.py", ONE),
    ("@silent --inputs @states", "nets.models:silent() fails: Silent (nets", ONE),
    ("@stops --inputs @states", "nets.models:stops() fails: Stop: too early (nets", ONE),
    ("stops:build --inputs @states", "stops cannot be imported: Stop: too early (stops.py, ", ONE),
    (
        "@takes --inputs @states",
        "nets.models:takes() fails: TypeError: takes() missing 1 required positional argument",
        ONE,
    ),
    (
        "@number --inputs @states",
        "nets.models:number is of type int, which can't be called",
        "pass the name of a fun",
    ),
    (
        "@states --inputs @states",
        "nets.models:states returns an object of type Tensor, but must return a torch.nn.Module",
        "return the model itself",
    ),
    (
        "@Stuck --inputs @states",
        r"nets.models:Stuck cannot be copied, but the comparison needs copies: RuntimeError: "
        r"[bold]no\x1b[31m copies (",
        "remove tensors with an autograd graph",
    ),
    (
        "@Mute --inputs @states",
        "nets.models:Mute fails on these inputs (int64 (4,)): Silent (nets",
        "pass arguments that it accepts: forward(states)",
    ),
    # the inputs
    (
        "@built --inputs @nested",
        "nets.models:built fails on these inputs (float32 (nested)): ",
        "pass arguments that it accepts",
    ),
    ("@built --inputs @fails", "nets.models:fails() fails: KeyError: 'vocabulary'", ONE),
    ("@built --inputs @plane", "there is no plane in nets.models", "check the name"),
    (
        "@built --inputs nots:batch",
        "module nots, which nots:batch needs, is neither in ",
        "run the command from the module's folder",
    ),
    (
        "@built --inputs @plain",
        "the inputs from nets.models:plain are of type Plain, but must be a tensor, a tuple or",
        "return or save one of these types",
    ),
    (
        "@built --inputs number.pt",
        "the inputs from number.pt are of type int, but must be a tensor",
        "return",
    ),
    (
        "@built --inputs inputs.npz",
        "--inputs 'inputs.npz' is neither module:function nor a .pt or .safetensors file",
        "pass the name of a function that returns the inputs, or save them with torch.save",
    ),
    (
        "@built --inputs absent.pt",
        "the inputs: absent.pt cannot be read (No such file or directory)",
        "check the path and the permissions",
    ),
    (
        "@built --inputs absent.safetensors",
        "the inputs: absent.safetensors cannot be read (No such file or directory)",
        "check the path and the permissions",
    ),
    (
        "@built --inputs classes.pt",
        "classes.pt contains a tests.cli.test_compare_models.Batch, but hotrow loads only tensors "
        "from pickle files",
        AGAIN,
    ),
    (
        "@built --inputs nested.pt",
        "nested.pt contains a torch._utils._rebuild_nested_tensor, but hotrow loads only tensors",
        AGAIN,
    ),
    (
        "@built --inputs none.pt",
        "returns only empty tensors for these inputs (int64 (0,)), so there is nothing to compare",
        "pass inputs with at least one element",
    ),
    ("@built --inputs text.pt", "text.pt cannot be read as a .pt file (", COMPLETE),
    ("@built --inputs half.pt", "half.pt cannot be read as a .pt file (", COMPLETE),
    ("@built --inputs empty.pt", "empty.pt cannot be read as a .pt file (", COMPLETE),
    (
        "@built --inputs text.safetensors",
        "text.safetensors cannot be read as a safetensors file (",
        "is the file complete? hotrow never opens pickled files (.pt, .bin); save the tensors with",
    ),
    (
        "@built --inputs mixed.safetensors",
        "the tensors in mixed.safetensors are named 0, scale, but these are neither all keywords",
        "name all tensors after the model's arguments, or number them all 0, 1, 2",
    ),
    # inputs that the model does not accept
    (
        "@built --inputs @three",
        "nets.models:built fails on these inputs (no tensors): TypeError: "
        "Policy.forward() takes from 2 to 3 positional arguments but 4 were given",
        "pass arguments that it accepts: forward(states, scale=None)",
    ),
    (
        "@built --inputs @floats",
        "nets.models:built fails on these inputs (float32 (4,)): RuntimeError: one_hot is",
        "pass arguments that it accepts: forward(states, scale=None)",
    ),
    (
        "@Picky --inputs @states",
        "nets.models:Picky fails on these inputs (int64 (4,)): ValueError: expected states "
        "of another kind xxx",
        "pass arguments that it accepts: forward(states)",
    ),
    # invalid combinations of options
    ("@built", "nets.models:built needs inputs", "add --inputs with module:function"),
    ("--inputs @states", "--inputs needs a model", "hotrow compare models:build --inputs"),
    ("--seed 3", "--seed needs a model", "hotrow compare models:"),
    ("--to matmul", "--to needs a model", "hotrow compare models:"),
    (
        "@built --inputs @states --to matmull",
        "to = 'matmull', but it must be 'lookup' or 'matmul'",
        "use either",
    ),
    ("@built --inputs @states --to=", "to = '', but it must be 'lookup' or 'matmul'", "use either"),
    (
        "@built --inputs @states --operation gather",
        "--operation cannot be used with the model nets.models:built, only with a table",
        "remove --operation, or compare a table",
    ),
    (
        "@built --inputs @states --table t.safetensors",
        "--table cannot be used with the model nets.models:built, only with a table",
        "remove --table, or compare a table",
    ),
    (
        "@built --inputs @states --ids 1,2 --table t --tensor w --html x.html --budget 2GB",
        "--table and --tensor and --ids and --budget and --html cannot be used with the model",
        "remove --table and --tensor and --ids",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "problem", "fix"), UNUSABLE, ids=[row[0][:60] for row in UNUSABLE]
)
def test_invalid_input_gets_a_message_and_exit_code_2(
    run: Run, arguments: str, problem: str, fix: str
) -> None:
    found = run(arguments)
    assert (found.code, found.out) == (2, "")
    error, remedy = found.err.splitlines()
    assert error.startswith("Error: ")
    assert problem in error
    assert remedy.startswith(f"  try: {fix}")
    assert len(error) < 900
    assert all(char == "\n" or char.isprintable() for char in found.err)


def test_only_tensors_are_unpickled(run: Run, folder: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {folder / 'sprung'}",)

    torch.save({"states": Trap()}, folder / "trap.pt")
    found = run("@built --inputs trap.pt")
    assert found.code == 2
    assert "hotrow loads only tensors from pickle files" in found.err
    assert not (folder / "sprung").exists()


def test_a_file_that_changes_after_its_checks_is_an_error(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_and_change(*arguments: Any) -> None:
        check_program(*arguments)
        (folder / "states.pt").write_bytes(other)

    path = folder / "states.pt"
    torch.save(torch.arange(15).repeat(10_000), path)
    data = path.read_bytes()
    other = data.replace(bytes(7), b"\1" + bytes(6))
    monkeypatch.setattr(checkpoint, "check_program", check_and_change)
    found = run("@built --inputs states.pt")
    assert found.code == 2
    assert "Error: states.pt cannot be read as a .pt file (BadZipFile: Bad CRC-32" in found.err


def test_an_argument_that_is_not_a_model_is_a_usage_error(run: Run) -> None:
    found = run("stray")
    assert (found.code, found.out) == (2, "")
    assert "unexpected extra argument (stray); write a model as module:function" in found.err
    assert "hotrow compare -h" in found.err


def test_the_help_has_an_example(run: Run) -> None:
    out = run("--help").out
    assert "\n    hotrow compare models:build --inputs inputs.pt --seed 1\n" in out
    assert "hotrow compare [OPTIONS] [MODEL]\n" in out
    for option in ("inputs", "seed"):
        assert re.search(rf"^  --{option} .*[A-Z]", out, re.MULTILINE)
    assert "module:function; the function takes no arguments" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


def test_an_import_name_has_a_colon() -> None:
    assert loader.is_import_name("a:b")
    assert not loader.is_import_name("stray")
