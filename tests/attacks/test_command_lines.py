"""Hostile command lines end with the right exit code."""

from tests.attacks import command_lines
from tests.support.exhaustive import exhaustive


@exhaustive
def test_hostile_command_lines_are_refused_or_run() -> None:
    problems = list(command_lines.attack(40, seed=3))
    assert len(problems) == 40
    assert not any(problems)


def test_command_lines_are_hostile() -> None:
    lines = command_lines.command_lines(0)
    assert 60 < sum(next(lines).is_refused for _ in range(100)) < 100
