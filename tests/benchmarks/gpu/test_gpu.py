"""Run the GPU checks and measurements on the CPU with tiny tables.

These tests find errors in the Python code before it first runs on a GPU.
"""

import json
import sys
import types
from unittest.mock import MagicMock

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import checks, times
from tests.support.exhaustive import exhaustive

pytestmark = exhaustive
FEW = [("SGD", {"lr": 0.1, "momentum": 0.9}), ("AdamW", {"weight_decay": 0.1})]


@pytest.fixture
def fake_cuda(monkeypatch):
    pytest.importorskip("triton", reason="needs Triton: run make test-all")
    from tests.support.fake_cuda import use_fake_cuda

    use_fake_cuda(monkeypatch)
    sizes = {"ROWS": 12, "COLUMNS": 3, "IDS": 4, "STEPS": 5, "FREQUENT": 100, "WIDE": 20}
    for name, value in sizes.items():
        monkeypatch.setattr(checks, name, value)
    monkeypatch.setattr(checks, "OPTIMIZERS", FEW)
    monkeypatch.setattr("hotrow.kernels.triton.operators.MAX_BLOCK", 16)


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_a_check_passes(check, fake_cuda):
    outcome = check()
    assert outcome is None or outcome.startswith("passed")


def test_a_check_fails_if_the_promise_is_broken(fake_cuda, monkeypatch):
    import triton.language as tl

    from hotrow.kernels.triton import operators, rows

    monkeypatch.setattr(rows, "CHUNK", tl.constexpr(16))
    monkeypatch.setattr(operators, "CHUNK", 16)
    with pytest.raises(AssertionError, match="row 3 of"):
        checks.duplicates_add_in_chunks_of_32()


def test_a_wait_in_a_step_is_found(fake_cuda, monkeypatch):
    def clip_and_read(layer):
        float(layer.weight.grad.norm())

    monkeypatch.setattr(checks, "clip_gradients", clip_and_read)
    with pytest.raises(AssertionError, match="_local_scalar_dense"):
        checks.a_step_never_waits()


def fake_fbgemm(monkeypatch):
    """Install a fake fbgemm_gpu module with tables that support only lookups."""
    package, configs = types.ModuleType("fbgemm_gpu"), types.ModuleType("configs")

    class Table(torch.nn.Module):
        def __init__(self, tables, **options):
            super().__init__()
            rows, columns, _, _ = tables[0]
            self.weight = torch.nn.Parameter(torch.zeros(rows, columns))

        def split_embedding_weights(self):
            return [self.weight.detach()]

        def forward(self, ids, offsets):
            return torch.nn.functional.embedding_bag(ids, self.weight, offsets[:-1], mode="sum")

    package.split_table_batched_embeddings_ops_training = MagicMock(
        SplitTableBatchedEmbeddingBagsCodegen=Table
    )
    configs.EmbOptimType = MagicMock()
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", package)
    monkeypatch.setitem(sys.modules, "fbgemm_gpu.split_embedding_configs", configs)


@pytest.mark.parametrize("has_fbgemm", [False, True])
def test_the_command_writes_records(has_fbgemm, fake_cuda, monkeypatch, tmp_path):
    if has_fbgemm:
        fake_fbgemm(monkeypatch)
    else:
        monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    for name, value in {"WARMUP": 4, "ROUNDS": 1, "STEPS_PER_ROUND": 12}.items():
        monkeypatch.setattr(times, name, value)
    monkeypatch.setattr(times, "WORKLOADS", (times.Workload("tiny", 40, 4, 6),))
    monkeypatch.setattr(checks, "CHECKS", (checks.an_alias_shows_dense_values,))
    monkeypatch.setattr(sys, "argv", ["gpu", "--records", str(tmp_path / "records")])
    assert command.main() == 0
    found = json.loads((tmp_path / "records" / "checks.json").read_text())
    assert found["checks"] == {"an_alias_shows_dense_values": "passed"}
    record = json.loads((tmp_path / "records" / "tiny.json").read_text())
    peers = {"hotrow", "hotrow, graph", "torch fused", "torch default"}
    peers |= {"torch SparseAdam (skips rows)"}
    fbgemm = "FBGEMM TBE, Adam (skips rows)"
    assert record["peers"].keys() == peers | ({fbgemm} if has_fbgemm else set())
    assert record["not_measured"].keys() == (set() if has_fbgemm else {fbgemm})
    assert record["ratios"]["hotrow"] == 1
    assert record["equality"]["max_error"] <= record["equality"]["allowed_error"]


def test_a_failed_check_gives_exit_code_1(fake_cuda, monkeypatch, tmp_path, capsys):
    def broken_promise():
        raise AssertionError("two runs differ")

    monkeypatch.setattr(checks, "CHECKS", (broken_promise,))
    arguments = ["gpu", "--only-checks", "--records", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert command.main() == 1
    assert "broken_promise: FAILED: AssertionError: two runs differ" in capsys.readouterr().out


def test_without_a_gpu_the_command_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "--records", str(tmp_path / "none")])
    assert command.main() == 2
    assert capsys.readouterr().err == "torch finds no CUDA device, so nothing was checked\n"
    assert not (tmp_path / "none").exists()
