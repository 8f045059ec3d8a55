"""Intercept the one-hot products that a converted model computes from the ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hotrow.kernels.tracing import never_compile_alone
from hotrow.onehot.parts import DenseColumns, Field
from hotrow.onehot.tensor import OneHot
from hotrow.table.nested import find_instances, map_instances

_SCALES = {"alpha", "beta"}  # the factors of the product and of the third tensor in `addmm`
TensorMap = Callable[[Any], Any]


@dataclass(frozen=True)
class Product:
    """A call to a torch function that multiplies by a one-hot.

    Attributes:
        func: the torch function.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.
        x: the one-hot among the arguments.
        autocast_dtype: the dtype of products under autocast; None without autocast.
        is_lookup: whether hotrow looked up rows of a weight. Otherwise, the product is another
            contraction with a dense tensor, such as the sum of rows by id `x.T @ rows`.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    x: OneHot
    autocast_dtype: torch.dtype | None
    is_lookup: bool

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(self.func.__name__).strip("_")

    @property
    def other_input(self) -> Tensor | None:
        """The dense input of a bilinear product, or None for other products."""
        if self.func is not F.bilinear:
            return None
        inputs = [*self.args[:2], *map(self.kwargs.get, ("input1", "input2"))]
        return next(t for t in inputs if isinstance(t, Tensor) and not isinstance(t, OneHot))

    @property
    def weights(self) -> list[Tensor]:
        """The dense tensors: the weight and the bias of a lookup, or the other factor."""
        other_input = self.other_input
        found = find_instances((self.args, self.kwargs), Tensor)
        return [t for t in found if not isinstance(t, OneHot) and t is not other_input]

    @property
    def factor(self) -> Tensor:
        """The dense tensor that the one-hot is multiplied by."""
        return self.weights[-1 if self.name in ("addmm", "baddbmm") else 0]

    @property
    def is_scaled(self) -> bool:
        """Whether the call passes `alpha` or `beta`."""
        return bool(self.kwargs.keys() & _SCALES)

    def with_scales(self, transform: TensorMap) -> Product:
        """Return the product with `transform` applied to `alpha` and `beta`."""
        scales = {
            name: transform(torch.as_tensor(self.kwargs[name])).item()
            for name in _SCALES & self.kwargs.keys()
        }
        return replace(self, kwargs=self.kwargs | scales)

    def run(self, transform: TensorMap) -> Tensor:
        """Call the function with `transform` applied to each tensor argument."""
        args, kwargs = map_instances((self.args, self.kwargs), Tensor, transform)
        result: Tensor = self.func(*args, **kwargs)
        return result


@dataclass(frozen=True)
class Multiplications:
    """The number of multiplications by one-hots, in the forward pass and for gradients."""

    forward: int = 0
    gradient: int = 0

    def __add__(self, other: Multiplications) -> Multiplications:
        return Multiplications(self.forward + other.forward, self.gradient + other.gradient)


class ProductMode(TorchFunctionMode):
    """A torch function mode that intercepts the products that the model computes from the ids."""

    @never_compile_alone
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and pass its result to the method for this kind of call."""
        kwargs = kwargs or {}
        x = next(find_instances((args, kwargs), OneHot), None)
        before = _counts(x)
        result = func(*args, **kwargs)
        lookups, contractions = (a - b for a, b in zip(_counts(x), before, strict=True))
        # The recurrent layers return several tensors, and multiply more than once.
        if x is None or not (lookups or contractions) or not isinstance(result, Tensor):
            self.on_other_call(func, args, kwargs)
            return result
        device = x.cached_device.type
        casts = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if casts else None
        product = Product(func, args, kwargs, x, dtype, bool(lookups))
        if lookups:
            return self.on_lookup(product, result)
        self.on_other_call(func, args, kwargs)
        tensors = list(find_instances((args, kwargs), Tensor))
        count = _CONTRACTIONS.get(product.name, 0)
        is_known = len(tensors) == count and len(product.weights) == count - 1
        if is_known and not product.is_scaled:
            return self.on_contraction(product, result)
        return result

    def on_other_call(self, func: Any, args: Any, kwargs: Any) -> None:
        """Handle a call that is not a lookup."""

    def on_lookup(self, product: Product, result: Tensor) -> Tensor:
        """Handle a lookup, and return the result that the model continues with."""
        raise NotImplementedError

    def on_contraction(self, product: Product, result: Tensor) -> Tensor:
        """Handle another product of a one-hot with a dense tensor; return the result to use."""
        return result


# The functions whose result is a sum of products of two tensors, plus a third tensor in some
# functions, and their numbers of tensors.
_CONTRACTIONS = {
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "einsum", "tensordot"), 2),
    **dict.fromkeys(("addmm", "baddbmm"), 3),
}


class ProductCounter(ProductMode):
    """Counts the multiplications of one-hot products, with dense one-hots and with lookups.

    A product of x (N, C) and a weight (C, D) takes N C D multiplications in the forward pass. The
    weight's gradient takes the same number, and so does the gradient of x if x requires grad. A
    lookup needs multiplications only for dense columns next to the one-hots, and for weighted
    one-hots.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.converted = Multiplications(), Multiplications()

    def on_lookup(self, product: Product, result: Tensor) -> Tensor:
        """Count the multiplications and return the result."""
        x, other_input = product.x, product.other_input
        per_column = result.numel() * (1 if other_input is None else other_input.shape[-1])
        fields = [part for part in x.parts if isinstance(part, Field)]
        columns = [part for part in x.parts if isinstance(part, DenseColumns)]
        scales = [field.weights for field in fields if field.weights is not None]
        weighted_ids = sum(field.ids.shape[-1] for field in fields) if scales else 0
        remaining = weighted_ids + sum(part.width for part in columns)
        classes, plain_gradient, converted_gradient = x.sizes[-1], 0, 0
        if result.requires_grad and product.factor.requires_grad:
            plain_gradient, converted_gradient = classes, remaining
        if result.requires_grad:
            trained_widths = [part.width for part in columns if part.values.requires_grad]
            trained_widths += [weighted_ids] if any(scale.requires_grad for scale in scales) else []
            trained_widths += [classes] if x.grad_proxy is not None else []
            plain_gradient += classes if trained_widths else 0
            converted_gradient += sum(trained_widths)
        self.plain += Multiplications(per_column * classes, per_column * plain_gradient)
        self.converted += Multiplications(per_column * remaining, per_column * converted_gradient)
        return result


def _counts(x: OneHot | None) -> tuple[int, int]:
    """Count the lookups and contractions of all one-hots that share an origin with `x`."""
    origins = frozenset() if x is None else x.origins
    lookups = sum(sum(origin.product_counts.values()) for origin in origins)
    return lookups, sum(origin.contraction_count for origin in origins)
