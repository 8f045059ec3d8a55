"""Test measurements of tiny tables: their records and assertions."""

import json
from dataclasses import replace

import pytest
import torch

from hotrow import optim
from hotrow.bench.batches import Batches
from hotrow.bench.equality import EqualityError
from hotrow.bench.measurement import Measurement
from hotrow.bench.peers import DENSE_TYPES, PEER_TYPES, TASK_PARTS, Peer, PeerType
from hotrow.bench.percentiles import turn_ratios
from hotrow.bench.workload import HOTROW, PeerConfig, TableWorkload
from hotrow.table.parameter import Table
from tests.support.exhaustive import exhaustive

# torch warns about its own sparse gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
SPARSE, ONE_HOT = PeerConfig("torch sparse"), PeerConfig("one-hot matmul")
FUSED, FOREACH, DEFAULT = map(PeerConfig, DENSE_TYPES)
ADAMW = TableWorkload(
    "adamw", "AdamW", "AdamW", 300, 8, 64, (HOTROW, SPARSE, FUSED, FOREACH, DEFAULT, ONE_HOT),
    warmup_steps=40, rounds=2, steps_per_turn=3, dense_steps_per_turn=2,
)  # fmt: skip
WORKLOADS = {
    "adamw": ADAMW,
    "bfloat16": replace(ADAMW, dtype="bfloat16", peers=(HOTROW, SPARSE, FUSED)),
    "float64": replace(ADAMW, dtype="float64", peers=(HOTROW, DEFAULT)),
    "uniform": replace(ADAMW, zipf_exponent=None, peers=(HOTROW, DEFAULT)),
    "rows": replace(ADAMW, peers=(HOTROW, PeerConfig("hotrow", rows=100), SPARSE)),
    "ids": replace(ADAMW, peers=(HOTROW, *(PeerConfig("hotrow", ids=4**n) for n in (2, 1)))),
    "forward": replace(ADAMW, task="forward", optimizer=None, peers=(HOTROW, DEFAULT, ONE_HOT)),
    "gradient": replace(ADAMW, task="gradient", optimizer=None, peers=(HOTROW, SPARSE, DEFAULT)),
}


@pytest.fixture(scope="module")
def records(_small_measurements):
    class Records(dict):
        def __missing__(self, name):
            return self.setdefault(name, Measurement(WORKLOADS[name]).run())

    return Records()


@exhaustive
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_record_has_every_field(records, name):
    record, workload = records[name], WORKLOADS[name]
    for key in ("optimizer", "rows", "columns", "ids", "warmup_steps", "rounds", "task", "dtype"):
        assert record[key] == getattr(workload, key)
    assert record["copy_bytes_per_s"] > 1e7
    for config in workload.peers:
        peer = record["peers"][config.name]
        assert "error" not in peer, peer
        for part in ("step", *TASK_PARTS[workload.task]):
            spread = peer[part]
            assert 0 <= spread["p20_ms"] <= spread["median_ms"] <= spread["p80_ms"]
        assert ("equality" in peer) == (config.type_name not in DENSE_TYPES)
        floor_ms = 1e3 * peer["floor_bytes"] / record["copy_bytes_per_s"]
        assert peer["floor_ms"] == pytest.approx(floor_ms)
        ratio = peer["step"]["median_ms"] / floor_ms
        assert peer["floor_ratio"]["median"] == pytest.approx(ratio, rel=1e-3)
        if config.type_name == "hotrow":
            assert peer["equality"]["equal"]
        if config != HOTROW:
            assert peer["hotrow_ratio"]["p20"] <= peer["hotrow_ratio"]["p80"]
    json.dumps(record)


def test_dense_peers_take_shorter_turns_and_ratios_are_by_turn():
    measurement = Measurement(replace(ADAMW, peers=(HOTROW, SPARSE, DEFAULT)))
    measurement.prepare_peers()
    turns = measurement.time_rounds()
    assert {name: [len(turn) for turn in peer] for name, peer in turns.items()} == {
        "hotrow": [3, 3], "torch sparse": [3, 3], "torch default": [2, 2],
    }  # fmt: skip
    ratios = turn_ratios([[1.0, 2.0, 3.0], [4.0]], [[4.0], [4.0]])
    assert ratios == {"median": 0.75, "p20": 0.6, "p80": 0.9}


@exhaustive
def test_equality_shows_which_peers_are_equal(records):
    peers = records["adamw"]["peers"]
    assert peers["hotrow"]["equality"]["reference"] == "torch.optim.AdamW"
    assert peers["one-hot matmul"]["equality"]["equal"]
    # SparseAdam skips idle rows, which dense Adam still updates.
    sparse = peers["torch sparse"]["equality"]
    assert not sparse["equal"]
    assert sparse["max_error"] > 100 * sparse["max_error_of_dense"]
    assert records["bfloat16"]["peers"]["hotrow"]["equality"]["max_error_of_dense"] > 1e-4
    assert records["float64"]["peers"]["hotrow"]["equality"]["max_error_of_dense"] < 1e-12
    assert records["forward"]["peers"]["one-hot matmul"]["equality"]["equal"]
    assert records["gradient"]["peers"]["torch sparse"]["equality"]["equal"]


