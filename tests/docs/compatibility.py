"""Check which PyTorch features work with converted models and hotrow's optimizers.

`python -m tests.docs.compatibility` generates docs/reference/compatibility.md from `FEATURES`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hotrow
import hotrow.distributed
from hotrow.errors import HotrowError
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table
from tests.support.paths import ROOT
from tests.support.ranks import mesh_of_all, rank_processes

PAGE = ROOT / "docs" / "reference" / "compatibility.md"
WORKS, DENSE, REFUSED, UNSUPPORTED = "works", "dense cost", "error", "not supported"
ROWS, COLUMNS = 50, 4
BATCHES = [torch.tensor(ids) for ids in ([[1, 2], [2, 7]], [[7, 9], [0, 9]], [[1, 1], [3, 0]])]
Run = Callable[[nn.Module, Any], None]


@dataclass(frozen=True)
class Feature:
    """A row of a table on the compatibility page.

    Attributes:
        section: the title of the table that contains the row.
        name: the feature, in Markdown.
        verdict: WORKS (same result as torch, and the cost scales with the number of touched
            rows), DENSE (same result as torch, at the cost of dense training), REFUSED (a
            `HotrowError`), or UNSUPPORTED (another error, or a result that differs from torch's).
        note: what the user should know about this feature.
        test: a function that raises an error unless the verdict is correct.
    """

    section: str
    name: str
    verdict: str
    note: str
    test: Callable[[], None]


FEATURES: list[Feature] = []


def feature(section: str, name: str, verdict: str, note: str = "") -> Callable[[Any], Any]:
    """Add a row to the page, with the decorated function as its test."""

    def add(test: Callable[[], None]) -> Callable[[], None]:
        FEATURES.append(Feature(section, name, verdict, note, test))
        return test

    return add


class Model(nn.Module):
    """A small model with a linear head; converting it turns its embedding into a table."""

    def __init__(self, embedding: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding = embedding or nn.Embedding(ROWS, COLUMNS)
        self.head = nn.Linear(COLUMNS, 2)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.embedding(ids)
        return self.head(rows.mean(1) if rows.ndim == 3 else rows)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return (model(ids).float() - 1).pow(2).mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train on each batch once, then on the first batch again; leave the last gradient in place."""
    for ids in (*BATCHES, BATCHES[0]):
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        optimizer.step()


def adam(model: nn.Module, library: Any, **options: Any) -> torch.optim.Optimizer:
    return library.AdamW(model.parameters(), lr=0.1, **options)


def pair(make: Callable[[], nn.Module] = Model) -> Iterator[tuple[nn.Module, Any]]:
    """Yield (model, torch.optim), then (converted model, hotrow.optim) with the same weights."""
    torch.manual_seed(0)
    model = make()
    converted = hotrow.convert(copy.deepcopy(model), min_entries=0)
    yield model, torch.optim
    yield converted, hotrow.optim


def same(
    run: Run, make: Callable[[], nn.Module] = Model, *, rows: bool = True, **limits: Any
) -> None:
    """Assert that hotrow's weights match torch's, and that hotrow has row gradients iff `rows`."""
    ends = []
    with count_dense() as calls:
        for model, library in pair(make):
            torch.manual_seed(1)
            run(model, library)
            ends.append({name: value.clone() for name, value in model.state_dict().items()})
    limits = limits or {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(*reversed(ends), **limits)
    assert (has_rows(model) and not calls) == rows, calls


def has_rows(model: nn.Module) -> bool:
    """Return whether the embedding is a table and its gradient has only the touched rows."""
    weight = model.embedding.weight
    if not (isinstance(weight, Table) and isinstance(weight.grad, RowGradient)):
        return False
    return 0 < len(weight.grad.rows) < ROWS


@contextlib.contextmanager
def count_dense() -> Iterator[list[int]]:
    """Yield a list that grows each time a row gradient is converted to a dense gradient."""
    calls: list[int] = []
    before = RowGradient.as_dense

    def as_dense(gradient: RowGradient) -> Tensor:
        calls.append(1)
        return before(gradient)

    RowGradient.as_dense = as_dense
    try:
        yield calls
    finally:
        RowGradient.as_dense = before


def converted(make: Callable[[], nn.Module] = Model) -> nn.Module:
    *_, (model, _) = pair(make)
    return model


# --- Training -------------------------------------------------------------------------------------

TRAINING = "Training loop"


@feature(TRAINING, "`clip_grad_norm_`", WORKS)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        optimizer = adam(model, library)
        for ids in BATCHES:
            optimizer.zero_grad()
            loss_of(model, ids).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()

    same(run)


@feature(TRAINING, "`clip_grad_value_`", WORKS)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        optimizer = adam(model, library)
        for ids in BATCHES:
            optimizer.zero_grad()
            loss_of(model, ids).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.001)
            optimizer.step()

    same(run)


@feature(
    TRAINING,
    "Gradient accumulation",
    WORKS,
    "The gradient contains the touched rows of all batches.",
)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        optimizer = adam(model, library)
        for ids in BATCHES * 2:
            loss_of(model, ids).backward()
        optimizer.step()
        train(model, optimizer)

    same(run)


@feature(TRAINING, "`zero_grad(set_to_none=False)`", WORKS)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        optimizer = adam(model, library)
        for ids in BATCHES:
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, ids).backward()
            optimizer.step()

    same(run)


