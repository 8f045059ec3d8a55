"""A table whose ids select columns trains exactly like a table whose ids select rows."""

import copy
import io
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrow
from hotrow import HotrowError
from hotrow.kernels.cpu.operators import CompiledRows
from hotrow.table.gradient import RowGradient
from hotrow.table.lookup import look_up, look_up_bags
from hotrow.table.parameter import Table
from tests.optim.test_optimizer import (
    COLUMNS,
    ROWS,
    batches,
    dense_model,
    hotrow_optimizer,
    parameter_vector,
    table_model,
    torch_optimizer,
    train,
)
from tests.support.exhaustive import grid
from tests.support.tolerance import assert_no_worse, assert_same_bits
from tests.table.test_parameter import READS, WRITES, Recorder

pytestmark = pytest.mark.usefixtures("small_tables")


class OneHot(nn.Linear):
    """A linear layer for one-hot input that takes ids instead of one-hots."""

    def forward(self, ids):
        return look_up(self.weight, ids, columns=True)


def plain(dtype=torch.float32):
    """Return `dense_model` with its embedding replaced by a linear layer for one-hot input."""
    layers = dense_model(dtype)
    table = layers[0].weight
    layers[0] = OneHot(ROWS, COLUMNS, bias=False)
    layers[0].weight = nn.Parameter(table.detach().t().contiguous())
    return layers


def by_columns(dtype=torch.float32):
    layers = plain(dtype)
    Table.adopt(layers[0].weight, columns=True)
    return layers


OPTIMIZERS = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    ("Adadelta", {}),
    ("RMSprop", {"momentum": 0.9}),
    ("RMSprop", {"centered": True, "weight_decay": 0.1}),
    ("ASGD", {"t0": 10.0}),
    ("Rprop", {}),
]
DECISIVE = OPTIMIZERS[0], OPTIMIZERS[4]
every = pytest.mark.parametrize(
    ("name", "options"),
    grid(OPTIMIZERS, lambda *case: case in (*DECISIVE, OPTIMIZERS[-1])),
    ids=str,
)
some = pytest.mark.parametrize(
    ("name", "options"),
    grid([OPTIMIZERS[i] for i in (0, 4, 8, 12)], lambda *case: case in DECISIVE),
    ids=str,
)
OPTIONS = OPTIMIZERS[3][1]  # missed steps are replayed, so it doesn't matter when rows are read


def trained(make, optimizer, name, options, dtype=torch.float32, steps=40, **how):
    layers = make(dtype)
    chosen = optimizer(name, layers, options)
    train(layers, chosen, batches(steps), **how)
    return layers, chosen


def assert_same_run(columns, rows):
    """Compare the parameters and the optimizer states bit for bit."""
    (layers, optimizer), (others, other) = columns, rows
    assert layers[0].weight.columns
    assert_same_bits(layers[0].weight.t(), others[0].weight.detach())
    assert_same_bits(layers[1].weight, others[1].weight)
    state, expected = optimizer.state[layers[0].weight], other.state[others[0].weight]
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert_same_bits(state[key].t() if value.ndim else state[key], value)


def clip(layers):
    nn.utils.clip_grad_norm_(layers.parameters(), 0.5)


def read(layers, optimizer):
    layers[0].weight.norm()
    layers.state_dict()
    optimizer.state_dict()


# --- Equal to training with rows, and to dense training -------------------------------------


# Test all rules in float32. To save compilation time, test other dtypes only with the first and
# last rules.
FORMS = [(*each, torch.float32) for each in OPTIMIZERS] + [
    (*each, dtype)
    for each in (OPTIMIZERS[0], OPTIMIZERS[-1])
    for dtype in (torch.float64, torch.bfloat16)
]


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    grid(
        FORMS,
        lambda name, options, dtype: (
            (name, options) in (*DECISIVE, OPTIMIZERS[-1])
            and (dtype == torch.float32 or (name, dtype) == ("SGD", torch.bfloat16))
        ),
    ),
)
def test_training_by_columns_has_the_same_bits_as_by_rows(name, options, dtype):
    runs = [
        trained(make, hotrow_optimizer, name, options, dtype) for make in (by_columns, table_model)
    ]
    assert isinstance(runs[0][0][0].weight.grad, RowGradient)
    assert_same_run(*runs)


@some
@pytest.mark.parametrize("how", [{"prepare": clip}, {"after": read}], ids=["clip", "read"])
def test_clipping_or_reading_each_step_keeps_the_same_bits_as_by_rows(name, options, how):
    assert_same_run(
        *(
            trained(make, hotrow_optimizer, name, options, **how)
            for make in (by_columns, table_model)
        )
    )


