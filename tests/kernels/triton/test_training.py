"""In Triton's interpreter, the GPU code gives the same bits as the CPU and never waits."""

import copy

import pytest
import torch
from torch import nn

import hotrow
from hotrow import HotrowError
from hotrow.kernels.triton.batch import DeviceIds
from hotrow.kernels.triton.operators import TritonRows
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table
from tests.support.exhaustive import exhaustive
from tests.support.gpu_model import COLUMNS, ROWS, batches, make_training, train
from tests.support.other_device import Waits
from tests.support.tolerance import assert_same_bits

pytestmark = exhaustive
aten = torch.ops.aten


def values_of(layers, optimizer):
    """Return copies of the table and its optimizer state; reading them settles all rows."""
    weight = layers[0].weight
    state = [each.clone() for each in optimizer.state[weight].values() if torch.is_tensor(each)]
    return [weight.detach().clone(), *state]


def assert_same_as_on_the_cpu(run, interpret):
    """Assert that the tensors that `run()` returns have the same bits on the CPU and a GPU."""
    expected = run()
    interpret()
    found = run()
    assert len(found) == len(expected) > 0
    for ours, cpu in zip(found, expected, strict=True):
        assert_same_bits(ours, cpu)


LAYERS = [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_training(name, layer, interpret):
    def run():
        layers, optimizer = make_training(name, {"lr": 0.1}, **layer)
        train(layers, optimizer, batches(6))
        return values_of(layers, optimizer)

    assert_same_as_on_the_cpu(run, interpret)


def test_accumulated_gradients(interpret):
    def run():
        layers, optimizer = make_training()
        for ids in batches(3):
            optimizer.zero_grad()
            layers(ids).sum().backward()
            layers(ids[:3]).pow(2).sum().backward()
            optimizer.step()
        return values_of(layers, optimizer)

    assert_same_as_on_the_cpu(run, interpret)


def test_gradients_scaled_by_a_grad_scaler(interpret):
    def run():
        layers, optimizer = make_training()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for ids in batches(3):
            optimizer.zero_grad()
            scaler.scale(layers(ids).pow(2).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return values_of(layers, optimizer)

    assert_same_as_on_the_cpu(run, interpret)


BAGS = [
    ({"mode": "sum"}, {}),
    ({"mode": "mean", "padding_idx": 2}, {}),
    ({"mode": "max"}, {}),
    ({"mode": "sum"}, {"offsets": torch.tensor([0, 1, 1, 4])}),
    ({"mode": "sum"}, {"per_sample_weights": torch.arange(6.0).view(2, 3)}),
]


def train_bag(bag, optimizer, all_ids, options):
    for ids in all_ids:
        optimizer.zero_grad()
        output = bag(ids if "offsets" in options else ids.view(2, 3), **options)
        (output * torch.arange(float(COLUMNS))).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(("layer", "options"), BAGS, ids=str)
def test_bags_never_wait(layer, options, interpret):
    def run():
        torch.manual_seed(0)
        bag = hotrow.convert(nn.EmbeddingBag(ROWS, COLUMNS, **layer), min_entries=0)
        assert isinstance(bag.weight, Table)
        optimizer = hotrow.optim.AdamW(bag.parameters())
        train_bag(bag, optimizer, batches(2), options)
        with Waits() as waits:
            train_bag(bag, optimizer, batches(2, seed=2), options)
        is_on_gpu = isinstance(bag.weight.lag._updater._operators, TritonRows)
        assert not (is_on_gpu and waits.calls)
        state = optimizer.state[bag.weight]
        return [bag.weight.detach().clone(), state["exp_avg"].clone()]

    assert_same_as_on_the_cpu(run, interpret)


def test_a_bag_divides_gradients_by_the_frequencies_of_their_ids(interpret):
    # torch's CPU kernel uses the frequencies of other ids, so it can't serve as the reference.
    interpret()
    options = {"mode": "mean", "scale_grad_by_freq": True}
    bag = hotrow.convert(nn.EmbeddingBag(ROWS, COLUMNS, **options), min_entries=0)
    assert isinstance(bag.weight, Table)
    ids = torch.tensor([[1, 11, 0], [8, 7, 1]])
    gradient = torch.arange(2.0 * COLUMNS).view(2, COLUMNS)
    bag(ids).backward(gradient)
    rows = (gradient / 3).repeat_interleave(3, 0) / ids.flatten().bincount()[ids.flatten(), None]
    expected = torch.zeros(ROWS, COLUMNS).index_add_(0, ids.flatten(), rows)
    torch.testing.assert_close(bag.weight.grad.as_dense(), expected)


def test_a_compiled_model_under_autocast_never_waits(interpret, monkeypatch):
    interpret()
    found = []
    for compiled in (False, True):
        layers, optimizer = make_training()
        layers[1].requires_grad_(False)  # torch's AdamW would read a step count on the CPU
        model = torch.compile(layers, backend="aot_eager", fullgraph=True) if compiled else layers
        for t, ids in enumerate(batches(5)):
            with monkeypatch.context() as patch:
                if t >= 2:  # the first steps may compile, so they may wait
                    for name in WAITING_METHODS:
                        patch.setattr(torch.Tensor, name, refuse_to_wait)
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    output = model(ids)
                assert output.dtype == torch.bfloat16
                output.float().pow(2).sum().backward()
                optimizer.step()
        assert layers[0].weight.lag.has_stale_rows
        found.append(values_of(layers, optimizer))
    for eager, compiled in zip(*found, strict=True):
        assert_same_bits(eager, compiled)


# Replace these methods, because torch.compile doesn't compile under a dispatch mode.
WAITING_METHODS = "item", "tolist", "nonzero", "numpy", "cpu", "__bool__", "__int__", "__float__"


def refuse_to_wait(tensor, *args, **kwargs):
    raise AssertionError("Python waits for the GPU")


def test_a_checkpoint_moves_between_devices(interpret):
    layers, optimizer = make_training()
    train(layers, optimizer, batches(3))
    saved = copy.deepcopy((layers.state_dict(), optimizer.state_dict()))
    train(layers, optimizer, batches(3, seed=2))
    expected = values_of(layers, optimizer)
    interpret()
    layers, optimizer = make_training()
    layers.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(layers, optimizer, batches(3, seed=2))
    assert isinstance(layers[0].weight.lag._updater._operators, TritonRows)
    for ours, cpu in zip(values_of(layers, optimizer), expected, strict=True):
        assert_same_bits(ours, cpu)


def test_evaluation_reads_settled_rows_and_stores_none(interpret):
    def run():
        layers, optimizer = make_training()
        train(layers, optimizer, batches(5))
        with torch.no_grad():
            rows = layers[0](torch.arange(ROWS).view(2, -1))
        return [rows, *values_of(layers, optimizer)]

    expected = run()
    interpret()
    layers, optimizer = make_training()
    train(layers, optimizer, batches(5))
    before = layers[0].weight.lag.row_steps.clone()
    with torch.no_grad():
        rows = layers[0](torch.arange(ROWS).view(2, -1))
    assert_same_bits(rows, expected[0])
    assert_same_bits(layers[0].weight.lag.row_steps, before)


def test_several_tables_share_a_ledger(interpret):
    def run():
        torch.manual_seed(0)
        sizes = (9, 3), (20, 3), (5, 1), (30, 3)
        tables = nn.ModuleList([nn.Embedding(*size) for size in sizes])
        hotrow.convert(tables, min_entries=0)
        optimizer = hotrow.optim.Adam(tables.parameters())
        for t in range(4):
            optimizer.zero_grad()
            used = tables if t != 2 else tables[:2]
            ids = torch.tensor([t, 0, t, 4])
            sum(table(ids).pow(2).sum() for table in used).backward()
            optimizer.step()
        return [table.weight.detach().clone() for table in tables]

    assert_same_as_on_the_cpu(run, interpret)


# --- The gradient ---------------------------------------------------------------------------


def make_gradient(**layer):
    layers, _ = make_training(**layer)
    ids = torch.tensor([[4, 2, 4], [0, 4, 2]])
    (layers[0](ids) * torch.arange(30.0).view(2, 3, 5)).sum().backward()
    return layers[0].weight.grad


OPERATIONS = {
    "dense": lambda g: g.as_dense(),
    "ids": lambda g: g.merge().ids.sort()[0],
    "scaled": lambda g: (g * 2).as_dense(),
    "scaled in place": lambda g: g.mul_(torch.tensor(0.5)).as_dense(),
    "clamped": lambda g: g.clamp_(-3, 3).as_dense(),
    "norm": lambda g: g.norm(),
    "infinity norm": lambda g: torch.linalg.vector_norm(g, float("inf")),
    "clone": lambda g: g.clone().as_dense(),
    "sum of two": lambda g: (g + g.clone()).as_dense(),
    "sum with dense": lambda g: g.add_(torch.ones(ROWS, COLUMNS)).as_dense(),
    "zero": lambda g: g.zero_().as_dense(),
    "written": lambda g: g.index_fill_(0, torch.tensor([3]), 2.0).as_dense(),
    "cast": lambda g: g.double().as_dense(),
    "moved": lambda g: g.to("cpu", copy=True).as_dense(),
    "any": lambda g: torch.isinf(g).any(),
}


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_on_the_gradient(name, layer, interpret):
    expected = OPERATIONS[name](make_gradient(**layer))
    interpret()
    gradient = make_gradient(**layer)
    assert isinstance(gradient, RowGradient)
    assert isinstance(gradient.row_storage.batch, DeviceIds)
    found = OPERATIONS[name](gradient)
    torch.testing.assert_close(found, expected, rtol=1e-6 if name == "norm" else 0, atol=0)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_read_of_an_averaged_gradient_keeps_its_touched_rows(layer, interpret):
    interpret()
    gradient, read, *later = (make_gradient(**layer).merge() for _ in range(4))
    for each in (gradient, read, *later):
        each.row_storage.includes_all_ranks = True
    for other in later:
        read.view(-1).sum()
        ids, rows = read.row_storage.touched_rows()
        assert torch.equal(ids, gradient.row_storage.ids)
        assert_same_bits(rows, gradient.row_storage.rows)
        assert_same_bits(read.norm(), gradient.norm())
        read.add_(other)
        gradient.add_(other).merge()


# --- No waits -------------------------------------------------------------------------------


PREPARATIONS = {
    "plain": lambda layers: None,
    "clip": lambda layers: nn.utils.clip_grad_norm_(layers.parameters(), 0.5),
    "clip values": lambda layers: nn.utils.clip_grad_value_(layers.parameters(), 0.5),
    "accumulate": lambda layers: layers[0](torch.tensor([1, 2])).sum().backward(),
}


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("name", PREPARATIONS)
def test_training_never_waits(name, layer, interpret):
    interpret()
    layers, optimizer = make_training(**layer)
    layers[1].requires_grad_(False)  # torch's AdamW would read a step count on the CPU
    train(layers, optimizer, batches(3))
    with Waits() as waits:
        train(layers, optimizer, batches(2), PREPARATIONS[name])
        with torch.no_grad():
            layers[0](batches(1)[0])
    # In each step, clip_grad_value_ reads a value on the CPU to check that clipping keeps zeros.
    checks = [aten.is_nonzero.default] * 2 if name == "clip values" else []
    assert waits.calls == checks
    assert layers[0].weight.lag.has_stale_rows  # the steps didn't settle all rows
    assert isinstance(layers[0].weight.lag._updater._operators, TritonRows)


def test_settling_all_rows_makes_no_copies(interpret):
    interpret()
    layers, optimizer = make_training()
    train(layers, optimizer, batches(3))
    with Waits() as waits:
        layers[0].weight.lag.settle(None)
    assert waits.largest < ROWS * COLUMNS
    assert waits.calls == []


# --- Ids out of range -----------------------------------------------------------------------


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("bad", [ROWS, -1, 2**32 + 1])
def test_a_bad_id_raises(bad, stale, interpret):
    interpret()
    layers, optimizer = make_training()
    if stale:
        train(layers, optimizer, batches(2))
    with pytest.raises(HotrowError, match=rf"input\[1, 0\] = {bad}, but the table has {ROWS} rows"):
        layers(torch.tensor([[1, 2], [bad, ROWS]]))
    layers(torch.tensor([1]))  # the error is raised once


class DelayedFlag:
    """Hide a bad id from Python until `show` is called, as if the kernel had not run yet."""

    def __init__(self, monkeypatch):
        from hotrow.kernels.triton.id_check import id_check

        check = id_check(torch.device("cpu"))
        self.flag, self.is_visible = check._has_bad_id, False
        monkeypatch.setattr(check, "_has_bad_id", self)

    def show(self):
        self.is_visible = True

    def __getitem__(self, i):
        return self.flag[i] if self.is_visible else 0

    def __setitem__(self, i, value):
        self.flag[i] = value


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "SGD"])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_bad_id_stops_all_later_steps(name, steps_before, interpret, monkeypatch):
    interpret()
    options = {"lr": 0.1, "momentum": 0.9} if name == "SGD" else {}
    layers, optimizer = make_training(name, options)
    rival, other = make_training(name, options)
    train(layers, optimizer, batches(steps_before))
    train(rival, other, batches(steps_before))
    flag = DelayedFlag(monkeypatch)
    bad = torch.tensor([1, ROWS + 3, 2])
    output = layers[0](bad)
    assert output[1].abs().sum() == 0
    output.sum().backward()
    optimizer.step()
    train(layers, optimizer, batches(2, seed=4))
    flag.show()
    with pytest.raises(HotrowError, match=rf"input\[1\] = {ROWS + 3}"):
        layers(torch.tensor([1]))
    # Training continues as if the skipped steps had not been taken.
    train(layers, optimizer, batches(2, seed=5))
    train(rival, other, batches(2, seed=5))
    for ours, expected in zip(values_of(layers, optimizer), values_of(rival, other), strict=True):
        assert_same_bits(ours, expected)


