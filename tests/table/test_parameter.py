"""A table settles its rows before any read. Its row gradient acts like a dense gradient."""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import hotrow
from hotrow import HotrowError
from hotrow.table.gradient import RowGradient
from hotrow.table.lookup import look_up
from hotrow.table.parameter import Table
from tests.support.tolerance import assert_same_bits

IDS = torch.tensor([[1, 2, 2], [5, 1, 0]])


def twins():
    """Return two copies of a model, one with a table and one with a plain parameter."""
    plain = nn.Sequential(nn.Embedding(10, 3), nn.Linear(3, 2))
    rows = copy.deepcopy(plain)
    Table.adopt(rows[0].weight)
    return rows, plain


class Recorder:
    """A lag that records the calls to its methods."""

    has_stale_rows, was_written = True, False

    def __init__(self):
        self.calls = []

    def close(self):
        self.settle(None)

    def settle(self, rows):
        self.calls.append(None if rows is None else rows.tolist())

    def look_up(self, at):
        self.calls.append(at.rows.tolist())
        return torch.full((at.inverse.numel(), 3), 7.0)


# --- The gradient ------------------------------------------------------------------------


def backward(model, *batches):
    for ids in batches:
        model(ids).pow(2).sum().backward()


@pytest.mark.parametrize("batches", [(IDS,), (IDS, IDS[:1]), (IDS, IDS, torch.tensor([9]))])
def test_the_gradient_equals_the_dense_gradient(batches):
    rows, plain = twins()
    backward(rows, *batches)
    backward(plain, *batches)
    gradient = rows[0].weight.grad
    assert isinstance(gradient, RowGradient)
    assert gradient.shape == (10, 3)
    assert_same_bits(gradient.as_dense(), plain[0].weight.grad)


def test_gradients_that_store_every_row_accumulate():
    rows, plain = nn.Embedding(3, 2), nn.Embedding(3, 2)
    Table.adopt(rows.weight)
    for layer in (rows, plain):
        for ids in ([2, 0, 1], [1, 2, 0, 2], [0]):
            ids = torch.tensor(ids)
            (layer(ids) * torch.arange(len(ids) * 2.0).view(-1, 2)).sum().backward()
        layer.weight.grad[0] += 1
    assert isinstance(rows.weight.grad, RowGradient)
    assert_same_bits(rows.weight.grad.as_dense(), plain.weight.grad)


def test_the_gradient_stores_only_touched_rows():
    rows, _ = twins()
    backward(rows, IDS)
    gradient = rows[0].weight.grad.merge()
    assert gradient.ids.tolist() == [1, 2, 5, 0]
    assert gradient.rows.shape == (4, 3)


@pytest.mark.parametrize(
    "options",
    [{"padding_idx": 2}, {"padding_idx": 0}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}],
)
def test_options_of_an_embedding_work_as_in_torch(options):
    plain = nn.Embedding(10, 3, **options)
    rows = copy.deepcopy(plain)
    Table.adopt(rows.weight)
    cotangent = torch.randn(2, 3, 3)
    for layer in (rows, plain):
        layer(IDS).backward(cotangent)
    assert_same_bits(rows.weight.grad.as_dense(), plain.weight.grad)
    assert_same_bits(rows.weight.data, plain.weight.data)


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"padding_idx": 0}])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_options_of_bags_work_as_in_torch(mode, options):
    plain = nn.EmbeddingBag(10, 3, mode=mode, **options)
    rows = copy.deepcopy(plain)
    Table.adopt(rows.weight)
    for layer in (rows, plain):
        layer(IDS).backward(torch.ones(2, 3))
    torch.testing.assert_close(rows.weight.grad.as_dense(), plain.weight.grad)