@feature(TRAINING, "`torch.autocast`", WORKS)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            train(model, adam(model, library))

    same(run)


@feature(
    TRAINING,
    "`torch.amp.GradScaler`",
    WORKS,
    "The scaler skips steps whose gradients overflow, as in torch.",
)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        optimizer, scaler = adam(model, library), torch.amp.GradScaler("cpu")
        for factor, ids in zip((1, float("inf"), 1), BATCHES, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, ids) * factor).backward()
            scaler.step(optimizer)
            scaler.update()

    same(run)


@feature(
    TRAINING, "Learning-rate schedulers", WORKS, "hotrow stores the learning rate of each step."
)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        optimizer = adam(model, library)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=12)
        for ids in BATCHES * 4:
            optimizer.zero_grad()
            loss_of(model, ids).backward()
            optimizer.step()
            with contextlib.suppress(ValueError):  # after the last step
                scheduler.step()

    same(run)


@feature(
    TRAINING,
    "Several optimizers",
    WORKS,
    "For example, use one optimizer for the tables and another for all other parameters.",
)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        rest = torch.optim.SGD(model.head.parameters(), lr=0.1)
        table = library.Adam(model.embedding.parameters(), lr=0.1)
        for ids in BATCHES:
            for each in (rest, table):
                each.zero_grad()
            loss_of(model, ids).backward()
            for each in (rest, table):
                each.step()

    same(run)


@feature(TRAINING, "`step(closure)`", WORKS)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        optimizer = adam(model, library)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, BATCHES[0])
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)

    same(run)


@feature(TRAINING, "Tensor, module and optimizer hooks", WORKS)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        optimizer = adam(model, library)
        calls: list[str] = []
        model.embedding.weight.register_hook(lambda gradient: gradient * 0.5)
        model.embedding.weight.register_post_accumulate_grad_hook(lambda _: calls.append("grad"))
        model.embedding.register_forward_hook(lambda *_: calls.append("forward"))
        optimizer.register_step_pre_hook(lambda *_: calls.append("step"))
        train(model, optimizer)
        assert calls == ["forward", "grad", "step"] * 4

    same(run)


@feature(TRAINING, "`torch.utils.checkpoint`", WORKS, "Tested with `use_reentrant=False`.")
def _() -> None:
    class Checkpointed(Model):
        def forward(self, ids: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, ids, use_reentrant=False)

    same(lambda model, library: train(model, adam(model, library)), Checkpointed)


