"""Read the attack corpus: hostile files, and one good file of each kind."""

from pathlib import Path

import pytest

from tests.attacks import fuzz, targets
from tests.support.exhaustive import exhaustive

FILES = sorted(path for path in fuzz.CORPUS.glob("*/*"))


def test_each_target_has_a_corpus() -> None:
    assert {path.parent.name for path in FILES} == set(targets.TARGETS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_file_is_read_correctly_or_refused(path: Path) -> None:
    accepted = targets.attack(path.parent.name, path.read_bytes())
    expected = path.name.partition("-")[0]
    assert expected in ("accepted", "refused")
    assert accepted == (expected == "accepted")


def test_only_code_that_reads_files_is_instrumented() -> None:
    skipped = set(fuzz.uninstrumented())
    assert {"hotrow", "hotrow.kernels.cpu.rows", "hotrow.optim.rules.adam"} <= skipped
    assert not skipped & {"hotrow.inputs", "hotrow.disk.record", "hotrow.lesson.times"}


@exhaustive
@pytest.mark.parametrize("target", sorted(targets.TARGETS))
def test_changed_files_are_read_correctly_or_refused(target: str) -> None:
    count = 20 if target in fuzz.SLOW else 300
    inputs = fuzz.random_inputs(target, seed=count)
    accepted = sum(targets.attack(target, next(inputs)) for _ in range(count))
    # The changes must break some of the files, but not all of them. Saved times are never rejected.
    assert 0 < accepted < count + (target == "saved_times")
