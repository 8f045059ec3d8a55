"""Compare both models with a float64 run of the plain model, where no rounding bound is known."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hotrow.inputs.text import one_line
from hotrow.table.nested import map_instances
from hotrow.verify.models.trial import Trial

# The error of the plain model, relative to the largest value, up to which a float64 run tells an
# error from rounding: this many eps, but at most `_MAX_ERROR`.
_MAX_EPS, _MAX_ERROR = 64, 2**-10
_SLACK_ULP = 2


class _Widening(TorchFunctionMode):
    """Makes code that asks for float32, such as `F.one_hot(x, V).float()`, get float64.

    The default dtype remains float32, because torch draws other random numbers in float64.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_instances((args, kwargs or {}), torch.dtype, _widened)
        result = (Tensor.double if func is Tensor.float else func)(*args, **kwargs)
        return map_instances(result, Tensor, _widen)


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float32 else dtype


def _widen(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype == torch.float32 else tensor


def run_in_float64(trial: Trial) -> tuple[dict[str, Tensor], str]:
    """Run the plain model in float64; return its results, and why it fails or ""."""

    def widen(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor.clone()

    try:
        side = dataclasses.replace(trial, inputs=trial.inputs.copy(widen)).make_plain()
        side.model.double()
        return side.compute_results(_Widening()), ""
    except Exception as error:  # for example, if the model's code fixes a dtype
        return {}, one_line(error)


def is_as_close(truth: Tensor | None, plain: Tensor | None, converted: Tensor | None) -> bool:
    """Return whether the converted model is as close to the float64 run as the plain model is.

    The error of each value may exceed the largest error of the plain model by at most 2 ulp. The
    result is false if the plain model's own error is so large that it could hide a wrong number.
    """
    if truth is None or plain is None or converted is None:
        return False
    if truth.dtype != torch.float64 or truth.shape != plain.shape:
        return False
    if not plain.is_floating_point() or plain.dtype == torch.float64 or not truth.numel():
        return False
    if plain.shape != converted.shape or plain.dtype != converted.dtype:
        return False
    eps = torch.finfo(plain.dtype).eps
    plain_error = float((plain.double() - truth).abs().max())
    scale = float(truth.abs().max())
    if not plain_error <= min(_MAX_EPS * eps, _MAX_ERROR) * scale:  # also false for NaN
        return False
    allowed = plain_error + _SLACK_ULP * eps * truth.abs()
    return bool(((converted.double() - truth).abs() <= allowed).all())
