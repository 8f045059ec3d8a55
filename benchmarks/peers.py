"""A table and its optimizer, hotrow's and torch's, behind one step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hotrow
from hotrow.table.parameter import Table

# What is timed of each task.
PARTS = {
    "forward": ("forward",),
    "gradient": ("zero_grad", "forward", "backward"),
    "step": ("zero_grad", "forward", "backward", "optimizer_step"),
}
FUSED = ("SGD", "Adagrad", "Adam", "AdamW")  # those of torch.optim with a fused step on CPUs


@dataclass(frozen=True)
class Case:
    """What a peer is made for: a task of `PARTS`, an optimizer if it steps, and the sizes."""

    task: str
    rule: str | None
    rows: int
    columns: int
    ids: int
    dtype: torch.dtype = torch.float32

    @property
    def table_bytes(self) -> int:
        """Of the weight."""
        return self.rows * self.columns * self.dtype.itemsize


def new_weight(case: Case) -> Tensor:
    """The same initial table for everybody."""
    weight = torch.empty(case.rows, case.columns, dtype=case.dtype)
    return weight.uniform_(generator=torch.Generator().manual_seed(0))


class Above(torch.autograd.Function):
    """Stands for the layers above: a loss whose gradient is given, and is nobody else's.

    As in a model, backward is the only one to hold it.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradients: list[Tensor]) -> Tensor:
        """Any number: nobody looks at it."""
        ctx.gradients = gradients
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> Any:
        """The given gradient, handed over."""
        return ctx.gradients.pop(), None


class Peer:
    """An embedding and an optimizer, trained by the loop that people write.

    Attributes:
        label: what it is, for the reader.
        counterpart: torch's dense optimizer whose numbers it would have, if it were equal.
        dense: whether its step goes through the whole table; then its past does not matter.
        reference: whether its numbers are the dense ones by definition.
    """

    dense = False
    reference = False

    def __init__(
        self, case: Case, module: Any, optimizer: Any, label: str, counterpart: str | None
    ) -> None:
        self.case, self.module, self.optimizer = case, module, optimizer
        self.label, self.counterpart = label, counterpart

    def step(self, ids: Tensor, gradient: Tensor) -> dict[str, float]:
        """The whole task once; the seconds of each of its `PARTS`.

        The output and its graph are released within backward's time.
        """
        names = PARTS[self.case.task]
        if names == ("forward",):
            return {"forward": self.forward_only(ids)}
        gradients = [gradient.clone()]
        times = [time.perf_counter()]
        self.clear()
        times.append(time.perf_counter())
        output = self.forward(ids)
        times.append(time.perf_counter())
        Above.apply(output, gradients).backward()  # type: ignore[no-untyped-call]
        del output
        times.append(time.perf_counter())
        if self.optimizer:
            self.optimizer.step()
            times.append(time.perf_counter())
        seconds = [end - begin for begin, end in itertools.pairwise(times)]
        return dict(zip(names, seconds, strict=True))

    def clear(self) -> None:
        """Let go of the gradient."""
        (self.optimizer or self.module).zero_grad()

    @torch.no_grad()
    def forward_only(self, ids: Tensor) -> float:
        """Seconds of it."""
        begin = time.perf_counter()
        self.forward(ids)
        return time.perf_counter() - begin

    def forward(self, ids: Tensor) -> Tensor:
        """(N, D): the rows of the ids."""
        output: Tensor = self.module(ids)
        return output

    @torch.no_grad()
    def read(self, rows: Tensor) -> Tensor:
        """A copy of some rows, read as a user would read them: by looking them up."""
        return self.forward(rows).detach().clone()

    @torch.no_grad()
    def gradient(self, rows: Tensor) -> Tensor:
        """Some rows of the gradient that the last step left."""
        found = self.module.weight.grad
        dense: Tensor = found.to_dense() if found.is_sparse else found
        return dense[rows]

    def state(self) -> Iterator[Tensor]:
        """The optimizer's state that is as large as the table; rows that lag are left so."""
        for values in self.optimizer.state.values() if self.optimizer else ():
            for value in dict.values(values):
                if isinstance(value, Tensor) and value.ndim == 2:
                    yield value

    def bytes_held(self) -> int:
        """The table and the state."""
        return self.case.table_bytes + sum(s.nbytes for s in self.state())

    def bytes_kept(self) -> int:
        """What is kept beside them from step to step."""
        return 0


