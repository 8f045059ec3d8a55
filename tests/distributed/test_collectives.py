"""torch's collectives read and write the settled rows of a table that is passed as weight.data."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hotrow
from hotrow.table.parameter import Table
from tests.support.ranks import rank_processes
from tests.support.tolerance import assert_same_bits

# Each function reads or writes `rows`, and returns the output of a read. There is one rank, so
# that each collective copies its input.
READS = {
    "scatter": lambda out, rows: dist.scatter(out, [rows]),
    "reduce_scatter": lambda out, rows: dist.reduce_scatter(out, [rows]),
    "all_gather": lambda out, rows: dist.all_gather([out], rows),
}
WRITES = {
    "all_gather": lambda rows, new: dist.all_gather([rows], new),
    "all_gather_coalesced": lambda rows, new: dist.all_gather_coalesced([[rows]], [new]),
    "all_gather_into_tensor": lambda rows, new: dist.all_gather_into_tensor(rows, new),
    "gather": lambda rows, new: dist.gather(new, [rows]),
    "reduce_scatter_tensor": lambda rows, new: dist.reduce_scatter_tensor(rows, new),
    "all_to_all": lambda rows, new: dist.all_to_all([rows], [new]),
    "all_to_all_single": lambda rows, new: dist.all_to_all_single(rows, new),
}


def train(layer, optimizer):
    """Take four steps; the last three touch only row 0."""
    for t in range(4):
        optimizer.zero_grad()
        layer(torch.tensor([0, 1, 2] if t == 0 else [0])).sum().backward()
        optimizer.step()


def use_rows(kind, name):
    """Return the table after training, a collective and more training, and the rows it read."""
    dense = nn.Embedding(20, 2)
    nn.init.zeros_(dense.weight)  # all values of the training are exact in float32
    table = hotrow.convert(copy.deepcopy(dense))
    assert isinstance(table.weight, Table)
    results = []
    for layer, library in (table, hotrow.optim), (dense, torch.optim):
        optimizer = library.SGD(layer.parameters(), lr=0.5, momentum=0.5)
        train(layer, optimizer)
        if layer is table:
            assert layer.weight.has_stale_rows
        rows = torch.full((20, 2), 7.0)
        if kind == "read":
            READS[name](rows, layer.weight.data)
        else:
            WRITES[name](layer.weight.data, rows)
        train(layer, optimizer)
        results.append((layer.weight.detach().clone(), rows))
    return results


@pytest.mark.parametrize(
    ("kind", "name"), [*(("read", name) for name in READS), *(("write", name) for name in WRITES)]
)
def test_a_collective_uses_settled_rows(kind, name):
    ((found, expected),) = rank_processes(1).run(use_rows, kind, name)
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)
