"""`hotrow.bench` on tables of a few rows: what it asserts and records."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch

from benchmarks import floor, kinds, memory, records, timing
from benchmarks.batches import Batches
from benchmarks.kinds import KINDS
from benchmarks.models import Model, Side
from benchmarks.peers import PARTS, Case, Peer
from benchmarks.startup import Startup
from benchmarks.tables import BEST, FLOOR, OURS, Entry, Goal, Tables
from benchmarks.workload import ratios
from benchmarks.workloads import SPARSE, SUITES, WORKLOADS
from hotrow import optim

# Of torch's own sparse gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
TABLES = {name: each for name, each in WORKLOADS.items() if isinstance(each, Tables)}
# One of each sort: goals, parts, dtypes, ids, tasks, every optimizer.
SORTS = [
    "adamw-1m-256", "adamw-50k-768-bf16", "sgd-1m-256", "adamw-1m-256-uniform", "adamw-10m-64",
    "adamw-growing-ids", "adamw-threads", "forward-50k-768", "gradient-1m-256", "sgd-1k-16",
    "adamw-10k-64", *(f"{rule.lower()}-1m-64" for rule in optim.__all__),
]  # fmt: skip
NOT_HERE = ("fbgemm", "jax dense", "jax lazy")  # whether they are installed is the machine's


def tiny(name):
    workload = TABLES[name].small().among(set(KINDS) - set(NOT_HERE))
    entries = tuple(replace(entry, rows=entry.rows and 100) for entry in workload.entries)
    sizes = {"rows": 300, "ids": 64, "columns": 8, "steps_before": 40, "turn": 3}
    return replace(workload, entries=entries, goals=TABLES[name].goals, **sizes)


TINY = {name: tiny(name) for name in SORTS}
ADAMW = TINY["adamw-1m-256"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Threads that wait for each other are of no use to tables this small."""
    before, size = torch.get_num_threads(), floor.COPIED_BYTES
    torch.set_num_threads(1)
    floor.Copying.__init__.__defaults__ = (1 << 20,)
    yield
    torch.set_num_threads(before)
    floor.Copying.__init__.__defaults__ = (size,)


@pytest.fixture(scope="module")
def measured(_one_thread):
    """A record of each sort, as the command would have them."""
    found = {}
    for name, workload in TINY.items():
        found[name] = workload.run() | {"environment": records.environment(threads=1)}
    return found


def test_batches_are_the_same_every_time_and_favour_few_rows():
    batches = Batches(1000, 4096)
    assert torch.equal(batches[3], Batches(1000, 4096)[3])
    assert not torch.equal(batches[3], batches[4])
    counts = torch.bincount(batches[3], minlength=1000)
    assert int(counts.argmax()) == int(batches.at(torch.tensor([0]).numpy()))
    # Ranks 1 and 8 differ by 8^1.1 = 9.8.
    assert 6 < counts.max() / counts[batches.at(torch.tensor([7]).numpy())].float() < 15
    uniform = torch.bincount(Batches(1000, 4096, zipf=False)[3], minlength=1000)
    assert uniform.max() < 20


