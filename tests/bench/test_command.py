"""Test `hotrow bench`, from its arguments to its report and files."""

import json
import re
import subprocess
import sys

import pytest

from hotrow.bench import measurement
from hotrow.bench.peers import PEER_TYPES
from hotrow.bench.process import JobError
from hotrow.bench.report import number
from hotrow.cli import bench, bench_report, terminal
from hotrow.cli import main as cli
from hotrow.lesson import times
from tests.bench.test_measurement import build_broken
from tests.support.exhaustive import exhaustive

# torch warns about its own sparse gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
SMALL = "--rows", "3_00", "--columns", "8", "--ids", "64"


def run_job(function, arguments, threads, report_progress):
    """Run the job in this process instead of in a child process."""
    assert function == "hotrow.cli.bench:run_workload"
    try:
        arguments = json.loads(json.dumps(arguments))
        return bench.run_workload(**arguments, report_progress=report_progress)
    except Exception as error:
        raise JobError(f"{type(error).__name__}: {error}", type(error).__name__) from None


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run `hotrow bench` in this process; return its exit code, output and errors."""
    monkeypatch.setattr(bench, "run_job", run_job)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run_command(*words):
        monkeypatch.setattr(sys, "argv", ["hotrow", "bench", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return run_command


def one_line(text):
    return " ".join(text.split())


@exhaustive
def test_the_command_runs_in_its_own_process(tmp_path):
    path = tmp_path / "bench.json"
    words = [*SMALL, "--optimizer", "sgd", "--threads", "1", "--json", str(path)]
    command = [sys.executable, "-m", "hotrow", "bench", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stdout.startswith("SGD, 300 x 8, 64 ids\n")
    record = json.loads(path.read_text())
    assert record["environment"]["settings"]["THP_MEM_ALLOC_ENABLE"] == "1"
    assert record["environment"]["threads"] == 1
    assert [record[key] for key in ("rows", "columns", "ids")] == [300, 8, 64]


@exhaustive
def test_the_report_has_times_memory_floor_and_equality(run, tmp_path):
    path = tmp_path / "bench.json"
    code, out, _ = run(*SMALL, "--json", path)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    peers = json.loads(path.read_text())["peers"]
    assert list(peers) == [
        "hotrow", "torch sparse", "torch fused", "torch foreach", "torch default",
        "one-hot matmul",
    ]  # fmt: skip
    for label in ("hotrow", "SparseAdam*", "torch fused", "torch foreach", "torch default"):
        assert out.count(f"\n  {label}  ") == 2, label  # in both tables
    text = one_line(out)
    assert "milliseconds forward backward optimizer total range ratio" in text
    assert "memory table and state extra during a step" in text
    assert "under 1 MB" in text
    assert re.search(r"Bandwidth floor: \S+ ms to move \S+ kB at \S+ GB/s; hotrow takes", text)
    assert "hotrow: the weights are equal to those of dense torch.optim.AdamW on" in text
    assert "SparseAdam*: the weights are not equal to those of dense torch.optim.Adam on" in text
    assert "* SparseAdam trains a different model: it skips rows without a gradient" in text
    assert "than torch's fastest dense AdamW (" in text  # the fastest optimizer varies


@exhaustive
@pytest.mark.parametrize("time", [0.00123456, 0.0987654, 98765.4])
def test_long_numbers_fit_into_one_line(run, tmp_path, time):
    path = tmp_path / "bench.json"
    run(*SMALL, "--json", path)
    record = json.loads(path.read_text())
    for peer in record["peers"].values():
        for part in ("forward", "backward", "optimizer_step", "step"):
            peer[part] = dict.fromkeys(("median_ms", "p20_ms", "p80_ms"), time)
    text = terminal.render(lambda console: bench_report.print_record(record, console))
    assert max(map(len, text.splitlines())) <= 80
    cell = re.escape(number(time))
    for label in ("torch foreach", "one-hot matmul", "SparseAdam\\*"):
        assert re.search(rf"\n  {label}( +{cell}){{4}} +{cell}-{cell} ", text), text


@exhaustive
def test_sparse_sgd_trains_the_same_model(run):
    code, out, _ = run(*SMALL, "--optimizer", "SGD", "--uniform")
    assert code == 0
    assert out.startswith("SGD, 300 x 8, 64 uniform ids\n  uniform ids, ")
    assert "\n  torch sparse  " in out
    assert "SparseAdam" not in out
    assert "than torch's sparse optimizer" in out


@exhaustive
def test_an_optimizer_without_fused_or_sparse_form_has_fewer_peers(run, tmp_path):
    path = tmp_path / "bench.json"
    code, _, _ = run(*SMALL, "--optimizer", "NAdam", "--dtype", "float64", "--json", path)
    assert code == 0
    record = json.loads(path.read_text())
    assert record["dtype"] == "float64"
    peers = ["hotrow", "torch foreach", "torch default", "one-hot matmul"]
    assert list(record["peers"]) == peers


def test_rows_that_are_not_equal_exit_1(run, monkeypatch, tmp_path):
    monkeypatch.setitem(PEER_TYPES, "hotrow", build_broken("hotrow"))
    path = tmp_path / "bench.json"
    code, out, err = run(*SMALL, "--json", path)
    assert (code, err) == (1, "")
    assert out.startswith("NOT equal: hotrow differs from dense training: max error ")
    assert not path.exists()


@exhaustive
def test_a_peer_that_does_not_fit_is_not_measured(run, monkeypatch):
    table = 4 * 300 * 8
    # There is enough memory only for the first peers.
    monkeypatch.setattr(measurement, "free_memory", lambda device: 8 * table)
    code, out, _ = run(*SMALL)
    assert code == 0
    text = one_line(out)
    assert "torch default was not measured: MemoryError: the peer needs about" in text
    assert "than torch's fastest dense AdamW" not in text


@pytest.mark.parametrize(
    ("words", "problem", "fix"),
    [
        (["--rows", "many"], "--rows 'many' is not an integer from 1 to", "1_000_000"),
        (["--device", "tpu"], "--device 'tpu' is not supported", "use cpu or cuda"),
        (["--device", "cuda:99"], "--device cuda:99: torch finds", "use --device cpu"),
        (["--rows", "0"], "--rows '0' is not an integer from 1 to 2,147,483,647", "1000000"),
        (["--columns", "-3"], "--columns '-3' is not an integer", ""),
        (["--ids", "1.5"], "--ids '1.5' is not an integer", ""),
        (["--threads", "1000000"], "--threads '1000000' is not an integer from 1 to", ""),
        (["--optimizer", "AdamV"], "--optimizer 'AdamV'", "choose one of Adadelta"),
        (["--dtype", "float16"], "--dtype 'float16'", "choose one of float32, bfloat16, float64"),
        (["--zipf", "0"], "--zipf '0' is not a number greater than 0 and at most 10", "--uniform"),
        (["--zipf", "nan"], "--zipf 'nan' is not a number", "use a number such as 1.1"),
        (["--zipf", "1.2", "--uniform"], "--uniform and --zipf 1.2 cannot be combined", "one of"),
        (["--json", "no/such/file"], "no/such/file cannot be written", "create it first"),
        (
            ["--rows", "2_000_000_000", "--columns", "2_000_000_000"],
            "--rows 2,000,000,000 --columns 2,000,000,000 --ids 16,384 with AdamW do not fit",
            "use fewer rows, columns or ids",
        ),
    ],
)
def test_invalid_input_gets_a_message_and_exit_code_2(run, monkeypatch, words, problem, fix):
    monkeypatch.setattr(bench, "run_job", lambda *_: 1 / 0)
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith(f"Error: {problem}")
    assert fix in err


@pytest.mark.parametrize(
    ("error", "code", "problem"),
    [
        (JobError("the process ended with signal 9"), 2, "the measurement ended without a result"),
        (JobError("KeyError: 'x'", "KeyError"), 3, "internal error in hotrow"),
    ],
)
def test_a_failed_child_process_is_reported(run, monkeypatch, error, code, problem):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(bench, "run_job", fail)
    found, out, err = run(*SMALL)
    assert (found, out) == (code, "")
    assert problem in err
    assert str(error) in err


def test_the_peers_of_a_large_table_and_the_default(run, monkeypatch):
    requested = []

    def note(function, arguments, threads, report_progress):
        requested.append(arguments["workload"])
        raise JobError("noted")

    monkeypatch.setattr(bench, "run_job", note)
    monkeypatch.setattr(bench, "free_memory", lambda device: 1e12)
    run()
    run("--rows", "10", "--columns", "1000000")
    default, wide = requested
    assert [default[key] for key in ("optimizer", "rows", "columns", "ids")] == [
        "AdamW", 1_000_000, 64, 16_384,
    ]  # fmt: skip
    assert "one-hot matmul" not in default["peers"]
    assert default["dense_steps_per_turn"] == 1
    assert wide["dense_steps_per_turn"] == 10


@exhaustive
def test_times_of_lookup_and_matmul_are_saved_for_the_lesson(run):
    assert times.load_times() == []
    _, out, _ = run(*SMALL)
    assert "hotrow learn now charts these lookup and matmul times" in out
    (timing,) = times.load_times()
    assert (timing.V, timing.D, timing.N) == (300, 8, 64)
    run("--rows", "400", *SMALL[2:])
    assert [timing.V for timing in times.load_times()] == [300, 400]


def record_of(**peers):
    part = {"median_ms": 1.5}
    record = {"rows": 10, "columns": 4, "ids": 3}
    return record | {"peers": {name: dict.fromkeys(parts, part) for name, parts in peers.items()}}


BOTH = ("forward", "backward")


def test_times_need_forward_and_backward_of_lookup_and_matmul():
    assert times.from_record(record_of(**{"hotrow": BOTH, "one-hot matmul": BOTH[:1]})) is None
    assert times.from_record(record_of(hotrow=BOTH)) is None
    both = times.from_record(record_of(**{"hotrow": BOTH, "one-hot matmul": BOTH}))
    assert both == times.Timing(10, 4, 3, 3.0, 3.0)


@pytest.mark.parametrize("content", ["", "[", "{}", "[1]", '[{"V": 1}]', "[" * 100_000])
def test_unreadable_times_are_ignored(monkeypatch, tmp_path, content):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "hotrow").mkdir()
    (tmp_path / "hotrow" / "times.json").write_text(content)
    assert times.load_times() == []
    times.save_times([times.Timing(10, 4, 3, 3.0, 3.0)])
    assert len(times.load_times()) == 1
