"""What became of the one-hots that a model's own code makes, line by line; a report reads it."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.conversion.resting import running
from hotrow.onehot.tensor import OneHot


def _look_on() -> None:
    """Have the method that runs look for one-hots each time."""
    if running.rest is not None:
        running.rest.worthwhile = True


class Origin:
    """A line of code that makes a one-hot, and what has become of it.

    Attributes:
        path: of the module whose code it is, in the model.
        where: file and line.
        what: the operation, in words.
        widths: how many columns its one-hots had, in the order met.
        uses: how often each product was a look-up.
        leaves: how often each operation had it written out.
        most_used: entries of the largest product that was a look-up.
        most_spared: entries of the largest product that was left to torch as they were few.
        is_returned: whether it left the methods that look for one-hots.
    """

    def __init__(self, record: Record, path: str, where: str, what: str) -> None:
        self._record = record
        self.path, self.where, self.what = path, where, what
        self.widths: dict[int, None] = {}
        self.uses: Counter[tuple[bool, torch.Size]] = Counter()  # (columns, shape) of weights
        self.leaves: Counter[Any] = Counter()
        self.most_used, self.most_spared, self.is_returned = 0, 0, False

    @property
    def least(self) -> int:
        """Entries that a one-hot has at least, of which a product is a look-up."""
        return self._record.least

    def made(self, x: OneHot) -> None:
        """It made this one."""
        self.widths[x.sizes[-1]] = None
        if x.entries >= self.least:
            _look_on()
        x.origins = frozenset([self])

    def used(self, weight: Tensor, columns: bool, entries: int) -> None:
        """A product with this weight was a look-up."""
        self.most_used = max(self.most_used, entries)
        self.uses[columns, weight.shape] += 1
        _look_on()

    def left(self, func: Any) -> None:
        """An operation without a rule."""
        self.leaves[func] += 1

    def spared(self, entries: int) -> None:
        """A product of a one-hot with few entries."""
        self.most_spared = max(self.most_spared, entries)

    def columns(self) -> str:
        """How many, in words."""
        several = sorted(self.widths)
        if len(several) > 3:
            return f"{several[0]:,} to {several[-1]:,} columns"
        return f"{', '.join(f'{width:,}' for width in several)} columns"

    def products(self) -> list[str]:
        """What was a look-up, in words."""
        return [
            f"linear({shape[1]}, {shape[0]})" if columns else f"matmul({shape[0]}, {shape[1]})"
            for columns, shape in self.uses
        ]

    def operations(self) -> list[str]:
        """What had it written out, in words."""
        return [getattr(func, "__name__", str(func)).strip("_") for func in self.leaves]


class Record:
    """The origins that were met in a model.

    Attributes:
        least: entries that a one-hot has at least, of which a product is a look-up.
        finders: of its methods, by name and whether it trains.
    """

    def __init__(self, model: nn.Module, least: int) -> None:
        self._model = weakref.ref(model)
        self.least = least
        self.finders: dict[Any, Any] = {}
        self._origins: dict[tuple[int, int, Any], Origin] = {}
        self._codes: list[Any] = []  # held, as they are known by their ids
        self._lock = threading.Lock()

    def origins(self) -> list[Origin]:
        """In the order in which they were met."""
        return list(self._origins.values())

    def at(self, frame: Any, func: Any) -> Origin:
        """The origin of what `func` made, called by the code in `frame`."""
        key = id(frame.f_code), frame.f_lasti, func  # two of a line are two
        origin = self._origins.get(key)
        if origin is None:
            code = frame.f_code
            while frame.f_back is not None and _is_ours(frame):
                frame = frame.f_back
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            with self._lock:
                made = Origin(
                    self, self._path(frame), where, _NAMES.get(func.__name__, func.__name__)
                )
                origin = self._origins.setdefault(key, made)
                self._codes.append(code)
        return origin

    def _path(self, frame: Any) -> str:
        model = self._model()
        paths: dict[int, str] = (
            {} if model is None else {id(m): name for name, m in model.named_modules()}
        )
        while frame is not None:
            inner = id(frame.f_locals.get("self"))
            if inner in paths:
                return paths[inner]
            frame = frame.f_back
        return ""


def _is_ours(frame: Any) -> bool:
    name = str(frame.f_globals.get("__name__"))
    return name.startswith(("torch.", "hotrow."))


_NAMES = {
    "__getitem__": "eye[ids]", "embedding": "embedding(ids, eye)", "index_select": "eye[ids]",
    "__eq__": "ids == arange", "eq": "ids == arange",
    "zeros": "zeros.scatter", "zeros_like": "zeros.scatter", "new_zeros": "zeros.scatter",
}  # fmt: skip