def test_each_batch_is_summed_before_it_is_added_to_the_others():
    rows, plain = twins()
    for cotangent in torch.randn(4, 5, 3):
        for model in (rows, plain):
            (model[0](torch.tensor([2, 2, 7, 2, 2])) * cotangent).sum().backward()
    assert_same_bits(rows[0].weight.grad.as_dense(), plain[0].weight.grad)


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
def test_clip_grad_norm_matches_dense(foreach, norm):
    rows, plain = twins()
    backward(rows, IDS)
    backward(plain, IDS)
    clipped = [
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=norm, foreach=foreach)
        for model in (rows, plain)
    ]
    torch.testing.assert_close(*clipped)
    torch.testing.assert_close(rows[0].weight.grad.as_dense(), plain[0].weight.grad)


@pytest.mark.parametrize("foreach", [None, False, True])
def test_clip_grad_value_matches_dense(foreach):
    rows, plain = twins()
    backward(rows, IDS)
    backward(plain, IDS)
    for model in (rows, plain):
        nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
    assert_same_bits(rows[0].weight.grad.as_dense(), plain[0].weight.grad)


@pytest.mark.parametrize("change", [torch.abs, torch.clone, lambda g: g * 2.0])
def test_operations_on_the_gradient_in_inference_mode(change):
    table = hotrow.convert(nn.Embedding(9, 3), min_entries=0)
    assert isinstance(table.weight, Table)
    table(torch.tensor([1, 4, 1])).square().sum().backward()
    gradient = table.weight.grad
    with torch.inference_mode():
        found = change(gradient)
    assert isinstance(found, RowGradient)
    assert_same_bits(found.as_dense(), change(gradient.clone().as_dense()))


def test_clipping_does_not_change_the_output_gradient():
    layer = nn.Embedding(4, 2)
    Table.adopt(layer.weight)
    output = layer(torch.tensor([1, 2]))
    cotangent = torch.ones(2, 2)
    output.backward(cotangent)
    layer.weight.grad.mul_(0.5)
    assert (cotangent == 1).all()