@pytest.mark.parametrize("name", SORTS)
def test_a_record_has_every_field(measured, name):
    record, workload = measured[name], TINY[name]
    for key in ("rule", "rows", "columns", "ids", "steps_before", "rounds", "task", "dtype"):
        assert record[key] == getattr(workload, key)
    assert record["copy_bytes_per_s"] > 1e8
    for entry in workload.entries:
        peer = record["peers"][entry.name]
        assert "failed" not in peer, peer
        for part in ("step", *PARTS[workload.task]):
            spread = peer[part]
            assert 0 <= spread["p20_ms"] <= spread["median_ms"] <= spread["p80_ms"]
        reference = entry.kind in ("torch fused", "torch foreach", "torch default")
        dense = (reference or entry.kind == "one-hot matmul") and workload.task != "forward"
        dense = dense or entry.kind == "one-hot matmul"
        turns = [len(turn) for turn in peer["step_samples_ms"]]
        assert turns == [workload.dense_turn if dense else workload.turn] * workload.rounds
        assert ("equality" in peer) != reference
        floor_ms = 1e3 * peer["floor_bytes"] / record["copy_bytes_per_s"]
        assert peer["floor_ms"] == pytest.approx(floor_ms)
        ratio = peer["step"]["median_ms"] / floor_ms
        assert peer["floor_ratio"]["median"] == pytest.approx(ratio, rel=1e-3)
        if entry.kind == "hotrow":
            assert peer["equality"]["equal"]
        if entry != OURS:
            ours = record["peers"]["hotrow"]["step_samples_ms"]
            assert peer["hotrow_ratio"] == ratios(ours, peer["step_samples_ms"])
    assert [goal["against"] for goal in record["goals"] if "against" in goal] == [
        goal.against for goal in workload.goals
    ]
    seen = record["environment"]
    assert seen["versions"]["torch"] == version("torch")
    assert {"commit", "cpu", "threads", "transparent_hugepage", "settings"} <= set(seen)
    json.dumps(record)


def test_equality_tells_who_is_equal(measured):
    peers = measured["adamw-1m-256"]["peers"]
    assert peers["hotrow"]["equality"]["with"] == "torch.optim.AdamW"
    # SparseAdam leaves the rows alone that dense Adam still moves.
    sparse = peers["torch sparse"]["equality"]
    assert not sparse["equal"]
    assert sparse["max_error"] > 100 * sparse["max_error_of_dense_float32"]
    half = measured["adamw-50k-768-bf16"]["peers"]["hotrow"]["equality"]
    assert half["max_error_of_dense_bfloat16"] > 1e-4
    for name in ("forward-50k-768", "adamw-10k-64"):
        assert measured[name]["peers"]["one-hot matmul"]["equality"]["equal"]
    assert measured["gradient-1m-256"]["peers"]["torch sparse"]["equality"]["equal"]


class Broken(Peer):
    """hotrow, but one row is left out of one step."""

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


@pytest.mark.parametrize("name", ["adamw-1m-256", "gradient-1m-256", "forward-50k-768"])
def test_a_run_whose_numbers_are_wrong_has_no_record(monkeypatch, name):
    def build(*arguments):
        peer = KINDS["kind that is right"].build(*arguments)
        peer.__class__ = Broken
        return peer

    monkeypatch.setitem(KINDS, "kind that is right", KINDS["hotrow"])
    monkeypatch.setitem(KINDS, "hotrow", replace(KINDS["hotrow"], build=build))
    with pytest.raises(AssertionError, match="hotrow is not what dense training gives"):
        timing.Run(replace(TINY[name], entries=(OURS,), goals=())).measure()


def test_another_rule_is_not_equal(monkeypatch):
    def mislabelled(case, others):
        peer = KINDS["kind that is right"].build(replace(case, rule="Adam"), others)
        peer.counterpart = "AdamW"
        return peer

    monkeypatch.setitem(KINDS, "kind that is right", KINDS["hotrow"])
    monkeypatch.setitem(KINDS, "hotrow", replace(KINDS["hotrow"], build=mislabelled))
    with pytest.raises(AssertionError, match="hotrow is not what dense training gives"):
        timing.Run(replace(ADAMW, entries=(OURS,), goals=())).measure()