@every
def test_every_column_matches_dense_training(name, options):
    columns, _ = trained(by_columns, hotrow_optimizer, name, options)
    dense, _ = trained(plain, torch_optimizer, name, options)
    truth, _ = trained(plain, torch_optimizer, name, options, torch.float64)
    assert type(dense[0].weight) is nn.Parameter
    assert_no_worse(*map(parameter_vector, (columns, dense, truth)))


@some
def test_accumulation_bags_and_dense_uses_have_the_same_bits_as_by_rows(name, options):
    found = []
    for make, columns in ((by_columns, True), (table_model, False)):
        layers = make()
        weight, optimizer = layers[0].weight, hotrow_optimizer(name, layers, options)
        for i, (ids, gradient) in enumerate(batches(24)):
            rows = look_up_bags(
                weight, ids.view(4, 3), gradient[:, :3].reshape(4, 9)[:, :3], columns
            )
            (rows * gradient[:4]).sum().backward()
            if i % 8 == 7:
                (weight.t() if columns else weight)[3:6].mul(gradient[:3]).sum().backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=i % 4 == 1)
        found.append((layers, optimizer))
    assert_same_run(*found)


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_a_gradient_scaler_has_the_same_bits_as_by_rows(options):
    found = []
    for make in (by_columns, table_model):
        layers = make()
        optimizer = hotrow.optim.AdamW(layers.parameters(), lr=0.1, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor in (1.0, float("inf"), 1.0, 1.0):
            optimizer.zero_grad()
            scaler.scale(layers(torch.tensor([1, 2])).sum() * factor).backward()
            scaler.unscale_(optimizer)
            clip(layers)
            scaler.step(optimizer)
            scaler.update()
        found.append((layers, optimizer))
    assert_same_run(*found)


# --- Lookups --------------------------------------------------------------------------------

KINDS = ["plain", "table", "the other table"]


def weight_of(kind, columns, dtype=torch.float64):
    torch.manual_seed(1)
    weight = torch.randn(7, 3).to(dtype)
    weight = nn.Parameter(weight.t().contiguous() if columns else weight)
    if kind == "plain":
        return weight
    return Table.adopt(weight, columns=columns == (kind == "table"))


def gradient_of(weight, columns):
    gradient = weight.grad.as_dense() if isinstance(weight.grad, RowGradient) else weight.grad
    return gradient.t() if columns else gradient


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,)], ids=str)
def test_a_lookup_equals_the_one_hot_product(kind, columns, shape):
    weight, ids = weight_of(kind, columns), torch.randint(7, shape, dtype=torch.int32)
    expected = weight_of("plain", columns)
    cotangent = torch.randn(*shape, 3, dtype=torch.float64)
    found = look_up(weight, ids, columns)
    selected = F.linear(F.one_hot(ids.long(), 7).double(), expected if columns else expected.t())
    assert_same_bits(found, selected.detach())
    found.backward(cotangent)
    selected.backward(cotangent)
    assert isinstance(weight.grad, RowGradient) == (kind == "table")
    torch.testing.assert_close(gradient_of(weight, columns), gradient_of(expected, columns))


@pytest.mark.parametrize("columns", [True, False])
def test_the_weight_may_change_between_forward_and_backward(columns):
    """The gradient of a lookup does not depend on the values of the weight."""
    weight, ids = weight_of("plain", columns), torch.tensor([1, 6, 1])
    output = look_up(weight, ids, columns)
    with torch.no_grad():
        weight.clamp_(-0.1, 0.1)
    output.sum().backward()
    assert gradient_of(weight, columns)[:, 0].tolist() == [0, 2, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3), (4, 1)], ids=str)
def test_bags_are_weighted_sums_of_rows(kind, columns, weighted, shape):
    weight, ids = weight_of(kind, columns), torch.randint(7, shape)
    expected = weight_of("plain", columns)
    scales = [torch.rand(shape).double().requires_grad_() for _ in range(2)]
    scales[1].data = scales[0].data
    cotangent = torch.randn(shape[0], 3, dtype=torch.float64)
    found = look_up_bags(weight, ids, scales[0] if weighted else None, columns)
    rows = (expected.t() if columns else expected)[ids]
    summed = (rows * scales[1].unsqueeze(-1) if weighted else rows).sum(1)
    torch.testing.assert_close(found, summed)
    found.backward(cotangent)
    summed.backward(cotangent)
    torch.testing.assert_close(gradient_of(weight, columns), gradient_of(expected, columns))
    assert isinstance(weight.grad, RowGradient) == (kind == "table")
    if weighted:
        torch.testing.assert_close(scales[0].grad, scales[1].grad)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [torch.int64, torch.float32])
