"""Test that measure_sameness measures correctly and detects wrong optimizers."""

import importlib
import inspect
import json
import math
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import numpy as np
import pytest
import torch

import hotrow.optim
from hotrow import HotrowError
from hotrow.cli.optimizer_options import (
    EXECUTION_OPTIONS,
    default_options,
    parse_optimizer,
    parse_options,
)
from hotrow.conversion import sampling
from hotrow.kernels.batch import GroupedGradients
from hotrow.optim import updater
from hotrow.optim.ledger import Ledger
from hotrow.optim.updater import RowUpdater
from hotrow.verify.sameness import (
    SCALES,
    SLACK,
    Batches,
    Sameness,
    measure_distance,
    measure_sameness,
    train,
)
from tests.support import tolerance
from tests.support.paths import ROOT
from tests.support.training import RowRun, configurations, label, train_dense

SMALL = {"steps": 60, "rows": 40, "columns": 5}
STRONG = {"lr": 0.01, "weight_decay": 0.1}
DEFAULT = sampling.MIN_ENTRIES  # the value before a fixture changes it


# --- the numbers ------------------------------------------------------------------------------


def test_errors_match_runs_without_the_public_api():
    """The torch runs use explicit dense gradients; the hotrow run calls the kernels directly."""
    for name, kwargs in [("AdamW", STRONG), ("RMSprop", {"momentum": 0.9})]:
        found = measure_sameness(name, kwargs, Batches(**SMALL), scales=(1.0, 1e-4))
        for each in found.distances:
            batches = Batches(**SMALL, scale=each.scale)
            truth, _ = train_dense(name, kwargs, batches, torch.float64)
            rival, _ = train_dense(name, kwargs, batches, torch.float32)
            ours, _ = RowRun(name, kwargs, batches, torch.float32, exact=False).run()
            assert each.torch_error == float((rival.double() - truth).abs().max()) > 0
            assert each.hotrow_error == float((ours.double() - truth).abs().max()) > 0
            assert each.bitwise_count == int((ours == rival).sum()) > 0
            assert each.value_count == ours.numel() == 200


def test_float64_reference_follows_the_formula():
    """Compare with a float64 NumPy version of SGD with momentum, weight decay and a schedule."""
    batches = Batches(**SMALL)
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
    [found] = train(torch.optim.SGD, options, batches, [0.5], torch.float64)
    w = batches.weights.double().numpy()
    buffer = np.zeros_like(w)
    for t, ids in enumerate(batches.all_ids):
        g = 0.01 * w
        np.add.at(g, ids.numpy(), (batches.gradients(t) * 0.5).double().numpy())
        buffer = 0.9 * buffer + g
        falls = 0.55 + 0.45 * math.cos(math.pi * (t - 6) / 54)
        w = w - 0.05 * ((t + 1) / 6 if t < 6 else falls) * buffer
    assert np.abs(found.numpy() - w).max() < 1e-13


def test_distance_between_three_tables():
    truth = torch.tensor([[1.0, -3.0, 0.5]], dtype=torch.float64)
    rival = torch.tensor([[1.0, -3.0, 0.75]])
    ours = torch.tensor([[1.0, -3.5, 0.5]])
    found = measure_distance(1e-4, ours, rival, truth)
    assert (found.scale, found.hotrow_error, found.torch_error) == (1e-4, 0.5, 0.25)
    assert (found.bitwise_count, found.value_count) == (1, 3)
    assert found.ulp == 2.0**-22  # the ulp of 3.0
    assert not found.within_bound
    assert 0 < SLACK * found.ulp <= 2 * tolerance.ulp(truth, torch.float32)


@pytest.mark.parametrize(("ulps", "within"), [(0, True), (2, True), (3, False)])
def test_slack_is_two_ulp(ulps, within):
    truth = torch.tensor([[1.0, 0.25]], dtype=torch.float64)
    rival = truth.float() + torch.tensor([[0.0, 2.0**-10]])
    ours = truth.float() + torch.tensor([[2.0**-10 + ulps * 2.0**-23, 0.0]])
    assert measure_distance(1.0, ours, rival, truth).within_bound == within


