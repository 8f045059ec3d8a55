"""torch.compile traces table lookups without a graph break, and they get row gradients."""

import copy
import shutil
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parameters_to_vector

import hotrow
from hotrow import HotrowError
from hotrow.table.gradient import RowGradient
from hotrow.table.lookup import look_up
from hotrow.table.parameter import Table
from tests.support.exhaustive import exhaustive, grid
from tests.support.tolerance import assert_no_worse

BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[
            exhaustive,
            pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs a C++ compiler"),
        ],
    ),
]


class Model(nn.Module):
    """Looks up one table several times, with and without bags."""

    def __init__(self, lookups=1, **options):
        super().__init__()
        self.items = nn.Embedding(50, 4, **options)
        self.bags = nn.EmbeddingBag(40, 4, mode="mean")
        self.head = nn.Linear(4, 2)
        self.lookups = lookups

    def forward(self, ids):
        hidden = self.bags(ids % 40)
        for n in range(self.lookups):
            hidden = hidden + (self.items((ids + n) % 50) * (n + 1)).sin().sum(1)
        return self.head(hidden.tanh())


def batches(count):
    source = torch.Generator().manual_seed(1)
    return [torch.randint(50, (3, 4), generator=source) for _ in range(count)]


def run(model, library, call, dtype=torch.float32):
    """Train the model, and return it."""
    optimizer = library.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    for ids in batches(6):
        optimizer.zero_grad()
        call(ids).pow(2).sum().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lookups", grid([1, 2, 3], (2).__eq__))
def test_a_compiled_model_trains_like_torch_and_keeps_rows(backend, lookups):
    torch.manual_seed(0)
    plain = Model(lookups, padding_idx=3)
    tables, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    hotrow.convert(tables, min_entries=0)
    compiled = torch.compile(tables, fullgraph=True, backend=backend)
    run(tables, hotrow.optim, compiled)
    assert all(type(layer.weight) is Table for layer in (tables.items, tables.bags))
    assert all(type(layer.weight.grad) is RowGradient for layer in (tables.items, tables.bags))
    assert tables.items.weight.dense_step is None
    run(plain, torch.optim, plain)
    run(exact, torch.optim, exact)
    vectors = [parameters_to_vector(model.parameters()) for model in (tables, plain, exact)]
    assert_no_worse(*vectors)
    with torch.no_grad():  # these lookups read rows that have missed steps
        ids = torch.arange(48).reshape(12, 4)
        assert_no_worse(compiled(ids), plain(ids), exact(ids))


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}])
def test_lookups_do_not_break_the_graph(options):
    model = hotrow.convert(Model(**options), min_entries=0)
    assert type(model.items.weight) is Table
    assert torch._dynamo.explain(model)(batches(1)[0]).graph_break_count == 0


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # raised at a graph break
def test_a_lookup_that_changes_rows_breaks_the_graph():
    model = hotrow.convert(Model(max_norm=1.0), min_entries=0)
    plain = copy.deepcopy(model)
    ids = batches(1)[0]
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, fullgraph=True, backend="eager")(ids)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="eager")(ids), plain(ids))


def test_the_refusal_of_another_use_in_a_full_graph_says_what_to_do():
    layer = hotrow.convert(nn.Embedding(9, 3), min_entries=0)
    compiled = torch.compile(
        lambda ids: layer(ids).sum() + layer.weight.pow(2).sum(), fullgraph=True, backend="eager"
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match="use the table only in lookups"):
        compiled(torch.tensor([1]))


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("steps", [0, 2])
def test_make_fx_raises(make, steps):
    layer = hotrow.convert(make(9, 3), min_entries=0)
    optimizer = hotrow.optim.AdamW(layer.parameters())
    for _ in range(steps):
        layer(torch.tensor([[1]])).sum().backward()
        optimizer.step()
    with pytest.raises(HotrowError, match="make_fx can't trace a lookup in a table"):
        make_fx(layer)(torch.tensor([[1]]))


@pytest.mark.parametrize("options", [{"padding_idx": 3}, {"scale_grad_by_freq": True}])
def test_the_gradient_has_the_layer_s_options(options):
    layer = nn.Embedding(50, 4, **options)
    table = copy.deepcopy(layer)
    Table.adopt(table.weight)
    ids = torch.tensor([3, 1, 1, 3, 7])
    for each, call in ((layer, layer), (table, torch.compile(table, backend="aot_eager"))):
        call(ids).pow(2).sum().backward()
        assert each.weight.grad.count_nonzero()
    assert type(table.weight.grad) is RowGradient
    torch.testing.assert_close(table.weight.grad.as_dense(), layer.weight.grad)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # raised at a graph break