def test_the_error_without_the_ids_names_the_position(interpret, monkeypatch):
    interpret()
    layers, optimizer = make_training()
    flag = DelayedFlag(monkeypatch)
    layers(torch.tensor([[1, 2], [3, ROWS]]))
    flag.show()
    with pytest.raises(HotrowError, match=rf"a table of {ROWS} rows had .*: input\[1, 1\]"):
        optimizer.settle() or layers(torch.tensor([1]))


def test_the_error_waits_for_all_streams_before_it_is_cleared(monkeypatch):
    from hotrow.kernels.triton.id_check import NO_BAD_ID, POSITION_BITS, IdCheck

    check, waits = IdCheck(torch.device("cpu")), []

    def synchronize(device):
        waits.append(device)
        check.bad_id.fill_((7 << POSITION_BITS) + 5)  # as if a stream was still running

    monkeypatch.setattr(check, "_device", torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert check.take_error() is None
    assert waits == []
    check.has_bad_id.fill_(1)
    check.bad_id.fill_((8 << POSITION_BITS) + 2)
    assert check.take_error().position == 5
    assert waits == [torch.device("cuda", 1)]
    assert check.bad_id.item() == NO_BAD_ID
    assert check.take_error() is None


@pytest.mark.parametrize("read", ["step", "state_dict", "weight"])
def test_reads_and_steps_raise_the_error_of_an_earlier_lookup(read, interpret, monkeypatch):
    interpret()
    layers, optimizer = make_training()
    train(layers, optimizer, batches(3))
    flag = DelayedFlag(monkeypatch)
    bad = torch.tensor([ROWS])
    layers(bad).sum().backward()
    flag.show()
    reads = {
        "step": optimizer.step,
        "state_dict": optimizer.state_dict,
        "weight": layers[0].weight.norm,
    }
    with pytest.raises(HotrowError, match=rf"input\[0\] = {ROWS}"):
        reads[read]()


def test_ids_of_the_wrong_dtype(interpret):
    interpret()
    layers, _ = make_training()
    with pytest.raises(HotrowError, match="input is float32"):
        layers(torch.tensor([1.0]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_that_are_not_contiguous(dtype, interpret):
    interpret()
    layers, _ = make_training()
    ids = torch.arange(12, dtype=dtype).view(3, 4)
    for view in (ids.t(), ids[:, ::2], ids[1:, 1]):
        assert_same_bits(layers[0](view).detach(), layers[0].weight.detach()[view.long()])