def test_non_finite_weights_are_not_within_the_bound():
    truth = torch.ones(1, 2, dtype=torch.float64)
    found = measure_distance(1.0, torch.tensor([[1.0, math.nan]]), truth.float(), truth)
    assert found.hotrow_error == math.inf
    assert not found.within_bound
    assert found.to_dict()["hotrow_error"] is None


def test_idle_rows_are_counted():
    batches = Batches(steps=90, rows=30, ids=3)
    seen = [[t for t, ids in enumerate(batches.all_ids) if row in ids] for row in range(30)]
    never = sum(not steps for steps in seen)
    gaps = [b - a - 1 for steps in seen if steps for a, b in zip(steps, [*steps[1:], 90])]  # noqa: B905
    assert batches.count_idle() == (never, max(gaps))
    assert never >= 30 // 4
    never, longest = Batches(steps=2500, rows=300).count_idle()
    assert never >= 75
    assert longest > 2000


def test_scales_are_trained_independently():
    batches = Batches(**SMALL)
    for package, dtype in [(torch.optim, torch.float64), (hotrow.optim, torch.float32)]:
        together = train(package.Adam, {}, batches, SCALES, dtype)
        for scale, table in zip(SCALES, together, strict=True):
            [alone] = train(package.Adam, {}, batches, [scale], dtype)
            assert torch.equal(table, alone)
            assert table.dtype == dtype


def test_runs_on_one_thread_and_restores_the_number_of_threads(threads, monkeypatch):
    torch.set_num_threads(3)
    seen = []
    real = torch.optim.SGD.step
    monkeypatch.setattr(
        torch.optim.SGD, "step", lambda self: (seen.append(torch.get_num_threads()), real(self))
    )
    found = measure_sameness("SGD", {}, Batches(steps=2))
    assert set(seen) == {1} == {found.to_dict()["threads"]}
    assert torch.get_num_threads() == 3


def test_options_are_not_changed_and_progress_is_reported():
    reported = []
    options = {"lr": torch.tensor(0.01)}
    batches = Batches(steps=120, rows=8, columns=2)
    found = measure_sameness(
        "SGD", options, batches, progress=lambda *given: reported.append(given)
    )
    assert options == {"lr": torch.tensor(0.01)}
    assert found.to_dict()["options"] == {"lr": "tensor(0.01)"}
    assert [done for _, done, _ in reported] == [0, 50, 100, 120, 170, 220, 240, 290, 340]
    assert {total for _, _, total in reported} == {360}
    assert {what for what, _, _ in reported} == {
        "torch.optim.SGD, float64",
        "torch.optim.SGD, float32",
        "hotrow.optim.SGD, float32",
    }


# --- a wrong optimizer ------------------------------------------------------------------------


def off_by_one(monkeypatch):
    """Make `settle` leave out the last step."""
    real = RowUpdater.settle

    def settle(self, rows):
        real(self, rows, self.ledger.length - 1)

    monkeypatch.setattr(RowUpdater, "settle", settle)


def untouched_rows_stay(monkeypatch):
    """Like SparseAdam, don't decay rows that were never touched."""
    real = RowUpdater.settle

    def settle(self, rows):
        rows = torch.arange(len(self.row_steps)) if rows is None else rows
        real(self, rows[self.row_steps[rows] > 0])

    monkeypatch.setattr(RowUpdater, "settle", settle)


def dropped_entry(monkeypatch):
    """Skip step 21 for rows that are idle in that step."""
    real = updater.step_together

    def step(tables):
        real(tables)
        for rows, _ in tables:
            if rows.ledger.length == 21:
                rows.row_steps[rows.row_steps <= 20] += 1

    monkeypatch.setattr(updater, "step_together", step)