def test_a_peer_that_is_missing_fails_or_does_not_fit_is_left_out(monkeypatch):
    def fails(*arguments):
        peer = KINDS["torch sparse"].build(*arguments)
        peer.optimizer.step = None
        return peer

    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.setitem(KINDS, "fails", kinds.Kind("fails", fails))
    needed = kinds.bytes_needed

    def too_much(kind, *case):
        return (1e18, 0) if kind == "one-hot matmul" else needed(kind, *case)

    monkeypatch.setattr(timing, "bytes_needed", too_much)
    names = ("fbgemm", "jax lazy", "one-hot matmul", "fails")
    workload = replace(
        TINY["sgd-1m-256"],
        entries=(OURS, *map(Entry, names)),
        goals=(Goal("fbgemm", 0.8), Goal("fails", 0.8), Goal(BEST, 1.0)),
    )
    record = timing.Run(workload).measure()
    failed = [record["peers"][name]["failed"] for name in names]
    starts = ("ModuleNotFoundError", "ModuleNotFoundError", "MemoryError: it needs", "TypeError")
    assert all(a.startswith(b) for a, b in zip(failed, starts, strict=True)), failed
    assert "1,000,000 TB" in failed[2]
    assert record["peers"]["fbgemm"]["remedy"] == "pip install --no-deps fbgemm-gpu-cpu==1.8.0"
    assert record["peers"]["jax lazy"]["remedy"] == "pip install jax==0.10.2 optax==0.2.8"
    assert "remedy" not in record["peers"]["fails"]
    assert [goal["met"] for goal in record["goals"]] == [None, None, None]


SEEN = pytest.mark.skipif(not memory.is_seen(), reason="needs Linux with glibc")


@SEEN
def test_memory_sees_a_gradient_as_large_as_the_table():
    rows, table = 200_000, 200_000 * 64 * 4  # 51 MB
    workload = replace(ADAMW, rows=rows, columns=64, rounds=2, turn=1)
    dense = Entry("torch default")
    entries = (OURS, SPARSE, replace(dense, kind="torch fused"), dense)
    peers = timing.Run(replace(workload, entries=entries, goals=())).measure()["peers"]
    extra = {name: peer["memory"]["peak_extra_bytes"] / table for name, peer in peers.items()}
    for peer in peers.values():
        assert peer["memory"]["table_and_state_bytes"] == 3 * table
    assert 0.99 < extra["torch fused"] < 1.2
    assert 2.9 < extra["torch default"] < 3.2  # the gradient, and two as large on its way
    assert extra["torch sparse"] < 0.1
    # 4 bytes a row for the steps it has been through.
    assert 4 * rows / table <= extra["hotrow"] < 4 * rows / table + 0.1


@SEEN
def test_memory_is_the_peak_and_not_what_was_freed():
    def ones(megabytes):
        return torch.ones(megabytes << 20, dtype=torch.uint8)

    def work():
        first, second = ones(16), ones(8)
        del first
        work.kept = second, ones(20)  # has no room in what was freed

    for _ in range(2):
        assert 27.5 < memory.peak_of(work) / (1 << 20) < 32
        del work.kept


def test_asking_for_state_leaves_rows_behind():
    peer = KINDS["hotrow"].build(Case("step", "AdamW", 20_000, 8, 50), {})
    batches = Batches(20_000, 50)
    for t in range(5):
        peer.step(batches[t], torch.ones(50, 8))
    assert peer.bytes_held() == 3 * 20_000 * 8 * 4
    memory.touch(peer)
    assert peer.module.weight.lag.settled_steps == 0
    assert peer.bytes_kept() == 4 * 20_000


def test_the_bytes_of_the_floor():
    # 3 ids, 2 of them distinct, in rows of 4 values of 4 bytes.
    assert floor.bytes_moved("forward", None, 4, 3, 2, 4) == 16 * (2 + 3)
    assert floor.bytes_moved("gradient", None, 4, 3, 2, 4) == 16 * (2 + 3 + 3 + 2)
    assert floor.bytes_moved("step", "SGD", 4, 3, 2, 4) == 16 * (2 * 2 + 3 + 3)
    assert floor.bytes_moved("step", "AdamW", 4, 3, 2, 2) == 8 * (2 * 2 * 3 + 3 + 3)
    held = {rule: floor.states(rule) for rule in optim.__all__}
    assert held == {
        "SGD": 0, "Adagrad": 1, "ASGD": 1, "RMSprop": 1, "Adam": 2, "AdamW": 2, "Adamax": 2,
        "NAdam": 2, "RAdam": 2, "Adadelta": 2, "Rprop": 2,
    }  # fmt: skip


