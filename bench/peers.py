"""A table and its optimizer, hotrow's and others', behind one step."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import hotrow

PARTS = ("zero_grad", "forward", "backward", "optimizer_step")


def new_weight(rows: int, columns: int) -> Tensor:
    """The same initial table for everybody."""
    return torch.empty(rows, columns).uniform_(generator=torch.Generator().manual_seed(0))


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
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None]:
        """The given gradient, handed over."""
        return ctx.gradients.pop(), None


class Peer:
    """An embedding and an optimizer, trained by the loop that people write.

    Attributes:
        label: what it is, for the reader.
        counterpart: torch's dense optimizer whose numbers it would have, if it were equal.
        dense: whether its step goes through the whole table; then its past does not matter.
    """

    dense = False

    def __init__(self, module: Any, optimizer: Any, label: str, counterpart: str) -> None:
        self.module, self.optimizer = module, optimizer
        self.label, self.counterpart = label, counterpart

    def step(self, ids: Tensor, gradient: Tensor) -> list[float]:
        """A whole training step; the seconds of each of `PARTS`.

        The output and its graph are released within backward's time.
        """
        gradients = [gradient.clone()]
        times = [time.perf_counter()]
        self.optimizer.zero_grad()
        times.append(time.perf_counter())
        output = self.forward(ids)
        times.append(time.perf_counter())
        Above.apply(output, gradients).backward()
        del output
        times.append(time.perf_counter())
        self.optimizer.step()
        times.append(time.perf_counter())
        return [end - begin for begin, end in itertools.pairwise(times)]

    def forward(self, ids: Tensor) -> Tensor:
        """(N, D): the rows of the ids."""
        output: Tensor = self.module(ids)
        return output

    @torch.no_grad()
    def read(self, rows: Tensor) -> Tensor:
        """A copy of some rows, read as a user would read them: by looking them up."""
        return self.forward(rows).detach().clone()

    def state(self) -> Iterator[Tensor]:
        """The optimizer's state that is as large as the table."""
        for values in self.optimizer.state.values():
            for value in values.values():
                if isinstance(value, Tensor) and value.ndim == 2:
                    yield value

    def bytes_held(self) -> int:
        """The table and the state."""
        weight = self.module.weight
        return weight.nelement() * weight.element_size() + sum(s.nbytes for s in self.state())


class Fbgemm(Peer):
    """FBGEMM's table, whose backward makes the step as well."""

    class Nothing:
        """Stands for the optimizer that is not called."""

        def zero_grad(self) -> None:
            """Nothing to do."""

        def step(self) -> None:
            """Done in backward."""

    def forward(self, ids: Tensor) -> Tensor:
        """One feature, no pooling: its quickest form for plain ids."""
        output: Tensor = self.module(ids, torch.tensor([0, len(ids)]))
        return output

    def state(self) -> Iterator[Tensor]:
        """What it keeps beside the table."""
        if self.counterpart != "SGD":  # asked for the state that SGD has not, it fails
            yield from (s for s in self.module.split_optimizer_states()[0] if s.ndim == 2)

    def bytes_held(self) -> int:
        """The table and the state."""
        table = self.module.split_embedding_weights()[0]
        return table.nbytes + sum(s.nbytes for s in self.state())


def embedding(rows: int, columns: int, sparse: bool = False) -> nn.Embedding:
    """torch's, around `new_weight`."""
    return nn.Embedding.from_pretrained(new_weight(rows, columns), freeze=False, sparse=sparse)


def ours(rule: str, rows: int, columns: int, others: dict[str, Peer]) -> Peer:
    """The two lines of the README."""
    module = hotrow.convert(embedding(rows, columns))
    optimizer = getattr(hotrow.optim, rule)(module.parameters())
    return Peer(module, optimizer, f"hotrow.optim.{rule}", rule)


def torch_dense(fused: bool) -> Callable[..., Peer]:
    """The dense optimizer, fused or as its constructor chooses (one tensor at a time)."""

    def build(rule: str, rows: int, columns: int, others: dict[str, Peer]) -> Peer:
        # The two forms take turns on one table and state, which would not fit twice.
        other = next((peer for peer in others.values() if peer.dense), None)
        module = other.module if other else embedding(rows, columns)
        options = {"fused": True} if fused else {}
        optimizer = getattr(torch.optim, rule)(module.parameters(), **options)
        if other:
            optimizer.state = other.optimizer.state
        label = f"torch.optim.{rule}" + ("(fused=True)" if fused else ", default")
        peer = Peer(module, optimizer, label, rule)
        peer.dense = True
        return peer

    return build


def torch_sparse(rule: str, rows: int, columns: int, others: dict[str, Peer]) -> Peer:
    """`nn.Embedding(sparse=True)` and the optimizer that takes its gradient."""
    module = embedding(rows, columns, sparse=True)
    if rule in ("Adam", "AdamW"):
        optimizer = torch.optim.SparseAdam(module.parameters())
        return Peer(module, optimizer, "sparse=True, torch.optim.SparseAdam", "Adam")
    optimizer = getattr(torch.optim, rule)(module.parameters())
    return Peer(module, optimizer, f"sparse=True, torch.optim.{rule}", rule)


def fbgemm(rule: str, rows: int, columns: int, others: dict[str, Peer]) -> Peer:
    """FBGEMM's table-batched embedding on the CPU; it has no Adam there."""
    kinds = {"SGD": "EXACT_SGD", "Adagrad": "EXACT_ADAGRAD"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its parts for GPUs, which are not in this build
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as tbe
        from fbgemm_gpu.split_embedding_configs import EmbOptimType

        defaults = getattr(torch.optim, rule)([torch.zeros(1)]).defaults
        options = {"eps": defaults["eps"]} if "eps" in defaults else {}
        module = tbe.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, columns, tbe.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU)],
            optimizer=EmbOptimType[kinds[rule]],
            learning_rate=defaults["lr"],
            pooling_mode=tbe.PoolingMode.NONE,
            bounds_check_mode=tbe.BoundsCheckMode.NONE,
            stochastic_rounding=False,
            **options,
        )
    module.split_embedding_weights()[0].copy_(new_weight(rows, columns))
    return Fbgemm(module, Fbgemm.Nothing(), f"FBGEMM TBE, {kinds[rule]}", rule)


KINDS: dict[str, Callable[[str, int, int, dict[str, Peer]], Peer]] = {
    "hotrow": ours,
    "torch fused": torch_dense(fused=True),
    "torch default": torch_dense(fused=False),
    "torch sparse": torch_sparse,
    "fbgemm": fbgemm,
}
REMEDY = {"fbgemm": "pip install --no-deps fbgemm-gpu-cpu==1.8.0"}