def test_bags_support_dtypes_that_torch_does_not(dtype, scale):
    weight, ids = torch.arange(8).view(4, 2).to(dtype), torch.tensor([[1, 3], [0, 0]])
    scales = torch.tensor([[2, 1], [1, 3]]).to(scale)
    found = look_up_bags(weight, ids, scales)
    assert found.dtype == torch.promote_types(dtype, scale)
    assert found.tolist() == [[10, 13], [0, 4]]
    assert look_up_bags(weight, ids).tolist() == [[8, 10], [0, 2]]
    assert look_up_bags(weight.t(), ids, columns=True).dtype == dtype


@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize("call", [look_up, look_up_bags])
def test_a_gradient_has_the_strides_of_the_weight(columns, is_transposed, call):
    ids = torch.tensor([[4, 2, 4], [0, 0, 1]])
    values = torch.randn((3, 7) if columns else (7, 3))
    weight = values.t().contiguous().t() if is_transposed else values
    results = []
    for each in (weight.requires_grad_(), values.clone().requires_grad_()):
        output = call(each, ids, columns=columns)
        [gradient] = torch.autograd.grad(output.pow(2).sum(), [each])
        assert gradient.stride() == each.stride()
        results.append(torch.cat([output.detach().flatten(), gradient.flatten()]))
    assert_same_bits(*results)


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated")  # torch does so
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", [look_up, look_up_bags])
def test_a_gradient_by_columns_is_contiguous(compiled, dtype, call):
    weight, ids = nn.Parameter(torch.randn(3, 7, dtype=dtype)), torch.tensor([[4, 2, 4], [0, 0, 1]])
    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    outputs = run(weight, ids, columns=True), F.embedding(ids, weight.t())
    if call is look_up_bags:
        outputs = outputs[0], outputs[1].sum(1)
    found, expected = (torch.autograd.grad(each.sum(), [weight])[0] for each in outputs)
    assert found.is_contiguous()
    assert_same_bits(found, expected)


@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("call", [look_up, look_up_bags])
def test_a_bad_id_raises_before_anything_settles(columns, call):
    weight = weight_of("table", columns)
    weight.lag = lag = Recorder()
    with pytest.raises(IndexError, match=r"the table has 7 rows \(valid ids: 0\.\.6\)"):
        call(weight, torch.tensor([[1, 7]]), columns=columns)
    assert lag.calls == []


def test_a_lookup_settles_the_rows_that_it_reads():
    weight, ids = weight_of("table", True, torch.float32), torch.tensor([[4, 2, 4]])
    weight.lag = lag = Recorder()
    with torch.no_grad():
        look_up(weight, ids, columns=True)
        look_up_bags(weight, ids, columns=True)
    assert [sorted(call) for call in lag.calls] == [[2, 4]] * 2
    assert look_up(weight, ids, columns=True).unique().tolist() == [7.0]
    assert [sorted(call) for call in lag.calls] == [[2, 4]] * 3
    with torch._C.DisableTorchFunctionSubclass():
        look_up(weight, torch.tensor([0]))  # a row lookup reads the weight as a dense matrix
    F.embedding(torch.tensor([0]), weight)
    F.embedding_bag(torch.tensor([[0]]), weight)
    assert lag.calls[3:] == [None] * 3


# --- The gradient ---------------------------------------------------------------------------


def twins():
    """Return a table whose ids select columns, and a plain parameter with the same values."""
    torch.manual_seed(2)
    values = torch.randn(10, 3)
    return Table.adopt(nn.Parameter(values.clone()), columns=True), nn.Parameter(values)


def backward(weight, *ids):
    look_up(weight, torch.tensor(ids), columns=True).pow(2).sum().backward()


@pytest.mark.parametrize("name", WRITES)
def test_in_place_writes_to_a_gradient_match_dense(name):
    results = []
    for weight in twins():
        backward(weight, 2, 0, 2)
        WRITES[name](weight.grad)
        backward(weight, 0)
        gradient = weight.grad
        results.append(gradient.as_dense() if isinstance(gradient, RowGradient) else gradient)
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