@feature(
    TRAINING,
    "Reads between steps: `weight.norm()`, printing, evaluation",
    WORKS,
    "hotrow settles the rows before each read.",
)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        optimizer = adam(model, library)
        for ids in BATCHES:
            optimizer.zero_grad()
            loss_of(model, ids).backward()
            optimizer.step()
            model.embedding.weight.norm()
            str(model.embedding.weight)
            with torch.no_grad():
                model(torch.arange(ROWS)[None])

    same(run)


# --- Options of optimizers ------------------------------------------------------------------------

OPTIONS = "Optimizers and their options"


@feature(OPTIONS, "Parameter groups", WORKS, "Each group has its own options.")
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        groups = [
            {"params": model.embedding.parameters(), "lr": 0.2, "weight_decay": 0.0},
            {"params": model.head.parameters()},
        ]
        train(model, library.AdamW(groups, lr=0.01))

    same(run)


@feature(OPTIONS, "`add_param_group` during training", WORKS)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        optimizer = library.AdamW(model.head.parameters(), lr=0.1)
        train(model, optimizer)
        optimizer.add_param_group({"params": model.embedding.parameters(), "lr": 0.2})
        train(model, optimizer)

    same(run)


@feature(
    OPTIONS,
    "Options that change during training",
    WORKS,
    "For example, `group['weight_decay'] = 0.1`.",
)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        optimizer = adam(model, library)
        for decay in (0.1, 0.0, 0.3):
            optimizer.param_groups[0]["weight_decay"] = decay
            train(model, optimizer)

    same(run)


@feature(OPTIONS, "`maximize`, `amsgrad`, `nesterov`, `centered`, ...", WORKS)
def _() -> None:
    for name, options in [
        ("AdamW", {"maximize": True}),
        ("Adam", {"amsgrad": True}),
        ("SGD", {"nesterov": True, "momentum": 0.9}),
        ("RMSprop", {"centered": True, "momentum": 0.5}),
    ]:
        same(
            lambda model, library, name=name, options=options: train(
                model, getattr(library, name)(model.parameters(), lr=0.01, **options)
            ),
        )


@feature(
    OPTIONS,
    "`foreach`, `fused`",
    WORKS,
    "These options apply only to dense parameters. Tables use hotrow's own kernels, which never "
    "change gradients. With `foreach`, torch's SGD with `nesterov` does.",
)
def _() -> None:
    for option in ("foreach", "fused"):
        same(lambda model, library, o=option: train(model, adam(model, library, **{o: True})))


@feature(OPTIONS, "`capturable`, `differentiable`", REFUSED)
def _() -> None:
    for option in ("capturable", "differentiable"):
        with pytest.raises(HotrowError, match=option):
            adam(converted(), hotrow.optim, **{option: True})


@feature(OPTIONS, "Learning rate as a tensor", WORKS)
def _() -> None:
    same(
        lambda model, library: train(
            model, library.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
        )
    )


@feature(
    OPTIONS, "Adam with coupled `weight_decay`", WORKS, "Missed steps are replayed one at a time."
)
def _() -> None:
    same(
        lambda model, library: train(
            model, library.Adam(model.parameters(), lr=0.1, weight_decay=0.1)
        )
    )


@feature(
    OPTIONS,
    "RMSprop with `weight_decay`",
    DENSE,
    "Tables use torch's dense step, so the result is bitwise equal.",
)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        train(model, library.RMSprop(model.parameters(), lr=0.1, weight_decay=0.1))

    same(run, rows=False)


@contextlib.contextmanager
def warning_of_dense_steps(library: Any) -> Iterator[None]:
    """Expect the warning about a torch optimizer, if the model is converted."""
    if library is torch.optim:
        yield
    else:
        with pytest.warns(UserWarning, match="updates every row"):
            yield


@feature(
    OPTIONS,
    "`torch.optim` optimizers on a converted model",
    DENSE,
    "hotrow warns at the first step.",
)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        with warning_of_dense_steps(library):
            train(model, adam(model, torch.optim))

    same(run, rows=False)


