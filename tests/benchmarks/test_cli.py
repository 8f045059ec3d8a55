"""Test `python -m benchmarks`, from its arguments to its files; test_suite.py tests the numbers."""

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

# torch warns about its own sparse gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command in this process; return its exit code, output and errors."""

    def run_command(*words):
        monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return run_command


@exhaustive
def test_the_command_in_its_own_process(tmp_path):
    folder = tmp_path / "a" / "records"
    words = ["--suite", "sgd-1k-16", "--peers", "torch sparse", "--small"]
    words += ["--threads", "1", "--records", folder]
    command = [sys.executable, "-m", "benchmarks", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = record_files.read(folder)
    assert list(found) == ["sgd-1k-16"]
    record = found["sgd-1k-16"]
    assert list(record["peers"]) == ["hotrow", "torch sparse"]
    environment = record["environment"]
    assert environment["threads"] == 1
    assert environment["versions"]["torch"] == version("torch")
    assert (
        environment["commit"].split()[0] == "unknown" or len(environment["commit"].split()[0]) == 12
    )
    assert {"jax", "optax", "fbgemm-gpu-cpu"} < set(environment["versions"])
    assert (folder / "sgd-1k-16.json").stat().st_size < 4000  # no samples
    assert "torch.optim.SGD (sparse=True)" in done.stdout
    assert ": at most 1x the time of the fastest peer," in done.stdout
    assert "measured: " in " ".join(done.stdout.split())
    assert "1 workload, about 8 s on two idle cores" in done.stderr
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
        (["--suite", "ful"], "--suite 'ful' is not a suite or workload", "did you mean full?"),
        (["--suite", ","], "--suite '' is not a suite or workload", "python -m benchmarks --list"),
        (["--peers", "torch spars"], "--peers 'torch spars' is not a peer", "torch sparse?"),
        (["--records", __file__], f"--records {__file__}: cannot create folder", ""),
        (["--threads", "0"], "Invalid value for '--threads'", ""),
    ],
)
def test_bad_arguments_are_rejected_before_anything_runs(run, monkeypatch, words, problem, fix):
    monkeypatch.setattr(suite, "run_suite", lambda *_: 1 / 0)
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert problem in " ".join(err.replace("│", " ").split())
    assert fix in err


def test_overlapping_suites_and_names_run_once(run, monkeypatch):
    requested = []
    monkeypatch.setattr(suite, "run_suite", lambda names, *_: requested.extend(names) or [])
    assert run("--suite", "quick, sgd-1k-16", "--suite", "startup")[0] == 0
    assert requested == [*SUITES["quick"], "startup"]
    requested.clear()
    run()
    assert requested == list(SUITES["quick"])


@exhaustive
def test_a_failed_workload_does_not_stop_the_others(run, monkeypatch, tmp_path):
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
    assert "sgd-1k-16 has no peer fbgemm\n" in err
    assert "sgd-1m-256 has no peer" not in err
    assert set(record_files.read(tmp_path)) == {"sgd-1m-256", "sgd-1k-16"}
    assert out.startswith("sgd-1m-256  SGD, 1,001 x 256, 257 ids\n")


def test_remaining_time_follows_the_elapsed_time(monkeypatch):
    now, reported = iter([0.0, 10.0]), []
    monkeypatch.setattr(suite.time, "monotonic", lambda: next(now))
    progress = suite.SuiteProgress(lambda *values: reported.append(values), 20.0)
    # Work estimated at 5 s of 20 s took 10 s, so the remaining 15 s should take 30 s.
    progress.update(replace(select("sgd-1k-16"), seconds=10.0), 0.5, "half")
    assert reported == [(0.25, "half", 10.0, 30.0)]


@pytest.mark.parametrize("brief", [True, False])
def test_report_of_a_record(brief):
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
    assert "The bandwidth floor is 2.5 ms (80 MB at 32 GB/s)." in found.setting
    assert found.rows[0][:2] == ["ours", "7.65 [7.1, 1,234]"]
    assert {"98.8", "3.06x"} < set(found.rows[0])
    assert found.rows[1][0] == "theirs, 7 rows, 3 ids, 1 thread"
    assert all(len(row) == len(found.head) for row in found.rows)
    for line in (
        "theirs, 7 rows, 3 ids, 1 thread: the weights are **not equal** to those of dense "
        "torch.optim.Adam on 9 sampled rows. The maximum error is 0.5 (dense bfloat16 training: "
        "0.25), and weights moved by up to 1.",
        "absent was not measured: ImportError: no. Install it with `pip install it`.",
        "Goal met: at least 10x faster than theirs, 7 rows, 3 ids, 1 thread; measured: 31.2x.",
        "Goal **not met**: at most 2x the bandwidth floor; measured: 3.06x.",
        "Goal met: at most 1x the time of the fastest peer, theirs, 7 rows, 3 ids, 1 thread; "
        "measured: 0.0321x.",
        "Goal not measured: at most 1x the time of the fastest peer.",
        "Goal **not met**: at most 50 MB of extra memory.",
    ):
        assert line in found.remarks
    assert found.rows[1][-1] == ("31.2x" if brief else "31.2x [25, 33.3]")
