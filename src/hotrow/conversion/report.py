"""Report what was converted in a model, what was not, and why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from hotrow.conversion import sampling
from hotrow.conversion.calls import iter_records
from hotrow.conversion.classes import direction_of, original_class
from hotrow.conversion.embeddings import find_embeddings, min_entries_of, weight_of
from hotrow.conversion.modules import refusals
from hotrow.conversion.origins import Origin
from hotrow.table.parameter import Table

NOTHING_FOUND = (
    "no embeddings, and no one-hots found so far; run the model first. The report lists only the "
    "one-hots that the model's own methods create. hotrow.one_hot needs no conversion, so its "
    "one-hots are not listed"
)


@dataclass(frozen=True)
class Finding:
    """The outcome for one embedding, or for one line of code that creates a one-hot.

    Attributes:
        path: the module's name, as in `named_modules`.
        what: a description of the embedding, or of the one-hot and its line of code.
        converted: whether an embedding became a table or a one-hot product became a lookup.
        how: "table", or the products that became lookups; "" if nothing was converted.
        why: the reason for a missing or partial conversion, or for a dense step; otherwise "".
    """

    path: str
    what: str
    converted: bool
    how: str = ""
    why: str = ""

    @property
    def outcome(self) -> str:
        """`how` and `why`, joined into one string."""
        return "; ".join(filter(None, (self.how, self.why)))

    def __str__(self) -> str:
        return f"{self.path or '(the model)'}  {self.what}  {self.outcome}"


@dataclass(frozen=True)
class Report:
    """The findings for a model, printed as one line per finding."""

    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) or NOTHING_FOUND

    __repr__ = __str__


def report(model: nn.Module) -> Report:
    """List what `hotrow.convert` converted in a model, what it did not, and why.

    Each finding names a module, describes an embedding or the line of code that creates a one-hot,
    and gives the outcome. For an embedding, the outcome is "table" or "stays plain PyTorch". For a
    one-hot, the outcome lists the products that were "looked up", or the operations for which
    hotrow "falls back to a dense one-hot". hotrow finds one-hots while the model
    runs, so run the model first.

    Args:
        model: a module, converted or not.

    Returns:
        A `Report`, which prints one line per finding. Its `findings` attribute is a tuple of
        `Finding` objects.

    Cost: one pass over the model's modules.

    >>> import torch
    >>> class Policy(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.linear = nn.Linear(500, 4)
    ...
    ...     def forward(self, states):
    ...         return self.linear(nn.functional.one_hot(states, 500).float())
    >>> import hotrow
    >>> model = hotrow.convert(Policy())
    >>> _ = model(torch.arange(500))
    >>> [finding.outcome for finding in hotrow.convert.report(model).findings]
    ['linear(500, 4) looked up']
    """
    findings = []
    is_converted = any(direction_of(module) for module in model.modules()) or any(
        isinstance(parameter, Table) for parameter in model.parameters()
    )
    for path, module, obstacle in find_embeddings(model):
        name = original_class(module).__name__
        what = f"{name}({module.num_embeddings}, {module.embedding_dim})"
        if direction_of(model) == "matmul":
            findings.append(Finding(path, what, True, "one-hot matmul"))
        else:
            weight = weight_of(module)
            is_table = isinstance(weight, Table)
            if isinstance(weight, Table):
                reasons = obstacle or _why_dense(weight), _why_copied(weight)
                why = "; ".join(filter(None, reasons))
            else:
                why = f"stays plain PyTorch: {obstacle or _why_plain(module, is_converted)}"
            findings.append(Finding(path, what, is_table, "table" if is_table else "", why))
    for path, module in model.named_modules():
        if module in refusals:
            what = original_class(module).__name__
            why = f"its one-hots are not found, because {refusals[module]}"
            findings.append(Finding(path, what, False, why=why))
    for path, record in iter_records(model):
        findings += [_finding_of(path, origin) for origin in record.origins()]
    # Some findings appear twice if a module inside the model was also called directly.
    return Report(tuple(dict.fromkeys(findings)))


def _finding_of(path: str, origin: Origin) -> Finding:
    full_path = ".".join(filter(None, (path, origin.path)))
    what = f"{origin.operation}, {origin.describe_widths()}, {origin.location}"
    outcomes = [f"{product} looked up" for product in origin.describe_products()]
    if origin.use_counts:
        outcomes.append(f"{', '.join(origin.use_counts)} computed from the ids")
    how = ", ".join(outcomes)
    return Finding(full_path, what, bool(how), how, _why_not_converted(origin))


def _why_not_converted(origin: Origin) -> str:
    fallbacks = list(origin.fallback_counts)
    reasons = []
    if fallbacks:
        need = "needs" if len(fallbacks) == 1 else "need"
        reasons.append(f"falls back to a dense one-hot: {', '.join(fallbacks)} {need} every column")
    if origin.is_returned:
        reasons.append("is returned as a dense one-hot: convert the code that uses it too")
    reasons += origin.describe_small_uses()
    if 0 < origin.max_product_entries < sampling.MIN_ENTRIES:
        reasons.append(
            f"by default, products run densely below {sampling.MIN_ENTRIES:,} entries, as here"
        )
    return "; ".join(reasons) or ("" if origin.is_used else "not used")


def _why_plain(module: nn.Embedding | nn.EmbeddingBag, is_converted: bool) -> str:
    weight, min_entries = weight_of(module), min_entries_of.get(module)
    entries = 0 if weight is None else weight.numel()
    if entries < sampling.MIN_ENTRIES:
        return "a dense step is just as fast at this size; min_entries=0 converts it anyway"
    if min_entries is None:
        later = ", or it was added, copied or loaded later" if is_converted else ""
        return f"hotrow.convert was not called on it{later}; call hotrow.convert(model)"
    if entries < min_entries:
        return f"it has fewer than min_entries={min_entries:,} entries"
    return "its weight was replaced after hotrow.convert; convert it again"


def _why_copied(weight: Tensor) -> str:
    if isinstance(weight, Table) and weight.was_copied:
        return "its values were copied, because a tensor outside of the model shared its storage"
    return ""


def _why_dense(weight: Tensor) -> str:
    if not isinstance(weight, Table) or weight.dense_step is None:
        return ""
    why = f"torch's dense step ran, because the gradient was dense in step {weight.dense_step}"
    if weight.dense_use is None:
        return why
    operation, location = weight.dense_use
    why += f": {operation} at {location} uses the whole table"
    return why + _ADVICE.get(operation, "")


_DECAY = (
    " (instead of the penalty c * weight.pow(2).sum(), pass weight_decay=2 * c to SGD or Adam "
    "to get the same gradient; AdamW's weight_decay is different)"
)
_ADVICE = {
    **dict.fromkeys(("pow", "square", "mul", "norm", "linalg_vector_norm"), _DECAY),
    "getitem": " (use torch.nn.functional.embedding(ids, weight): its gradient contains only the "
    "touched rows)",
}
