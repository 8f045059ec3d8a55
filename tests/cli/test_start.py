"""Test the start of the `hotrow` command, before its modules are imported."""

import signal
import subprocess
import sys
import tomllib

import pytest

import _hotrow_command
from hotrow.cli import main as cli
from tests.support.exhaustive import exhaustive
from tests.support.paths import ROOT

# Send Ctrl-C when Python looks for the module that the first argument names.
INTERRUPT = """
import signal, sys
module, sys.argv[1:] = sys.argv[1], ["--version"]
class Finder:
    def find_spec(self, name, *_):
        if name == module:
            signal.raise_signal(signal.SIGINT)
if module.startswith("ignored "):
    module = module.split()[1]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
import _hotrow_command
sys.meta_path.insert(0, Finder())
_hotrow_command.main()
"""


def start(module: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT, module], capture_output=True, text=True, timeout=100
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("module", ["hotrow", "torch", "numpy", "hotrow.cli.compare"])
def test_ctrl_c_during_an_import_ends_the_command_silently(module: str) -> None:
    assert start(module) == (130, "", "")


@exhaustive
def test_ignored_ctrl_c_stays_ignored_during_imports() -> None:
    code, out, err = start("ignored torch")
    assert (code, out.split()[0], err) == (0, "hotrow", "")


def test_ctrl_c_is_handled_as_usual_after_the_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = []
    monkeypatch.setattr(cli, "main", lambda: handlers.append(signal.getsignal(signal.SIGINT)))
    _hotrow_command.main()
    assert handlers == [signal.default_int_handler]


def test_command_starts_outside_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"hotrow": "_hotrow_command:main"}
