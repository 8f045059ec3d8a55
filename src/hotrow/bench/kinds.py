"""Every peer by name, and what each takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hotrow.bench import fbgemm, floor, jaxpeers
from hotrow.bench.peers import Case, Peer, one_hot, ours, torch_dense, torch_sparse
from hotrow.text import size


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


def bytes_needed(kind: str, case: Case, others: dict[str, Peer]) -> float:
    """About, for the table, its state, a step, and a one-hot where there is one.

    torch's dense forms share a table: each but the first needs only what its step takes.
    """
    step = 0.0 if case.task == "forward" else KINDS[kind].gradients
    shares = kind in DENSE and any(p.reference and p.case == case for p in others.values())
    held = 0 if case.rule is None else floor.states(case.rule)
    written = case.ids * case.rows * case.dtype.itemsize if kind == "one-hot matmul" else 0
    return (step + (0 if shares else 1 + held)) * case.table_bytes + written


def build(kind: str, case: Case, others: dict[str, Peer], left: float) -> Peer:
    """Make a peer, with `left` bytes of memory that no other will need.

    Raises:
        MemoryError: it would need more.
    """
    needed = bytes_needed(kind, case, others)
    if needed > left:
        raise MemoryError(f"it needs about {size(needed)}, and {size(max(left, 0))} are left")
    return KINDS[kind].build(case, others)
