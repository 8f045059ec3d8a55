"""Test that no step needs many more instructions than recorded."""

import json
import shutil

import pytest

from benchmarks import instructions
from tests.support.exhaustive import exhaustive

MAX_GROWTH = 1.1


@exhaustive
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_instruction_counts_do_not_grow():
    recorded = json.loads(instructions.RECORD.read_text())
    counted = instructions.count_instructions()
    assert counted.keys() == recorded.keys()
    limits = {name: MAX_GROWTH * count["ratio"] for name, count in recorded.items()}
    grown = {name: counted[name] for name in counted if counted[name]["ratio"] > limits[name]}
    assert not grown
