"""Hostile command lines end with the right exit code."""

import subprocess
import sys

from tests.attacks import command_lines
from tests.support.exhaustive import exhaustive
from tests.support.paths import ROOT


@exhaustive
def test_hostile_command_lines_are_refused_or_run() -> None:
    # Run another process, because pytest replaces sys.stdout, which forked processes inherit.
    command = [sys.executable, "-m", "tests.attacks.command_lines", "40"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "40 tried, 0 wrong" in done.stdout


def test_command_lines_are_hostile() -> None:
    lines = command_lines.command_lines(0)
    assert 60 < sum(next(lines).is_refused for _ in range(100)) < 100
