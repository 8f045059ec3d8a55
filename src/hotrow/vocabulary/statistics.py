"""Statistics of a vocabulary: rows in use, idle rows, memory, and what an eviction would drop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.kernels.program import FROZEN
from hotrow.optim.lag import RowLag
from hotrow.table.parameter import Table
from hotrow.vocabulary.key_vocabulary import Vocabulary
from hotrow.vocabulary.layers import find_layers
from hotrow.vocabulary.states import initial_slots, row_tensors, unwrap

BAR_WIDTH = 30


@dataclass(frozen=True)
class Statistics:
    """The statistics of one vocabulary, printed as text.

    Attributes:
        rows: V, the number of rows.
        touched_rows: the number of rows that training has touched, or None if it isn't known.
        frozen_rows: the number of frozen rows.
        weight_bytes: the memory of the weights.
        state_bytes: the memory of the optimizer's state tensors.
        spare_bytes: the bytes reserved for more rows. They take no physical memory until used.
        idle_name: what `idle` counts.
        idle: (least, most, rows) for each range of counts: its two ends and its number of rows.
        evicted: the keys that `evict` would drop first, or an empty tuple.
    """

    rows: int
    touched_rows: int | None
    frozen_rows: int
    weight_bytes: int
    state_bytes: int
    spare_bytes: int
    idle_name: str = ""
    idle: tuple[tuple[int, int, int], ...] = ()
    evicted: tuple[Any, ...] = ()

    def __str__(self) -> str:
        touched = ""
        if self.touched_rows is not None:
            share = self.touched_rows / self.rows if self.rows else 0.0
            touched = f", {self.touched_rows:,} ever touched ({share:.0%})"
        frozen = f", {self.frozen_rows:,} frozen" if self.frozen_rows else ""
        lines = [
            f"rows    {self.rows:,}{touched}{frozen}",
            f"memory  weights {_size(self.weight_bytes)}, optimizer state "
            f"{_size(self.state_bytes)}, reserved {_size(self.spare_bytes)}",
        ]
        if self.idle:
            largest = max(count for _, _, count in self.idle)
            lines.append(f"{self.idle_name}:")
            for least, most, count in self.idle:
                name = f"{least:,}" if least == most else f"{least:,} to {most:,}"
                bar = "#" * -(-BAR_WIDTH * count // max(largest, 1))
                lines.append(f"{name:>20}  {count:>12,}  {bar}".rstrip())
        if self.evicted:
            lines.append(f"evicted first: {', '.join(map(repr, self.evicted))}")
        return "\n".join(lines)

    __repr__ = __str__


def stats(
    vocabulary: Vocabulary | nn.Module, optimizer: Any = None, *, evicted: int = 5
) -> Statistics:
    """Return statistics of a vocabulary, without settling any row.

    Args:
        vocabulary: a `Vocabulary`, or a layer or model as in `hotrow.vocabulary.resize`.
        optimizer: the layer's optimizer, which holds the state to measure. Defaults to the
            optimizer of the `Vocabulary`.
        evicted: how many keys to list, starting with the first that `Vocabulary.evict` would drop.

    Returns:
        A `Statistics` object, which prints as text. A row of a `Vocabulary` counts as touched once
        `admit` has seen it. A row of a layer counts as touched if its optimizer state has changed;
        without an optimizer state, the number of touched rows is not known. For a
        `Vocabulary`, `idle` counts the batches for which a row was idle; for a table, it counts the
        steps that a row has missed.

    Cost: reads the optimizer's state once.

    >>> import torch, hotrow
    >>> words = hotrow.vocabulary.Vocabulary(torch.nn.Embedding(1, 4), unknown="row")
    >>> _ = words.admit(["the", "cat"]), words.admit(["the"])
    >>> print(hotrow.vocabulary.stats(words, evicted=1))
    rows    3, 2 ever touched (67%)
    memory  weights 48 B, optimizer state 0 B, reserved 0 B
    batches since admit saw a row:
                       0             1  ##############################
                       1             1  ##############################
                  2 to 3             1  ##############################
    evicted first: 'cat'
    """
    layers: Sequence[nn.Module] = [vocabulary] if isinstance(vocabulary, nn.Module) else []
    counts: Tensor | None = None
    name, idle, keys = "", None, ()
    if isinstance(vocabulary, Vocabulary):
        layers = vocabulary.layers
        optimizer = vocabulary.optimizer if optimizer is None else optimizer
        counts, idle = vocabulary.counts, vocabulary.idle_batches
        name, keys = "batches since admit saw a row", tuple(vocabulary.next_evicted(evicted))
    inner = unwrap(optimizer)
    found = [find_layers(layer) for layer in layers]
    weights = list({id(each.weight): each.weight for each in found}.values())
    states = [] if inner is None else [row_tensors(inner, weight) for weight in weights]
    tensors = [_raw(weight) for weight in weights]
    slots = [slot for state in states for slot in state.values()]
    lag = weights[0].lag if isinstance(weights[0], Table) else None
    if idle is None and isinstance(lag, RowLag):
        missed = lag.ledger.length - lag.row_steps[lag.row_steps < FROZEN]
        name, idle = "steps that rows have missed", missed.clamp(min=0)
    touched = None if counts is None else int((counts > 0).sum())
    if touched is None and inner is not None and states[0]:
        touched = _count_touched(inner, weights[0], found[0].columns, states[0])
    return Statistics(
        found[0].row_count,
        touched,
        len(found[0].frozen_rows()),
        sum(each.nbytes for each in tensors),
        sum(map(_used_bytes, slots)),
        sum(map(_spare_bytes, (*tensors, *slots))),
        name,
        () if idle is None else _ranges(idle),
        keys,
    )


def _raw(weight: nn.Parameter) -> Tensor:
    return weight.raw_data if isinstance(weight, Table) else weight.data


def _used_bytes(tensor: Tensor) -> int:
    if tensor.is_sparse:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def _spare_bytes(tensor: Tensor) -> int:
    return 0 if tensor.is_sparse else tensor.untyped_storage().nbytes() - tensor.nbytes


def _count_touched(
    optimizer: torch.optim.Optimizer, weight: nn.Parameter, columns: bool, state: dict[str, Tensor]
) -> int:
    """Return the number of rows whose state differs from the initial state."""
    initial = initial_slots(optimizer, weight)
    is_touched = torch.zeros(weight.shape[columns], dtype=torch.bool, device=weight.device)
    for name, value in state.items():
        if value.is_sparse:
            is_touched[value._indices()[int(columns)]] = True
        else:
            is_touched |= (value != initial.get(name, 0.0)).any(0 if columns else 1)
    return int(is_touched.sum())


def _ranges(counts: Tensor) -> tuple[tuple[int, int, int], ...]:
    """Count how many values are 0, 1, 2 to 3, 4 to 7, and so on, up to the largest value."""
    powers = torch.where(counts > 0, counts.double().clamp(min=1).log2().floor() + 1, 0)
    sizes = powers.long().bincount().tolist()
    return tuple(
        (0 if power == 0 else 1 << (power - 1), max(0, (1 << power) - 1), size)
        for power, size in enumerate(sizes)
    )


def _size(count: float) -> str:
    """Format a number of bytes."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
