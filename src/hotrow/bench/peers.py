"""Peers: hotrow, torch's optimizers and the one-hot matmul behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hotrow
from hotrow.bench.clock import Clock
from hotrow.bench.floor import state_count
from hotrow.table.parameter import Table

# The timed parts of each task.
TASK_PARTS = {
    "forward": ("forward",),
    "gradient": ("zero_grad", "forward", "backward"),
    "step": ("zero_grad", "forward", "backward", "optimizer_step"),
}
FUSED_OPTIMIZERS = ("SGD", "Adagrad", "Adam", "AdamW")  # torch has fused versions for CPUs


@dataclass(frozen=True)
class Case:
    """A task from `TASK_PARTS`, its optimizer (None if the task has no step), and the sizes."""

    task: str
    optimizer: str | None
    rows: int
    columns: int
    ids: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def table_bytes(self) -> int:
        """The size of the weight in bytes."""
        return self.rows * self.columns * self.dtype.itemsize


def initial_weight(case: Case) -> Tensor:
    """Return the initial table, the same for every peer."""
    weight = torch.empty(case.rows, case.columns, dtype=case.dtype)
    return weight.uniform_(generator=torch.Generator().manual_seed(0)).to(case.device)


class GivenGradient(torch.autograd.Function):
    """A loss with a given gradient; the loss stands in for the other layers of a model.

    As in a real model, the backward pass owns the only reference to that gradient.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradients: list[Tensor]) -> Tensor:
        """Return a placeholder for the loss."""
        ctx.gradients = gradients
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Return the given gradient."""
        return ctx.gradients.pop(), None


class Peer:
    """An embedding and an optimizer in the usual training loop.

    Attributes:
        label: the name in reports.
        counterpart: the dense torch optimizer that this peer's rows are compared with.
        is_dense: whether a step updates the whole table; if so, its time doesn't depend on earlier
            steps.
        is_reference: whether this peer uses torch's dense optimizer itself.
    """

    is_dense = False
    is_reference = False

    def __init__(
        self, case: Case, module: Any, optimizer: Any, label: str, counterpart: str | None
    ) -> None:
        self.case, self.module, self.optimizer = case, module, optimizer
        self.label, self.counterpart = label, counterpart

    def step(self, ids: Tensor, gradient: Tensor) -> dict[str, float]:
        """Run the task once; return the seconds that each of its `TASK_PARTS` took.

        The backward time includes freeing the output and its graph.
        """
        names = TASK_PARTS[self.case.task]
        if names == ("forward",):
            return {"forward": self.forward_only(ids)}
        gradients, clock = [gradient.clone()], Clock(self.case.device)
        self.zero_grad()
        clock.mark()
        output = self.forward(ids)
        clock.mark()
        GivenGradient.apply(output, gradients).backward()  # type: ignore[no-untyped-call]
        del output
        clock.mark()
        if self.optimizer:
            self.optimizer.step()
            clock.mark()
        return dict(zip(names, clock.seconds(), strict=True))

    def zero_grad(self) -> None:
        """Release the gradient."""
        (self.optimizer or self.module).zero_grad()

    @torch.no_grad()
    def forward_only(self, ids: Tensor) -> float:
        """Return the time of the lookup in seconds."""
        clock = Clock(self.case.device)
        self.forward(ids)
        clock.mark()
        return clock.seconds()[0]

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the rows of the ids, (N,) -> (N, D)."""
        output: Tensor = self.module(ids)
        return output

    @torch.no_grad()
    def read(self, rows: Tensor) -> Tensor:
        """Return a copy of the given rows, read with a lookup."""
        return self.forward(rows).detach().clone()

    @torch.no_grad()
    def gradient(self, rows: Tensor) -> Tensor:
        """Return the given rows of the last step's gradient."""
        gradient = self.module.weight.grad
        dense: Tensor = gradient.to_dense() if gradient.is_sparse else gradient
        return dense[rows]

    def state(self) -> Iterator[Tensor]:
        """Yield the state tensors that are as large as the table, without settling rows."""
        for values in self.optimizer.state.values() if self.optimizer else ():
            for value in dict.values(values):
                if isinstance(value, Tensor) and value.ndim == 2:
                    yield value

    def table_and_state_bytes(self) -> int:
        """Return the size in bytes of the table and the optimizer state."""
        return self.case.table_bytes + sum(s.nbytes for s in self.state())

    def bookkeeping_bytes(self) -> int:
        """Return the size in bytes of other data that persists between steps."""
        return 0


