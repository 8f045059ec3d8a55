"""A table and its optimizer behind one step: hotrow's, torch's, and the one-hot matmul."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hotrow
from hotrow.bench.floor import state_count
from hotrow.table.parameter import Table

# What is timed of each task.
TASK_PARTS = {
    "forward": ("forward",),
    "gradient": ("zero_grad", "forward", "backward"),
    "step": ("zero_grad", "forward", "backward", "optimizer_step"),
}
FUSED_OPTIMIZERS = ("SGD", "Adagrad", "Adam", "AdamW")  # those that torch fuses on CPUs


@dataclass(frozen=True)
class Case:
    """What a peer is built for: a task of `TASK_PARTS`, its optimizer if it steps, the sizes."""

    task: str
    optimizer: str | None
    rows: int
    columns: int
    ids: int
    dtype: torch.dtype = torch.float32

    @property
    def table_bytes(self) -> int:
        """Of the weight."""
        return self.rows * self.columns * self.dtype.itemsize


def initial_weight(case: Case) -> Tensor:
    """The same initial table for every peer."""
    weight = torch.empty(case.rows, case.columns, dtype=case.dtype)
    return weight.uniform_(generator=torch.Generator().manual_seed(0))


class GivenGradient(torch.autograd.Function):
    """Stands for the layers above: a loss with a given gradient.

    As in a model, backward holds the only reference to that gradient.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradients: list[Tensor]) -> Tensor:
        """Any number: it is not used."""
        ctx.gradients = gradients
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """The given gradient."""
        return ctx.gradients.pop(), None


class Peer:
    """An embedding and an optimizer, trained by the usual loop.

    Attributes:
        label: its name in reports.
        counterpart: torch's dense optimizer that its numbers are compared with.
        is_dense: whether a step updates the whole table; then earlier steps don't affect its time.
        is_reference: whether its numbers are the dense ones by definition.
    """

    is_dense = False
    is_reference = False

    def __init__(
        self, case: Case, module: Any, optimizer: Any, label: str, counterpart: str | None
    ) -> None:
        self.case, self.module, self.optimizer = case, module, optimizer
        self.label, self.counterpart = label, counterpart

    def step(self, ids: Tensor, gradient: Tensor) -> dict[str, float]:
        """The whole task once; the seconds of each of its `TASK_PARTS`.

        The output and its graph are released within backward's time.
        """
        names = TASK_PARTS[self.case.task]
        if names == ("forward",):
            return {"forward": self.forward_only(ids)}
        gradients = [gradient.clone()]
        times = [time.perf_counter()]
        self.zero_grad()
        times.append(time.perf_counter())
        output = self.forward(ids)
        times.append(time.perf_counter())
        GivenGradient.apply(output, gradients).backward()  # type: ignore[no-untyped-call]
        del output
        times.append(time.perf_counter())
        if self.optimizer:
            self.optimizer.step()
            times.append(time.perf_counter())
        seconds = [end - begin for begin, end in itertools.pairwise(times)]
        return dict(zip(names, seconds, strict=True))

    def zero_grad(self) -> None:
        """Release the gradient."""
        (self.optimizer or self.module).zero_grad()

    @torch.no_grad()
    def forward_only(self, ids: Tensor) -> float:
        """Seconds of the look-up."""
        begin = time.perf_counter()
        self.forward(ids)
        return time.perf_counter() - begin

    def forward(self, ids: Tensor) -> Tensor:
        """(N, D): the rows of the ids."""
        output: Tensor = self.module(ids)
        return output

    @torch.no_grad()
    def read(self, rows: Tensor) -> Tensor:
        """A copy of some rows, read as a user reads them: by looking them up."""
        return self.forward(rows).detach().clone()

    @torch.no_grad()
    def gradient(self, rows: Tensor) -> Tensor:
        """Some rows of the gradient that the last step left."""
        gradient = self.module.weight.grad
        dense: Tensor = gradient.to_dense() if gradient.is_sparse else gradient
        return dense[rows]

    def state(self) -> Iterator[Tensor]:
        """The optimizer's state that is as large as the table; lagging rows are not settled."""
        for values in self.optimizer.state.values() if self.optimizer else ():
            for value in dict.values(values):
                if isinstance(value, Tensor) and value.ndim == 2:
                    yield value

    def table_and_state_bytes(self) -> int:
        """Of the table and the state."""
        return self.case.table_bytes + sum(s.nbytes for s in self.state())

    def bookkeeping_bytes(self) -> int:
        """Of what is kept from step to step besides table and state."""
        return 0


Build = Callable[[Case, dict[str, Peer]], Peer]


class OneHot(nn.Module):
    """The literal product, with its one-hot written directly in the table's dtype."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, ids: Tensor) -> Tensor:
        """(N,) -> (N, D)."""
        rows = len(self.weight)
        one_hot = torch.zeros(len(ids), rows, dtype=self.weight.dtype)
        output: Tensor = one_hot.scatter_(1, ids[:, None], 1) @ self.weight
        return output


def torch_embedding(case: Case, sparse: bool = False) -> nn.Embedding:
    """Torch's layer around `initial_weight`."""
    weight = initial_weight(case)
    return nn.Embedding(case.rows, case.columns, sparse=sparse, _weight=weight)


