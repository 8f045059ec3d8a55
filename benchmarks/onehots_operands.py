"""The ids and operands of the operations in `benchmarks.onehots`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COLUMNS, EXPERTS = 16, 8


class Operands(nn.Module):
    """The ids and operands of one size."""

    def __init__(self, rows: int, classes: int, use: Callable[[Operands], Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator))

        def ids(count: int, *shape: int) -> Tensor:
            return torch.randint(count, shape, generator=generator)

        self.use = use
        self.rows_count, self.classes, self.expert_count = rows, classes, EXPERTS
        self.ids, self.few_ids = ids(classes, rows), ids(EXPERTS, rows)
        self.label_ids = ids(classes // 4, rows, 4) * 4 + torch.arange(4)  # distinct in each row
        self.dense, self.table = normal(rows, classes), normal(classes, COLUMNS)
        self.rows, self.weights = normal(rows, COLUMNS), normal(classes)
        self.experts = normal(classes, EXPERTS, COLUMNS)
        self.linear_weight, self.linear_bias = normal(COLUMNS, classes), normal(COLUMNS)

    def one_hot(self) -> Tensor:
        """Return the one-hot of the ids."""
        return F.one_hot(self.ids, self.classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Compute the result; `convert` infers the batch size from `ids`."""
        return self.use(self)