@feature(OPTIONS, "`torch.optim.LBFGS`", DENSE, "hotrow warns at the first step.")
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, BATCHES[0])
            loss.backward()
            return loss

        with warning_of_dense_steps(library):
            optimizer.step(closure)

    same(run, rows=False, rtol=1e-3, atol=1e-4)


@feature(OPTIONS, "`torch.optim.SparseAdam`", REFUSED, "Use `hotrow.optim.Adam`.")
def _() -> None:
    model = converted()
    with pytest.raises(HotrowError, match=r"use hotrow\.optim\.Adam"):
        train(model, torch.optim.SparseAdam(model.embedding.parameters()))


@feature(
    OPTIONS,
    "`AveragedModel` (EMA and SWA)",
    DENSE,
    "Each update of the average reads the whole table.",
)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = adam(model, library)
        for ids in BATCHES:
            optimizer.zero_grad()
            loss_of(model, ids).backward()
            optimizer.step()
            average.update_parameters(model)
        averages.append([value.clone() for value in average.module.parameters()])

    averages: list[list[Tensor]] = []
    same(run)
    torch.testing.assert_close(*averages, rtol=1e-5, atol=1e-6)


# --- The model ------------------------------------------------------------------------------------

MODEL = "Models and layers"


def embedding(**options: Any) -> Callable[[], nn.Module]:
    return lambda: Model(nn.Embedding(ROWS, COLUMNS, **options))


def plain(model: nn.Module, library: Any) -> None:
    train(model, adam(model, library))


for _option, _value in [("padding_idx", 1), ("max_norm", 1.0), ("scale_grad_by_freq", True)]:
    feature(MODEL, f"`{_option}`", WORKS)(
        lambda option=_option, value=_value: same(plain, embedding(**{option: value}))
    )


@feature(
    MODEL,
    "`sparse=True`",
    WORKS,
    "`convert` converts such layers at any size. They train like dense embeddings.",
)
def _() -> None:
    model = converted(embedding(sparse=True))
    torch.manual_seed(0)
    dense = Model()
    plain(model, hotrow.optim)
    plain(dense, torch.optim)
    torch.testing.assert_close(model.state_dict(), dense.state_dict(), rtol=1e-5, atol=1e-6)
    assert has_rows(model)


@feature(MODEL, "`EmbeddingBag`: sum, mean, max", WORKS)
def _() -> None:
    for mode in ("sum", "mean", "max"):
        same(plain, lambda mode=mode: Model(nn.EmbeddingBag(ROWS, COLUMNS, mode=mode)))


@feature(MODEL, "`per_sample_weights`, `include_last_offset`", WORKS)
def _() -> None:
    class Bags(Model):
        def __init__(self) -> None:
            super().__init__(nn.EmbeddingBag(ROWS, COLUMNS, mode="sum", include_last_offset=True))

        def forward(self, ids: Tensor) -> Tensor:
            weights = torch.arange(1.0, 1 + ids.numel())
            bags = self.embedding(ids.flatten(), torch.tensor([0, 3, 4]), weights)
            return self.head(bags)

    same(plain, Bags)


@feature(MODEL, "One table shared by several layers", WORKS)
def _() -> None:
    class Shared(Model):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Embedding(ROWS, COLUMNS)
            self.other.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + self.head(self.other(ids.flip(1)).sum(1))

    same(plain, Shared)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, COLUMNS)
        self.head = nn.Linear(COLUMNS, ROWS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).mean(1))


@feature(MODEL, "Tied output head", DENSE, "Every row gets a gradient.")
def _() -> None:
    same(plain, Tied, rows=False)


@feature(
    MODEL,
    "Loss penalty on the whole table",
    DENSE,
    "With SGD and Adam, use `weight_decay` instead.",
)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        optimizer = adam(model, library)
        for ids in BATCHES:
            optimizer.zero_grad()
            (loss_of(model, ids) + model.embedding.weight.pow(2).sum()).backward()
            optimizer.step()

    same(run, rows=False)


