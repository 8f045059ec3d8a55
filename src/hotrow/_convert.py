"""A model in, the same model out: its embeddings are tables, and a report says which and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import Tensor, nn

from hotrow.errors import HotrowError
from hotrow.rows import Table


@dataclass(frozen=True)
class Finding:
    """What became of one module.

    Attributes:
        path: of the module in the model.
        what: the module, in words.
        converted: whether it is a table now.
        why: if not, the reason; if it is, why its steps were dense all the same.
    """

    path: str
    what: str
    converted: bool
    why: str = ""

    def __str__(self) -> str:
        fate = "table" if self.converted else "left"
        fate += f": {self.why}" if self.why else ""
        return f"{self.path or '(the model)'}  {self.what}  {fate}"


@dataclass(frozen=True)
class Report:
    """The findings of a model, one for each embedding in it; prints as a list."""

    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) or "no embeddings"

    __repr__ = __str__


def convert(model: nn.Module) -> nn.Module:
    """Make the model's embeddings tables, whose gradients and steps cost their touched rows.

    The module, its parameters and its `state_dict` keys stay the same objects and names; the
    parameters become `Table`s in place. Train it with an optimizer of `hotrow.optim`. A table
    that something other than an embedding holds as well (a tied head) is left: its gradient is
    dense. Converting again changes nothing. `convert.report(model)` says what was done and why,
    and, after steps, which table had a dense gradient all the same.

    Plain torch code around the tables stays as it is: reading one, in any way, settles its rows
    first, and a tensor that shares its storage (`weight.data`, `state_dict()`, `.numpy()`) follows
    the training. A table made from a numpy array gets storage of its own. In `torch.compile` a
    look-up ends a graph. A copy of the model has tables; one loaded from a file, or whose
    parameters were replaced (`load_state_dict(assign=True)`, `to_empty`), is to be converted again.

    Args:
        model: any module; changed in place.

    Returns:
        The model.

    Raises:
        HotrowError: not a module.

    >>> model = convert(nn.Sequential(nn.Embedding(4, 5), nn.Linear(5, 2)))
    >>> print(convert.report(model))
    0  Embedding(4, 5)  table
    """
    if not isinstance(model, nn.Module):
        raise HotrowError(f"convert takes a torch.nn.Module, not a {type(model).__name__}")
    for _, module, why in _embeddings(model):
        if not why and isinstance(module.weight, nn.Parameter):
            Table.adopt(module.weight)
    return model


def report(model: nn.Module) -> Report:
    """What is a table in the model, and what is not and why."""
    return Report(
        tuple(
            Finding(
                path,
                f"{type(module).__name__}({module.num_embeddings}, {module.embedding_dim})",
                isinstance(module.weight, Table),
                why or _why_dense(module.weight),
            )
            for path, module, why in _embeddings(model)
        )
    )


convert.report = report  # type: ignore[attr-defined]


def _embeddings(model: nn.Module) -> list[tuple[str, nn.Embedding | nn.EmbeddingBag, str]]:
    """(path, module, why it is left) of each; "" where it can be a table."""
    holders: Counter[int] = Counter()
    for module in model.modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            holders.update(id(parameter) for parameter in module.parameters(recurse=False))
    found = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            found.append((path, module, _why_left(module, holders)))
    return found


def _why_left(module: nn.Embedding | nn.EmbeddingBag, holders: Counter[int]) -> str:
    weight: Tensor = module.weight
    if not isinstance(weight, nn.Parameter):
        return "its weight is computed from other parameters"
    if holders[id(weight)]:
        return "its table is used densely too (a tied head), so its gradient is dense"
    if not weight.is_floating_point():
        return "its table is not floating"
    return ""


def _why_dense(weight: Tensor) -> str:
    if isinstance(weight, Table) and weight.was_dense:
        return "had a dense gradient, as something beside look-ups uses it; such steps are torch's"
    return ""
