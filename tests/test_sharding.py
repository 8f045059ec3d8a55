"""Tables split over processes give the numbers of one, bit for bit."""

import pytest
import torch
from ranks import close_all, ranks
from spreading import (
    OPTIMIZERS,
    STEPS,
    fields,
    make,
    spread,
    train_alone,
    train_together,
    values_of,
)
from tolerance import assert_same_bits

WORLDS = (1, 2, 3, 4)


@pytest.fixture(scope="module", autouse=True)
def _end():
    yield
    close_all()


def sharded(name, count, dtype):
    """A run on this rank."""
    rank = torch.distributed.get_rank()
    model = spread(fields(dtype), "shard", count)
    optimizer = make(name, model)
    train_together(model, optimizer, count, rank, range(STEPS), dtype)
    return values_of(model, optimizer)


@pytest.mark.parametrize("count", WORLDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_sharded_run_ends_with_the_bits_of_one_process(name, count):
    dtype = torch.float64 if name == "Adagrad" else torch.float32
    model = fields(dtype)
    optimizer = make(name, model)
    train_alone(model, optimizer, count, range(STEPS), dtype)
    expected = values_of(model, optimizer)
    for found in ranks(count).run(sharded, name, count, dtype):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if "layer" in key or key[0] in "45":
                torch.testing.assert_close(found[key], value)
            else:
                assert_same_bits(found[key], value)