def test_a_record_counts_its_own_bytes(measured):
    distinct = len(torch.unique(Batches(300, 64)[0]))
    for name, values, item in (("adamw-1m-256", 3, 4), ("adamw-50k-768-bf16", 3, 2)):
        moved = measured[name]["peers"]["hotrow"]["floor_bytes"]
        assert moved == 8 * item * (2 * distinct * values + 2 * 64)
    uniform = measured["adamw-1m-256-uniform"]
    assert uniform["distinct_ids_per_step"] == len(torch.unique(Batches(300, 64, False)[0]))


def test_the_copy_speed_counts_what_is_read_and_what_is_written():
    copying = floor.Copying(1000)
    copying.watch(3)
    assert len(copying.seconds) == 3
    copying.seconds = [4.0, 1.0, 2.0]
    assert copying.bytes_per_second() == 1000.0


def test_goals_are_judged(measured):
    assert ratios([[1.0, 2.0, 3.0], [4.0]], [[4.0], [4.0]]) == {
        "median": 0.75,
        "p20": 0.6,
        "p80": 0.9,
    }
    run = timing.Run(replace(ADAMW, entries=(OURS, SPARSE, Entry("jax lazy"))))
    run.peers = dict.fromkeys(("hotrow", "torch sparse", "jax lazy"))
    run.found = {
        "hotrow": {"floor_ratio": {"median": 2.5}},
        "torch sparse": {"hotrow_ratio": {"median": 0.75}},
        "jax lazy": {"hotrow_ratio": {"median": 1.25}},
    }
    assert run.goal("torch sparse", 0.75)["met"] is True
    assert run.goal("torch sparse", 0.74)["met"] is False
    assert run.goal(FLOOR, 2.5)["met"] is True
    assert run.goal(FLOOR, 2.4)["met"] is False
    assert run.goal(BEST, 1.0) == {
        "against": "best peer", "at_most_ratio": 1.0, "best_peer": "jax lazy", "ratio": 1.25,
        "met": False,
    }  # fmt: skip
    for extra, met in ((151e6, False), (149e6, True)):
        run.found["hotrow"]["memory"] = {"peak_extra_bytes": extra}
        assert run.memory_goal(150e6)["met"] is met
    del run.found["hotrow"]["memory"]
    assert run.memory_goal(150e6)["met"] is None
    assert measured["adamw-1m-256"]["goals"][-1]["at_most_extra_bytes"] == 150e6


def test_goals_beside_those_that_were_not_asked_for_are_none():
    workload = TABLES["adamw-1m-256"]
    left = workload.among(["torch sparse"])
    assert [entry.name for entry in left.entries] == ["hotrow", "torch sparse"]
    assert [goal.against for goal in left.goals] == ["torch sparse", FLOOR, BEST]
    assert [goal.against for goal in workload.among(["fbgemm"]).goals] == [FLOOR]


def test_growth_has_sizes_of_its_own(measured):
    peers = measured["adamw-growing-ids"]["peers"]
    moved = [peer["floor_bytes"] for peer in peers.values()]
    assert moved[1:] == sorted(moved[1:], reverse=True)
    assert len(set(moved)) > 2
    rows = [peer["rows"] for peer in measured["adamw-10m-64"]["peers"].values()]
    assert rows == [300, 100, 300, 300]


def test_threads_are_set_for_a_turn_and_put_back(monkeypatch):
    seen = []
    step = Peer.step

    def watched(self, ids, gradient):
        seen.append(torch.get_num_threads())
        return step(self, ids, gradient)

    monkeypatch.setattr(Peer, "step", watched)
    workload = replace(TINY["sgd-1k-16"], entries=(OURS, Entry("hotrow", threads=2)), goals=())
    timing.Run(workload).measure()
    assert set(seen) == {1, 2}
    assert torch.get_num_threads() == 1


@pytest.mark.skipif(
    importlib.util.find_spec("fbgemm_gpu") is None, reason="needs a peer of the benchmark: FBGEMM"
)
@pytest.mark.parametrize("rule", ["SGD", "Adagrad"])
def test_fbgemm_is_equal(rule):
    workload = replace(TINY["sgd-1m-256"], rule=rule, entries=(OURS, Entry("fbgemm")), goals=())
    record = timing.Run(workload).measure()
    assert record["peers"]["fbgemm"]["equality"]["equal"], record["peers"]["fbgemm"]


@pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="needs a peer of the benchmark: JAX"
)
@pytest.mark.parametrize("rule", ["SGD", "Adagrad", "Adam", "AdamW", None])
def test_jax_is_equal_where_it_is_dense(rule):
    entries = (OURS, Entry("jax dense"), *[Entry("jax lazy")] * (rule is not None))
    task = "gradient" if rule is None else "step"
    workload = replace(ADAMW, rule=rule, task=task, entries=entries, goals=())
    peers = timing.Run(workload).measure()["peers"]
    assert peers["jax dense"]["equality"]["max_error"] < 1e-5
    if rule in ("Adam", "AdamW"):
        lazy, sparse = Entry("jax lazy"), SPARSE
        peers = timing.Run(replace(workload, entries=(OURS, lazy, sparse))).measure()["peers"]
        a, b = (peers[each.name]["equality"]["max_error"] for each in (lazy, sparse))
        assert a == pytest.approx(b, rel=1e-2)
    elif rule:
        assert peers["jax lazy"]["equality"]["max_error"] < 1e-5


MODELS = {name: each for name, each in WORKLOADS.items() if isinstance(each, Model)}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_equal_and_timed(name):
    model = replace(MODELS[name].small(), rounds=2, turn=(1, 1))
    record = model.run()
    assert record["equality"]["output"]["converted_error"] < 1e-5
    assert record["ratio"]["median"] > 0
    found = {"time": record["ratio"]["median"], "memory": record["memory_ratio"]}
    assert [goal["met"] for goal in record["goals"]] == [
        None if found[what] is None else found[what] <= most for what, most in model.goals
    ]
    for side in ("before", "after"):
        ratio = record[side]["median_ms"] / record["floor_ms"]
        assert record["floor_ratio"][side] == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize(("after", "met"), [(4, True), (6, False), (None, None)])
def test_goals_of_a_model_are_judged(monkeypatch, after, met):
    ratio = None if after is None else after / 100
    found = {"ratio": {"median": 0.02}, "memory_ratio": ratio}
    monkeypatch.setattr(Model, "times", lambda self, told: found)
    monkeypatch.setattr(Model, "equality", lambda self: {})
    model = replace(MODELS["onehot-plain"], goals=(("memory", 0.05), ("time", 0.01)))
    assert [goal["met"] for goal in model.run()["goals"]] == [met, False]


def test_the_bytes_that_a_model_must_move():
    model, draw = MODELS["recommender"].make(True)
    batch = draw(0)
    side = Side(model, converted=True, min_entries=0)
    for t in range(3):
        side.step(draw(t))
    ids, dense = batch
    rows = sum(len(ids[:, i].unique()) for i in range(ids.shape[1]))
    plain = sum(p.numel() for p in model.net.parameters())
    times = {"after": {"median_ms": 3.0}}
    found = MODELS["recommender"].above_floor(side, batch, 1e6, times)
    columns = model.tables[0].embedding_dim
    moved = 2 * 3 * 4 * (rows * columns + plain) + ids.nbytes + dense.nbytes
    assert found["floor_bytes"] == moved
    assert found["floor_ms"] == pytest.approx(moved / 1e3)


def test_a_model_whose_numbers_are_wrong_has_no_record(monkeypatch):
    from benchmarks import models

    right = models.found

    def wrong(model, batch):
        found = right(model, batch)
        if next(model.parameters()).dtype == torch.float32:
            wrong.calls += 1
            if wrong.calls == 2:  # the converted one
                found["output"] = found["output"] + 1e-3
        return found

    wrong.calls = 0
    monkeypatch.setattr(models, "found", wrong)
    with pytest.raises(AssertionError, match="onehot-policy"):
        MODELS["onehot-policy"].small().equality()


