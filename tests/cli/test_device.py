"""Test `--device` of `hotrow compare` and `hotrow check`, with a GPU simulated on the CPU."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.support.exhaustive import exhaustive

CHECK = ["check", "--optimizer", "SGD", "--set", "momentum=0.9", "--steps", "30"]
CHECK += ["--rows", "12", "--columns", "3", "--ids", "4"]
MODEL = """
import torch
from torch import nn

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(16, 4)

    def forward(self, ids, scale):
        return self.words(ids) * scale[0]

def batch():
    return torch.tensor([3, 1, 3]), [torch.tensor(2.0)]
"""


@pytest.mark.parametrize("command", [["compare"], CHECK], ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("device", "problem", "fix"),
    [
        ("tpu", "--device 'tpu' is not supported", "use cpu or cuda"),
        ("cuda:x", "--device 'cuda:x' is not supported", "use cpu or cuda"),
        ("cuda:99", "--device cuda:99: torch finds", "use --device cpu, or install torch with"),
    ],
)
def test_a_missing_device_gets_exit_code_2(command, device, problem, fix, run_hotrow):
    found = run_hotrow(*command, "--device", device)
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith(f"Error: {problem}")
    assert fix in found.err


@pytest.fixture
def fake_cuda(monkeypatch):
    """Simulate a GPU on the CPU."""
    pytest.importorskip("triton", reason="needs Triton: run make test-all")
    from tests.support.fake_cuda import use_fake_cuda

    use_fake_cuda(monkeypatch)


@exhaustive
def test_check_trains_on_the_device(fake_cuda, run_hotrow, monkeypatch):
    from hotrow.kernels.triton import operators

    real, launches = operators._step_joined, []

    def record(tables, *others):
        launches.append(len(tables))
        real(tables, *others)

    monkeypatch.setattr(operators, "_step_joined", record)
    found = run_hotrow(*CHECK, "--device", "cuda", "--scales", "1,1e-4", "--json")
    content = json.loads(found.out)
    assert (found.code, content["device"], content["within"]) == (0, "cuda", True)
    assert launches == [2] * 30  # one launch for both scales


@exhaustive
def test_check_fails_on_the_device_if_a_step_is_wrong(fake_cuda, run_hotrow, monkeypatch):
    from hotrow.kernels.triton import operators

    monkeypatch.setattr(operators, "_step_joined", lambda *arguments: None)
    found = run_hotrow(*CHECK, "--device", "cuda", "--scales", "1")
    assert found.code == 1
    assert "NOT the same step" in found.out


@pytest.fixture
def moved(fake_cuda, monkeypatch):
    """Return a list of the shapes of the tensors that move to the device."""
    shapes, real = [], torch.Tensor.to

    def to(tensor, *args, **kwargs):
        if args and str(args[0]) == "cuda":
            shapes.append(tuple(tensor.shape))
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    return shapes


@exhaustive
def test_compare_runs_on_the_device(moved, run_hotrow, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    save_file({"w": torch.randn(7, 3)}, "one.safetensors")
    words = [
        "compare",
        "--table",
        "one.safetensors",
        "--ids",
        "5,1,5",
        "--json",
        "--device",
        "cuda",
    ]
    found = run_hotrow(*words)
    assert (found.code, json.loads(found.out)["equal"]) == (0, True)
    assert moved == [(7, 3)]


@exhaustive
def test_compare_moves_a_model_and_its_inputs(moved, run_hotrow, monkeypatch, tmp_path):
    (tmp_path / "words_on_gpu.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["compare", "words_on_gpu:Words", "--inputs", "words_on_gpu:batch", "--device", "cuda"]
    found = run_hotrow(*words)
    assert found.code == 0, found.err
    assert set(moved) == {(3,), (), (16, 4)}