OTHERS = {
    "cotangent": lambda output, tensors: output.backward(tensors[0]),
    "its view": lambda output, tensors: output.backward(tensors[0].view(2, 3, 3)),
    "hook": lambda output, tensors: (
        output.register_hook(tensors.append),
        (output * tensors[0]).sum().backward(),
    ),
    "retained": lambda output, tensors: (
        output.retain_grad(),
        (output * tensors[0]).sum().backward(),
        tensors.append(output.grad),
    ),
    "numpy": lambda output, tensors: output.backward(torch.from_numpy(tensors[0].numpy())),
    "none": lambda output, tensors: (output * tensors[0]).sum().backward(),
    "part": lambda output, tensors: (
        tensors.append(torch.cat([tensors[0], tensors[0] + 1], -1)),
        torch.cat([output, output.detach()], -1).backward(tensors[1]),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_ids_and_gradients_may_be_reused_after_backward(name):
    results = []
    for model in twins():
        ids, tensors = IDS.clone(), [torch.arange(18.0).view(2, 3, 3)]
        output = model[0](ids)
        OTHERS[name](output, tensors)
        ids.zero_()
        for each in tensors:
            each.detach().numpy()[:] = -7.0
        gradient = model[0].weight.grad
        results.append(gradient.as_dense() if isinstance(gradient, RowGradient) else gradient)
    assert_same_bits(*results)


def test_a_gradient_without_other_references_is_not_copied():
    model, _ = twins()
    model[0](IDS).pow(2).sum().backward()
    assert not model[0].weight.grad.row_storage.is_merged


def test_a_part_of_a_larger_gradient_is_copied_and_not_summed():
    model, _ = twins()
    rows = model[0](IDS)
    torch.cat([rows, rows.detach()], -1).pow(2).sum().backward()
    storage = model[0].weight.grad.row_storage
    assert not storage.is_merged
    assert storage.rows.is_contiguous()


def test_an_undetected_write_to_a_gradient_raises():
    model, _ = twins()
    model[0](IDS).pow(2).sum().backward()
    gradient = model[0].weight.grad
    gradient.row_storage.rows.zero_()
    with pytest.raises(HotrowError, match="was changed in place after backward"):
        gradient.merge()


def test_writes_to_an_alias_of_a_gradient_change_the_gradient():
    results = []
    for model in twins():
        backward(model, IDS)
        gradient = model[0].weight.grad
        gradient.data.mul_(3)
        gradient.detach().clamp_(-1, 1)
        results.append(
            gradient.as_dense() if isinstance(gradient, RowGradient) else gradient.clone()
        )
        gradient.data.zero_()
        assert not gradient.abs().sum()
        backward(model, IDS)
        gradient.detach_().zero_()
        assert not gradient.abs().sum()
    assert_same_bits(*results)


def test_a_gradient_scaler_matches_dense():
    results = []
    for model in twins():
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        optimizer.add_param_group({"params": [model[0].weight]})
        scaler.scale(model(IDS).sum()).backward()
        scaler.unscale_(optimizer)
        gradient = model[0].weight.grad
        results.append(gradient.as_dense() if isinstance(gradient, RowGradient) else gradient)
    assert_same_bits(*results)


def test_zero_grad_clears_the_gradient():
    rows, _ = twins()
    backward(rows, IDS)
    rows.zero_grad(set_to_none=False)
    assert rows[0].weight.grad.as_dense().abs().sum() == 0
    backward(rows, IDS)
    rows.zero_grad()
    assert rows[0].weight.grad is None


def test_other_operations_get_the_dense_gradient():
    rows, plain = twins()
    backward(rows, IDS)
    backward(plain, IDS)
    gradient, expected = rows[0].weight.grad, plain[0].weight.grad
    assert_same_bits(gradient + 1, expected + 1)
    assert_same_bits(gradient.sum(0), expected.sum(0))
    assert_same_bits(gradient[2], expected[2])
    assert_same_bits(gradient.abs().as_dense(), expected.abs())
    assert_same_bits(gradient.exp(), expected.exp())  # exp does not map zero to zero
    assert "RowGradient(10 x 3" in repr(gradient)


WRITES = {
    "add": lambda g: g.add_(1.0),
    "broadcast": lambda g: g.add_(torch.ones(1, 3)),
    "nan": lambda g: g.mul_(float("nan")),
    "copy": lambda g: g.copy_(torch.ones(10, 3)),
    "slice": lambda g: g[:3].zero_(),
    "set a slice": lambda g: g.__setitem__(slice(0, 3), 0.0),
    "set rows": lambda g: g.__setitem__(torch.tensor([1, 4]), 5.0),
    "column": lambda g: g[:, 0].mul_(7),
    "view": lambda g: g.view(-1).clamp_(max=0.5),
    "transposed": lambda g: g.t().mul_(2),
    "split": lambda g: g.split(4)[1].fill_(3.0),
    "data of a slice": lambda g: g.data[2:4].fill_(3.0),
    "foreach zero": lambda g: torch._foreach_zero_([g]),
    "foreach divide": lambda g: torch._foreach_div_([g], 2.0),
    "foreach scalars": lambda g: torch._foreach_mul_([g], [2.0]),
    "foreach add": lambda g: torch._foreach_add_([g], 1.0),
    "foreach copy": lambda g: torch._foreach_copy_([g], [torch.ones(10, 3)]),
    "out": lambda g: torch.mul(g, 3, out=g),
    "new data": lambda g: setattr(g, "data", torch.full((10, 3), 2.0)),
    "write, then accumulate": lambda g: (g[:3].zero_(), g.add_(torch.ones(10, 3))),
    "zero a view's base": lambda g: (g[:3], g.zero_()),
}


@pytest.mark.parametrize("name", WRITES)
def test_in_place_writes_to_a_gradient_match_dense(name):
    results = []
    for model in twins():
        backward(model, IDS)
        WRITES[name](model[0].weight.grad)
        backward(model, IDS[:1])
        gradient = model[0].weight.grad
        results.append(gradient.as_dense() if isinstance(gradient, RowGradient) else gradient)
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda gradient: gradient.t_(),
        lambda gradient: gradient.data.transpose_(0, 1),
        lambda gradient: gradient.unsqueeze_(0),
        lambda gradient: gradient.resize_(2, 2),
        lambda gradient: gradient.as_strided_((3, 3), (0, 1)),
    ],
)
def test_a_gradient_refuses_changes_of_its_shape_in_place(change, columns):
    weight = Table.adopt(nn.Parameter(torch.randn(3, 3)), columns)
    look_up(weight, torch.tensor([0, 1]), columns).sum().backward()
    expected = weight.grad.as_dense()
    with pytest.raises(HotrowError, match="would change the shape or the strides of a table's"):
        change(weight.grad)
    assert torch.equal(weight.grad.as_dense(), expected)
    values = torch.ones(3, 3)
    weight.grad.set_(values)
    assert torch.equal(weight.grad.as_dense(), values)


