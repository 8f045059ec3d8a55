"""The benchmark's harness, on tables of a few rows: what it asserts, records and shows."""

import copy
import json
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # bench is beside the package, not in it

from bench.batches import Batches  # noqa: E402
from bench.peers import KINDS, PARTS, Peer  # noqa: E402
from bench.workloads import FBGEMM, OURS, WORKLOADS, Entry, Goal  # noqa: E402

from bench import memory, page, records, startup, timing, train  # noqa: E402

# Of torch's own sparse gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
TINY = {
    name: replace(workload.small(), rows=300, ids=64, columns=8, steps_before=40)
    for name, workload in WORKLOADS.items()
}
ADAMW = TINY["adamw-1m-256"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Threads that wait for each other are of no use to tables this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def measured(_one_thread):
    """A record of every workload, as the command would write them; some without FBGEMM."""
    found = {}
    for name, workload in TINY.items():
        entries = tuple(entry for entry in workload.entries if entry != FBGEMM)
        workload = replace(workload, entries=entries)
        found[name] = timing.Run(workload).measure()
        found[name]["environment"] = records.environment(threads=1)
        train.add_memory_goal(workload, found[name])
    return found


def test_batches_are_the_same_every_time_and_favour_few_rows():
    batches = Batches(1000, 4096)
    assert torch.equal(batches[3], Batches(1000, 4096)[3])
    assert not torch.equal(batches[3], batches[4])
    counts = torch.bincount(batches[3], minlength=1000)
    assert int(counts.argmax()) == int(batches.at(torch.tensor([0]).numpy()))
    # Ranks 1 and 8 differ by 8^1.1 = 9.8.
    assert 6 < counts.max() / counts[batches.at(torch.tensor([7]).numpy())].float() < 15


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_record_has_every_field(measured, name):
    record, workload = measured[name], TINY[name]
    for key in ("rule", "rows", "columns", "ids", "steps_before", "rounds"):
        assert record[key] == getattr(workload, key)
    for entry in workload.entries:
        if entry == FBGEMM:
            continue
        peer = record["peers"][entry.name]
        for part in ("step", *PARTS):
            spread = peer[part]
            assert 0 <= spread["p20_ms"] <= spread["median_ms"] <= spread["p80_ms"]
        dense = entry.kind in ("torch fused", "torch default")
        samples = peer["step_samples_ms"]
        assert [len(turn) for turn in samples] == [
            workload.dense_turn if dense else workload.turn
        ] * workload.rounds
        assert ("equality" in peer) != dense
    assert [goal["against"] for goal in record["goals"] if "against" in goal] == [
        goal.against for goal in workload.goals
    ]
    seen = record["environment"]
    assert seen["versions"]["torch"] == version("torch")
    assert {"commit", "cpu", "threads", "transparent_hugepage", "settings"} <= set(seen)
    json.dumps(record)


def test_equality_tells_who_is_equal(measured):
    peers = measured["adamw-1m-256"]["peers"]
    assert peers["hotrow"]["equality"]["equal"]
    assert peers["hotrow"]["equality"]["with"] == "torch.optim.AdamW"
    # SparseAdam leaves the rows alone that dense Adam still moves.
    sparse = peers["torch sparse"]["equality"]
    assert not sparse["equal"]
    assert sparse["max_error"] > 100 * sparse["max_error_of_dense_float32"]


class Broken(Peer):
    """hotrow, but one row is left out of one step."""

    def step(self, ids, gradient):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 20:
            gradient = gradient * (ids != ids[0]).unsqueeze(-1)
        return super().step(ids, gradient)


def test_a_run_whose_numbers_are_wrong_has_no_record(monkeypatch):
    def build(*arguments):
        peer = KINDS["kind that is right"](*arguments)
        peer.__class__ = Broken
        return peer

    monkeypatch.setitem(KINDS, "kind that is right", KINDS["hotrow"])
    monkeypatch.setitem(KINDS, "hotrow", build)
    with pytest.raises(AssertionError, match="hotrow is not what dense training gives"):
        timing.Run(replace(ADAMW, entries=(OURS,), goals=())).measure()


def test_another_rule_is_not_equal(monkeypatch):
    def build(rule, rows, columns, others):
        return KINDS["kind that is right"]("Adam", rows, columns, others)

    def mislabelled(*arguments):
        peer = build(*arguments)
        peer.counterpart = "AdamW"
        return peer

    monkeypatch.setitem(KINDS, "kind that is right", KINDS["hotrow"])
    monkeypatch.setitem(KINDS, "hotrow", mislabelled)
    with pytest.raises(AssertionError, match="hotrow is not what dense training gives"):
        timing.Run(replace(ADAMW, entries=(OURS,), goals=())).measure()


def test_a_peer_that_is_missing_or_fails_is_left_out(monkeypatch):
    def fails(*arguments):
        peer = KINDS["torch sparse"](*arguments)
        peer.optimizer.step = None
        return peer

    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    monkeypatch.setitem(KINDS, "fails", fails)
    workload = replace(
        TINY["sgd-1m-256"],
        entries=(OURS, FBGEMM, Entry("fails")),
        goals=(Goal("fbgemm", 0.8), Goal("fails", 0.8)),
    )
    record = timing.Run(workload).measure()
    assert record["peers"]["fbgemm"]["failed"].startswith("ModuleNotFoundError")
    assert record["peers"]["fails"]["failed"].startswith("TypeError")
    assert [goal["met"] for goal in record["goals"]] == [None, None]
    record["environment"] = records.environment(1)
    text = page.page({"sgd-1m-256": record})
    assert "To have it: `pip install --no-deps fbgemm-gpu-cpu==1.8.0`" in text
    assert "sparse=True, torch.optim.SGD took no part: TypeError" in text


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_sees_a_gradient_as_large_as_the_table():
    workload = replace(ADAMW, rows=200_000, columns=64)  # 51 MB
    dense = memory.measure(workload, Entry("torch fused"))
    assert dense["table_and_state_bytes"] == 3 * 200_000 * 64 * 4
    ours = memory.measure(workload, OURS)
    assert ours["table_and_state_bytes"] == 3 * 200_000 * 64 * 4
    table = 200_000 * 64 * 4
    assert 0.9 * table < dense["peak_extra_bytes"] < 1.5 * table
    assert -0.1 * table < ours["peak_extra_bytes"] < 0.5 * table


def test_goals_are_judged(measured):
    run = timing.Run(ADAMW)
    run.peers = {"torch sparse": None}
    run.found = {
        "hotrow": {"step_samples_ms": [[1.0, 2.0, 3.0], [4.0]]},
        "torch sparse": {"step_samples_ms": [[4.0], [4.0]]},
    }
    assert run.ratio("torch sparse") == {"median": 0.75, "p20": 0.6, "p80": 0.9}
    run.found["torch sparse"]["hotrow_ratio"] = {"median": 0.75}
    assert run.goal("torch sparse", 0.75)["met"] is True
    assert run.goal("torch sparse", 0.74)["met"] is False
    record = copy.deepcopy(measured["adamw-1m-256"])
    record["goals"] = []
    record["peers"]["hotrow"]["memory"] = {"peak_extra_bytes": 151e6}
    train.add_memory_goal(ADAMW, record)
    assert record["goals"][0]["met"] is False


def test_a_record_is_written_beside_and_renamed(tmp_path, monkeypatch):
    records.write({"a": 1}, "one", tmp_path)
    assert records.read(tmp_path) == {"one": {"a": 1}}

    def interrupted(self, target):
        assert json.loads(self.read_text()) == {"a": 2}
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        records.write({"a": 2}, "one", tmp_path)
    assert records.read(tmp_path) == {"one": {"a": 1}}


def test_the_page_shows_figures_and_verdicts(measured):
    found = copy.deepcopy(measured)
    peers = found["adamw-1m-256"]["peers"]
    peers["hotrow"]["step"] = {"median_ms": 7.654, "p20_ms": 7.1, "p80_ms": 1234.5}
    peers["hotrow"]["memory"] = {"peak_extra_bytes": 98_765_432}
    peers["torch fused"]["hotrow_ratio"] = {"median": 0.0321, "p20": 0.03, "p80": 0.04}
    for goal, verdict in zip(
        found["adamw-1m-256"]["goals"], (True, False, None, None), strict=True
    ):
        goal["met"] = verdict
    text = page.page(found)
    assert "| hotrow.optim.AdamW | 7.65 [7.1, 1,234] |" in text
    assert "| 98.8 |" in text
    assert "| 0.0321 [0.03, 0.04] | at most 0.0333: met |" in text
    assert "| at most 0.00667: **not met** |" in text
    assert "| at most 0.6: not measured |" in text
    assert "**not equal** to dense torch.optim.Adam" in text
    for record in found.values():
        assert f"## {record['rule']}, {record['rows']:,} x {record['columns']}, " in text
    assert records.environment(1)["commit"] in text


def test_the_whole_command(tmp_path):
    """In processes of its own: times, memory, start-up, records, page."""
    target = tmp_path / "page.md"
    arguments = ["--small", "--only", "adamw-10m-64", "--records", str(tmp_path)]
    assert train.main([*arguments, "--page", str(target)]) == 0
    record = records.read(tmp_path)["adamw-10m-64"]
    for peer in record["peers"].values():
        assert set(peer["memory"]) == {"peak_extra_bytes", "table_and_state_bytes"}
    assert record["environment"]["threads"] == 2
    made = target.read_text()
    assert train.main([*arguments, "--page", str(target), "--page-only"]) == 0
    assert target.read_text() == made


def test_a_process_that_dies_is_reported(tmp_path, capsys, monkeypatch):
    def plan(name, asked):
        job = {"kind": "time", "name": name, "seconds": 1, "workload": "no such"}
        return [job | {k: getattr(asked, k) for k in ("small", "threads")}]

    monkeypatch.setattr(train, "plan", plan)
    arguments = ["--small", "--only", "sgd-1m-256", "--records", str(tmp_path)]
    assert train.main([*arguments, "--page", str(tmp_path / "page.md")]) == 1
    assert "sgd-1m-256 failed: KeyError: 'no such'" in capsys.readouterr().err
    assert records.read(tmp_path) == {}


def test_startup_first_uses_find_no_cache_and_later_ones_do(tmp_path, monkeypatch):
    program = f"""
import os, pathlib
cache = pathlib.Path(os.environ["NUMBA_CACHE_DIR"])
with open({str(tmp_path / "log")!r}, "a") as log:
    print("later" if cache.exists() else "first", file=log)
cache.mkdir(exist_ok=True)
"""
    monkeypatch.setattr(startup, "TORCH", "")
    monkeypatch.setattr(startup, "HOTROW", program)
    monkeypatch.setattr(startup, "STEPS", "")
    found = startup.measure(rounds=2)
    assert (tmp_path / "log").read_text().split() == ["first", "first", "later", "later"]
    assert len(found["first_use_samples_s"]) == 2
    assert found["added"]["p20_ms"] <= found["added"]["median_ms"]
    found["environment"] = records.environment(1)
    assert "Goal for the added time: at most 0.5 s" in page.page({"startup": found})


@pytest.mark.parametrize("program", [startup.TORCH, startup.HOTROW])
def test_the_programs_of_startup_train(program):
    names = {}
    exec(program + "before = table(torch.arange(1000)).detach().clone()" + startup.STEPS, names)
    moved = (names["table"](torch.arange(1000)) != names["before"]).any(1)
    assert bool(moved[:500].all())


def test_it_will_not_measure_without_the_peers_advantage(monkeypatch):
    from bench import job

    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    with pytest.raises(AssertionError, match="THP_MEM_ALLOC_ENABLE=1 must be set"):
        job.run({"kind": "memory"})


def test_time_left_follows_how_long_it_took(monkeypatch, capsys):
    now = iter([0.0, 10.0])
    monkeypatch.setattr(train.time, "monotonic", lambda: next(now))
    job = {"name": "a", "seconds": 10.0}
    progress = train.Progress([job, job])
    progress.tell(job, 0.5, "half")  # 5 of 20 estimated seconds took 10: 15 more take 30
    assert "a: half, 10 s spent, about 30 s left" in capsys.readouterr().err
