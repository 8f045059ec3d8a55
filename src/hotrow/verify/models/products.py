"""The products with one-hots that became look-ups, seen while a converted model runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hotrow.onehot.parts import Columns, Field
from hotrow.onehot.tensor import OneHot
from hotrow.table.nested import mapped, within

Swap = Callable[[Any], Any]


@dataclass(frozen=True)
class Product:
    """A call of torch that multiplies by a one-hot.

    Attributes:
        func: of torch.
        args: of the call.
        kwargs: of the call.
        x: the one-hot among them.
        autocast: the dtype in which products are computed around it, if that is another.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    x: OneHot
    autocast: torch.dtype | None

    @property
    def name(self) -> str:
        """What the call is named."""
        return str(self.func.__name__).strip("_")

    @property
    def other(self) -> Tensor | None:
        """What is multiplied beside the one-hot and the weight, in a bilinear product."""
        if self.func is not F.bilinear:
            return None
        inputs = [*self.args[:2], *map(self.kwargs.get, ("input1", "input2"))]
        return next(t for t in inputs if isinstance(t, Tensor) and not isinstance(t, OneHot))

    @property
    def weights(self) -> list[Tensor]:
        """The weight, and the bias if there is one."""
        other = self.other
        found = within((self.args, self.kwargs), Tensor)
        return [each for each in found if not isinstance(each, OneHot) and each is not other]

    def run(self, swap: Swap) -> Tensor:
        """The call with `swap` of each of its tensors."""
        args, kwargs = mapped((self.args, self.kwargs), Tensor, swap)
        result: Tensor = self.func(*args, **kwargs)
        return result


@dataclass(frozen=True)
class Counted:
    """Multiplications that have a one-hot, or what stands for one, as a factor."""

    forward: int = 0
    gradient: int = 0

    def __add__(self, other: Counted) -> Counted:
        return Counted(self.forward + other.forward, self.gradient + other.gradient)


class Watch(TorchFunctionMode):
    """A mode of torch's, on around a converted model: sees each product that becomes a look-up."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch gives, or what `met` does."""
        kwargs = kwargs or {}
        x = next(within((args, kwargs), OneHot), None)
        before = 0 if x is None else _looked_up(x)
        result = func(*args, **kwargs)
        if x is None or _looked_up(x) == before:
            self.passed(func, args, kwargs)
            return result
        device = x.place.type
        casts = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if casts else None
        return self.met(Product(func, args, kwargs, x, dtype), result)

    def passed(self, func: Any, args: Any, kwargs: Any) -> None:
        """Another call."""

    def met(self, product: Product, result: Tensor) -> Tensor:
        """What to go on with in place of the result of a look-up."""
        raise NotImplementedError


class Count(Watch):
    """Counts the multiplications of the products, as they were and as look-ups.

    For x (N, C) and a weight (C, D): N C D forward, as many for the weight's gradient, and as many
    for that of x if there is one. As look-ups: those of dense columns beside the one-hots, and of
    the one-hots' own weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.converted = Counted(), Counted()

    def met(self, product: Product, result: Tensor) -> Tensor:
        """Count, and go on."""
        x, other = product.x, product.other
        each = result.numel() * (1 if other is None else other.shape[-1])
        fields = [part for part in x.parts if isinstance(part, Field)]
        columns = [part for part in x.parts if isinstance(part, Columns)]
        scales = [field.weights for field in fields if field.weights is not None]
        scaled = sum(field.ids.shape[-1] for field in fields) if scales else 0
        left = scaled + sum(part.width for part in columns)
        classes, before, after = x.sizes[-1], 0, 0
        if result.requires_grad and product.weights[0].requires_grad:
            before, after = classes, left
        if result.requires_grad:
            trained = [part.width for part in columns if part.values.requires_grad]
            trained += [scaled] if any(scale.requires_grad for scale in scales) else []
            trained += [classes] if x.shadow is not None else []
            before, after = before + (classes if trained else 0), after + sum(trained)
        self.plain += Counted(each * classes, each * before)
        self.converted += Counted(each * left, each * after)
        return result


def _looked_up(x: OneHot) -> int:
    """How often a product with one of its origins was a look-up."""
    return sum(sum(origin.uses.values()) for origin in x.origins)