def test_startup_first_uses_find_no_cache_and_later_ones_do(tmp_path, monkeypatch):
    from benchmarks import startup

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
    found = Startup().small().run()
    assert (tmp_path / "log").read_text().split() == ["first", "first", "later", "later"]
    assert len(found["first_use_samples_s"]) == 2
    assert found["added"]["p20_ms"] <= found["added"]["median_ms"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_peak_of_a_program_is_its_own(monkeypatch, tmp_path):
    from benchmarks import startup

    monkeypatch.setattr(startup, "STEPS", "")
    mine = torch.ones(300 << 20, dtype=torch.uint8)
    small, large = (startup.run(f"b'x' * ({n} << 20)", str(tmp_path))[1] for n in (0, 100))
    assert small < 50e6 < 100e6 < large < 160e6 < mine.nbytes


def test_a_program_of_startup_that_fails_is_no_time(tmp_path):
    from benchmarks import startup

    with pytest.raises(subprocess.CalledProcessError):
        startup.run("raise SystemExit(3)", str(tmp_path))


def test_the_programs_of_startup_train():
    from benchmarks import startup

    for program in (startup.TORCH, startup.HOTROW):
        names = {}
        read = "before = table(torch.arange(1000)).detach().clone()"
        exec(program + read + startup.STEPS, names)
        moved = (names["table"](torch.arange(1000)) != names["before"]).any(1)
        assert bool(moved[:500].all())


def test_suites_keep_to_their_time_and_have_every_optimizer():
    for suite, limit in (("quick", 120), ("full", 1200)):
        assert sum(WORKLOADS[name].seconds for name in SUITES[suite]) <= limit
    assert set(SUITES["quick"]) < set(SUITES["full"])
    assert {each.rule for each in TABLES.values() if each.task == "step"} == set(optim.__all__)
    for name, workload in TABLES.items():
        assert workload.entries[0] == OURS, name
        entries = {entry.name for entry in workload.entries}
        assert {goal.against for goal in workload.goals} <= entries | {FLOOR, BEST}, name


def test_a_small_workload_keeps_its_goals_beside_whom_they_are():
    small = WORKLOADS["adamw-10m-64"].small()
    assert small.goals[0].against in {entry.name for entry in small.entries}


def test_memory_is_reckoned_for_all_of_them(monkeypatch):
    case = Case("forward", None, 1000, 8, 50)
    table = 4 * 1000 * 8
    assert kinds.bytes_needed("one-hot matmul", case, {}) == (table, 4 * 50 * 1000)
    step = Case("step", "AdamW", 1000, 8, 50)
    assert kinds.bytes_needed("torch fused", step, {}) == (3 * table, table)
    others = {"torch fused": KINDS["torch fused"].build(step, {})}
    assert kinds.bytes_needed("torch default", step, others) == (0, 3 * table)
    # Each holds its own, and the largest step needs its memory beside.
    room = kinds.Room(100)
    for held, step in ((40, 10), (10, 30), (20, 10)):
        room.check(held, step)
        room.take(held, step)
    for held, step, left in ((1, 1, 1), (1, 30, 30), (0, 31, 30)):
        with pytest.raises(MemoryError, match=f"about {held + step} B, and {left} B are left"):
            room.check(held, step)
    room.check(0, 30)
    # Of two tables that would fit alone, the second is left out.
    monkeypatch.setattr(timing, "free_memory", lambda: 5 * 4 * 300 * 8)
    workload = replace(ADAMW, entries=(OURS, SPARSE), goals=())
    record = timing.Run(workload).measure()
    expected = "MemoryError: it needs about 28.8 kB, and 19.2 kB are left"
    assert record["peers"]["torch sparse"]["failed"] == expected
    # What is not installed holds none.
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.setattr(timing, "free_memory", lambda: 7 * 4 * 300 * 8)
    workload = replace(workload, entries=(OURS, Entry("jax lazy"), SPARSE))
    peers = timing.Run(workload).measure()["peers"]
    assert [name for name, peer in peers.items() if "failed" in peer] == ["jax lazy"]
