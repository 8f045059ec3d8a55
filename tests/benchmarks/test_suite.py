"""Test the benchmark suite: goals, peers from other libraries, models, startup and workloads."""

import importlib.util
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.goals import BEST, FLOOR, Goal, judge
from benchmarks.models import Model, Side
from benchmarks.startup import Startup
from benchmarks.tables import TableBenchmark
from benchmarks.workloads import SPARSE, SUITES, WORKLOADS
from hotrow import optim
from hotrow.bench import floor
from hotrow.bench.workload import HOTROW, PeerConfig
from tests.support.exhaustive import exhaustive

# torch warns about its own sparse gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
TABLES = {name: each for name, each in WORKLOADS.items() if isinstance(each, TableBenchmark)}
MODELS = {name: each for name, each in WORKLOADS.items() if isinstance(each, Model)}
SIZES = {"rows": 300, "ids": 64, "columns": 8, "warmup_steps": 40, "steps_per_turn": 3}
ADAMW, SGD = (replace(TABLES[f"{name}-1m-256"].shrink(), **SIZES) for name in ("adamw", "sgd"))


@pytest.fixture(scope="module", autouse=True)
def _small_measurements():
    """Measure with one thread and small copies, because the tables are tiny."""
    threads, size = torch.get_num_threads(), floor.COPY_BYTES
    torch.set_num_threads(1)
    floor.COPY_BYTES = 1 << 20
    yield
    torch.set_num_threads(threads)
    floor.COPY_BYTES = size


def test_goals_are_judged():
    peers = {
        "hotrow": {"floor_ratio": {"median": 2.5}, "memory": {"peak_extra_bytes": 150e6}},
        "torch sparse": {"hotrow_ratio": {"median": 0.75}},
        "hotrow, 10 rows": {"hotrow_ratio": {"median": 1.5}},
        "jax lazy": {"hotrow_ratio": {"median": 1.25}},
        "fbgemm": {"error": "it is absent"},
    }

    def verdict(against, max_ratio):
        (result,) = judge({"peers": peers}, (Goal(against, max_ratio),), None)
        return result["met"]

    assert verdict("torch sparse", 0.75) is True
    assert verdict("torch sparse", 0.74) is False
    assert verdict("fbgemm", 0.8) is None
    assert verdict(FLOOR, 2.5) is True
    assert verdict(FLOOR, 2.4) is False
    (best,) = judge({"peers": peers}, (Goal(BEST, 1.0),), None)
    assert best == {
        "against": "best peer", "max_ratio": 1.0, "best_peer": "jax lazy", "ratio": 1.25,
        "met": False,
    }  # fmt: skip
    for most, met in ((149e6, False), (151e6, True)):
        (memory,) = judge({"peers": peers}, (), most)
        assert memory == {"max_extra_bytes": most, "extra_bytes": 150e6, "met": met}
    del peers["hotrow"]["memory"]
    (memory,) = judge({"peers": peers}, (), 150e6)
    assert memory["met"] is None
    alone = {"peers": {"hotrow": peers["hotrow"]}}
    (best,) = judge(alone, (Goal(BEST, 1.0),), None)
    assert best == {"against": "best peer", "max_ratio": 1.0, "ratio": None, "met": None}


def test_a_workload_records_its_goals():
    record = ADAMW.with_peers(["torch sparse"]).run()
    assert [goal.get("against") for goal in record["goals"]] == ["torch sparse", FLOOR, BEST, None]
    assert record["goals"][2]["best_peer"] == "torch sparse"
    assert record["goals"][3]["max_extra_bytes"] == 150e6


def test_only_goals_of_the_chosen_peers_remain():
    workload = TABLES["adamw-1m-256"]
    left = workload.with_peers(["torch sparse"])
    assert [peer.name for peer in left.peers] == ["hotrow", "torch sparse"]
    assert [goal.against for goal in left.goals] == ["torch sparse", FLOOR, BEST]
    assert [goal.against for goal in workload.with_peers(["fbgemm"]).goals] == [FLOOR]


def test_a_peer_that_is_not_installed_is_not_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    monkeypatch.setitem(sys.modules, "jax", None)
    names = "fbgemm", "jax lazy"
    goals = Goal("fbgemm", 0.8), Goal(BEST, 1.0)
    peers = (HOTROW, *map(PeerConfig, names))
    record = replace(SGD, peers=peers, goals=goals, warmup_steps=5).run()
    for name in names:
        assert record["peers"][name]["error"].startswith("ModuleNotFoundError")
    commands = [record["peers"][name]["install_command"] for name in names]
    assert commands[0] == "pip install --no-deps fbgemm-gpu-cpu==1.8.0"
    assert commands[1] == "pip install jax==0.10.2 optax==0.2.8"
    assert [goal["met"] for goal in record["goals"]] == [None, None]