def test_reads_of_a_gradient_match_dense():
    rows, plain = twins()
    backward(rows, IDS)
    backward(plain, IDS)
    gradient, expected = rows[0].weight.grad, plain[0].weight.grad
    assert gradient.tolist() == expected.tolist()
    assert (np.asarray(gradient) == expected.numpy()).all()
    assert (gradient.numpy() == expected.numpy()).all()
    file = io.BytesIO()
    torch.save(gradient, file)
    file.seek(0)
    assert_same_bits(torch.load(file, weights_only=True), expected)
    assert torch.equal(copy.deepcopy(gradient) * 1, expected)


@pytest.mark.parametrize("norm", [2.0, float("inf")])
def test_the_norm_of_an_empty_gradient_is_zero(norm):
    rows, plain = twins()
    norms = []
    for model in (rows, plain):
        model[0](IDS[:0]).sum().backward()
        norms.append(nn.utils.clip_grad_norm_(model[0].parameters(), 1.0, norm_type=norm))
    assert_same_bits(*norms)


@pytest.mark.parametrize("dense_first", [True, False])
def test_a_dense_use_adds_its_gradient(dense_first):
    rows, plain = twins()
    results = []
    for model in (rows, plain):
        uses = [
            lambda m=model: backward(m, IDS),
            lambda m=model: m[0].weight.pow(2).sum().backward(),
        ]
        for use in reversed(uses) if dense_first else uses:
            use()
        gradient = model[0].weight.grad
        results.append(gradient.as_dense() if isinstance(gradient, RowGradient) else gradient)
    torch.testing.assert_close(*results)


def test_a_lookup_and_a_dense_use_in_one_backward_match_dense():
    results = []
    for model in twins():
        hidden = model[0](IDS)
        (hidden @ model[0].weight.t()).pow(2).sum().backward()  # a tied head
        gradient = model[0].weight.grad
        results.append(gradient.as_dense() if isinstance(gradient, RowGradient) else gradient)
    torch.testing.assert_close(*results)


# --- No stale read -----------------------------------------------------------------------

READS = {
    "index": lambda m, w: w[3],
    "data": lambda m, w: w.data,
    "norm": lambda m, w: w.norm(),
    "detach": lambda m, w: np.asarray(w.detach()),
    "arithmetic": lambda m, w: w + 1,
    "linear": lambda m, w: F.linear(torch.ones(3), w),
    "foreach": lambda m, w: torch._foreach_mul([w], 2.0),
    "iteration": lambda m, w: list(w),
    "tolist": lambda m, w: w.tolist(),
    "repr": lambda m, w: repr(w),
    "data_ptr": lambda m, w: w.data_ptr(),
    "state_dict": lambda m, w: m.state_dict(),
    "deepcopy": lambda m, w: copy.deepcopy(m),
    "save": lambda m, w: torch.save(m, io.BytesIO()),
    "save of the state": lambda m, w: torch.save(m.state_dict(), io.BytesIO()),
    "vector": lambda m, w: nn.utils.parameters_to_vector(m.parameters()),
    "averaged model": lambda m, w: torch.optim.swa_utils.AveragedModel(m),
    "load": lambda m, w: m.load_state_dict(copy.deepcopy(m.state_dict())),
    "move": lambda m, w: m.double(),
    "scatter": lambda m, w: w.index_select(0, IDS[0]),
    "write": lambda m, w: nn.init.zeros_(w),
}


