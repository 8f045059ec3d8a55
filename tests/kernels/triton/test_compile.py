"""Every kernel compiles to machine code for GPUs that this computer doesn't have.

The compiler reports the register and stack usage of each kernel. A kernel that needs more registers
than recorded, or spills them to the stack, is slower and fails these tests. If there is a good
reason for this, record the new numbers with `python -m tests.support.compile_kernels --update`.
"""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.exhaustive import exhaustive

pytestmark = exhaustive
MORE_REGISTERS = 8  # another version of Triton may need a few more
MORE_STACK = 32  # bytes


def compile_kernels(*arguments):
    """Compile kernels in a process where Triton doesn't interpret them."""
    pytest.importorskip("triton", reason="needs Triton: run make test-all")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.compile_kernels", *arguments],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def assert_within_limits(records, expected_count):
    assert len(records) == expected_count
    version = ".".join(metadata.version("triton").split(".")[:2])
    limits = json.loads(Path(__file__).with_name(f"registers-{version}.json").read_text())
    for record in records:
        registers, stack = limits[record["key"]]
        assert record["registers"] <= registers + MORE_REGISTERS, record
        assert record["stack"] <= stack + MORE_STACK, record
        assert record["local"] == 0, record
        # Division and square root round correctly, and only explicit operations are fused.
        assert record["approximate"] == [], record
        assert record["fused"] == [], record


@pytest.mark.parametrize("target", ["80", "89", "90", "100"])
def test_every_optimizer_compiles(target):
    records = compile_kernels(target)
    assert_within_limits(records, expected_count=4 + 3 * 14 + 4)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_every_closed_form_compiles_in_each_dtype(dtype):
    records = compile_kernels("90", "--dtypes", dtype, "--only", "NAdam", "Adamax", "ASGD", "Rprop")
    assert_within_limits(records, expected_count=3 * 4)


def test_all_warps_load_the_step_count_of_a_row_before_one_thread_stores_it():
    records = compile_kernels("90", "--only", "Adagrad")  # no other code in this step has a barrier
    barriers = {record["key"].split()[2]: record["barriers"] for record in records}
    assert barriers["step"] == 1
    assert barriers["settle"] == 1


def test_a_table_with_one_column_compiles():
    records = compile_kernels("90", "--columns", "1", "--only", "NAdam")
    assert [record["local"] for record in records] == [0, 0, 0]