USES = {
    "clone": lambda g: g.clone(),
    "scaled": lambda g: g * 3,
    "clamped": lambda g: g.clamp(-0.1, 0.1),
    "abs": lambda g: g.abs(),
    "exp": lambda g: g.exp(),
    "row": lambda g: g[4],
    "double": lambda g: g.double(),
    "detach": lambda g: g.detach(),
    "data": lambda g: g.data,
    "doubled": lambda g: g + g,
    "and dense": lambda g: g + torch.arange(30.0).view(10, 3),
    "dense and": lambda g: torch.arange(30.0).view(10, 3) + g,
    "transposed": lambda g: g.t(),
    "numpy": lambda g: torch.from_numpy(g.numpy()),
    "list": lambda g: torch.tensor(g.tolist()),
    "deep copy": lambda g: copy.deepcopy(g),
    "flat": lambda g: (g.view(-1).mul_(2), g)[1],
    "flattened": lambda g: (g.flatten().mul_(2), g)[1],
    "reshaped": lambda g: (g.reshape(-1).mul_(2), g.reshape(30), g)[2],
    "raveled": lambda g: (g.ravel().mul_(2), g)[1],
    "contiguous": lambda g: (g.contiguous().mul_(2), g)[1],
    "flat function": lambda g: (torch.flatten(g).mul_(2), g)[1],
    "strided": lambda g: (g.as_strided((3,), (4,), 1).fill_(2.0), g)[1],
    "zeroed": lambda g: g.zero_(),
    "a view, then zeroed": lambda g: (g[:3], g.zero_())[1],
    "scaled in place": lambda g: g.detach().mul_(0.5),
}


@pytest.mark.parametrize("name", USES)
def test_reads_of_a_gradient_match_dense(name):
    results = []
    for weight in twins():
        backward(weight, 2, 0, 2)
        found = USES[name](weight.grad)
        results.append(found.as_dense() if isinstance(found, RowGradient) else found)
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


def test_a_gradient_stores_only_touched_columns():
    weight, _ = twins()
    backward(weight, 2, 0, 2)
    gradient = weight.grad.merge()
    assert (gradient.shape, gradient.stride(), gradient.count) == ((10, 3), (3, 1), 3)
    assert gradient.ids.tolist() == [2, 0]
    assert gradient.rows.shape == (2, 10)
    assert all(isinstance(g, RowGradient) for g in (gradient * 2, gradient.double(), gradient.data))


@pytest.mark.filterwarnings("ignore:.* updates every row")
@pytest.mark.parametrize("ids", [[2, 0, 1, 2], [1]])
def test_a_gradient_with_all_columns_has_the_memory_order_of_its_strides(ids):
    found = []
    for weight in twins():
        backward(weight, *ids)
        with torch.no_grad():
            weight.grad.add_(torch.arange(30.0).view(10, 3))
            weight.grad.mul_(2)
        assert isinstance(weight.grad, RowGradient) == isinstance(weight, Table)
        optimizer = torch.optim.SGD([weight], lr=0.5, fused=True)
        optimizer.step()
        found += [weight.grad.as_strided((30,), (1,)), weight.detach()]
    for ours, expected in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(ours, expected)


def test_gradients_by_rows_and_by_columns_add_up():
    square = torch.arange(9.0).view(3, 3)
    rows, columns = (Table.adopt(nn.Parameter(square.clone()), c) for c in (False, True))
    look_up(rows, torch.tensor([1])).sum().backward()
    look_up(columns, torch.tensor([1]), columns=True).sum().backward()
    expected = torch.tensor([[0.0, 1, 0], [1, 2, 1], [0, 1, 0]])
    assert_same_bits((rows.grad + columns.grad).as_dense(), expected)
    assert_same_bits((columns.grad + rows.grad).as_dense(), expected)


# --- The parameter --------------------------------------------------------------------------


def lagging(name="Adam", options=OPTIONS):
    layers, optimizer = trained(by_columns, hotrow_optimizer, name, options, steps=6)
    assert layers[0].weight.lag.has_stale_rows
    return layers, optimizer


def test_adopt_keeps_the_object_and_its_shape():
    layers = plain()
    weight, before = layers[0].weight, layers[0].weight.detach().clone()
    assert Table.adopt(weight, columns=True) is weight is layers[0].weight
    assert Table.adopt(weight, columns=True) is weight
    assert_same_bits(weight.detach(), before)
    assert weight.is_contiguous()
    assert weight.raw_rows.shape == (ROWS, COLUMNS)
    assert type(weight.raw_rows) is torch.Tensor
    assert weight.raw_rows.data_ptr() == weight.data_ptr()
    assert_same_bits(layers.state_dict()["0.weight"], before)
    rows = Table.adopt(nn.Parameter(torch.ones(2, 3)))
    assert (rows.columns, rows.raw_rows.shape) == (False, (2, 3))


@pytest.mark.parametrize("columns", [True, False])
def test_a_table_cannot_be_by_rows_and_by_columns(columns):
    weight = Table.adopt(nn.Parameter(torch.ones(2, 3)), columns)
    text = r"ids already select the (rows|columns) of the table of shape \(2, 3\), so they cannot"
    with pytest.raises(HotrowError, match=text):
        Table.adopt(weight, not columns)