@pytest.mark.skipif(
    importlib.util.find_spec("fbgemm_gpu") is None, reason="needs a benchmark peer: FBGEMM"
)
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_fbgemm_is_equal(optimizer):
    peers = (HOTROW, PeerConfig("fbgemm"))
    record = replace(SGD, optimizer=optimizer, peers=peers, goals=()).run()
    assert record["peers"]["fbgemm"]["equality"]["equal"], record["peers"]["fbgemm"]


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs a benchmark peer: JAX")
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "Adam", "AdamW", None])
def test_jax_is_equal_where_it_is_dense(optimizer):
    configs = (HOTROW, PeerConfig("jax dense"), *[PeerConfig("jax lazy")] * (optimizer is not None))
    task = "gradient" if optimizer is None else "step"
    workload = replace(ADAMW, optimizer=optimizer, task=task, peers=configs, goals=())
    peers = workload.run()["peers"]
    assert peers["jax dense"]["equality"]["max_error"] < 1e-5
    if optimizer in ("Adam", "AdamW"):
        lazy, sparse = PeerConfig("jax lazy"), SPARSE
        peers = replace(workload, peers=(HOTROW, lazy, sparse)).run()["peers"]
        a, b = (peers[each.name]["equality"]["max_error"] for each in (lazy, sparse))
        assert a == pytest.approx(b, rel=1e-2)
    elif optimizer:
        assert peers["jax lazy"]["equality"]["max_error"] < 1e-5


@exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_models_are_equal_and_timed(name):
    model = replace(MODELS[name].shrink(), rounds=2, steps_per_turn=(1, 1))
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
    monkeypatch.setattr(Model, "measure_times", lambda self, report_progress: found)
    monkeypatch.setattr(Model, "measure_equality", lambda self: {})
    model = replace(MODELS["onehot-plain"], goals=(("memory", 0.05), ("time", 0.01)))
    assert [goal["met"] for goal in model.run()["goals"]] == [met, False]


def test_bytes_that_a_model_must_move():
    model, draw = MODELS["recommender"].make(True)
    batch = draw(0)
    side = Side(model, converted=True, min_entries=0)
    for t in range(3):
        side.step(draw(t))
    ids, dense = batch
    rows = sum(len(ids[:, i].unique()) for i in range(ids.shape[1]))
    plain = sum(p.numel() for p in model.net.parameters())
    times = {"after": {"median_ms": 3.0}}
    found = MODELS["recommender"].compare_with_floor(side, batch, 1e6, times)
    columns = model.tables[0].embedding_dim
    moved = 2 * 3 * 4 * (rows * columns + plain) + ids.nbytes + dense.nbytes
    assert found["floor_bytes"] == moved
    assert found["floor_ms"] == pytest.approx(moved / 1e3)


def test_a_wrong_model_raises_and_has_no_record(monkeypatch):
    from benchmarks import models

    right = models.run_model

    def wrong(model, batch):
        found = right(model, batch)
        if next(model.parameters()).dtype == torch.float32:
            wrong.calls += 1
            if wrong.calls == 2:  # the converted model
                found["output"] = found["output"] + 1e-3
        return found

    wrong.calls = 0
    monkeypatch.setattr(models, "run_model", wrong)
    with pytest.raises(AssertionError, match="onehot-policy"):
        MODELS["onehot-policy"].shrink().measure_equality()


def test_only_later_starts_find_a_cache(tmp_path, monkeypatch):
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
    found = Startup().shrink().run()
    assert (tmp_path / "log").read_text().split() == ["first", "first", "later", "later"]
    assert found["added"]["p20_ms"] <= found["added"]["median_ms"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_peak_of_a_program_excludes_this_process(monkeypatch, tmp_path):
    from benchmarks import startup

    monkeypatch.setattr(startup, "STEPS", "")
    mine = torch.ones(300 << 20, dtype=torch.uint8)
    small, large = (startup.run_program(f"b'x' * ({n} << 20)", str(tmp_path))[1] for n in (0, 100))
    assert small < 50e6 < 100e6 < large < 160e6 < mine.nbytes


def test_a_failing_startup_program_raises(tmp_path):
    from benchmarks import startup

    with pytest.raises(subprocess.CalledProcessError):
        startup.run_program("raise SystemExit(3)", str(tmp_path))


def test_the_startup_programs_train():
    from benchmarks import startup

    for program in (startup.TORCH, startup.HOTROW):
        names = {}
        read = "before = table(torch.arange(1000)).detach().clone()"
        exec(program + read + startup.STEPS, names)
        moved = (names["table"](torch.arange(1000)) != names["before"]).any(1)
        assert bool(moved[:500].all())


def test_suites_fit_their_time_and_have_every_optimizer():
    for suite, limit in (("quick", 120), ("full", 1200)):
        assert sum(WORKLOADS[name].seconds for name in SUITES[suite]) <= limit
    assert set(SUITES["quick"]) < set(SUITES["full"])
    assert {each.optimizer for each in TABLES.values() if each.task == "step"} == set(optim.__all__)
    for name, workload in TABLES.items():
        assert workload.peers[0] == HOTROW, name
        peers = {peer.name for peer in workload.peers}
        assert {goal.against for goal in workload.goals} <= peers | {FLOOR, BEST}, name


def test_a_small_workload_keeps_the_peers_of_its_goals():
    small = WORKLOADS["adamw-10m-64"].shrink()
    assert small.goals[0].against in {peer.name for peer in small.peers}
