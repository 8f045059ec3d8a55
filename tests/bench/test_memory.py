"""Test the peak memory of a step, and the memory estimates for peers."""

from dataclasses import replace

import pytest
import torch

from hotrow.bench import measurement, memory
from hotrow.bench.batches import Batches
from hotrow.bench.measurement import Measurement
from hotrow.bench.peers import PEER_TYPES, Case, PeerType, estimate_bytes
from hotrow.bench.workload import HOTROW, PeerConfig, TableWorkload
from tests.support.exhaustive import exhaustive

# torch warns about its own sparse gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
SUPPORTED = pytest.mark.skipif(not memory.is_supported(), reason="needs Linux with glibc")
SPARSE = PeerConfig("torch sparse")
ADAMW = TableWorkload(
    "any", "any", "AdamW", 300, 8, 64, (HOTROW, SPARSE), warmup_steps=20, rounds=2,
    steps_per_turn=2, dense_steps_per_turn=1,
)  # fmt: skip


@exhaustive
@SUPPORTED
def test_memory_includes_a_gradient_as_large_as_the_table():
    rows, table = 200_000, 200_000 * 64 * 4  # 51 MB
    dense = PeerConfig("torch default")
    peers = (HOTROW, SPARSE, PeerConfig("torch fused"), dense)
    workload = replace(ADAMW, rows=rows, columns=64, peers=peers, rounds=2, steps_per_turn=1)
    found = Measurement(workload).run()["peers"]
    extra = {name: peer["memory"]["peak_extra_bytes"] / table for name, peer in found.items()}
    for peer in found.values():
        assert peer["memory"]["table_and_state_bytes"] == 3 * table
    assert 0.99 < extra["torch fused"] < 1.2
    assert 2.9 < extra["torch default"] < 3.2  # the gradient and two temporaries of the same size
    assert extra["torch sparse"] < 0.1
    # hotrow stores the number of each row's last step in 4 bytes.
    assert 4 * rows / table <= extra["hotrow"] < 4 * rows / table + 0.1


@SUPPORTED
def test_memory_is_the_peak_of_allocated_bytes():
    def ones(megabytes):
        return torch.ones(megabytes << 20, dtype=torch.uint8)

    def work():
        first, second = ones(16), ones(8)
        del first
        work.kept = second, ones(20)  # too large for the block that `del` freed

    for _ in range(2):
        assert 27.5 < memory.measure_peak(work) / (1 << 20) < 32
        del work.kept


def test_reading_the_state_size_settles_no_rows():
    peer = PEER_TYPES["hotrow"].build(Case("step", "AdamW", 20_000, 8, 50), {})
    batches = Batches(20_000, 50)
    for t in range(5):
        peer.step(batches[t], torch.ones(50, 8))
    assert peer.table_and_state_bytes() == 3 * 20_000 * 8 * 4
    memory.make_state_resident(peer)
    assert peer.module.weight.lag.settled_steps == 0
    assert peer.bookkeeping_bytes() == 4 * 20_000


def estimate(type_name, case, others):
    return estimate_bytes(type_name, PEER_TYPES[type_name], case, others)


def test_memory_is_estimated_for_every_peer():
    forward = Case("forward", None, 1000, 8, 50)
    table = 4 * 1000 * 8
    assert estimate("one-hot matmul", forward, {}) == (table, 4 * 50 * 1000)
    step = Case("step", "AdamW", 1000, 8, 50)
    assert estimate("torch fused", step, {}) == (3 * table, table)
    others = {"torch fused": PEER_TYPES["torch fused"].build(step, {})}
    assert estimate("torch default", step, others) == (0, 3 * table)


def test_the_budget_has_all_tables_and_the_largest_step():
    budget = memory.MemoryBudget(100)
    for table, step in ((40, 10), (10, 30), (20, 10)):
        budget.check(table, step)
        budget.reserve(table, step)
    for table, step, left in ((1, 1, 1), (1, 30, 30), (0, 31, 30)):
        with pytest.raises(MemoryError, match=f"about {table + step} B, but only {left} B is free"):
            budget.check(table, step)
    budget.check(0, 30)


def test_a_peer_that_does_not_fit_is_not_measured(monkeypatch):
    # Each table fits alone, but the two together do not.
    monkeypatch.setattr(measurement, "free_memory", lambda device: 5 * 4 * 300 * 8)
    record = Measurement(ADAMW).run()
    expected = "MemoryError: the peer needs about 28.8 kB, but only 19.2 kB is free"
    assert record["peers"]["torch sparse"]["error"] == expected


@exhaustive
def test_a_peer_that_cannot_be_built_needs_no_memory(monkeypatch):
    def build(case, others):
        raise ModuleNotFoundError("not here")

    types = PEER_TYPES | {"absent": PeerType("absent", build, install_command="pip install it")}
    monkeypatch.setattr(measurement, "free_memory", lambda device: 7 * 4 * 300 * 8)
    workload = replace(ADAMW, peers=(HOTROW, PeerConfig("absent"), SPARSE))
    peers = Measurement(workload, types).run()["peers"]
    assert [name for name, peer in peers.items() if "error" in peer] == ["absent"]
    assert peers["absent"]["install_command"] == "pip install it"