@pytest.mark.parametrize("name", READS)
def test_any_read_settles_all_rows(name):
    model, _ = twins()
    weight = model[0].weight
    weight.lag = lag = Recorder()
    READS[name](model, weight)
    assert None in lag.calls


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_lookup_of_ids_that_python_cannot_read_settles_all_rows(is_trained):
    layer = hotrow.convert(nn.Embedding(6, 2), min_entries=0)
    optimizer = hotrow.optim.Adam(layer.parameters(), lr=0.1)
    for ids in ([0, 1], [2]):
        layer(torch.tensor(ids)).sum().backward()
        optimizer.step()
    assert layer.weight.has_stale_rows
    ids = torch.tensor([1, 0])
    with torch.set_grad_enabled(is_trained):
        found = layer(TwoTensor(ids, ids))
    assert not layer.weight.has_stale_rows
    assert torch.equal(found.a if isinstance(found, TwoTensor) else found, layer(ids))


@pytest.mark.parametrize("look_up", [F.embedding, F.embedding_bag])
def test_a_lookup_settles_the_rows_that_it_reads(look_up):
    model, _ = twins()
    model[0].weight.lag = lag = Recorder()
    weight = model.eval()[0].weight
    with torch.no_grad():
        look_up(IDS, weight)
    assert [sorted(call) for call in lag.calls] == [[0, 1, 2, 5]]
    trained = look_up(IDS, weight)  # `Lag.look_up` reads rows that get a gradient
    assert [sorted(call) for call in lag.calls] == [[0, 1, 2, 5]] * 2
    assert trained.unique().tolist() == [7.0]
    look_up(IDS, weight, max_norm=1.0)  # max_norm writes to the rows, so settle them first
    assert weight[IDS.unique()].norm(dim=1).max() <= 1.0


@pytest.mark.parametrize("ids", [[3, 10], [-1]])
def test_a_bad_id_raises_before_anything_settles(ids):
    model, _ = twins()
    model[0].weight.lag = lag = Recorder()
    with pytest.raises(IndexError, match=r"the table has 10 rows \(valid ids: 0\.\.9\)"):
        model(torch.tensor(ids))
    assert lag.calls == []


def test_operations_on_metadata_settle_nothing():
    model, _ = twins()
    weight = model[0].weight
    weight.lag = lag = Recorder()
    assert (weight.shape, weight.size(0), weight.numel(), weight.ndim) == ((10, 3), 10, 30, 2)
    assert weight.grad is None
    assert weight.requires_grad
    hash(weight)
    weight.register_hook(lambda gradient: gradient)
    model.zero_grad()
    model.train()
    assert list(model.named_parameters())
    assert lag.calls == []


def test_copies_and_files_are_settled_and_have_no_lag():
    model, _ = twins()
    model[0].weight.lag = Recorder()
    other = copy.deepcopy(model)
    assert isinstance(other[0].weight, Table)
    assert other[0].weight.lag is None
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["0.weight"]) is torch.Tensor
    assert_same_bits(loaded["0.weight"], model[0].weight.data)


@pytest.mark.parametrize(
    "copied",
    [
        lambda weight: pickle.loads(pickle.dumps(weight)),
        copy.copy,
        lambda weight: ForkingPickler.loads(ForkingPickler.dumps(weight)),
    ],
    ids=["pickle", "copy", "sharing"],
)
def test_a_copy_has_the_attributes_that_other_code_has_set(copied):
    model, _ = twins()
    weight = model[0].weight
    backward(model, IDS)
    hotrow.optim.SGD([weight], lr=0.1).step()
    assert isinstance(weight, Table)
    weight._no_weight_decay = True
    assert vars(copied(weight)) == {"_no_weight_decay": True}


