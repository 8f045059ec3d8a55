"""Run the scripts in integrations/."""

import re
import subprocess
import sys

import pytest

from tests.support.exhaustive import exhaustive
from tests.support.paths import ROOT

PACKAGES = {
    "accelerate_loop": "accelerate",
    "huggingface_trainer": "transformers",
    "lightning_module": "lightning",
    "one_hots": "vector_quantize_pytorch",
    "pyg_transe": "torch_geometric",
    "recommender": "torchfm",
    "stable_baselines3_dqn": "stable_baselines3",
}


def test_make_runs_every_script():
    scripts = {path.stem for path in (ROOT / "integrations").glob("*.py")} - {"common"}
    (listed,) = re.findall(r"SCRIPTS := ((?:.*\\\n)*.*)\n", (ROOT / "Makefile").read_text())
    assert set(listed.replace("\\", "").split()) == scripts == set(PACKAGES)


@exhaustive
@pytest.mark.parametrize("name", PACKAGES)
def test_script(name):
    pytest.importorskip(PACKAGES[name], exc_type=ImportError)
    command = [sys.executable, "-W", "ignore", "-m", f"integrations.{name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "hotrow" in done.stdout
    assert "the same model" in done.stdout