@pytest.mark.parametrize("name", [name for name in READS if name not in ("state_dict", "move")])
def test_any_read_settles_all_columns(name):
    layers = nn.Sequential(OneHot(6, 3, bias=False))
    weight = Table.adopt(layers[0].weight, columns=True)
    weight.lag = lag = Recorder()
    if name == "linear":
        F.linear(torch.ones(6), weight)
    elif name == "scatter":
        weight.index_select(1, torch.tensor([2]))
    elif name == "index":
        weight[:, 3]
    else:
        READS[name](layers, weight)
    assert None in lag.calls


def test_a_deep_copy_continues_training():
    layers, optimizer = lagging()
    other, successor = copy.deepcopy((layers, optimizer))
    assert other[0].weight.columns
    assert other[0].weight.is_contiguous()
    for each, chosen in ((layers, optimizer), (other, successor)):
        train(each, chosen, batches(6, seed=1))
    assert isinstance(other[0].weight.grad, RowGradient)
    assert_same_bits(other[0].weight.detach(), layers[0].weight.detach())


def test_saved_files_match_torchs():
    layers, optimizer = lagging()
    expected, _ = trained(plain, torch_optimizer, "Adam", OPTIONS, steps=6)
    file = io.BytesIO()
    torch.save((layers, optimizer), file)
    file.seek(0)
    loaded, chosen = torch.load(file, weights_only=False)
    weight = loaded[0].weight
    assert type(weight) is nn.Parameter
    assert weight.is_contiguous()
    assert all(v.is_contiguous() for v in chosen.state[weight].values())
    torch.testing.assert_close(weight, expected[0].weight)
    assert all(v.is_contiguous() for v in optimizer.state_dict()["state"][0].values())
    assert all(
        v.shape == (COLUMNS, ROWS) for v in optimizer.state[layers[0].weight].values() if v.ndim
    )


def test_another_process_shares_the_storage():
    layers, _ = lagging()
    ForkingPickler(io.BytesIO()).dump(layers[0].weight)
    assert layers[0].weight.is_shared()


CHANGES = {
    "moved": lambda m, w: m.double(),
    "loaded": lambda m, w: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "data": lambda m, w: setattr(
        w, "data", torch.linspace(-1, 1, w.numel()).view(w.shape).to(w.dtype)
    ),
    "data with an alias": lambda m, w: (
        KEPT.append(torch.linspace(-1, 1, w.numel()).view(w.shape).to(w.dtype))
        or setattr(w, "data", KEPT[-1])
    ),
    "written": lambda m, w: w.data[2].fill_(7.0),
    "from a vector": lambda m, w: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(m.parameters()).detach() * 0.5, m.parameters()
    ),
    "shared": lambda m, w: m.share_memory(),
}
KEPT = []


@pytest.mark.parametrize("name", CHANGES)
def test_training_continues_from_a_changed_parameter(name):
    found = []
    for make, optimizer in (
        (by_columns, hotrow_optimizer),
        (plain, torch_optimizer),
        (plain, torch_optimizer),
    ):
        layers = make(torch.float64 if len(found) == 2 else torch.float32)
        train(layers, optimizer("Adam", layers, OPTIONS), batches(6))
        CHANGES[name](layers, layers[0].weight)
        train(layers, optimizer("Adam", layers, OPTIONS), batches(6, seed=1))
        found.append(layers)
    if name == "data with an alias":
        assert_same_bits(KEPT[-3], found[0][0].weight.detach())
    columns, dense, truth = (
        torch.cat([p.detach().flatten() for p in m.parameters()]) for m in found
    )
    if name == "moved":
        torch.testing.assert_close(columns, dense, rtol=1e-5, atol=1e-6)
    else:
        assert_no_worse(columns, dense, truth)


@pytest.mark.parametrize(
    "dtype", grid([torch.float32, torch.bfloat16], lambda dtype: dtype == torch.float32)
)
def test_training_by_columns_never_moves_the_weight(dtype):
    layers = plain(dtype)
    weight = layers[0].weight
    pointer = weight.data_ptr()
    optimizer = hotrow_optimizer("Adam", layers, OPTIONS)
    for has_alias in (True, False):
        alias = weight.detach() if has_alias else None
        train(layers, optimizer, batches(3))
        assert isinstance(weight.grad, RowGradient)
        assert isinstance(weight.lag.rows()._operators, CompiledRows)
        for each in (weight, weight.grad, optimizer.state[weight]["exp_avg"]):
            assert each.is_contiguous()
        assert alias is None or torch.equal(alias, weight)
        assert weight.data_ptr() == weight.view(-1).data_ptr() == pointer