class HotrowPeer(Peer):
    """hotrow's table."""

    def bookkeeping_bytes(self) -> int:
        """Of the count of steps that each row has been through."""
        lag = getattr(self.module.weight, "lag", None)
        return 0 if lag is None else int(lag.row_steps.nbytes)


def build_hotrow(case: Case, others: dict[str, Peer]) -> Peer:
    """The two lines of the README; a small table is converted as well."""
    module = hotrow.convert(torch_embedding(case), min_entries=0)
    assert isinstance(module.weight, Table), "convert left the embedding to torch"
    if case.optimizer is None:
        return HotrowPeer(case, module, None, "hotrow.convert(nn.Embedding)", None)
    optimizer = getattr(hotrow.optim, case.optimizer)(module.parameters())
    return HotrowPeer(case, module, optimizer, f"hotrow.optim.{case.optimizer}", case.optimizer)


def build_torch_dense(**options: bool) -> Build:
    """The dense optimizer: fused, foreach, or as its constructor chooses (a tensor at a time)."""

    def build(case: Case, others: dict[str, Peer]) -> Peer:
        # Its forms take turns on one table and state, which would not fit several times.
        other = next((p for p in others.values() if p.is_reference and p.case == case), None)
        module = other.module if other else torch_embedding(case)
        optimizer, label = None, "nn.Embedding"
        if case.optimizer is not None:
            optimizer = getattr(torch.optim, case.optimizer)(module.parameters(), **options)
            if other:
                optimizer.state = other.optimizer.state
            form = "".join(f"({name}=True)" for name in options) or "(default)"
            label = f"torch.optim.{case.optimizer}{form}"
        peer = Peer(case, module, optimizer, label, case.optimizer)
        peer.is_reference = True
        peer.is_dense = case.task != "forward"
        return peer

    return build


def build_torch_sparse(case: Case, others: dict[str, Peer]) -> Peer:
    """`nn.Embedding(sparse=True)` and the optimizer that takes its gradient."""
    module = torch_embedding(case, sparse=True)
    if case.optimizer is None:
        return Peer(case, module, None, "nn.Embedding(sparse=True)", None)
    if case.optimizer in ("Adam", "AdamW"):
        optimizer: Any = torch.optim.SparseAdam(module.parameters())
        return Peer(case, module, optimizer, "torch.optim.SparseAdam (sparse=True)", "Adam")
    optimizer = getattr(torch.optim, case.optimizer)(module.parameters())
    label = f"torch.optim.{case.optimizer} (sparse=True)"
    return Peer(case, module, optimizer, label, case.optimizer)


def build_one_hot(case: Case, others: dict[str, Peer]) -> Peer:
    """The matmul with a one-hot, with torch's quickest optimizer."""
    module = OneHot(initial_weight(case))
    optimizer, label = None, "one-hot matmul"
    if case.optimizer is not None:
        options = {"fused": True} if case.optimizer in FUSED_OPTIMIZERS else {"foreach": True}
        optimizer = getattr(torch.optim, case.optimizer)(module.parameters(), **options)
        label += f", torch.optim.{case.optimizer}({next(iter(options))}=True)"
    peer = Peer(case, module, optimizer, label, case.optimizer)
    peer.is_dense = True
    return peer


@dataclass(frozen=True)
class PeerType:
    """A kind of peer that can take part.

    Attributes:
        about: what it is, in a line.
        build: makes a peer, given those that exist already.
        gradient_tables: the tables' worth of memory a step takes over table and state, at most.
        install_command: how to install it, if it is a package of its own.
    """

    about: str
    build: Build
    gradient_tables: float = 0.0
    install_command: str = ""


PEER_TYPES = {
    "hotrow": PeerType("hotrow.convert and hotrow.optim; always takes part", build_hotrow),
    "torch fused": PeerType(
        "nn.Embedding, torch.optim(fused=True)", build_torch_dense(fused=True), 1.0
    ),
    "torch foreach": PeerType(
        "nn.Embedding, torch.optim(foreach=True)", build_torch_dense(foreach=True), 3.0
    ),
    "torch default": PeerType("nn.Embedding, torch.optim as it comes", build_torch_dense(), 3.0),
    "torch sparse": PeerType(
        "nn.Embedding(sparse=True), with SGD, Adagrad or SparseAdam", build_torch_sparse
    ),
    "one-hot matmul": PeerType(
        "the product with a one-hot that is written out", build_one_hot, 1.0
    ),
}
DENSE_TYPES = ("torch fused", "torch foreach", "torch default")


def estimate_bytes(
    type_name: str, peer_type: PeerType, case: Case, others: dict[str, Peer]
) -> tuple[float, float]:
    """About: for table and state, and for a step, with its one-hot where there is one.

    torch's dense forms share a table.
    """
    is_shared = type_name in DENSE_TYPES and any(
        peer.is_reference and peer.case == case for peer in others.values()
    )
    states = 0 if case.optimizer is None else state_count(case.optimizer)
    step = 0.0 if case.task == "forward" else peer_type.gradient_tables * case.table_bytes
    one_hot = case.ids * case.rows * case.dtype.itemsize if type_name == "one-hot matmul" else 0
    return 0.0 if is_shared else float((1 + states) * case.table_bytes), step + one_hot
