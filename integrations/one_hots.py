"""Third-party code that uses one-hots for purposes other than lookups.

The code of each program is unmodified. Each program runs before and after `convert`. The outputs,
gradients and buffers are compared in float64, and the times are measured in float32.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from mixture_of_experts import MoE
from monai.losses import DiceLoss
from monai.metrics import get_confusion_matrix
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from vector_quantize_pytorch import VectorQuantize

import hotrow
from hotrow.bench.process import run_job
from hotrow.bench.workload import ignore_progress

Program = tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]
WARMUPS, STEPS = 5, 15


class QLearning(nn.Module):
    """The loss of a DQN update; a one-hot selects the value of each action."""

    def __init__(self, states: int, actions: int) -> None:
        super().__init__()
        self.actions = actions
        self.q = nn.Sequential(nn.Linear(states, 64), nn.ReLU(), nn.Linear(64, actions))

    def forward(self, state: Tensor, action: Tensor, target: Tensor) -> Tensor:
        """Return the mean squared error of the selected values."""
        mask = F.one_hot(action, self.actions)
        return F.mse_loss((self.q(state) * mask).sum(1), target)


class Classifier(nn.Module):
    """A classifier with smoothed labels."""

    def __init__(self, columns: int, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.head = nn.Linear(columns, classes)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        """Return the cross entropy with smoothed labels."""
        log_p = self.head(x).log_softmax(-1)
        target = F.one_hot(label, self.classes).to(x.dtype) * 0.9 + 0.1 / self.classes
        return -(target * log_p).sum(-1).mean()


class Characters(nn.Module):
    """A recurrent network over characters."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = characters
        self.rnn = nn.GRU(characters, 64, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the mean square of the hidden states."""
        x = F.one_hot(ids, self.characters).to(self.rnn.weight_hh_l0.dtype)
        return self.rnn(x)[0].square().mean()


class Confusion(nn.Module):
    """Computes monai's confusion matrix for each image."""

    def forward(self, prediction: Tensor, label: Tensor) -> Tensor:
        """Return each class's counts of true and false positives and negatives."""
        classes = prediction.shape[1]
        guess = F.one_hot(prediction.argmax(1), classes).movedim(-1, 1)
        truth = F.one_hot(label, classes).movedim(-1, 1)
        return get_confusion_matrix(guess, truth)


def _ids(count: int, *shape: int) -> Tensor:
    return torch.randint(count, shape)


PROGRAMS: dict[str, Program] = {
    **{
        f"vector-quantize-pytorch, {size:,} codes": (
            lambda size=size: VectorQuantize(32, size, decay=0.9, kmeans_init=False),
            lambda: (torch.randn(8, 1024, 32),),
        )
        for size in (512, 8192)
    },
    "DQN update, 5,000 actions": (
        lambda: QLearning(32, 5_000),
        lambda: (torch.randn(512, 32), _ids(5_000, 512), torch.randn(512)),
    ),
    "monai DiceLoss, 100 classes": (
        lambda: DiceLoss(to_onehot_y=True, softmax=True),
        lambda: (torch.randn(2, 100, 96, 96, requires_grad=True), _ids(100, 2, 1, 96, 96)),
    ),
    "monai confusion matrix, 100 classes": (
        Confusion,
        lambda: (torch.randn(2, 100, 96, 96), _ids(100, 2, 96, 96)),
    ),
    "mixture-of-experts MoE, 16 experts": (
        lambda: MoE(64, 16).eval(),
        lambda: (torch.randn(4, 1024, 64),),
    ),
    "GRU over 10,000 characters": (
        lambda: Characters(10_000),
        lambda: (_ids(10_000, 16, 64),),
    ),
    "label smoothing, 100,000 classes": (
        lambda: Classifier(32, 100_000),
        lambda: (torch.randn(64, 32), _ids(100_000, 64)),
    ),
}


def run(model: nn.Module, arguments: tuple[Any, ...]) -> list[Tensor]:
    """Run forward and backward; return all outputs, gradients and buffers."""
    torch.manual_seed(0)
    model.zero_grad()
    outputs = [each for each in tree_leaves(model(*arguments)) if isinstance(each, Tensor)]
    inputs = [each for each in arguments if each.requires_grad]
    losses = [each.sum() for each in outputs if each.requires_grad]
    if losses:
        torch.autograd.backward(losses)
    gradients = [each.grad for each in (*model.parameters(), *inputs) if each.grad is not None]
    for each in inputs:
        each.grad = None
    return [*outputs, *gradients, *model.buffers()]


def in_float64(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return copies of the arguments, with floating-point tensors in float64."""
    return tuple(
        v.detach().double().requires_grad_(v.requires_grad) if v.is_floating_point() else v
        for v in values
    )


def measure(title: str, report_progress: object) -> dict[str, Any]:
    """Compare and time a program; return the median times and the lines of the report."""
    torch.manual_seed(1)
    make, arguments = PROGRAMS[title]
    model, values = make(), arguments()
    tolerance = 1e-5 if "quantize" in title else 1e-9  # this package computes in float32
    plain, converted = (
        copy.deepcopy(model).double(),
        hotrow.convert(copy.deepcopy(model).double()),
    )
    for _ in range(2):
        theirs, ours = run(plain, in_float64(values)), run(converted, in_float64(values))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    sides = {"torch": model, "hotrow": hotrow.convert(copy.deepcopy(model))}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(WARMUPS + STEPS):
        for name, side in sides.items():
            start = time.perf_counter()
            run(side, values)
            times[name].append(1e3 * (time.perf_counter() - start))
    medians = {name: statistics.median(found[WARMUPS:]) for name, found in times.items()}
    return medians | {"report": str(hotrow.convert.report(sides["hotrow"])).splitlines()}


def main() -> None:
    """Compare and time each program in its own process, where malloc keeps freed memory."""
    for title in PROGRAMS:
        found = run_job(
            "integrations.one_hots:measure",
            {"title": title},
            torch.get_num_threads(),
            ignore_progress,
        )
        dense, ids = found["torch"], found["hotrow"]
        ratio = f"{dense / ids:.2f}x"
        print(f"{title}: {dense:.1f} ms, with hotrow {ids:.1f} ms, {ratio}, the same model")
        print(*(f"    {line}" for line in found["report"]), sep="\n", flush=True)


if __name__ == "__main__":
    main()