@feature(
    MODEL,
    "Loss penalty on the rows in the batch",
    WORKS,
    "For example, `model.embedding(ids).pow(2).sum()`.",
)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        optimizer = adam(model, library)
        for ids in BATCHES:
            optimizer.zero_grad()
            (loss_of(model, ids) + model.embedding(ids).pow(2).sum()).backward()
            optimizer.step()

    same(run)


@feature(MODEL, "`parametrizations` of the table", DENSE, "`convert` skips such layers.")
def _() -> None:
    def make() -> nn.Module:
        model = Model()
        parametrizations.weight_norm(model.embedding)
        return model

    same(plain, make, rows=False)


@feature(MODEL, "`nn.utils.prune` on the table", DENSE, "`convert` skips such layers.")
def _() -> None:
    def make() -> nn.Module:
        model = Model()
        prune.l1_unstructured(model.embedding, "weight", 0.3)
        model.embedding.weight = model.embedding.weight.detach()
        return model

    same(plain, make, rows=False)


@feature(MODEL, "Frozen tables", WORKS, "Freeze them with `requires_grad_(False)`.")
def _() -> None:
    def make() -> nn.Module:
        model = Model()
        model.embedding.requires_grad_(False)
        return model

    for model, library in pair(make):
        before = model.embedding.weight.clone()
        plain(model, library)
        assert torch.equal(model.embedding.weight, before)


@feature(MODEL, "`nn.Module.to(dtype)` before creating the optimizer", WORKS)
def _() -> None:
    same(lambda model, library: plain(model.double(), library))


@feature(MODEL, "`nn.Module.to(dtype)` after the first step", REFUSED, "Create a new optimizer.")
def _() -> None:
    model = converted()
    optimizer = adam(model, hotrow.optim)
    train(model, optimizer)
    model.double()
    with pytest.raises(HotrowError, match="create a new optimizer"):
        train(model, optimizer)


# --- Checkpoints ----------------------------------------------------------------------------------

CHECKPOINTS = "Checkpoints and copies"


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = converted()
    optimizer = adam(model, hotrow.optim)
    train(model, optimizer)
    return model, optimizer


@feature(CHECKPOINTS, "Model and optimizer `state_dict`, from torch to hotrow and back", WORKS)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        optimizer = adam(model, library)
        train(model, optimizer)
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        file.seek(0)
        states = torch.load(file, weights_only=True)
        other = Model()
        if library is torch.optim:
            hotrow.convert(other, min_entries=0)
        resumed = adam(other, hotrow.optim if library is torch.optim else torch.optim)
        other.load_state_dict(states[0])
        resumed.load_state_dict(states[1])
        train(other, resumed)
        model.load_state_dict(other.state_dict())

    same(run)


@feature(
    CHECKPOINTS,
    "`load_state_dict(assign=True)`",
    DENSE,
    "Loading replaces the table. Convert the model again.",
)
def _() -> None:
    model, _ = _trained()
    model.load_state_dict(Model().state_dict(), assign=True)
    assert not isinstance(model.embedding.weight, Table)
    hotrow.convert(model, min_entries=0)
    plain(model, hotrow.optim)
    assert has_rows(model)


@feature(CHECKPOINTS, "`copy.deepcopy(model)`", WORKS, "The copy is converted too.")
def _() -> None:
    model, _ = _trained()
    copied = copy.deepcopy(model)
    plain(copied, hotrow.optim)
    assert has_rows(copied)


@feature(
    CHECKPOINTS,
    "`pickle`, `torch.save(model)`",
    DENSE,
    "The loaded model is plain PyTorch. Convert it again.",
)
def _() -> None:
    model, _ = _trained()
    loaded = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert not isinstance(loaded.embedding.weight, Table)
    hotrow.convert(loaded, min_entries=0)
    plain(loaded, hotrow.optim)
    assert has_rows(loaded)