FILLS = {
    "normal": nn.init.normal_,
    "orthogonal": nn.init.orthogonal_,
    "noise": lambda w: w.add_(torch.randn_like(w)),
    "dropout": lambda w: w.copy_(F.dropout(w)),
    "flat": lambda w: w.flatten().mul_(torch.arange(w.numel())),
    "strided": lambda w: w.as_strided((3,), (5,), 2).fill_(7.0),
    "contiguous": lambda w: w.contiguous().add_(1),
}


@pytest.mark.parametrize("name", FILLS)
def test_writes_that_depend_on_the_memory_order_match_torch(name):
    found = []
    for layers, _ in (lagging(), trained(plain, torch_optimizer, "Adam", OPTIONS, steps=6)):
        torch.manual_seed(3)
        with torch.no_grad():
            FILLS[name](layers[0].weight)
        found.append(layers[0].weight.detach())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("what", ["weight", "state"])
def test_an_alias_shows_the_values_of_dense_training(what):
    found = []
    for layers, optimizer in (lagging(), trained(plain, torch_optimizer, "Adam", OPTIONS, steps=6)):
        weight = layers[0].weight
        alias = weight.data if what == "weight" else optimizer.state[weight]["exp_avg"]
        train(layers, optimizer, batches(6, seed=1))
        found.append(alias)
        if isinstance(weight, Table):
            assert not weight.lag.has_stale_rows
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_training_continues_after_an_in_place_transpose_of_a_square_table():
    values = torch.randn(3, 3)
    table, plain = nn.Parameter(values.clone()), nn.Parameter(values)
    Table.adopt(table, columns=True)
    optimizers = hotrow.optim.AdamW([table], lr=0.1), torch.optim.AdamW([plain], lr=0.1)
    for weight, optimizer in zip((table, plain), optimizers, strict=True):
        for t in range(6):
            optimizer.zero_grad()
            backward(weight, t % 3)
            optimizer.step()
            if t == 3:
                with torch.no_grad():
                    weight.t_()
    assert type(table.grad) is torch.Tensor  # autograd copies it to the weight's strides
    torch.testing.assert_close(table.detach(), plain.detach())


# --- Checkpoints ----------------------------------------------------------------------------


@every
def test_a_run_moves_from_torch_to_hotrow_and_back(name, options):
    steps = list(batches(30))
    truth, rival = plain(torch.float64), plain()
    for each in (truth, rival):
        train(each, torch_optimizer(name, each, options), steps)
    layers = plain()
    optimizer = torch_optimizer(name, layers, options)
    for part, (make, others) in enumerate(
        ((plain, torch_optimizer), (by_columns, hotrow_optimizer), (plain, torch_optimizer))
    ):
        if part:
            following = make()
            following.load_state_dict(layers.state_dict())
            successor = others(name, following, options)
            successor.load_state_dict(optimizer.state_dict())
            layers, optimizer = following, successor
        train(layers, optimizer, steps[10 * part : 10 * part + 10])
    assert_no_worse(*map(parameter_vector, (layers, rival, truth)))


@some
def test_a_resumed_run_has_the_same_bits(name, options):
    steps = list(batches(24))
    layers = by_columns()
    optimizer = hotrow_optimizer(name, layers, options)
    train(layers, optimizer, steps[:12])
    saved = copy.deepcopy((layers.state_dict(), optimizer.state_dict()))
    train(layers, optimizer, steps[12:])
    resumed = by_columns()
    resumed.load_state_dict(saved[0])
    other = hotrow_optimizer(name, resumed, options)
    other.load_state_dict(saved[1])
    train(resumed, other, steps[12:])
    assert isinstance(resumed[0].weight.grad, RowGradient)
    assert_same_bits(resumed[0].weight.detach(), layers[0].weight.detach())


