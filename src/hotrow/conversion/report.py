"""The report of a converted model: what was converted, what was not, and why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from hotrow.conversion import sampling
from hotrow.conversion.embeddings import find_embeddings
from hotrow.conversion.modules import direction_of, iter_records, original_class
from hotrow.conversion.origins import Origin
from hotrow.table.parameter import Table


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


def report(model: nn.Module) -> Report:
    """What was converted in the model, what was not, and why.

    One-hots are found while the model runs, so run it first.
    """
    findings = []
    for path, module, obstacle in find_embeddings(model):
        name = original_class(module).__name__
        what = f"{name}({module.num_embeddings}, {module.embedding_dim})"
        if direction_of(model) == "matmul":
            findings.append(Finding(path, what, True, "product"))
        else:
            is_table = isinstance(module.weight, Table)
            why = obstacle or (_why_dense if is_table else _why_plain)(module.weight)
            findings.append(Finding(path, what, is_table, "table", why))
    for path, record in iter_records(model):
        findings += [_finding_of(path, origin) for origin in record.origins()]
    # A module that is also called on its own has recorded some of them twice.
    return Report(tuple(dict.fromkeys(findings)))


def _finding_of(path: str, origin: Origin) -> Finding:
    full_path = ".".join(filter(None, (path, origin.path)))
    what = f"{origin.operation}, {origin.describe_widths()}, {origin.location}"
    how = ", ".join(f"{product} looks up" for product in origin.describe_products())
    return Finding(full_path, what, bool(how), how, _why_not_converted(origin))


def _why_not_converted(origin: Origin) -> str:
    operations = ", ".join(origin.describe_fallbacks())
    reasons = [f"reaches {operations}, which needs every column"] if operations else []
    if origin.is_returned:
        reasons.append("is returned to code outside the model: convert what is around it as well")
    largest, min_entries = origin.max_small_entries, origin.min_entries
    if 0 < origin.max_product_entries < sampling.MIN_ENTRIES:
        reasons.append(f"unless asked to, only from {sampling.MIN_ENTRIES:,} entries on")
    elif largest and origin.product_counts:
        reasons.append(f"from {min_entries:,} entries on")
    elif largest:
        reasons.append(
            f"multiplied with {largest:,} entries at most, and torch's own product is as quick for "
            f"fewer than {min_entries:,}"
        )
    return "; ".join(reasons) or ("" if origin.product_counts else "is not multiplied")


def _why_plain(weight: Tensor) -> str:
    if weight.numel() < sampling.MIN_ENTRIES:
        why = "torch's own dense step is as quick for a table of its size"
        return f"{why}; `min_entries=0` makes it one"
    return "smaller than `min_entries`, or its weight was replaced since: convert it again"


def _why_dense(weight: Tensor) -> str:
    if isinstance(weight, Table) and weight.had_dense_gradient:
        return "had a dense gradient, as something beside look-ups uses it; such steps are torch's"
    return ""