@feature(CHECKPOINTS, "`safetensors`", WORKS)
def _() -> None:
    from safetensors.torch import load_file, save_file

    model, _ = _trained()
    with tempfile.TemporaryDirectory() as folder:
        save_file(model.state_dict(), f"{folder}/model.safetensors")
        loaded = load_file(f"{folder}/model.safetensors")
    torch.testing.assert_close(loaded, dict(model.state_dict()), rtol=0, atol=0)


@feature(
    CHECKPOINTS,
    "Aliases of the weight: `weight.data`, `weight.numpy()`, `state_dict()`",
    WORKS,
    "The aliases stay up to date during training.",
)
def _() -> None:
    model, optimizer = _trained()
    alias = model.embedding.weight.data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, optimizer)
    torch.testing.assert_close(alias, model.embedding.weight.detach(), rtol=0, atol=0)


# --- Autograd -------------------------------------------------------------------------------------

AUTOGRAD = "Autograd and transforms"


@feature(AUTOGRAD, "`torch.autograd.grad(loss, weight)`, `loss.backward(inputs=[weight])`", WORKS)
def _() -> None:
    found = []
    for model, _ in pair():
        weight = model.embedding.weight
        found += torch.autograd.grad(loss_of(model, BATCHES[0]), weight)
        loss_of(model, BATCHES[0]).backward(inputs=[weight])
        found.append(weight.grad)
    assert type(found[2]) is type(found[3]) is RowGradient
    torch.testing.assert_close(found[2] + 0, found[0])
    torch.testing.assert_close(found[3] + 0, found[1])


@feature(
    AUTOGRAD,
    "Second derivatives of a table (`create_graph=True`)",
    WORKS,
    "For example, you can penalize a gradient. Sharded and replicated tables don't support this.",
)
def _() -> None:
    found = []
    for model, _ in pair():
        loss = loss_of(model, BATCHES[0])
        (gradient,) = torch.autograd.grad(loss, model.embedding.weight, create_graph=True)
        gradient.pow(2).sum().backward()
        found.append(model.embedding.weight.grad)
    torch.testing.assert_close(found[1] + 0, found[0])


@feature(
    AUTOGRAD,
    "`torch.autograd.detect_anomaly`",
    WORKS,
    "Anomaly mode checks the touched rows for NaN.",
)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly():
                plain(model, library)

    same(run)


@feature(
    MODEL,
    "`nn.Parameter(table)`, `nn.Embedding.from_pretrained(table)`",
    WORKS,
    "The new parameter shares the table's values, so every step settles all rows. If one optimizer "
    "trains both parameters, both take torch's dense step.",
)
def _() -> None:
    model = converted()
    table = model.embedding.weight
    parameter = nn.Parameter(table)
    plain(model, hotrow.optim)
    assert torch.equal(parameter, table)
    assert nn.Embedding.from_pretrained(table).weight.data_ptr() == table.data_ptr()


@feature(AUTOGRAD, "Forward-mode derivatives (`torch.func.jvp`)", DENSE)
def _() -> None:
    found = []
    for model, library in pair():
        plain(model, library)
        values = dict(model.named_parameters())
        tangents = {name: torch.ones_like(value) for name, value in values.items()}

        def output(values: dict[str, Tensor], model: nn.Module = model) -> Tensor:
            return torch.func.functional_call(model, values, (BATCHES[0],))

        found.append(torch.func.jvp(output, (values,), (tangents,)))
    torch.testing.assert_close(*found)


@feature(
    AUTOGRAD,
    "`torch.func`: `functional_call`, `grad`, `vmap`",
    DENSE,
    "A transform that takes a table as an input reads stale rows from it. Pass `weight.detach()`, "
    "or call `optimizer.settle()` first.",
)
def _() -> None:
    found = []
    for model, library in pair():
        plain(model, library)
        values = {name: value.detach() for name, value in model.named_parameters()}

        def loss(values: dict[str, Tensor], ids: Tensor, model: nn.Module = model) -> Tensor:
            return (torch.func.functional_call(model, values, (ids,)) - 1).pow(2).mean()

        found.append(torch.func.grad(loss)(values, BATCHES[0]))
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(values, BATCHES[0][:, None])
        found[-1] |= {f"each {name}": value for name, value in each.items()}
    torch.testing.assert_close(*found)