def test_adopt_keeps_the_object():
    layer = nn.Embedding(4, 2)
    weight, pointer = layer.weight, layer.weight.data_ptr()
    assert Table.adopt(weight) is weight is layer.weight
    assert isinstance(weight, nn.Parameter)
    assert weight.data_ptr() == pointer
    assert Table.adopt(weight) is weight


# --- Writes to outputs, gradients with a graph, storage that changes ------------------------


def lagging():
    """Return a converted table with stale rows, and its optimizer."""
    torch.manual_seed(0)
    model = hotrow.convert(nn.Embedding(9, 4))
    optimizer = hotrow.optim.AdamW(model.parameters())
    for i in range(6):
        optimizer.zero_grad()
        model(torch.tensor([i])).sum().backward()
        optimizer.step()
    assert model.weight.lag.has_stale_rows
    return model, optimizer


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("lags", [True, False])
def test_in_place_writes_to_an_output_match_dense(lags, shape):
    model = lagging()[0] if lags else hotrow.convert(nn.Embedding(9, 4))
    plain = nn.Embedding.from_pretrained(model.weight.detach().clone(), freeze=False)
    for each in (model, plain):
        each.zero_grad()
        output = each(torch.tensor([1, 2, 2, 0]).view(shape))
        output += 1
        output.relu_()
        output.pow(2).sum().backward()
    assert_same_bits(model.weight.grad.as_dense(), plain.weight.grad)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_gradient_with_create_graph_is_applied():
    model, optimizer = lagging()
    optimizer.zero_grad()
    model(torch.tensor([1, 2, 2])).pow(2).sum().backward(create_graph=True)
    before = model.weight.detach().clone()
    optimizer.step()
    assert bool((model.weight != before)[[1, 2]].all())


def test_a_lookup_raises_after_the_storage_was_replaced():
    model, _ = lagging()
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        model.weight.set_(torch.ones(9, 4))
    with pytest.raises(HotrowError, match="storage was replaced while some of its rows were stale"):
        model(torch.arange(9))


def test_training_continues_after_the_storage_was_set():
    """`torch.nn.utils.parametrize` sets the storage so that the optimizer stays valid."""
    model, optimizer = lagging()
    plain = nn.Embedding.from_pretrained(model.weight.detach().clone(), freeze=False)
    dense = torch.optim.AdamW(plain.parameters())
    dense.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for layer, each in ((model, optimizer), (plain, dense)):
        for i in range(6):
            each.zero_grad()
            layer(torch.tensor([i])).sum().backward()
            each.step()
            if i == 2:
                with torch.no_grad():
                    layer.weight.set_(layer.weight * 2)  # the product settles all rows
    assert model.weight.lag.has_stale_rows
    torch.testing.assert_close(model.weight.detach(), plain.weight.detach())


