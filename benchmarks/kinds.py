"""Every peer by name, and what each takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import fbgemm, floor, jaxpeers
from benchmarks.peers import Case, Peer, one_hot, ours, torch_dense, torch_sparse
from hotrow.inputs.text import format_size


@dataclass(frozen=True)
class Kind:
    """Who can take part.

    Attributes:
        about: what it is, in a line.
        build: makes it, given those there are already.
        gradients: how many tables' worth of memory a step takes over table and state, at most.
        remedy: how it is installed, if it is a package of its own.
    """

    about: str
    build: Callable[[Case, dict[str, Peer]], Peer]
    gradients: float = 0.0
    remedy: str = ""


KINDS = {
    "hotrow": Kind("hotrow.convert and hotrow.optim; always takes part", ours),
    "torch fused": Kind("nn.Embedding, torch.optim(fused=True)", torch_dense(fused=True), 1.0),
    "torch foreach": Kind(
        "nn.Embedding, torch.optim(foreach=True)", torch_dense(foreach=True), 3.0
    ),
    "torch default": Kind("nn.Embedding, torch.optim as it comes", torch_dense(), 3.0),
    "torch sparse": Kind(
        "nn.Embedding(sparse=True), with SGD, Adagrad or SparseAdam", torch_sparse
    ),
    "one-hot matmul": Kind("the product with a one-hot that is written out", one_hot, 1.0),
    "fbgemm": Kind(
        "FBGEMM's table-batched embedding, on CPUs", fbgemm.fbgemm, remedy=fbgemm.REMEDY
    ),
    "jax dense": Kind("JAX and optax", jaxpeers.dense, 2.0, jaxpeers.REMEDY),
    "jax lazy": Kind("JAX, touched rows only, by hand", jaxpeers.lazy, 0.0, jaxpeers.REMEDY),
}
DENSE = ("torch fused", "torch foreach", "torch default")


def bytes_needed(kind: str, case: Case, others: dict[str, Peer]) -> tuple[float, float]:
    """About: for table and state, and for a step, with its one-hot where there is one.

    torch's dense forms share a table.
    """
    shares = kind in DENSE and any(p.reference and p.case == case for p in others.values())
    states = 0 if case.rule is None else floor.states(case.rule)
    step = 0.0 if case.task == "forward" else KINDS[kind].gradients * case.table_bytes
    written = case.ids * case.rows * case.dtype.itemsize if kind == "one-hot matmul" else 0
    return 0.0 if shares else float((1 + states) * case.table_bytes), step + written


class Room:
    """The memory that there is for all peers: each holds its own, one at a time makes a step."""

    def __init__(self, free: float) -> None:
        self.free, self.step = free, 0.0

    def check(self, held: float, step: float) -> None:
        """Whether there is some for one more.

        Raises:
            MemoryError: there is not as much.
        """
        left = self.free - max(self.step - step, 0.0)  # of which another's step needs some
        if held + step > left:
            needed = format_size(held + step)
            raise MemoryError(f"it needs about {needed}, and {format_size(max(left, 0))} are left")

    def take(self, held: float, step: float) -> None:
        """For one more, who takes part."""
        self.free, self.step = self.free - held, max(self.step, step)
