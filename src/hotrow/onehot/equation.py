"""Parse the equations of `torch.einsum`."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hotrow.onehot.results import sizes_of


def parse_equation(equation: str, operands: Sequence[Any]) -> tuple[list[str], str] | None:
    """Return the labels of the operands and the output, or None if they are unsupported."""
    if "->" not in equation or not all(isinstance(each, Tensor) for each in operands):
        return None
    left, output = equation.replace(" ", "").split("->", 1)
    labels = left.split(",")
    if len(labels) != len(operands):
        return None
    free = [letter for letter in string.ascii_letters if letter not in equation]
    ellipsis: str | None = None
    for i, (each, t) in enumerate(zip(labels, operands, strict=True)):
        if "..." not in each:
            continue
        count = len(sizes_of(t)) - len(each.replace("...", ""))
        if each.count("...") > 1 or not 0 <= count <= len(free):
            return None
        letters = "".join(free[:count])
        if ellipsis is not None and letters != ellipsis:
            return None  # torch would broadcast these axes
        ellipsis = letters
        labels[i] = each.replace("...", letters)
    if "..." in output:
        if ellipsis is None or output.count("...") > 1:
            return None
        output = output.replace("...", ellipsis)
    elif ellipsis:
        return None
    known = set("".join(labels))
    if not set(output) <= known or not known <= set(string.ascii_letters):
        return None
    return labels, output