def test_a_gradient_can_be_shared_with_other_processes():
    model, _ = lagging()
    expected = model.weight.grad.as_dense()
    model.share_memory()
    assert model.weight.is_shared()
    assert_same_bits(model.weight.grad.as_dense(), expected)
    assert model.weight.grad.untyped_storage().is_shared()


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_hooks_of_a_lookup_get_the_gradient_of_the_weight_alone():
    layer = hotrow.convert(nn.Embedding(6, 2), min_entries=0)
    assert type(layer.weight) is Table
    optimizer, found = hotrow.optim.AdamW(layer.parameters(), lr=0.1), []
    layer.register_backward_hook(lambda module, inputs, outputs: (2 * inputs[0],))
    for row in range(3):
        optimizer.zero_grad()
        output = layer(torch.tensor([row, 5]))
        assert len(output.grad_fn.next_functions) == 1
        output.grad_fn.register_hook(lambda inputs, outputs: found.append(len(inputs)))
        output.sum().backward()
        assert layer.weight.grad.as_dense()[row].tolist() == [2.0, 2.0]
        optimizer.step()
    assert found == [1, 1, 1]


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, w: torch.func.grad(f)(w),
        lambda f, w: torch.func.vjp(f, w)[1](torch.ones((), dtype=w.dtype))[0],
        lambda f, w: torch.func.jvp(f, (w,), (w,))[1],
        lambda f, w: torch.func.hessian(f)(w),
        lambda f, w: torch.func.vmap(torch.func.grad(f))(torch.stack([w, 2 * w])),
        lambda f, w: torch.func.functionalize(f)(w),
    ],
    ids=["grad", "vjp", "jvp", "hessian", "vmap", "functionalize"],
)
@pytest.mark.parametrize("read", [lambda e: e(torch.tensor([1, 2, 3])), lambda e: e.weight[:3]])
def test_a_transform_of_a_function_reads_settled_rows(transform, read):
    found = []
    for library in (hotrow, torch):
        torch.manual_seed(0)
        layer = nn.Embedding(12, 3, dtype=torch.float64)
        if library is hotrow:
            hotrow.convert(layer, min_entries=0)
        optimizer = library.optim.Adam(layer.parameters(), lr=0.1)
        for ids in ([1, 2], [3]):
            optimizer.zero_grad()
            layer(torch.tensor(ids)).square().sum().backward()
            optimizer.step()
        if library is hotrow:
            assert layer.weight.has_stale_rows
        loss = lambda w, layer=layer: (read(layer) @ w).square().sum()  # noqa: E731
        found.append(transform(loss, torch.ones(3, 2, dtype=torch.float64)))
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", ["data_ptr", "const_data_ptr"])
def test_gradients_have_different_addresses(method):
    """Code that counts shared tensors once compares addresses."""
    gradients = [lagging()[0].weight.grad for _ in range(2)]
    expected = [each.as_dense() for each in gradients]
    addresses = [getattr(each, method)() for each in gradients]
    assert len({0, *addresses}) == 3
    assert addresses == [each.untyped_storage().data_ptr() for each in gradients]
    for gradient, dense in zip(gradients, expected, strict=True):
        assert_same_bits(gradient.as_dense(), dense)


def test_a_read_during_the_step_of_a_table_raises(monkeypatch):
    model, optimizer = lagging()

    def interrupted(*args):
        model.weight.sum()

    monkeypatch.setattr("hotrow.optim.updater.step_together", interrupted)
    with pytest.raises(HotrowError, match="a table was read during its own step"):
        optimizer.step()
    monkeypatch.undo()
    model.weight.sum()  # reading the table after the step doesn't raise an error


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.0])
def test_nan_and_inf_checks_read_only_the_rows(value, monkeypatch):
    gradient = RowGradient(torch.tensor([1, 2]), torch.tensor([[1.0], [value]]), (5, 1))
    dense = gradient.as_dense()
    monkeypatch.setattr(RowGradient, "as_dense", None)
    for check in (torch.isnan, torch.isinf):
        assert check(gradient).any() == check(dense).any()


@pytest.mark.filterwarnings("ignore:Anomaly", "ignore:Error detected")
def test_anomaly_mode_keeps_rows_and_finds_nan(monkeypatch):
    rows, _ = twins()
    monkeypatch.setattr(RowGradient, "as_dense", None)
    with torch.autograd.set_detect_anomaly(True):
        rows(IDS).pow(2).sum().backward()
        assert type(rows[0].weight.grad) is RowGradient
        output = rows[0](IDS)
        output.register_hook(lambda gradient: gradient * float("nan"))
        with pytest.raises(RuntimeError, match=r"LookUpBackward.* returned nan"):
            output.sum().backward()


