"""Test cases for every layer: valid sizes and ids, and invalid input."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    columns: int
    shape: tuple[int, ...]  # shape of the ids
    distinct: int = 0  # draw ids from the first `distinct` rows; 0 means all rows
    dtype: torch.dtype = torch.int64

    def ids(self) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        high = max(self.distinct or self.rows, 1)
        return torch.randint(0, high, self.shape, generator=generator, dtype=self.dtype)

    def table(self, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(11)
        return torch.randn(self.rows, self.columns, generator=generator).to(dtype)


CASES = [
    Case("lesson", 4, 5, (3,)),
    Case("ragged sizes", 507, 123, (252,)),
    Case("repeated ids", 50, 17, (300,), distinct=3),
    Case("one id repeated", 9, 4, (64,), distinct=1),
    Case("batch of sequences", 97, 33, (8, 13)),
    Case("three batch dimensions", 31, 8, (2, 3, 5)),
    Case("a scalar id", 12, 6, ()),
    Case("one row", 1, 7, (5,)),
    Case("one column", 40, 1, (20,)),
    Case("no columns", 40, 0, (20,)),
    Case("no ids", 10, 3, (0,)),
    Case("empty two-dimensional batch", 10, 3, (4, 0)),
    Case("int32 ids", 60, 9, (30,), dtype=torch.int32),
]
case_table = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
BAG_CASES = [case for case in CASES if len(case.shape) == 2] + [
    Case("bags of repeated ids", 30, 7, (6, 40), distinct=2),
    Case("bags of one id", 30, 7, (6, 1)),
    Case("no bags", 30, 7, (0, 4)),
    Case("int32 bags", 30, 7, (5, 4), dtype=torch.int32),
]
bag_table = pytest.mark.parametrize("case", BAG_CASES, ids=lambda case: case.name)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class BadInput:
    """Input that every layer with a 7 x 3 table rejects, and the error that the layer raises."""

    name: str
    input: Callable[[], Tensor]
    error: type[Exception]  # a built-in base class of the error
    message: str


BAD_INPUTS = [
    BadInput(
        "too large",
        lambda: torch.tensor([[1, 2, 3], [4, 7, 7]]),
        IndexError,
        "input[1, 1] = 7, but the table has 7 rows (valid ids: 0..6); 1 more out of "
        "range: ids start at 0; do yours start at 1, or does the table need one more row?",
    ),
    BadInput(
        "far too large",
        lambda: torch.tensor([[0, 50257]]),
        IndexError,
        "input[0, 1] = 50257, but the table has 7 rows (valid ids: 0..6): "
        "do these ids come from a larger vocabulary?",
    ),
    BadInput(
        "negative",
        lambda: torch.tensor([[3, -100]]),
        IndexError,
        "input[0, 1] = -100, but the table has 7 rows (valid ids: 0..6): negative ids often mark "
        "padding or ignored positions; mask them or map them to a row",
    ),
    BadInput(
        "float ids",
        lambda: torch.tensor([[1.0, 2.0]]),
        ValueError,
        "input is float32 of shape (1, 2), but one-hot or probability input must have a last "
        "dimension of 7, the number of table rows: if these are ids, use input.long()",
    ),
    BadInput(
        "wrong number of probabilities",
        lambda: torch.rand(4, 6),
        ValueError,
        "input is float32 of shape (4, 6), but one-hot or probability input must have a last "
        "dimension of 7, the number of table rows: if these are ids, use input.long()",
    ),
    BadInput(
        "one-hot with the wrong dtype",
        lambda: torch.eye(7, dtype=torch.float64),
        ValueError,
        "input is float64, but the table is float32: use input.to(torch.float32)",
    ),
    BadInput(
        "bool",
        lambda: torch.tensor([[True, False]]),
        ValueError,
        "input is bool of shape (1, 2), but ids must be int64 or int32: for a one-hot or multi-hot,"
        " use input.float(); for the positions where a mask is True, use input.nonzero()",
    ),
    BadInput(
        "uint8",
        lambda: torch.tensor([[1, 2]], dtype=torch.uint8),
        ValueError,
        "input is uint8 of shape (1, 2), but ids must be int64 or int32: "
        "torch indexing treats uint8 as a mask; use input.long()",
    ),
    BadInput(
        "int16",
        lambda: torch.tensor([[1, 2]], dtype=torch.int16),
        ValueError,
        "input is int16 of shape (1, 2), but ids must be int64 or int32: "
        "if these are ids, use input.long()",
    ),
    BadInput(
        "complex",
        lambda: torch.ones(2, 7, dtype=torch.complex64),
        ValueError,
        "input is complex64 of shape (2, 7), but ids must be int64 or int32",
    ),
    BadInput(
        "integer one-hot",
        lambda: torch.nn.functional.one_hot(torch.tensor([[2, 6]]), 7).flatten(0, 1),
        ValueError,
        "-hot in int64: its last dimension is 7, the number of table rows, and all values are 0 or "
        "1",
    ),
]
bad_input_table = pytest.mark.parametrize("bad", BAD_INPUTS, ids=lambda bad: bad.name)