@exhaustive
@pytest.mark.parametrize("optimizer", sorted(optim.__all__))
def test_every_optimizer_is_measured(optimizer):
    workload = replace(ADAMW, optimizer=optimizer, peers=(HOTROW, FOREACH), warmup_steps=10)
    peers = Measurement(workload).run()["peers"]
    assert peers["hotrow"]["label"] == f"hotrow.optim.{optimizer}"
    assert "error" not in peers["torch foreach"]


def test_a_small_embedding_is_measured_as_a_table():
    for optimizer in ("SGD", "AdamW"):
        measurement = Measurement(replace(ADAMW, optimizer=optimizer, peers=(HOTROW,)))
        measurement.prepare_peers()
        assert isinstance(measurement.peers["hotrow"].module.weight, Table)


class BrokenPeer(Peer):
    """A faulty hotrow peer that skips a row in some steps."""

    def step(self, ids, gradient):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps in (1, 20):
            gradient = gradient * (ids != ids[0]).unsqueeze(-1)
        return super().step(ids, gradient)

    def read(self, rows):
        found = super().read(rows)
        if self.case.task == "forward":
            found[0, 0] += 1e-6
        return found


def build_broken(type_name):
    right = PEER_TYPES[type_name]

    def build(*arguments):
        peer = right.build(*arguments)
        peer.__class__ = BrokenPeer
        return peer

    return PeerType("broken", build)


def build_mislabelled(case, others):
    peer = PEER_TYPES["hotrow"].build(replace(case, optimizer="Adam"), others)
    peer.counterpart = "AdamW"
    return peer


@pytest.mark.parametrize("name", ["adamw", "float64", "gradient", "forward"])
def test_wrong_rows_raise_and_leave_no_record(name):
    types = PEER_TYPES | {"hotrow": build_broken("hotrow")}
    with pytest.raises(EqualityError, match="hotrow differs from dense training"):
        Measurement(replace(WORKLOADS[name], peers=(HOTROW,)), types).run()


def test_another_optimizer_is_not_equal():
    types = PEER_TYPES | {"hotrow": PeerType("mislabelled", build_mislabelled)}
    with pytest.raises(EqualityError, match="hotrow differs from dense training"):
        Measurement(replace(ADAMW, peers=(HOTROW,)), types).run()


@exhaustive
def test_unequal_peers_are_recorded_and_failing_ones_removed():
    def build_failing(*arguments):
        peer = PEER_TYPES["torch sparse"].build(*arguments)
        peer.optimizer.step = None
        return peer

    types = PEER_TYPES | {
        "one-hot matmul": build_broken("one-hot matmul"),
        "torch sparse": PeerType("failing", build_failing),
    }
    workload = replace(ADAMW, optimizer="SGD", peers=(HOTROW, ONE_HOT, SPARSE))
    peers = Measurement(workload, types).run()["peers"]
    assert peers["one-hot matmul"]["equality"]["equal"] is False
    assert peers["torch sparse"]["error"].startswith("TypeError")
    assert "step" not in peers["torch sparse"]


@exhaustive
def test_a_record_has_the_bytes_of_its_dtype(records):
    distinct = len(torch.unique(Batches(300, 64)[0]))
    for name, item in (("adamw", 4), ("bfloat16", 2), ("float64", 8)):
        moved = records[name]["peers"]["hotrow"]["floor_bytes"]
        assert moved == 8 * item * (2 * distinct * 3 + 2 * 64)
    uniform = len(torch.unique(Batches(300, 64, None)[0]))
    assert records["uniform"]["distinct_ids_per_step"] == uniform


@exhaustive
def test_peers_may_have_different_sizes(records):
    peers = records["ids"]["peers"]
    assert [peer.get("ids") for peer in peers.values()] == [None, 16, 4]
    moved = [peer["floor_bytes"] for peer in peers.values()]
    assert moved == sorted(moved, reverse=True)
    assert len(set(moved)) == 3
    assert [peer["rows"] for peer in records["rows"]["peers"].values()] == [300, 100, 300]


@exhaustive
def test_threads_are_set_for_a_turn_and_restored(monkeypatch):
    seen = []
    step = Peer.step

    def watched(self, ids, gradient):
        seen.append(torch.get_num_threads())
        return step(self, ids, gradient)

    monkeypatch.setattr(Peer, "step", watched)
    peers = (HOTROW, PeerConfig("hotrow", threads=2))
    Measurement(replace(ADAMW, optimizer="SGD", peers=peers, warmup_steps=2)).run()
    assert set(seen) == {1, 2}
    assert torch.get_num_threads() == 1