def second_derivatives(model, ids, second):
    """Return the gradients of `second`, a function of the first gradients."""
    weights = list(model.parameters())
    gradients = torch.autograd.grad(model(ids).pow(3).sum(), weights, create_graph=True)
    second(weights, gradients, model, ids).backward()
    return [weight.grad for weight in weights]


SECOND = {
    "penalty": lambda weights, gradients, *_: sum(each.pow(2).sum() for each in gradients),
    "product with a vector": lambda weights, gradients, *_: sum(
        (each * torch.arange(each.numel()).view(each.shape)).sum() for each in gradients
    ),
    "step of an inner loop": lambda weights, gradients, model, ids: (
        torch.func.functional_call(
            model,
            {
                name: weight - 0.1 * gradient
                for (name, weight), gradient in zip(
                    model.named_parameters(), gradients, strict=True
                )
            },
            (ids,),
        )
        .pow(2)
        .sum()
    ),
}


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}])
@pytest.mark.parametrize("second", SECOND)
def test_second_derivatives_equal_torch_s(second, options):
    plain = nn.Sequential(nn.Embedding(10, 3, **options), nn.Linear(3, 2)).double()
    rows = copy.deepcopy(plain)
    Table.adopt(rows[0].weight)
    expected, found = (second_derivatives(each, IDS, SECOND[second]) for each in (plain, rows))
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one + 0, two)


def test_second_derivatives_of_column_lookups():
    table = nn.Parameter(torch.randn(3, 10, dtype=torch.float64))
    plain = table.detach().clone().requires_grad_()
    Table.adopt(table, columns=True)
    for weight, rows in (
        (table, look_up(table, IDS, columns=True)),
        (plain, F.embedding(IDS, plain.t())),
    ):
        (gradient,) = torch.autograd.grad(rows.pow(3).sum(), weight, create_graph=True)
        gradient.pow(2).sum().backward()
    torch.testing.assert_close(table.grad + 0, plain.grad)


def trained_table():
    layer = hotrow.convert(nn.Embedding(10, 3), min_entries=0)
    optimizer = hotrow.optim.AdamW(layer.parameters())
    for ids in IDS:
        layer(ids).sum().backward()
        optimizer.step()
    assert layer.weight.has_stale_rows
    return layer, optimizer


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_made_from_a_table_shares_its_values(requires_grad):
    layer, optimizer = trained_table()
    parameter = nn.Parameter(layer.weight, requires_grad=requires_grad)
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad == requires_grad
    assert list(nn.ParameterList([parameter])) == [parameter]
    optimizer.step()
    assert parameter.data_ptr() == layer.weight.data_ptr()
    assert torch.equal(parameter.detach(), layer.weight.detach())


def test_a_layer_made_from_a_table_trains():
    layer, _ = trained_table()
    other = nn.Embedding.from_pretrained(layer.weight.detach().clone(), freeze=False)
    again = nn.Embedding.from_pretrained(layer.weight, freeze=False)
    for each, library in ((other, torch.optim), (again, hotrow.optim)):
        optimizer = library.AdamW(each.parameters())
        for ids in IDS:
            optimizer.zero_grad()
            each(ids).pow(2).sum().backward()
            optimizer.step()
    torch.testing.assert_close(again.weight.detach(), other.weight)


@pytest.mark.parametrize(
    "wrap",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        lambda layer: nn.utils.prune.l1_unstructured(layer, "weight", 0.5),
    ],
)
def test_a_converted_layer_can_be_parametrized(wrap):
    layer, _ = trained_table()
    plain = nn.Embedding.from_pretrained(layer.weight.detach().clone(), freeze=False)
    torch.manual_seed(0)
    wrap(plain)
    torch.manual_seed(0)
    wrap(layer)
    for each, library in ((plain, torch.optim), (layer, hotrow.optim)):
        optimizer = library.SGD(each.parameters(), lr=0.1)
        each.zero_grad()
        each(IDS).pow(2).sum().backward()
        optimizer.step()
    torch.testing.assert_close(layer(IDS), plain(IDS))