@feature(
    AUTOGRAD,
    "`torch.autograd.grad(..., is_grads_batched=True)`",
    UNSUPPORTED,
    "Raises an error. Compute the gradients one after the other.",
)
def _() -> None:
    _, (model, _) = pair()
    output = model.embedding(BATCHES[0])
    with pytest.raises(NotImplementedError):
        torch.autograd.grad(
            output, model.embedding.weight, torch.ones(2, *output.shape), is_grads_batched=True
        )


# --- Execution ------------------------------------------------------------------------------------

EXECUTION = "Compilers and dtypes"
PARALLEL = "Multiple processes"


@feature(
    EXECUTION,
    "`torch.compile`",
    WORKS,
    "Lookups don't cause graph breaks, except with `max_norm`, in a distributed table, or in a bag "
    "with `padding_idx` or `scale_grad_by_freq`. Any other read of a table causes a graph break, "
    "so `fullgraph=True` raises an error.",
)
def _() -> None:
    def run(model: nn.Module, library: Any) -> None:
        torch._dynamo.reset()
        train(torch.compile(model, fullgraph=True, backend="aot_eager"), adam(model, library))

    same(run)
    model, _ = _trained()
    compiled = torch.compile(lambda: model.embedding.weight.sum(), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="only in lookups"):
        compiled()


@feature(
    EXECUTION,
    "`torch.jit.script`",
    UNSUPPORTED,
    "A scripted module reads stale rows. Call `optimizer.settle()` first.",
)
def _() -> None:
    model, optimizer = _trained()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(model)
    stale = script(BATCHES[1])
    optimizer.settle()
    assert torch.equal(script(BATCHES[1]), model(BATCHES[1]))
    assert not torch.equal(stale, script(BATCHES[1]))


@feature(
    EXECUTION,
    "`torch.jit.trace`",
    WORKS,
    "If you train the model further, the traced module reads stale rows. Call "
    "`optimizer.settle()` first. The trace of a model with one-hots uses dense one-hots.",
)
def _() -> None:
    model, optimizer = _trained()
    traced = torch.jit.trace(model, BATCHES[0])
    assert torch.equal(traced(BATCHES[1]), model(BATCHES[1]))
    train(model, optimizer)
    optimizer.settle()
    assert torch.equal(traced(BATCHES[1]), model(BATCHES[1]))


@feature(
    EXECUTION,
    "`torch.export`",
    WORKS,
    "With one-hots, the exported model ignores autocast, and a dynamic batch size often fails "
    "(`specialized it to be a const`): export the original model.",
)
def _() -> None:
    model, _ = _trained()
    exported = torch.export.export(model, (BATCHES[0],)).module()
    torch.testing.assert_close(exported(BATCHES[1]), model(BATCHES[1]))


@feature(EXECUTION, "float64 and bfloat16", WORKS)
def _() -> None:
    same(lambda model, library: plain(model.double(), library))
    same(lambda model, library: plain(model.bfloat16(), library), rtol=0.05, atol=0.02)


@feature(
    EXECUTION,
    "float16",
    WORKS,
    "hotrow has no compiled float16 kernels. `eps` must not round to 0 in float16, as the defaults "
    "of Adam (1e-8) and Adagrad (1e-10) do; otherwise, torch turns every idle row into NaN. hotrow "
    "keeps these rows.",
)
def _() -> None:
    same(
        lambda model, library: train(model.half(), adam(model, library, eps=1e-4)),
        rtol=0.01,
        atol=0.01,
    )
    for name in ("Adam", "Adagrad"):
        for library, finite_rows in ((hotrow.optim, 10), (torch.optim, 2)):
            layer = nn.Embedding(10, COLUMNS, dtype=torch.float16)
            if library is hotrow.optim:
                layer = hotrow.convert(layer, min_entries=0)
                assert isinstance(layer.weight, Table)
            optimizer = getattr(library, name)(layer.parameters())
            for _ in range(20):
                optimizer.zero_grad()
                layer(torch.tensor([1, 2])).sum().backward()
                optimizer.step()
            assert layer.weight.isfinite().all(1).sum() == finite_rows