@pytest.mark.parametrize("has_alias", [True, False])
def test_a_transposed_state_trains_like_a_contiguous_one(has_alias):
    found = []
    for transposes in (True, False):
        layers, optimizer = lagging()
        state, kept = optimizer.state[layers[0].weight], None
        if transposes:
            kept = state["exp_avg"].t().contiguous().t()
            state["exp_avg"] = kept
        if not has_alias:
            del kept
        train(layers, optimizer, batches(6))
        assert isinstance(layers[0].weight.grad, RowGradient)
        found.append(layers[0].weight.detach())
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_a_run_with_fused_steps_moves_from_torch_to_hotrow_and_back(name):
    options = {"lr": 0.01, "fused": True} | ({"momentum": 0.9} if name == "SGD" else {})
    found = []
    for make, chosen in ((by_columns, hotrow_optimizer), (plain, torch_optimizer)):
        layers = plain()
        optimizer = torch_optimizer(name, layers, options)
        train(layers, optimizer, batches(4))
        following = make()
        following.load_state_dict(layers.state_dict())
        successor = chosen(name, following, options)
        successor.load_state_dict(optimizer.state_dict())
        for i in range(6):  # the first step is dense; some gradients are dense
            successor.zero_grad()
            if i % 3:
                look_up(following[0].weight, torch.tensor([i]), columns=True).sum().backward()
            else:
                gradient = torch.linspace(-1, 1, COLUMNS * ROWS).view(COLUMNS, ROWS)
                following[0].weight.grad = gradient
            if i % 3 == 2:
                F.linear(torch.ones(ROWS), following[0].weight).sum().backward()
            successor.step()
        last = plain()
        last.load_state_dict(following.state_dict())
        optimizer = torch_optimizer(name, last, options)
        optimizer.load_state_dict(successor.state_dict())
        train(last, optimizer, batches(4))
        found.append(parameter_vector(last))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.* updates every row")
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("is_loaded", [True, False])
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("closure", [True, False])
def test_torchs_fused_optimizers_train_a_table(name, is_loaded, dense, closure):
    options = {"lr": 0.01, "fused": True} | ({"momentum": 0.9} if name == "SGD" else {})
    found = []
    for make, chosen in ((by_columns, hotrow_optimizer), (plain, torch_optimizer)):
        layers = make()
        earlier = chosen(name, layers, options)
        train(layers, earlier, batches(4))
        optimizer = torch_optimizer(name, layers, options)
        if is_loaded:
            optimizer.load_state_dict(earlier.state_dict())

        def backward(id, layers=layers, optimizer=optimizer):
            optimizer.zero_grad()
            loss = layers(torch.tensor([id])).pow(2).sum()
            (loss + layers[0].weight.pow(2).sum() if dense else loss).backward()
            return loss

        for id in (2, 0, 7):
            if closure:
                optimizer.step(lambda id=id, backward=backward: backward(id))
            else:
                backward(id)
                optimizer.step()
        assert isinstance(layers[0].weight, Table) == (make is by_columns)
        following = plain()  # a resumed run, without hotrow
        following.load_state_dict(layers.state_dict())
        successor = torch_optimizer(name, following, options)
        successor.load_state_dict(optimizer.state_dict())
        train(following, successor, batches(4))
        found.append(torch.cat([layers[0].weight.detach(), following[0].weight.detach()]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_an_assigned_checkpoint_continues_with_fused_steps(name):
    options = {"lr": 0.01, "fused": True} | ({"momentum": 0.9} if name == "SGD" else {})
    found = []
    for make, chosen in ((by_columns, hotrow_optimizer), (plain, torch_optimizer)):
        layers = make()
        optimizer = chosen(name, layers, options)
        train(layers, optimizer, batches(4))
        following = plain()
        following.load_state_dict(copy.deepcopy(layers.state_dict()), assign=True)
        successor = chosen(name, following, options)
        successor.load_state_dict(optimizer.state_dict())
        train(following, successor, batches(4))
        found.append(parameter_vector(following))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("flat", [torch.flatten, Tensor.flatten, Tensor.ravel, Tensor.contiguous])
def test_a_gradient_penalty_of_another_shape_has_a_gradient(flat):
    found = []
    for weight in twins():
        loss = look_up(weight, torch.tensor([2, 0, 2]), columns=True).pow(3).sum()
        [gradient] = torch.autograd.grad(loss, [weight], create_graph=True)
        flat(gradient).pow(2).sum().backward()
        grad = weight.grad
        found.append(grad.as_dense() if isinstance(grad, RowGradient) else grad)
    torch.testing.assert_close(*found)


def test_inference_mode_does_not_stop_gradients():
    layers = by_columns()
    optimizer = hotrow_optimizer("SGD", layers, {"lr": 0.1})
    train(layers, optimizer, batches(2))
    weight = layers[0].weight
    with torch.inference_mode():
        assert weight.view(-1).shape == (ROWS * COLUMNS,)
        layers(torch.tensor([1]))
    assert not weight.is_inference()
    optimizer.zero_grad()
    weight.square().sum().backward()
    assert_same_bits(weight.grad, 2 * weight.detach())


def test_a_saved_state_has_the_strides_that_torchs_would_have():
    transposed = nn.Embedding(7, 3, _weight=torch.randn(3, 7).t())
    transposed.register_buffer("alias", transposed.weight.data)  # otherwise, convert copies it
    layers = by_columns(), hotrow.convert(transposed, min_entries=0)
    for model in layers:
        optimizer = hotrow.optim.Adam(model.parameters())
        model(torch.tensor([1])).sum().backward()
        optimizer.step()
        strides = optimizer.state_dict()["state"][0]["exp_avg"].stride()
        assert strides == ((1, 7) if model is layers[1] else (ROWS, 1))
    assert isinstance(transposed.weight, Table)


# --- Parameters that become tables when they are looked up ----------------------------------


@every
@pytest.mark.parametrize("columns", [True, False])
def test_a_parameter_with_lookups_becomes_a_table(name, options, columns):
    found = []
    for optimizer, dtype in (
        (hotrow_optimizer, torch.float32),
        (torch_optimizer, torch.float32),
        (torch_optimizer, torch.float64),
    ):
        layers = plain(dtype)
        if not columns:
            layers[0] = dense_model(dtype)[0]
            layers[0].forward = lambda ids, layer=layers[0]: look_up(layer.weight, ids)
        chosen = optimizer(name, layers, options)
        for i, batch in enumerate(batches(30)):
            train(layers, chosen, [batch])
            assert isinstance(layers[0].weight, Table) == (optimizer is hotrow_optimizer)
            learned = i > 0 and optimizer is hotrow_optimizer
            assert isinstance(layers[0].weight.grad, RowGradient) == learned
        found.append(layers)
    assert found[0][0].weight.columns == columns
    assert_no_worse(*map(parameter_vector, found))


def test_only_trained_parameters_are_marked_as_lookup_tables():
    ids = torch.tensor([1, 2])
    frozen, whole = nn.Parameter(torch.ones(3, 4), requires_grad=False), nn.Parameter(torch.ones(3))
    quiet, leaf = nn.Parameter(torch.ones(3, 4)), torch.ones(3, 4, requires_grad=True)
    for weight in (frozen, leaf, quiet * 1):
        look_up(weight, ids)
    with torch.no_grad():
        look_up(quiet, ids)
    with pytest.raises(RuntimeError):
        look_up(whole, ids)
    torch.compile(lambda w: look_up(w, ids, True), backend="eager", fullgraph=True)(quiet)
    computed = nn.utils.parametrizations.weight_norm(OneHot(4, 3, bias=False))
    computed(ids)
    for weight in (frozen, whole, leaf, quiet, *computed.parameters()):
        assert not hasattr(weight, "lookup_axis")
    for columns, mark in ((True, "columns"), (False, "rows")):
        look_up_bags(quiet, ids[None], columns=columns)
        assert quiet.lookup_axis == mark


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_a_parameter_with_unsupported_options_stays_dense(option):
    layers = plain()
    optimizer = hotrow.optim.Adam(layers.parameters(), foreach=False)
    optimizer.param_groups[0][option] = True
    layers(torch.tensor([1])).sum().backward()
    optimizer._adopt_tables()
    assert layers[0].weight.lookup_axis == "columns"
    assert type(layers[0].weight) is nn.Parameter
    optimizer.param_groups[0][option] = False
    optimizer.step()
    assert isinstance(layers[0].weight, Table)


def test_zero_grad_to_zeros_matches_dense_training():
    found = []
    for optimizer in (hotrow_optimizer, torch_optimizer):
        layers = plain()
        chosen = optimizer("Adam", layers, OPTIONS)
        for ids, gradient in batches(4):
            chosen.zero_grad(set_to_none=False)
            (layers[0](ids) * gradient).sum().backward()
            chosen.step()
        found.append(layers[0].weight.detach())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_graph", [True, False])
def test_a_compiled_model_reads_settled_rows(in_graph):
    call = lambda weight, ids: look_up(weight, ids, True)  # noqa: E731
    call = torch.compiler.allow_in_graph(call) if in_graph else call
    compiled = torch.compile(call, backend="aot_eager", fullgraph=in_graph and None)
    found = []
    for optimizer in (hotrow_optimizer, torch_optimizer):
        layers = plain()
        chosen, seen = optimizer("AdamW", layers, {"lr": 0.1, "weight_decay": 0.1}), []
        for i, (ids, gradient) in enumerate(batches(12)):
            chosen.zero_grad()
            way = compiled if i % 3 == 1 else call  # compiled lookups don't mark the weight
            (way(layers[0].weight, ids) * gradient).sum().backward()
            chosen.step()
            with torch.set_grad_enabled(i % 2 == 1):
                seen.append(compiled(layers[0].weight, torch.tensor([ROWS - 1, 7])).detach())
        found.append(torch.cat([*seen, layers[0].weight.detach().t()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_small_parameter_is_not_marked(monkeypatch):
    monkeypatch.setattr("hotrow.table.lookup.MIN_TABLE_ENTRIES", 13)
    weights = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(13, 1))
    for weight in weights:
        look_up(weight, torch.tensor([1]))
    assert [hasattr(weight, "lookup_axis") for weight in weights] == [False, True]