def test_a_bag_that_counts_ids_breaks_the_graph(mode):
    plain = nn.EmbeddingBag(4, 2, mode=mode, scale_grad_by_freq=True)
    table = copy.deepcopy(plain)
    Table.adopt(table.weight)
    ids, offsets = torch.tensor([0, 1, 1, 2, 2, 2, 0, 1]), torch.tensor([0, 3, 5])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="without padding_idx and scale_grad"):
        torch.compile(table, fullgraph=True, backend="eager")(ids, offsets)
    torch._dynamo.reset()
    for call in (plain, torch.compile(table, backend="aot_eager")):
        call(ids, offsets).mul(torch.tensor([[1.0], [10.0], [100.0]])).sum().backward()
    assert type(table.weight.grad) is RowGradient
    torch.testing.assert_close(table.weight.grad.as_dense(), plain.weight.grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_compiled_code_reads_is_dense(backend):
    plain = nn.Embedding(50, 4)
    table = copy.deepcopy(plain)
    Table.adopt(table.weight)

    def penalized(layer):
        return lambda ids: layer(ids).sum() + layer.weight.pow(2).sum()

    ids = batches(1)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading the whole table causes a graph break
        torch.compile(penalized(table), backend=backend)(ids).backward()
    penalized(plain)(ids).backward()
    torch.testing.assert_close(table.weight.grad + 0, plain.weight.grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_columns(backend):
    weight = nn.Parameter(torch.randn(4, 50))
    plain = weight.detach().clone().requires_grad_()
    Table.adopt(weight, columns=True)
    ids = batches(1)[0]
    compiled = torch.compile(
        lambda w, ids: look_up(w, ids, True).sin(), fullgraph=True, backend=backend
    )
    for _ in range(2):
        compiled(weight, ids).sum().backward()
        F.embedding(ids, plain.t()).sin().sum().backward()
    assert type(weight.grad) is RowGradient
    torch.testing.assert_close(weight.grad.as_dense(), plain.grad)


def test_compiled_code_keeps_its_own_copy_of_the_ids():
    layer = nn.Embedding(50, 4)
    Table.adopt(layer.weight)
    ids = torch.tensor([1, 2])
    torch.compile(layer, backend="aot_eager")(ids).sum().backward()
    ids.fill_(9)
    assert layer.weight.grad.merge().ids.tolist() == [1, 2]


def test_ids_are_checked():
    layer = nn.Embedding(50, 4)
    Table.adopt(layer.weight)
    with pytest.raises(HotrowError, match="= 50"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.tensor([1, 50]))


def test_a_plain_tensor_with_the_table_s_storage_reads_settled_rows():
    model = hotrow.convert(nn.Embedding(50, 4), min_entries=0)
    optimizer = hotrow.optim.Adam(model.parameters())
    for ids in batches(3):
        model(ids).sum().backward()
        optimizer.step()
    assert model.weight.has_stale_rows
    values, ids = model.weight.raw_data, torch.arange(50)
    rows = torch.ops.hotrow.look_up_rows(values, ids, None, False, False)
    assert torch.equal(rows, model.weight.detach())


class ReadsAttributes(nn.Module):
    """Reads attributes of its tables, as models do to choose a dtype or a device."""

    def __init__(self):
        super().__init__()
        self.items, self.codes = nn.Embedding(50, 4), nn.Linear(60, 4)

    def forward(self, ids):
        items, codes = self.items.weight, self.codes.weight
        one_hots = F.one_hot(ids, 60).to(codes.dtype).to(codes.device)
        rows = self.items(ids.to(items.device)).to(items.dtype) * items.shape[1] / len(codes)
        return rows * items.requires_grad + self.codes(one_hots) * codes.ndim


@pytest.mark.parametrize("backend", BACKENDS)
def test_attributes_of_tables_do_not_break_the_graph(backend):
    torch.manual_seed(0)
    plain = ReadsAttributes()
    tables, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    hotrow.convert(tables, min_entries=0)
    run(tables, hotrow.optim, torch.compile(tables, fullgraph=True, backend=backend))
    assert type(tables.items.weight) is Table
    run(plain, torch.optim, plain)
    run(exact, torch.optim, exact)
    assert_no_worse(*[parameters_to_vector(m.parameters()) for m in (tables, plain, exact)])


class ReturnsOneHots(nn.Module):
    """Uses a table, and returns its one-hots."""

    def __init__(self):
        super().__init__()
        self.items, self.codes = nn.Embedding(50, 4), nn.Linear(60, 4)

    def forward(self, ids):
        one_hots = F.one_hot(ids, 60).float()
        return self.items(ids) + self.codes(one_hots), one_hots.detach()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_function_with_a_table_returns_one_hots(backend):
    model, (ids,) = ReturnsOneHots(), batches(1)
    plain = copy.deepcopy(model)
    hotrow.convert(model, min_entries=0)
    assert type(model.items.weight) is Table
    found, expected = torch.compile(model, backend=backend)(ids), plain(ids)
    torch.testing.assert_close(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