@feature(
    PARALLEL, "`share_memory()`, `torch.multiprocessing`", DENSE, "Each step settles all rows."
)
def _() -> None:
    same(lambda model, library: plain(model.share_memory(), library))


def ddp_on_a_rank() -> None:
    rank = torch.distributed.get_rank()

    def run(model: nn.Module, library: Any) -> None:
        parallel = nn.parallel.DistributedDataParallel(model)
        optimizer = adam(model, library)
        for ids in BATCHES:
            optimizer.zero_grad()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss = loss_of(parallel, ids + 5 * rank)
            expects_warning = library is hotrow.optim and ids is BATCHES[0]
            assert any("hotrow.distributed.replicate" in str(each.message) for each in caught) == (
                expects_warning
            )
            loss.backward()
            optimizer.step()

    same(run, rows=False)


@feature(
    PARALLEL,
    "`DistributedDataParallel`",
    DENSE,
    "DDP sends the whole gradient, and hotrow warns at the first lookup. With "
    "`find_unused_parameters=True`, the copies of a table that only some processes look up differ "
    "by rounding. `hotrow.distributed.replicate` sends only the touched rows.",
)
def _() -> None:
    rank_processes(2).run(ddp_on_a_rank)


def fsdp_on_a_rank() -> None:
    from torch.distributed.fsdp import fully_shard

    ends = []
    for model, library in pair():
        model = fully_shard(model, mesh=mesh_of_all(2))
        assert type(model.embedding.weight) is torch.distributed.tensor.DTensor
        plain(model, library)
        ends.append([value.full_tensor() for value in model.parameters()])
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


@feature(
    PARALLEL,
    "`fully_shard` (FSDP2)",
    DENSE,
    "FSDP replaces the table. To split tables by rows, use `hotrow.distributed.shard`.",
)
def _() -> None:
    rank_processes(2).run(fsdp_on_a_rank)


COLUMN_NAMES = "| feature | status | note |\n| --- | --- | --- |\n"
INTRODUCTION = """\
# Compatibility with PyTorch

This page lists PyTorch features and whether they work with a model converted by `hotrow.convert`
and an optimizer from `hotrow.optim`.

works
: The result is the same as torch's, and the cost scales with the number of touched rows.

dense cost
: The result is the same as torch's, but the cost is that of dense training.

error
: hotrow raises a `HotrowError` that explains the fix.

not supported
: A different error is raised, or the result differs from torch's. The note gives an alternative.

Each row is verified by a test in `tests/docs/compatibility.py`, run with torch {torch} on a CPU.
The kernels for [NVIDIA GPUs](../how-to/gpu.md) have their own tests. MPS and `nn.DataParallel` on
several GPUs aren't tested. On devices other than CPUs and NVIDIA GPUs, hotrow uses plain torch
operations instead of compiled kernels.

<!-- Generated by `python -m tests.docs.compatibility`. Edit that module instead. -->
"""


def page() -> str:
    """Return the text of the page, generated from `FEATURES`."""
    parts = [INTRODUCTION.format(torch=torch.__version__.split("+")[0])]
    for section in dict.fromkeys(each.section for each in FEATURES):
        rows = [
            f"| {each.name} | {each.verdict} | {each.note} |\n"
            for each in FEATURES
            if each.section == section
        ]
        parts.append(f"## {section}\n\n{COLUMN_NAMES}{''.join(rows)}")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
