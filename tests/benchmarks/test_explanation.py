"""Test the training runs and the figures for docs/explanation."""

import json
import shutil

import pytest

from benchmarks import explanation
from tests.support.exhaustive import exhaustive
from tests.support.paths import ROOT

FOLDER = ROOT / "docs/explanation"
RUNS = json.loads((FOLDER / "runs.json").read_text())


def test_the_figures_show_the_recorded_runs(tmp_path):
    shutil.copy(FOLDER / "runs.json", tmp_path)
    explanation.main(["--draw", "--docs", str(tmp_path)])
    for name in explanation.FIGURES:
        assert (tmp_path / name).read_text() == (FOLDER / name).read_text()


@exhaustive
@pytest.mark.parametrize("name", explanation.OPTIMIZERS)
def test_a_rerun_gives_the_recorded_weight(name):
    batches, weights = explanation.follow_weight(name)
    assert batches == RUNS["weight"]["batches"]
    assert weights == pytest.approx(RUNS["weight"]["values"][name], abs=3e-6)


@exhaustive
@pytest.mark.parametrize("name", explanation.OPTIMIZERS)
def test_a_shorter_rerun_gives_the_recorded_losses(name):
    recorded = RUNS["loss"][str(explanation.DRAWN_RATE)][name]
    losses = explanation.train(name, explanation.DRAWN_RATE, steps=200)
    assert list(losses) == pytest.approx(recorded[:2], abs=2e-4)


def test_hotrow_matches_dense_adam_and_sparse_adam_does_not():
    stride = explanation.WEIGHT_READ
    dense, rows, sparse = (RUNS["weight"]["values"][name] for name in explanation.OPTIMIZERS)
    assert rows == pytest.approx(dense[::stride], abs=2e-6)
    assert max(abs(a - b) for a, b in zip(sparse, dense, strict=True)) > 0.05
    for losses in RUNS["loss"].values():
        dense, rows, sparse = (losses[name] for name in explanation.OPTIMIZERS)
        assert rows == pytest.approx(dense, abs=2e-4)
        assert any(abs(a - b) > 0.005 for a, b in zip(sparse, dense, strict=True))


def test_the_page_has_the_recorded_losses():
    page = (FOLDER / "sparse-adam.md").read_text()
    for rate, losses in RUNS["loss"].items():
        last = (f"{losses[name][-1]:.4f}" for name in explanation.OPTIMIZERS)
        assert f"| {' | '.join([rate, *last])} |" in page