def decay_twice(monkeypatch):
    """Apply weight decay twice per step."""
    real = Ledger.append
    monkeypatch.setattr(
        Ledger, "append", lambda self, entry: real(self, (entry[0] ** 2, *entry[1:]))
    )


def dropped_duplicate(monkeypatch):
    """Use only the first gradient of a repeated id."""
    real = updater.step_together

    def first_only(grads):
        ids = grads.ids.inverse.reshape(-1).tolist()
        earlier = [i in ids[:k] for k, i in enumerate(ids)]
        values = grads.values.masked_fill(torch.tensor(earlier)[:, None], 0)
        return GroupedGradients(grads.ids, values)

    def step(tables):
        real([(rows, first_only(grads)) for rows, grads in tables])

    monkeypatch.setattr(updater, "step_together", step)


MUTANTS = [off_by_one, untouched_rows_stay, dropped_entry, decay_twice, dropped_duplicate]


def test_correct_optimizer_is_within_the_bound():
    found = measure_sameness("AdamW", STRONG, Batches(**SMALL))
    assert found
    assert all(each.within_bound for each in found.distances)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_optimizer_is_not_within_the_bound(mutant, monkeypatch):
    mutant(monkeypatch)
    found = measure_sameness("AdamW", STRONG, Batches(**SMALL))
    assert not found
    assert not found.to_dict()["within"]
    assert not any(each.within_bound for each in found.distances)


def test_one_scale_outside_the_bound_fails():
    found = measure_sameness("SGD", {}, Batches(**SMALL), scales=(1.0, 1e-4))
    assert found
    truth = torch.ones(1, 1, dtype=torch.float64)
    wrong = measure_distance(1.0, truth.float() + 1, truth.float(), truth)
    assert not Sameness("SGD", {}, found.batches, (found.distances[0], wrong))


# --- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(hotrow.optim.__all__))
def test_every_option_that_changes_numbers_can_be_set(name):
    known = default_options(name)
    signature = set(inspect.signature(getattr(torch.optim, name)).parameters)
    assert set(known) == signature - EXECUTION_OPTIONS - {"params"}
    texts = [
        f"{key}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for key, value in known.items()
    ]
    assert parse_options(name, texts) == known
    assert parse_optimizer(name.upper()) == name
    for given, kwargs in configurations():
        if given == name:
            assert set(kwargs) <= set(known), label(kwargs)


def test_options_that_torch_rejects_raise():
    with pytest.raises(HotrowError, match=r"torch.optim.SGD rejects nesterov=True: Nesterov"):
        measure_sameness("SGD", {"nesterov": True}, Batches(steps=2))


def test_runs_that_fail_or_diverge_raise():
    with pytest.raises(HotrowError, match="SGD, float64 ends with inf or NaN in the weights at"):
        measure_sameness("SGD", {"lr": 1e20, "weight_decay": 1.0}, Batches(steps=60))
    with pytest.raises(HotrowError, match="SGD, float32 ends with inf or NaN in the weights at"):
        measure_sameness("SGD", {"lr": 1e20, "weight_decay": 1.0}, Batches(steps=10))
    with pytest.raises(HotrowError, match=r"ASGD, float64 fails with lambd=1.0, alpha=10+\.0: "):
        measure_sameness("ASGD", {"lambd": 1.0, "alpha": 1e9}, Batches(steps=20))
    with pytest.raises(HotrowError, match=r"Adamax, float32 fails with lr=1e\+39: .* overflow"):
        measure_sameness("Adamax", {"lr": 1e39}, Batches(steps=2))
    with pytest.raises(HotrowError, match=r"12 ids on a 100,000,000 x 19 table need about .* GB"):
        Batches(rows=100_000_000)


# --- the document -----------------------------------------------------------------------------


@pytest.fixture
def script():
    return importlib.import_module("benchmarks.sameness")


