"""`hotrow bench`, from the arguments to the files; its numbers are test_bench.py's."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from importlib.metadata import version

import pytest

import hotrow
from benchmarks import records, running, telling
from benchmarks.kinds import KINDS
from benchmarks.workloads import SUITES, WORKLOADS, chosen
from hotrow.cli import main as cli
from hotrow.lesson import times


@pytest.fixture
def run(capsys, monkeypatch):
    """Run `hotrow bench` here; its exit code, output and errors."""

    def bench(*words):
        monkeypatch.setattr(sys, "argv", ["hotrow", "bench", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return bench


def test_the_whole_command(tmp_path):
    """In processes of its own: times, records, JSON and figures."""
    kept, drawn, all_ = tmp_path / "kept", tmp_path / "a" / "b", tmp_path / "all.json"
    words = ["--suite", "sgd-1k-16", "--peers", "torch sparse", "--small"]
    words += ["--threads", "1", "--records", kept, "--plot", drawn, "--json", all_]
    done = subprocess.run(
        [sys.executable, "-m", "hotrow", "bench", *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(all_.read_text())
    assert list(found) == ["sgd-1k-16"]
    assert found == records.read(kept)
    record = found["sgd-1k-16"]
    assert list(record["peers"]) == ["hotrow", "torch sparse"]
    assert record["environment"]["threads"] == 1
    assert record["environment"]["versions"]["torch"] == version("torch")
    figure = ET.parse(drawn / "sgd-1k-16.svg").getroot()
    assert "hotrow.optim.SGD" in "".join(figure.itertext())
    assert "sparse=True, torch.optim.SGD" in done.stdout
    assert "Goal beside sparse=True, torch.optim.SGD: at most 1.5 x: " in done.stdout
    assert "1 workload, about 8 s on two quiet cores" in done.stderr
    assert " left\n" in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_list_names_every_workload_and_peer(run):
    code, out, _ = run("--list")
    assert code == 0
    for name in [*SUITES, *WORKLOADS, *KINDS]:
        assert f"{name} " in out or f"{name}:" in out, name
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "problem", "fix"),
    [
        (["--suite", "ful"], "--suite 'ful' is no suite or workload", "did you mean full?"),
        (["--suite", ","], "--suite '' is no suite or workload", "hotrow bench --list"),
        (["--peers", "torch spars"], "--peers 'torch spars' is no peer", "torch sparse?"),
        (["--json", "no/such/file"], "no/such/file cannot be written", "make it first"),
        (["--plot", __file__], f"--plot {__file__} cannot be a folder", ""),
        (["--threads", "0"], "Invalid value for '--threads'", ""),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_runs(run, monkeypatch, words, problem, fix):
    monkeypatch.setattr(running, "measure", lambda *_: 1 / 0)
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert problem in " ".join(err.replace("│", " ").split())
    assert fix in err


def test_suites_and_names_may_overlap(run, monkeypatch):
    asked = []
    monkeypatch.setattr(running, "measure", lambda names, *_: asked.extend(names) or [])
    assert run("--suite", "quick, sgd-1k-16", "--suite", "startup")[0] == 0
    assert asked == [*SUITES["quick"], "startup"]
    asked.clear()
    run()
    assert asked == list(SUITES["quick"])


def test_a_workload_whose_process_fails_is_reported(run, monkeypatch, tmp_path):
    monkeypatch.setattr(records, "SETTINGS", {})  # its process refuses to measure without
    code, out, err = run("--suite", "sgd-1k-16", "--small", "--records", tmp_path)
    assert (code, out) == (1, "")
    assert "sgd-1k-16 failed: AssertionError: THP_MEM_ALLOC_ENABLE=1 must be set" in err
    assert records.read(tmp_path) == {}


def test_what_fails_takes_nothing_else_with_it(run, monkeypatch, tmp_path):
    def here(workload, asked, progress):
        if workload.name == "adamw-1k-16":
            raise running.Failed("no result")
        return workload.run()

    monkeypatch.setattr(running, "run", here)
    suite = "adamw-1k-16,sgd-1m-256,sgd-1k-16"
    code, out, err = run("--suite", suite, "--small", "--peers", "fbgemm", "--records", tmp_path)
    assert code == 1
    assert "\nadamw-1k-16 failed: no result\n" in f"\n{err}"
    assert "sgd-1k-16: without fbgemm, which it does not have\n" in err
    assert "sgd-1m-256: without" not in err
    assert set(records.read(tmp_path)) == {"sgd-1m-256", "sgd-1k-16"}
    assert out.startswith("sgd-1m-256  SGD, 1,001 x 256, 257 ids\n")


def test_time_left_follows_how_long_it_took(monkeypatch):
    now, told = iter([0.0, 10.0]), []
    monkeypatch.setattr(running.time, "monotonic", lambda: next(now))
    progress = running.Progress(lambda *what: told.append(what), 20.0)
    # 5 of 20 estimated seconds took 10: 15 more take 30.
    progress(replace(chosen("sgd-1k-16"), seconds=10.0), 0.5, "half")
    assert told == [(0.25, "half", 10.0, 30.0)]


def test_a_record_says_where_it_was_made(tmp_path):
    assert records.commit(tmp_path) == f"none: hotrow {hotrow.__version__}, installed"
    inside = records.commit(records.ROOT).split()[0]
    assert inside == "unknown" or len(inside) == 12


@pytest.mark.parametrize("brief", [True, False])
def test_what_is_told_of_a_record(brief):
    equal = {"equal": False, "rows_compared": 9, "max_error": 0.5, "max_move_of_dense": 1.0}
    equal |= {"max_error_of_dense_bfloat16": 0.25, "with": "torch.optim.Adam"}
    step = {"median_ms": 7.654, "p20_ms": 7.1, "p80_ms": 1234.5}
    ratio = {"median": 0.0321, "p20": 0.03, "p80": 0.04}
    ours = {"rows": 5, "label": "ours", "step": step, "memory": {"peak_extra_bytes": 98_765_432}}
    ours |= {"floor_ms": 2.5, "floor_bytes": 8e7, "floor_ratio": {"median": 3.06}}
    theirs = {"rows": 7, "ids": 3, "threads": 1, "label": "theirs", "step": step}
    record = {
        "workload": "w", "about": "a try", "task": "step", "rule": "Adam", "rows": 5,
        "columns": 2, "ids": 4, "dtype": "bfloat16", "zipf": False, "distinct_ids_per_step": 4,
        "steps_before": 6, "steps_before_dense": 2, "copy_bytes_per_s": 32e9,
        "peers": {
            "hotrow": ours,
            "peer": theirs | {"equality": equal, "hotrow_ratio": ratio},
            "absent": {"rows": 5, "failed": "ImportError: no", "remedy": "pip install it"},
        },
        "goals": [
            {"against": "peer", "at_most_ratio": 0.1, "ratio": 0.0321, "met": True},
            {"against": "floor", "at_most_ratio": 2.0, "ratio": 3.06, "met": False},
            {"against": "best peer", "at_most_ratio": 1.0, "best_peer": "peer", "ratio": 0.0321,
             "met": True},
            {"against": "best peer", "at_most_ratio": 1.0, "ratio": None, "met": None},
            {"at_most_extra_bytes": 5e7, "met": False},
        ],
    }  # fmt: skip
    told = telling.tell(record, brief)
    assert told.title == "Adam, 5 x 2, 4 uniform ids, bfloat16"
    assert "The floor is 2.5 ms: 80 MB at 32 GB/s." in told.setting
    assert told.rows[0][:2] == ["ours", "7.65 [7.1, 1,234]"]
    assert {"98.8", "3.06" if brief else "3.06 x"} < set(told.rows[0])
    assert told.rows[1][0] == "theirs, 7 rows, 3 ids, 1 thread"
    assert all(len(row) == len(told.head) for row in told.rows)
    for line in (
        "theirs, 7 rows, 3 ids, 1 thread: **not equal** to dense torch.optim.Adam on 9 rows. "
        "Largest error 0.5 (torch's dense bfloat16: 0.25), where weights moved by up to 1.",
        "absent took no part: ImportError: no. To have it: `pip install it`.",
        "Goal beside the floor: at most 2 x: 3.06 x, **not met**.",
        "Goal beside the quickest peer, theirs, 7 rows, 3 ids, 1 thread: at most 1 x: 0.0321 x, "
        "met.",
        "Goal beside the quickest peer: at most 1 x: not measured.",
        "Goal for hotrow's extra memory: at most 50 MB: **not met**.",
    ):
        assert line in told.remarks
    if not brief:
        assert told.rows[1][-2:] == ["0.0321 [0.03, 0.04]", "at most 0.1: met"]
    beside = "Goal beside theirs, 7 rows, 3 ids, 1 thread: at most 0.1 x: 0.0321 x, met."
    assert (beside in told.remarks) == brief


def times_of(**peers):
    part = {"median_ms": 1.5}
    record = {"workload": "any", "rows": 10, "columns": 4, "ids": 3}
    return record | {"peers": {name: dict.fromkeys(parts, part) for name, parts in peers.items()}}


BOTH = times_of(**{"hotrow": ("forward", "backward"), "one-hot matmul": ("forward", "backward")})
FORWARD = times_of(**{"hotrow": ("forward",), "one-hot matmul": ("forward",)})
ALONE = times_of(hotrow=("forward", "backward"))


@pytest.fixture
def measured(run, monkeypatch, tmp_path):
    """Run it with these records for those of the measurement; the times that it left."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("hotrow.cli.bench._show", lambda record, console: None)

    def measured(*found, words=()):
        def measure(names, asked, tell, show):
            for record in found:
                show(record)
            return []

        monkeypatch.setattr(running, "measure", measure)
        code, _, said = run("--suite", "sgd-1k-16", *words)
        assert code == 0
        assert ("hotrow learn shows" in said) == bool(times.load_times() and not words)
        return times.load_times()

    return measured


def test_times_of_both_ways_are_left_for_the_lesson(measured):
    assert measured(FORWARD, ALONE) == []
    assert measured(BOTH, FORWARD) == [times.Timing(10, 4, 3, 3.0, 3.0)]
    other = BOTH | {"rows": 20}
    assert [timing.V for timing in measured(other)] == [10, 20]
    faster = json.loads(json.dumps(BOTH))
    faster["peers"]["hotrow"]["forward"]["median_ms"] = 0.5
    assert [(timing.V, timing.lookup_ms) for timing in measured(faster)] == [(10, 2.0), (20, 3.0)]


def test_a_trial_of_the_harness_leaves_no_times(measured):
    assert measured(BOTH, words=["--small"]) == []


@pytest.mark.parametrize("content", ["", "[", "{}", "[1]", '[{"V": 1}]', "[" * 100_000])
def test_times_that_cannot_be_read_are_none(measured, tmp_path, content):
    folder = tmp_path / "cache" / "hotrow"
    folder.mkdir(parents=True)
    (folder / "times.json").write_text(content)
    assert times.load_times() == []
    assert len(measured(BOTH)) == 1
