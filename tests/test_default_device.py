"""Nothing depends on torch's default device, which programs set with `torch.set_default_device`."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hotrow
from hotrow import disk, vocabulary
from hotrow.table.parameter import Table
from hotrow.verify.models.compare import compare_models
from tests.support.tolerance import assert_same_bits

IDS = torch.tensor([3, 0, 3, 5])


def make_layer(rows, **options):
    generator = torch.Generator("cpu").manual_seed(0)
    weight = torch.randn(rows, 4, generator=generator, device="cpu")
    layer = hotrow.convert(nn.Embedding(rows, 4, _weight=weight, **options), min_entries=0)
    assert isinstance(layer.weight, Table)
    return layer


def train(layer, optimizer, ids=IDS):
    layer(ids).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def one_hots(path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(9, 4, device="cpu")
            with torch.no_grad():
                self.linear.weight.copy_(torch.arange(36, device="cpu").view(4, 9))
                self.linear.bias.zero_()

        def forward(self, ids):
            eye = torch.eye(9, device="cpu")[ids]
            return self.linear(eye) + self.linear(F.one_hot(ids, 9).float() * 2)

    model = hotrow.convert(Model(), min_entries=0)
    result = model(IDS)
    result.sum().backward()
    return [result, model.linear.weight.grad]


def new_rows(path):
    layer = make_layer(9, padding_idx=8)
    optimizer = hotrow.optim.Adam(layer.parameters())
    train(layer, optimizer)
    vocabulary.resize(layer, 12, optimizer, init=lambda rows: rows.fill_(1.0))
    ids = torch.tensor([5, 8, 3, -1], device="cpu")
    new_ids = vocabulary.take(layer, ids, optimizer, init=lambda rows: rows.fill_(2.0))
    vocabulary.freeze(layer, ids[-1:] + 1)
    train(layer, optimizer, torch.tensor([0, 2], device="cpu"))
    vocabulary.unfreeze(layer, ids[-1:] + 1)
    train(layer, optimizer, torch.tensor([0, 2], device="cpu"))
    assert layer.padding_idx == 1
    return [new_ids, layer.weight, *optimizer.state_dict()["state"][0].values()]


def keys(path):
    layer = make_layer(1, padding_idx=0)
    optimizer = hotrow.optim.Adam(layer.parameters())
    words = vocabulary.Vocabulary(layer, optimizer, unknown="row", init=lambda rows: rows.fill_(1))
    ids = [words.admit(["a", "b", "a"]), words.admit(["c", "b"])]
    train(layer, optimizer, ids[0])
    assert words.next_evicted(1) == ["a"]
    assert vocabulary.stats(words).rows == 4
    ids.append(words.evict(3))
    words.save(path / "words.safetensors")
    other = make_layer(1)
    ids.append(vocabulary.Vocabulary.load(path / "words.safetensors", other).look_up(["b", "a"]))
    return [*ids, layer.weight, words.counts, words.idle_batches]


def table_on_disk(path):
    with disk.create(path / "table", 9, 4, fill=lambda block: block.fill_(0.5)) as store:
        optimizer = hotrow.optim.AdamW(store.layer.parameters())
        train(store.layer, optimizer)
        vocabulary.resize(store.layer, 12, optimizer, init=lambda rows: rows.fill_(1.0))
        train(store.layer, optimizer)
        store.save({"step": torch.tensor(2, device="cpu")})
    with disk.open(path / "table") as store:
        optimizer = hotrow.optim.AdamW(store.layer.parameters())
        train(store.layer, optimizer)
        state = optimizer.state_dict()["state"][0]
        return [t.clone() for t in (store.layer.weight, store.rest["step"], *state.values())]


def sparse_gradients(path):
    layer = nn.Embedding(9, 4, sparse=True, device="cpu")
    torch.nn.init.ones_(layer.weight)
    layer(IDS).sum().backward()
    vocabulary.resize(layer, 12, init=torch.nn.init.zeros_)
    return [layer.weight.grad.to_dense(), layer.weight]


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(9, 4, device="cpu")
        torch.nn.init.ones_(self.linear.weight)

    def forward(self, ids):
        return self.linear(F.one_hot(ids, 9).float())


def comparisons(path):
    layer = make_layer(9)
    assert hotrow.check(layer, layer.weight, IDS)
    sparse = nn.Embedding(9, 4, sparse=True, device="cpu")
    torch.nn.init.ones_(sparse.weight)
    assert hotrow.check(sparse, torch.ones(9, 4, device="cpu"), IDS)
    assert compare_models(Linear(), IDS, seconds=0)
    return []


@pytest.mark.parametrize(
    "run", [one_hots, new_rows, keys, table_on_disk, sparse_gradients, comparisons]
)
def test_results_do_not_depend_on_the_default_device(run, tmp_path):
    results = []
    for context in (contextlib.nullcontext(), torch.device("meta")):
        with context:
            path = tmp_path / str(len(results))
            path.mkdir()
            results.append(run(path))
    for expected, found in zip(*results, strict=True):
        assert_same_bits(found.detach(), expected.detach())
