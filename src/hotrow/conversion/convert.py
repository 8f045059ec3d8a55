"""A model in, the same model out, that looks rows up; and a report says what and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hotrow.conversion import resting
from hotrow.conversion.modules import WAYS, own_class, records_in, run_with_mode, way_of
from hotrow.conversion.origins import Origin
from hotrow.errors import HotrowError
from hotrow.onehot import rules as algebra
from hotrow.onehot import tensor as onehot
from hotrow.table.parameter import Table
from hotrow.verify.cost import as_count


@dataclass(frozen=True)
class Finding:
    """What became of one embedding, or of one line that makes a one-hot.

    Attributes:
        path: of the module in the model.
        what: the module, or the line, in words.
        converted: whether it looks up now: as a table, or in place of a product.
        how: the look-ups that a one-hot became; "table" for an embedding.
        why: if not, or not all, the reason; of a table, why its steps were dense all the same.
    """

    path: str
    what: str
    converted: bool
    how: str = ""
    why: str = ""

    def __str__(self) -> str:
        fate = self.how if self.converted else "left"
        fate += f": {self.why}" if self.why else ""
        return f"{self.path or '(the model)'}  {self.what}  {fate}"


@dataclass(frozen=True)
class Report:
    """The findings of a model; prints as a list."""

    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) or "no embeddings, and no one-hots seen so far"

    __repr__ = __str__


def convert(model: nn.Module, to: str = "lookup", least: int | None = None) -> nn.Module:
    """Make a model look rows up: its embeddings, and what it multiplies by one-hots.

    The module, its parameters and its `state_dict` keys stay the same objects and names. Train it
    with an optimizer of `hotrow.optim`; any other works, at its own cost. Converting again changes
    nothing.

    Embeddings of 100,000 entries or more become `Table`s in place, whose gradients and steps cost
    their touched rows; `least` says what becomes of smaller ones. One that something other than an
    embedding holds as well (a tied head) is left: its gradient is dense. Plain torch code around
    the tables stays as it is: reading one, in any way, settles its rows first, and a tensor that
    shares its storage (`weight.data`, `state_dict()`, `.numpy()`) follows the training. A table
    made from a numpy array gets storage of its own. In `torch.compile` a look-up of a table ends a
    graph.

    One-hots that the model's own Python makes, by `F.one_hot`, `torch.eye(V)[ids]`, ones scattered
    into zeros or `ids[..., None] == arange(V)`, become `hotrow.one_hot`s: what is multiplied by one
    looks its rows up instead, `Linear` and `@` first of all. The weight of such a product, if it
    has a million entries or more, becomes a table with the first step of an optimizer of
    `hotrow.optim`; its memory is then that of its transpose, which safetensors has to be given as
    `.contiguous()`. This goes for the methods of the modules in the model, each of which gets a
    class of the same name in between; what leaves them is written out. In `torch.compile`, for
    `F.one_hot`; in a checkpoint (`use_reentrant=False`), within modules' methods.

    `convert.report(model)` says what was done, where, and why not: of one-hots, once the model has
    run. A copy of the model is converted; of one loaded from a file, or whose parameters were
    replaced (`load_state_dict(assign=True)`, `to_empty`), the embeddings are to be converted again.

    Args:
        model: any module; changed in place.
        to: "lookup", or "matmul" for the other direction: every embedding multiplies its table by
            the one-hot of its ids, for backends where a product is the cheap one.
        least: entries from which on hotrow takes part; 100,000 unless given. A smaller embedding is
            left to torch, whose dense gradient and step are about as quick (SGD's, and those with
            `fused=True`, up to a million entries: 1_000_000 suits them). So is a product with a
            smaller one-hot (rows of the batch x columns), and a model in which none is larger runs
            as it was: only its first calls, then one in 64, and any with more input than those,
            look for one-hots. In `torch.compile` all are looked up. Of modules within modules the
            one that is called decides.

    Returns:
        The model.

    Raises:
        HotrowError: not a module; another direction; `least` is no count.

    Cost: nothing for torch's own layers. In a class of your own, each call of a torch function
    passes through Python, about a microsecond, in models with one-hots worth it; in others, the
    call of the model itself does.

    >>> model = convert(nn.Sequential(nn.Embedding(50_000, 5), nn.Linear(5, 2)))
    >>> print(convert.report(model))
    0  Embedding(50000, 5)  table
    """
    if not isinstance(model, nn.Module):
        raise HotrowError(f"convert takes a torch.nn.Module, not a {type(model).__name__}")
    if to not in WAYS:
        raise HotrowError(
            f"convert goes to 'lookup' or to 'matmul', not to {to!r}", fix="give one of these"
        )
    least = None if least is None else as_count("least", least)
    for function in (onehot.make, *algebra.in_graph()):
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]
    run_with_mode(model, to, least)
    if to == "lookup":
        smallest = resting.LEAST if least is None else least
        for _, module, why in _embeddings(model):
            # Of torch's own, a sparse gradient is one that most optimizers refuse.
            if not why and (module.weight.numel() >= smallest or module.sparse):
                Table.adopt(module.weight)  # type: ignore[arg-type]
    return model


def report(model: nn.Module) -> Report:
    """What looks up in the model, and what does not and why.

    One-hots are found when the model runs, so it is to have run before.
    """
    found = []
    for path, module, why in _embeddings(model):
        what = f"{own_class(module).__name__}({module.num_embeddings}, {module.embedding_dim})"
        if way_of(model) == "matmul":
            found.append(Finding(path, what, True, "product"))
        else:
            is_table = isinstance(module.weight, Table)
            why = why or (_why_dense if is_table else _why_plain)(module.weight)
            found.append(Finding(path, what, is_table, "table", why))
    for path, record in records_in(model):
        found += [_of_origin(path, origin) for origin in record.origins()]
    # A module that is also called by itself has met some of them twice.
    return Report(tuple(dict.fromkeys(found)))


convert.report = report  # type: ignore[attr-defined]


def _of_origin(path: str, origin: Origin) -> Finding:
    inner = ".".join(filter(None, (path, origin.path)))
    what = f"{origin.what}, {origin.columns()}, {origin.where}"
    uses = ", ".join(f"{product} looks up" for product in origin.products())
    return Finding(inner, what, bool(uses), uses, _why_left_out(origin))


def _why_left_out(origin: Origin) -> str:
    operations = ", ".join(origin.operations())
    reasons = [f"reaches {operations}, which needs every column"] if operations else []
    if origin.is_returned:
        reasons.append("is returned to code outside the model: convert what is around it as well")
    most, least = origin.most_spared, origin.least
    if 0 < origin.most_used < resting.LEAST:
        reasons.append(f"unless asked to, only from {resting.LEAST:,} entries on")
    elif most and origin.uses:
        reasons.append(f"from {least:,} entries on")
    elif most:
        reasons.append(
            f"multiplied with {most:,} entries at most, and torch's own product is as quick for "
            f"fewer than {least:,}"
        )
    return "; ".join(reasons) or ("" if origin.uses else "is not multiplied")


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


def _why_plain(weight: Tensor) -> str:
    if weight.numel() < resting.LEAST:
        return "torch's own dense step is as quick for a table of its size; `least=0` makes it one"
    return "smaller than `least`, or its weight was replaced since: convert it again"


def _why_dense(weight: Tensor) -> str:
    if isinstance(weight, Table) and weight.was_dense:
        return "had a dense gradient, as something beside look-ups uses it; such steps are torch's"
    return ""
