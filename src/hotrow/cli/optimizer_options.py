"""Parse the name and options of an optimizer from command-line arguments."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Sequence
from typing import Any

import hotrow.optim
from hotrow.errors import HotrowError

# Options that change how torch computes a step, but not the result.
EXECUTION_OPTIONS = {"foreach", "fused", "capturable", "differentiable"}


def parse_optimizer(text: str) -> str:
    """Return the exact name of an optimizer in `hotrow.optim`, ignoring the case of `text`.

    >>> parse_optimizer("adamw")
    'AdamW'
    """
    by_lower = {name.lower(): name for name in hotrow.optim.__all__}
    if text.lower() in by_lower:
        return by_lower[text.lower()]
    matches = difflib.get_close_matches(text.lower(), by_lower, n=1)
    guess = f" (did you mean {by_lower[matches[0]]}?)" if matches else ""
    names = sorted(by_lower.values(), key=str.lower)
    raise HotrowError(
        f"--optimizer {text!r} is not in hotrow.optim{guess}",
        fix=f"choose one of {', '.join(names)}",
    )


def default_options(optimizer: str) -> dict[str, Any]:
    """Return the constructor options that affect the training result, with their defaults.

    >>> default_options("AdamW")["betas"]
    (0.9, 0.999)
    """
    parameters = inspect.signature(getattr(hotrow.optim, optimizer).torch_class).parameters
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if name != "params" and name not in EXECUTION_OPTIONS
    }


def parse_options(optimizer: str, texts: Sequence[str]) -> dict[str, Any]:
    """Parse options of the form NAME=VALUE; each value has the type of the option's default.

    >>> parse_options("AdamW", ["weight_decay=0.1", "betas=0.8,0.95", "amsgrad=true"])
    {'weight_decay': 0.1, 'betas': (0.8, 0.95), 'amsgrad': True}
    """
    allowed = default_options(optimizer)
    listing = f"choose one of {', '.join(allowed)}"
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise HotrowError(
                f"--set {text!r} is not NAME=VALUE", fix="write it as lr=0.01 or betas=0.8,0.95"
            )
        if name in EXECUTION_OPTIONS:
            raise HotrowError(
                f"--set {text!r}: {name} changes how torch computes a step, but not the result",
                fix="remove it",
            )
        if name not in allowed:
            matches = difflib.get_close_matches(name, allowed, n=1)
            guess = f" (did you mean {matches[0]}?)" if matches else ""
            raise HotrowError(
                f"--set {text!r}: {optimizer} has no option {name}{guess}", fix=listing
            )
        if name in options:
            raise HotrowError(f"--set {text!r}: {name} is set twice", fix="set it once")
        options[name] = _parse_value(text, name, value, allowed[name])
    return options


def _parse_value(text: str, name: str, value: str, default: Any) -> Any:
    if isinstance(default, bool):
        if value.lower() not in ("true", "false"):
            raise HotrowError(
                f"--set {text!r}: {name} must be true or false", fix=f"write it as {name}=true"
            )
        return value.lower() == "true"
    count = len(default) if isinstance(default, tuple) else 1
    numbers = tuple(map(_parse_number, value.split(",")))
    if len(numbers) != count or None in numbers:
        example = ",".join(map(str, default)) if count > 1 else default
        what = f"{count} finite numbers" if count > 1 else "a finite number"
        raise HotrowError(
            f"--set {text!r}: {name} must be {what}", fix=f"write it as {name}={example}"
        )
    return numbers if count > 1 else numbers[0]


def _parse_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def parse_scales(text: str) -> tuple[float, ...]:
    """Parse positive numbers separated by commas.

    >>> parse_scales("1,1e-4")
    (1.0, 0.0001)
    """
    scales = []
    for word in text.split(","):
        scale = _parse_number(word)
        if scale is None or scale <= 0:
            raise HotrowError(
                f"--scales {text!r}: {word.strip()!r} is not a positive number",
                fix="write the scales as 1,1e-4,1e-7,1e-9",
            )
        scales.append(scale)
    return tuple(scales)
