"""The result of comparing a model with its converted copy, and the cost of both."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hotrow.conversion.report import Finding
from hotrow.verify.agreement import Agreement
from hotrow.verify.measure import Measurement


@dataclass(frozen=True)
class ModelCost:
    """The cost of one kind of run, for the plain and the converted model.

    Attributes:
        name: "forward" or "forward and gradient".
        plain_multiplications: the number of multiplications in the one-hot products that became
            lookups, or None if the model was converted to matmuls.
        converted_multiplications: the number of these multiplications that the converted model
            still needs.
        plain: the measured time and memory of the plain model.
        converted: the measured time and memory of the converted model.
    """

    name: str
    plain_multiplications: int | None
    converted_multiplications: int | None
    plain: Measurement
    converted: Measurement

    @property
    def ratio(self) -> float:
        """The median time of the plain model divided by that of the converted model."""
        return self.plain.median_ms / self.converted.median_ms

    def to_dict(self) -> dict[str, Any]:
        """Return all values as a dict for JSON. Key names include the units."""
        return {
            "what": self.name,
            "plain": {"one_hot_multiplications": self.plain_multiplications} | self.plain.to_dict(),
            "converted": {"one_hot_multiplications": self.converted_multiplications}
            | self.converted.to_dict(),
            "time_ratio": self.ratio,
        }


@dataclass(frozen=True, eq=False)
class ModelComparison:
    """The result of `compare_models`. It is truthy if both models give equal results.

    Attributes:
        title: the name of the model.
        inputs: a description of the inputs.
        seed: the seed for both runs and for the outputs' gradients.
        training: whether the model was in training mode.
        tables: the weights that were stored as tables, as in training with `hotrow.optim`.
        findings: the parts that were or were not converted, each with its location and the reason.
        agreements: one `Agreement` for each output, for each gradient, and for each parameter,
            buffer, tensor in an attribute of a module, or value in the inputs that the run changed.
        costs: the cost of the forward pass alone, and of the forward pass with the gradient.
        notes: the cause of a difference or an inconclusive result, if it is known, and the parts
            of the output that can't be compared.
        to: the direction of the conversion, "lookup" or "matmul".
    """

    title: str
    inputs: str
    seed: int
    training: bool
    tables: tuple[str, ...]
    findings: tuple[Finding, ...]
    agreements: tuple[Agreement, ...]
    costs: tuple[ModelCost, ...]
    notes: tuple[str, ...]
    to: str = "lookup"

    @property
    def equal(self) -> bool:
        """Return whether all results in `agreements` are equal."""
        return all(agreement.equal for agreement in self.agreements)

    @property
    def verdict(self) -> str:
        """The result in one line."""
        verdicts = {agreement.verdict for agreement in self.agreements}
        if "different" in verdicts:
            return "NOT equal: the converted model gives different numbers"
        if "unsure" in verdicts:
            return "inconclusive: rounding may not explain all differences"
        if not any(finding.converted for finding in self.findings):
            return "equal: nothing was converted, so nothing is saved"
        zeros = "none of the zeros" if self.to == "lookup" else "with all of the zeros"
        if "rounding" in verdicts:
            return f"equal within rounding: the same sums, {zeros}"
        return f"equal: the same numbers, {zeros}"

    def __bool__(self) -> bool:
        return self.equal

    def to_dict(self) -> dict[str, Any]:
        """Return all values as a dict for JSON. Key names include the units."""
        return {
            "title": self.title,
            "equal": self.equal,
            "verdict": self.verdict,
            "inputs": self.inputs,
            "seed": self.seed,
            "training": self.training,
            "tables": list(self.tables),
            "findings": [asdict(finding) for finding in self.findings],
            "agreements": [{"what": each.name} | each.to_dict() for each in self.agreements],
            "spent": [each.to_dict() for each in self.costs],
            "notes": list(self.notes),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
        }
