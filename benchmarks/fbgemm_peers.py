"""A peer that uses FBGEMM's table-batched embedding on the CPU."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hotrow.bench.peers import Case, Peer, initial_weight

OPTIMIZERS = {"SGD": "EXACT_SGD", "Adagrad": "EXACT_ADAGRAD"}  # FBGEMM has no Adam for CPUs
INSTALL_COMMAND = "pip install --no-deps fbgemm-gpu-cpu==1.8.0"


class FbgemmPeer(Peer):
    """A peer with FBGEMM's table. Its backward pass includes the optimizer step."""

    class NoOptimizer:
        """An optimizer that does nothing."""

        def zero_grad(self) -> None:
            """Do nothing."""

        def step(self) -> None:
            """Do nothing: the backward pass has already updated the table."""

    def forward(self, ids: Tensor) -> Tensor:
        """Look up each id as a bag of one. This is faster than `PoolingMode.NONE`."""
        output: Tensor = self.module(ids, _offsets(len(ids)))
        return output

    def state(self) -> Iterator[Tensor]:
        """Yield the optimizer state tensors that are as large as the table."""
        if self.counterpart == "Adagrad":  # reading SGD's state raises an error
            yield from (s for s in self.module.split_optimizer_states()[0] if s.ndim == 2)


@functools.cache
def _offsets(count: int) -> Tensor:
    """Return bag offsets for `count` bags that contain one id each."""
    return torch.arange(count + 1)


def build_fbgemm(case: Case, others: dict[str, Peer]) -> Peer:
    """Build FBGEMM's table with its optimizer."""
    optimizer = case.optimizer or "SGD"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FBGEMM warns that the CPU build lacks GPU code
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as tbe
        from fbgemm_gpu.split_embedding_configs import EmbOptimType

        defaults = getattr(torch.optim, optimizer)([torch.zeros(1)]).defaults
        options = {"eps": defaults["eps"]} if "eps" in defaults else {}
        module: Any = tbe.SplitTableBatchedEmbeddingBagsCodegen(
            [(case.rows, case.columns, tbe.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU)],
            optimizer=EmbOptimType[OPTIMIZERS[optimizer]],
            learning_rate=defaults["lr"],
            pooling_mode=tbe.PoolingMode.SUM,
            bounds_check_mode=tbe.BoundsCheckMode.NONE,
            stochastic_rounding=False,
            **options,
        )
    module.split_embedding_weights()[0].copy_(initial_weight(case))
    label = "FBGEMM TBE" if case.optimizer is None else f"FBGEMM TBE, {OPTIMIZERS[optimizer]}"
    return FbgemmPeer(case, module, FbgemmPeer.NoOptimizer(), label, case.optimizer)
