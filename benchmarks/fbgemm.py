"""FBGEMM's table-batched embedding on the CPU."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import Case, Peer, new_weight

OPTIMIZERS = {"SGD": "EXACT_SGD", "Adagrad": "EXACT_ADAGRAD"}  # it has no Adam on CPUs
REMEDY = "pip install --no-deps fbgemm-gpu-cpu==1.8.0"


class Fbgemm(Peer):
    """FBGEMM's table, whose backward makes the step as well."""

    class Nothing:
        """Stands for the optimizer that is not called."""

        def zero_grad(self) -> None:
            """Nothing to do."""

        def step(self) -> None:
            """Done in backward."""

    def forward(self, ids: Tensor) -> Tensor:
        """A bag for each id, which is quicker than its form without bags (`PoolingMode.NONE`)."""
        output: Tensor = self.module(ids, _offsets(len(ids)))
        return output

    def state(self) -> Iterator[Tensor]:
        """What it keeps beside the table."""
        if self.counterpart == "Adagrad":  # asked for the state that SGD has not, it fails
            yield from (s for s in self.module.split_optimizer_states()[0] if s.ndim == 2)


@functools.cache
def _offsets(count: int) -> Tensor:
    """Where the bags of one id each begin and end."""
    return torch.arange(count + 1)


def fbgemm(case: Case, others: dict[str, Peer]) -> Peer:
    """The table, with the optimizer that its backward contains."""
    rule = case.rule or "SGD"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its parts for GPUs, which are not in this build
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as tbe
        from fbgemm_gpu.split_embedding_configs import EmbOptimType

        defaults = getattr(torch.optim, rule)([torch.zeros(1)]).defaults
        options = {"eps": defaults["eps"]} if "eps" in defaults else {}
        module: Any = tbe.SplitTableBatchedEmbeddingBagsCodegen(
            [(case.rows, case.columns, tbe.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU)],
            optimizer=EmbOptimType[OPTIMIZERS[rule]],
            learning_rate=defaults["lr"],
            pooling_mode=tbe.PoolingMode.SUM,
            bounds_check_mode=tbe.BoundsCheckMode.NONE,
            stochastic_rounding=False,
            **options,
        )
    module.split_embedding_weights()[0].copy_(new_weight(case))
    label = "FBGEMM TBE" if case.rule is None else f"FBGEMM TBE, {OPTIMIZERS[rule]}"
    return Fbgemm(case, module, Fbgemm.Nothing(), label, case.rule)