@pytest.fixture
def generate(script, monkeypatch, capsys, tmp_path, threads):
    """Run the script in this process; return its exit code, page, record and printed output."""

    def run(*arguments):
        monkeypatch.setattr(
            script, "ProcessPoolExecutor", lambda jobs, mp_context: ThreadPoolExecutor(1)
        )
        folder = tmp_path / "docs"
        monkeypatch.setattr("sys.argv", ["sameness.py", "--folder", str(folder), *arguments])
        code = script.main()
        assert sorted(path.name for path in folder.iterdir())[:2] == [
            "sameness.json",
            "sameness.md",
        ]
        record = json.loads((folder / "sameness.json").read_text())
        page = (folder / "sameness.md").read_text()
        assert page == script.document(record)
        return code, page, record, capsys.readouterr()

    return run


def test_document_lists_every_configuration(generate):
    code, page, record, printed = generate("--only", "Adagrad", "--steps", "4")
    count = sum(name == "Adagrad" for name, _ in configurations())
    assert code == 0
    assert f"**{4 * count} of {4 * count} runs are within this bound.**" in page
    assert f"The runs cover {count} configurations of 1 optimizers" in page
    assert page.count(" | yes |\n") == count == len(record["configurations"])
    assert "NOT" not in page
    first = record["configurations"][0]
    found = measure_sameness("Adagrad", {}, Batches(steps=4, rows=300, columns=152)).to_dict()
    assert first["scales"] == found["scales"]
    assert "| lr=tensor(0.001) |" in page
    assert f"torch: {version('torch')}\n" in page
    assert printed.out == f"{count} of {count} configurations are within the bound\n"
    assert f"{count} of {count} (Adagrad), " in printed.err


def test_document_shows_every_miss(generate, script, monkeypatch):
    decay_twice(monkeypatch)
    three = [("AdamW", {}), ("AdamW", {"betas": (0.8, 0.95), "weight_decay": 0}), ("SGD", {})]
    monkeypatch.setattr(script, "configurations", lambda: three)
    code, page, record, printed = generate("--steps", "60")
    assert code == 1
    assert [each["within"] for each in record["configurations"]] == [False, True, True]
    assert "**8 of 12 runs are within this bound.**" in page
    assert "- AdamW: defaults (at 1, 0.0001, 1e-07, 1e-09)\n" in page
    assert page.count(" | **NOT** |\n") == 1
    assert "\n| betas=(0.8, 0.95), weight_decay=0 | " in page
    assert printed.out == (
        "NOT within the bound: AdamW: defaults\n2 of 3 configurations are within the bound\n"
    )


def test_cell_of_the_document(script):
    scale = {"hotrow_error": 0.0, "torch_float32_error": 3.0, "ulp": 2.0, "bitwise": 2, "values": 3}
    assert script.cell(scale | {"within": True}) == "0.0 / 1.5, 66%"
    assert script.cell(scale | {"within": False, "hotrow_error": None}) == "**inf / 1.5, 66%**"


def test_document_in_docs_matches_its_records(script):
    record = json.loads((ROOT / "docs/sameness.json").read_text())
    assert (ROOT / "docs/sameness.md").read_text() == script.document(record)
    assert {each["optimizer"] for each in record["configurations"]} == set(hotrow.optim.__all__)
    assert {each["steps"] for each in record["configurations"]} == {2500}


def test_small_table_is_converted_too(monkeypatch):
    monkeypatch.setattr("hotrow.conversion.sampling.MIN_ENTRIES", DEFAULT)
    steps_taken = []
    step = updater.step_together
    monkeypatch.setattr(updater, "step_together", lambda *args: steps_taken.append(step(*args)))
    batches = Batches(steps=3, rows=20, ids=4)
    train(hotrow.optim.AdamW, {}, batches, [1.0], torch.float32)
    assert len(steps_taken) >= 3