class OneHot(nn.Module):
    """The literal product, with its one-hot written at once in the table's dtype."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, ids: Tensor) -> Tensor:
        """(N,) -> (N, D)."""
        rows = len(self.weight)
        one_hot = torch.zeros(len(ids), rows, dtype=self.weight.dtype)
        output: Tensor = one_hot.scatter_(1, ids[:, None], 1) @ self.weight
        return output


def embedding(case: Case, sparse: bool = False) -> nn.Embedding:
    """torch's, around `new_weight`."""
    weight = new_weight(case)
    return nn.Embedding(case.rows, case.columns, sparse=sparse, _weight=weight)


class Ours(Peer):
    """hotrow's table, or what it leaves to torch."""

    def bytes_kept(self) -> int:
        """The steps that each row has been through."""
        lag = getattr(self.module.weight, "lag", None)
        return 0 if lag is None else int(lag.row_steps.nbytes)


def ours(case: Case, others: dict[str, Peer]) -> Peer:
    """The two lines of the README; what they leave to torch makes torch's quickest step."""
    module = hotrow.convert(embedding(case))
    if case.rule is None:
        return Ours(case, module, None, "hotrow.convert(nn.Embedding)", None)
    is_table = isinstance(module.weight, Table)
    options = {} if is_table or case.rule not in FUSED else {"fused": True}
    optimizer = getattr(hotrow.optim, case.rule)(module.parameters(), **options)
    form = "(fused=True)" if options else ""
    return Ours(case, module, optimizer, f"hotrow.optim.{case.rule}{form}", case.rule)


def torch_dense(**options: bool) -> Callable[[Case, dict[str, Peer]], Peer]:
    """The dense optimizer: fused, foreach, or as its constructor chooses (a tensor at a time)."""

    def build(case: Case, others: dict[str, Peer]) -> Peer:
        # Its forms take turns on one table and state, which would not fit several times.
        other = next((p for p in others.values() if p.reference and p.case == case), None)
        module = other.module if other else embedding(case)
        optimizer, label = None, "nn.Embedding"
        if case.rule is not None:
            optimizer = getattr(torch.optim, case.rule)(module.parameters(), **options)
            if other:
                optimizer.state = other.optimizer.state
            form = "".join(f"({name}=True)" for name in options) or ", default"
            label = f"torch.optim.{case.rule}{form}"
        peer = Peer(case, module, optimizer, label, case.rule)
        peer.reference = True
        peer.dense = case.task != "forward"
        return peer

    return build


def torch_sparse(case: Case, others: dict[str, Peer]) -> Peer:
    """`nn.Embedding(sparse=True)` and the optimizer that takes its gradient."""
    module = embedding(case, sparse=True)
    if case.rule is None:
        return Peer(case, module, None, "nn.Embedding(sparse=True)", None)
    if case.rule in ("Adam", "AdamW"):
        optimizer: Any = torch.optim.SparseAdam(module.parameters())
        return Peer(case, module, optimizer, "sparse=True, torch.optim.SparseAdam", "Adam")
    optimizer = getattr(torch.optim, case.rule)(module.parameters())
    return Peer(case, module, optimizer, f"sparse=True, torch.optim.{case.rule}", case.rule)


def one_hot(case: Case, others: dict[str, Peer]) -> Peer:
    """The matmul that all this is instead of, with torch's quickest optimizer."""
    module = OneHot(new_weight(case))
    optimizer, label = None, "one-hot matmul"
    if case.rule is not None:
        options = {"fused": True} if case.rule in FUSED else {"foreach": True}
        optimizer = getattr(torch.optim, case.rule)(module.parameters(), **options)
        label += f", torch.optim.{case.rule}({next(iter(options))}=True)"
    peer = Peer(case, module, optimizer, label, case.rule)
    peer.dense = True
    return peer
