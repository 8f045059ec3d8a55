"""`python -m benchmarks`, from the arguments to the files; its numbers are test_suite.py's."""

import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version

import pytest

from benchmarks import cli, record_files, report, suite
from benchmarks.registry import PEER_TYPES
from benchmarks.workloads import SUITES, WORKLOADS, select
from hotrow.bench import floor
from hotrow.bench.process import JobError
from tests.support.exhaustive import exhaustive
from tests.support.paths import ROOT

# Of torch's own sparse gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command here; its exit code, output and errors."""

    def run_command(*words):
        monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return run_command


@exhaustive
def test_the_whole_command(tmp_path):
    """In processes of its own: times and records."""
    kept = tmp_path / "a" / "kept"
    words = ["--suite", "sgd-1k-16", "--peers", "torch sparse", "--small"]
    words += ["--threads", "1", "--records", kept]
    command = [sys.executable, "-m", "benchmarks", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = record_files.read(kept)
    assert list(found) == ["sgd-1k-16"]
    record = found["sgd-1k-16"]
    assert list(record["peers"]) == ["hotrow", "torch sparse"]
    seen = record["environment"]
    assert seen["threads"] == 1
    assert seen["versions"]["torch"] == version("torch")
    assert seen["commit"].split()[0] == "unknown" or len(seen["commit"].split()[0]) == 12
    assert {"jax", "optax", "fbgemm-gpu-cpu"} < set(seen["versions"])
    assert (kept / "sgd-1k-16.json").stat().st_size < 4000  # no samples
    assert "sparse=True, torch.optim.SGD" in done.stdout
    assert "Goal beside sparse=True, torch.optim.SGD: at most 1.5 x: " in done.stdout
    assert "1 workload, about 8 s on two quiet cores" in done.stderr
    assert " left\n" in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_list_names_every_workload_and_peer(run):
    code, out, _ = run("--list")
    assert code == 0
    for name in [*SUITES, *WORKLOADS, *PEER_TYPES]:
        assert f"{name} " in out or f"{name}:" in out, name
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "problem", "fix"),
    [
        (["--suite", "ful"], "--suite 'ful' is no suite or workload", "did you mean full?"),
        (["--suite", ","], "--suite '' is no suite or workload", "python -m benchmarks --list"),
        (["--peers", "torch spars"], "--peers 'torch spars' is no peer", "torch sparse?"),
        (["--records", __file__], f"--records {__file__} cannot be a folder", ""),
        (["--threads", "0"], "Invalid value for '--threads'", ""),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_runs(run, monkeypatch, words, problem, fix):
    monkeypatch.setattr(suite, "run_suite", lambda *_: 1 / 0)
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert problem in " ".join(err.replace("│", " ").split())
    assert fix in err


def test_suites_and_names_may_overlap(run, monkeypatch):
    asked = []
    monkeypatch.setattr(suite, "run_suite", lambda names, *_: asked.extend(names) or [])
    assert run("--suite", "quick, sgd-1k-16", "--suite", "startup")[0] == 0
    assert asked == [*SUITES["quick"], "startup"]
    asked.clear()
    run()
    assert asked == list(SUITES["quick"])


def test_what_fails_takes_nothing_else_with_it(run, monkeypatch, tmp_path):
    def run_in_process(workload, options, report_progress):
        if workload.name == "adamw-1k-16":
            raise JobError("no result")
        return workload.run()

    monkeypatch.setattr(floor, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(suite, "run_in_process", run_in_process)
    names = "adamw-1k-16,sgd-1m-256,sgd-1k-16"
    code, out, err = run("--suite", names, "--small", "--peers", "fbgemm", "--records", tmp_path)
    assert code == 1
    assert "\nadamw-1k-16 failed: no result\n" in f"\n{err}"
    assert "sgd-1k-16: without fbgemm, which it does not have\n" in err
    assert "sgd-1m-256: without" not in err
    assert set(record_files.read(tmp_path)) == {"sgd-1m-256", "sgd-1k-16"}
    assert out.startswith("sgd-1m-256  SGD, 1,001 x 256, 257 ids\n")


def test_time_left_follows_how_long_it_took(monkeypatch):
    now, reported = iter([0.0, 10.0]), []
    monkeypatch.setattr(suite.time, "monotonic", lambda: next(now))
    progress = suite.SuiteProgress(lambda *values: reported.append(values), 20.0)
    # 5 of 20 estimated seconds took 10: 15 more take 30.
    progress.update(replace(select("sgd-1k-16"), seconds=10.0), 0.5, "half")
    assert reported == [(0.25, "half", 10.0, 30.0)]


@pytest.mark.parametrize("brief", [True, False])
def test_the_report_of_a_record(brief):
    equal = {"equal": False, "rows_compared": 9, "max_error": 0.5, "max_change_of_dense": 1.0}
    equal |= {"max_error_of_dense": 0.25, "reference": "torch.optim.Adam"}
    step = {"median_ms": 7.654, "p20_ms": 7.1, "p80_ms": 1234.5}
    ratio = {"median": 0.0321, "p20": 0.03, "p80": 0.04}
    ours = {"rows": 5, "label": "ours", "step": step, "memory": {"peak_extra_bytes": 98_765_432}}
    ours |= {"floor_ms": 2.5, "floor_bytes": 8e7, "floor_ratio": {"median": 3.06}}
    theirs = {"rows": 7, "ids": 3, "threads": 1, "label": "theirs", "step": step}
    record = {
        "workload": "w", "about": "a try",
        "task": "step", "optimizer": "Adam", "rows": 5,
        "columns": 2, "ids": 4, "dtype": "bfloat16", "zipf_exponent": None,
        "distinct_ids_per_step": 4,
        "warmup_steps": 6, "dense_warmup_steps": 2, "copy_bytes_per_s": 32e9,
        "peers": {
            "hotrow": ours,
            "peer": theirs | {"equality": equal, "hotrow_ratio": ratio},
            "absent": {"rows": 5, "error": "ImportError: no", "install_command": "pip install it"},
        },
        "goals": [
            {"against": "peer", "max_ratio": 0.1, "ratio": 0.0321, "met": True},
            {"against": "floor", "max_ratio": 2.0, "ratio": 3.06, "met": False},
            {"against": "best peer", "max_ratio": 1.0, "best_peer": "peer", "ratio": 0.0321,
             "met": True},
            {"against": "best peer", "max_ratio": 1.0, "ratio": None, "met": None},
            {"max_extra_bytes": 5e7, "met": False},
        ],
    }  # fmt: skip
    found = report.describe(record, brief)
    assert found.title == "Adam, 5 x 2, 4 uniform ids, bfloat16"
    assert "The floor is 2.5 ms: 80 MB at 32 GB/s." in found.setting
    assert found.rows[0][:2] == ["ours", "7.65 [7.1, 1,234]"]
    assert {"98.8", "3.06" if brief else "3.06 x"} < set(found.rows[0])
    assert found.rows[1][0] == "theirs, 7 rows, 3 ids, 1 thread"
    assert all(len(row) == len(found.head) for row in found.rows)
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
        assert line in found.remarks
    if not brief:
        assert found.rows[1][-2:] == ["0.0321 [0.03, 0.04]", "at most 0.1: met"]
    beside = "Goal beside theirs, 7 rows, 3 ids, 1 thread: at most 0.1 x: 0.0321 x, met."
    assert (beside in found.remarks) == brief
