"""Compare the statistics of vocabularies with counts made by hand."""

import torch
from torch import nn

import hotrow
from hotrow import vocabulary


def train(layer, optimizer, *batches):
    for ids in batches:
        optimizer.zero_grad()
        layer(torch.tensor(ids)).sum().backward()
        optimizer.step()


def test_a_table_counts_touched_and_missed_rows_without_settling():
    layer = hotrow.convert(nn.Embedding(8, 2), min_entries=0)
    optimizer = hotrow.optim.AdamW(layer.parameters())
    train(layer, optimizer, [0, 1], [1, 2], [1], [3], [1])
    vocabulary.freeze(layer, [7])
    steps = layer.weight.lag.row_steps.clone()
    found = vocabulary.stats(layer, optimizer)
    assert torch.equal(layer.weight.lag.row_steps, steps)
    assert (found.rows, found.touched_rows, found.frozen_rows) == (8, 4, 1)
    assert (found.weight_bytes, found.state_bytes, found.spare_bytes) == (64, 128, 0)
    # Row 1 is up to date. Row 3 has missed 1 step, row 2 has missed 3, row 0 has missed 4, and
    # rows 4 to 6 have missed all 5.
    assert found.idle == ((0, 0, 1), (1, 1, 1), (2, 3, 1), (4, 7, 4))
    vocabulary.resize(layer, 9, optimizer)
    found = vocabulary.stats(layer, optimizer)
    assert (found.rows, found.touched_rows, found.spare_bytes) == (9, 4, 3 * 7 * 8)
    assert "rows    9, 4 ever touched (44%), 1 frozen" in str(found)


def test_initial_values_other_than_zero_are_not_touched():
    layer = nn.Embedding(5, 2)
    optimizer = torch.optim.Adagrad(layer.parameters(), initial_accumulator_value=0.5)
    train(layer, optimizer, [4, 1])
    found = vocabulary.stats(layer, optimizer)
    assert (found.touched_rows, found.state_bytes, found.idle) == (2, 40, ())
    assert vocabulary.stats(layer).touched_rows is None


def test_a_shared_weight_counts_once():
    layer, head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
    head.weight = layer.weight
    optimizer = torch.optim.Adam(layer.parameters())
    train(layer, optimizer, [1])
    words = vocabulary.Vocabulary([layer, head], keys=["a", "b", "c"], unknown="row")
    found = vocabulary.stats(words, optimizer)
    assert (found.weight_bytes, found.state_bytes) == (32, 64)


def test_a_sparse_state_is_measured():
    layer = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    train(layer, optimizer, [1, 3])
    found = vocabulary.stats(layer, optimizer)
    assert (found.touched_rows, found.state_bytes, found.spare_bytes) == (2, 2 * 16, 0)


def test_a_vocabulary_lists_the_keys_that_would_be_evicted():
    layer = nn.Embedding(1, 2)
    words = vocabulary.Vocabulary(layer, unknown="row")
    for batch in (["a", "b"], ["b"], ["c", "b"], ["a"]):
        words.admit(batch)
    found = vocabulary.stats(words, evicted=2)
    assert found.evicted == ("b", "c")
    assert (found.rows, found.touched_rows) == (4, 3)
    assert found.idle == ((0, 0, 1), (1, 1, 2), (2, 3, 0), (4, 7, 1))
    words.evict(2)
    assert words.keys() == ["a"]
    assert all(len(line) <= 80 for line in str(found).splitlines())