Build = Callable[[Case, dict[str, Peer]], Peer]


class OneHot(nn.Module):
    """A layer that multiplies dense one-hots by the table, in the table's dtype."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Multiply the one-hots of the ids by the table, (N,) -> (N, D)."""
        rows = len(self.weight)
        one_hot = self.weight.new_zeros(len(ids), rows)
        output: Tensor = one_hot.scatter_(1, ids[:, None], 1) @ self.weight
        return output


def torch_embedding(case: Case, sparse: bool = False) -> nn.Embedding:
    """Return an `nn.Embedding` with `initial_weight`."""
    weight = initial_weight(case)
    return nn.Embedding(case.rows, case.columns, sparse=sparse, _weight=weight)


class HotrowPeer(Peer):
    """hotrow's table and optimizer."""

    def bookkeeping_bytes(self) -> int:
        """Return the size in bytes of the array that stores the last step of each row."""
        lag = getattr(self.module.weight, "lag", None)
        return 0 if lag is None else int(lag.row_steps.nbytes)


def build_hotrow(case: Case, others: dict[str, Peer]) -> Peer:
    """Build the hotrow peer with the README's two lines of code, but also convert small tables."""
    module = hotrow.convert(torch_embedding(case), min_entries=0)
    assert isinstance(module.weight, Table), "convert did not convert the embedding"
    if case.optimizer is None:
        return HotrowPeer(case, module, None, "hotrow.convert(nn.Embedding)", None)
    optimizer = getattr(hotrow.optim, case.optimizer)(module.parameters())
    return HotrowPeer(case, module, optimizer, f"hotrow.optim.{case.optimizer}", case.optimizer)


def build_torch_dense(**options: bool) -> Build:
    """Return a function that builds a peer with torch's fused, foreach or default optimizer."""

    def build(case: Case, others: dict[str, Peer]) -> Peer:
        # The dense optimizers share one table and state to save memory.
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
    """Build `nn.Embedding(sparse=True)` with an optimizer for sparse gradients."""
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
    """Build the one-hot matmul with torch's fastest optimizer."""
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
    """A kind of peer.

    Attributes:
        about: a one-line description.
        build: a function that builds the peer, given its case and the existing peers.
        gradient_tables: the peak memory that a step needs in addition to the table and its state,
            as a multiple of the table's size.
        install_command: the command that installs the package of this peer, if it needs one.
    """

    about: str
    build: Build
    gradient_tables: float = 0.0
    install_command: str = ""


PEER_TYPES = {
    "hotrow": PeerType("hotrow.convert and hotrow.optim; always measured", build_hotrow),
    "torch fused": PeerType(
        "nn.Embedding, torch.optim(fused=True)", build_torch_dense(fused=True), 1.0
    ),
    "torch foreach": PeerType(
        "nn.Embedding, torch.optim(foreach=True)", build_torch_dense(foreach=True), 3.0
    ),
    "torch default": PeerType(
        "nn.Embedding, torch.optim with its defaults", build_torch_dense(), 3.0
    ),
    "torch sparse": PeerType(
        "nn.Embedding(sparse=True), with SGD, Adagrad or SparseAdam", build_torch_sparse
    ),
    "one-hot matmul": PeerType("the product of a dense one-hot and the table", build_one_hot, 1.0),
}
DENSE_TYPES = ("torch fused", "torch foreach", "torch default")


def estimate_bytes(
    type_name: str, peer_type: PeerType, case: Case, others: dict[str, Peer]
) -> tuple[float, float]:
    """Estimate the bytes of a peer's table and state, and the bytes that its step needs.

    Peers with torch's dense optimizers share a table.
    """
    is_shared = type_name in DENSE_TYPES and any(
        peer.is_reference and peer.case == case for peer in others.values()
    )
    states = 0 if case.optimizer is None else state_count(case.optimizer)
    step = 0.0 if case.task == "forward" else peer_type.gradient_tables * case.table_bytes
    one_hot = case.ids * case.rows * case.dtype.itemsize if type_name == "one-hot matmul" else 0
    return 0.0 if is_shared else float((1 + states) * case.table_bytes), step + one_hot
