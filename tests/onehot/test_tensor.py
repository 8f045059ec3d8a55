"""A `one_hot` tensor behaves like the result of `F.one_hot`, but stores only the ids."""

import copy
import io
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hotrow import HotrowError
from hotrow.onehot.encoding import one_hot
from hotrow.onehot.results import meta_result, meta_tensor
from hotrow.onehot.tensor import OneHot
from tests.support.exhaustive import exhaustive, grid
from tests.support.onehots import (
    CLASSES,
    IDS,
    LargestAllocation,
    assert_alike,
    outcome,
    saved_file,
    to_dense,
    twins,
)
from tests.support.tolerance import assert_rounded, assert_same_bits, assert_same_numbers

TABLE = torch.randn(CLASSES, 4, generator=torch.Generator().manual_seed(5))


def expressions(text):
    """Parametrize a test with expressions that use `x`, one per line."""
    names = {"torch": torch, "F": F, "np": np, "copy": copy, "W": TABLE, "pickle": pickle}
    names["saved_file"] = saved_file
    lines = [line.strip() for line in text.strip().splitlines()]
    runs = [eval(f"lambda x: ({line})", names) for line in lines]
    return pytest.mark.parametrize(
        "run", [pytest.param(r, id=t) for r, t in zip(runs, lines, strict=True)]
    )


def statements(text):
    """Parametrize a test with one case per line: statements with `x`, then the value to compare."""
    cases = []
    for line in text.strip().splitlines():
        *before, result = [part.strip() for part in line.split(";")]
        code = "".join(f"    {each}\n" for each in before)
        names = {"torch": torch, "F": F, "np": np, "W": TABLE}
        exec(f"def run(x):\n{code}    return {result}", names)
        cases.append(pytest.param(names["run"], id=line.strip()))
    return pytest.mark.parametrize("run", cases)


# --- Construction --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.int64, torch.int32, torch.uint8, torch.bool),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (2, 0), (0,), (2, 1, 3)], ids=str)
def test_equals_torch_one_hot(shape, dtype):
    ids = torch.randint(0, 6, shape)
    assert_alike(one_hot(ids, 6, dtype), F.one_hot(ids, 6).to(dtype))


def test_infers_num_classes_like_torch():
    for ids in (IDS, torch.tensor(3), torch.tensor([0]), torch.zeros(2, 2, dtype=torch.int64)):
        assert_alike(one_hot(ids), F.one_hot(ids))
        assert_alike(one_hot(ids, -1), F.one_hot(ids, -1))


def test_accepts_lists_arrays_and_integer_tensors():
    for ids in ([[1, 0, 4], [2, 2, 3]], IDS.numpy(), IDS.int(), IDS):
        assert_alike(one_hot(ids, 5), F.one_hot(IDS, 5))
    assert_alike(one_hot(3, 5), F.one_hot(torch.tensor(3), 5))
    assert_alike(one_hot([], 5), F.one_hot(torch.zeros(0, dtype=torch.int64), 5))


def test_copies_its_ids():
    ids = IDS.clone()
    x = one_hot(ids, 5, torch.float32)
    ids.zero_()
    assert_same_bits(x @ TABLE, F.one_hot(IDS, 5).float() @ TABLE)


@pytest.mark.parametrize(
    ("ids", "classes", "message"),
    [
        ([[1, 5]], 5, "ids[0, 1] = 5, but the one-hot has 5 classes (valid ids: 0..4)"),
        ([1, -1], 5, "ids[1] = -1, but the one-hot has 5 classes (valid ids: 0..4)"),
        ([0], 0, "num_classes = 0, but a one-hot needs at least 1 class"),
        ([], -1, "num_classes = -1, but a one-hot needs at least 1 class"),
        ([-2], -1, "ids[0] = -2, but the one-hot has 1 classes (valid ids: 0..0)"),
    ],
)
def test_id_without_a_column_raises(ids, classes, message):
    with pytest.raises(RuntimeError) as raised:  # F.one_hot raises RuntimeError
        one_hot(ids, classes)
    assert isinstance(raised.value, HotrowError)
    assert isinstance(raised.value, IndexError)
    assert message in str(raised.value)
    with pytest.raises(RuntimeError):
        F.one_hot(torch.tensor(ids, dtype=torch.int64), classes)


@pytest.mark.parametrize("ids", [torch.tensor([1.0]), torch.tensor([True]), "ab"])
def test_non_integer_ids_raise(ids):
    with pytest.raises(HotrowError, match="ids"):
        one_hot(ids, 5)


@expressions(
    """
    x
    1 - x
    x.exp() * 2
    x[0].gather(1, x[0].argmax(1, keepdim=True))
    x * x.flip(0)
    x @ W.to("meta")
    """
)
def test_meta_ids_give_a_meta_one_hot(run):
    ours, dense = (run(make(IDS.to("meta"), 5).float()) for make in (one_hot, F.one_hot))
    assert ours.is_meta
    assert (ours.shape, ours.dtype) == (dense.shape, dense.dtype)
    moved = run(twins()[1].to("meta"))
    assert moved.is_meta
    assert (moved.shape, moved.dtype) == (dense.shape, dense.dtype)


# --- Attributes, printing and copies -------------------------------------------------------


@expressions(
    """
    x.shape
    x.size()
    x.size(-1)
    x.dim()
    x.ndim
    x.numel()
    x.nelement()
    x.stride()
    x.is_contiguous()
    x.storage_offset()
    x.element_size()
    x.itemsize
    x.nbytes
    x.untyped_storage().nbytes()
    x.dtype
    x.device
    x.layout
    x.is_floating_point()
    x.is_complex()
    x.is_signed()
    x.is_leaf
    x.requires_grad
    x.grad
    x.grad_fn
    x.is_inference()
    x.is_sparse
    x.dim_order()
    len(x)
    repr(x)
    str(x)
    f"{x}"
    f"{x[0, 0, 1]}"
    list(x)
    [row @ W for row in x]
    x.tolist()
    x[0, 0, 1].item()
    float(x[0, 0, 1])
    bool(x[0, 0, 1])
    bool(x)
    x.item()
    1 in x
    x in [x]
    isinstance(x, torch.Tensor)
    torch.is_tensor(x)
    torch.equal(x, x)
    x.equal(x)
    torch.empty_like(x).shape
    torch.ones_like(x)
    x.new_zeros(3)
    x.new_tensor([1.0])
    torch.as_tensor(x)
    torch.utils.data.default_collate([x, x])
    torch.from_dlpack(x)
    torch.from_numpy(np.from_dlpack(x))
    torch.from_numpy(x.numpy())
    torch.from_numpy(np.asarray(x))
    torch.from_numpy(np.array(x))
    torch.from_numpy(np.stack([x, x]))
    torch.ones(2, 3, 5)[x.bool()]
    torch.ones(2, 3, 5).copy_(x)
    torch.ones(2, 3, 5) + x
    torch.tensor(2.0) * x
    x[0].T
    x.mT
    x[0].t()
    x.real
    x.data
    x.view_as(x)
    torch.zeros(30).view_as(x)
    torch.zeros(3, 1).expand_as(x[0])
    torch.zeros(3, dtype=torch.int64).type_as(x)
    torch.zeros(3, dtype=torch.int64).to(x)
    """
)
def test_attributes_match_the_dense_one_hot(run):
    for dtype in (torch.float32, torch.int64):
        dense, ours = twins(dtype)
        assert_alike(outcome(run, ours), outcome(run, dense))


def test_prints_requires_grad():
    dense, ours = twins(requires_grad=True)
    assert repr(ours) == repr(dense)
    assert ours.tolist() == dense.tolist()
    with pytest.raises(RuntimeError, match="detach"):
        ours.numpy()


def test_is_hashable_and_accepts_attributes():
    ours = twins()[1]
    ours.note = 3
    assert {ours: ours.note}[ours] == 3


@expressions(
    """
    pickle.loads(pickle.dumps(x))
    pickle.loads(pickle.dumps([x, x[0]]))
    copy.deepcopy(x)
    copy.deepcopy({"a": [x, x[0]]})["a"]
    copy.copy(x)
    torch.load(saved_file(x))
    torch.load(saved_file([x, x[0]]), weights_only=True)
    """
)
def test_leaves_pytorch_as_a_dense_tensor(run):
    dense, ours = twins()
    assert_alike(run(ours), run(dense))


def test_saved_one_hot_loads_without_hotrow():
    buffer = io.BytesIO()
    torch.save({"x": twins()[1]}, buffer)
    code = (
        "import sys, io, torch; x = torch.load(io.BytesIO(sys.stdin.buffer.read()))['x']\n"
        "assert type(x) is torch.Tensor and x.sum() == 6 and 'hotrow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], input=buffer.getvalue(), check=True)


def test_deepcopy_keeps_the_gradient():
    dense, ours = twins(requires_grad=True)
    for x in (dense, ours):
        (x @ TABLE).sum().backward()
    copied = copy.deepcopy(ours)
    assert copied.requires_grad
    assert_same_bits(to_dense(copied.grad), dense.grad)


def test_deepcopy_keeps_a_gradient_set_by_hand():
    x = twins()[1]
    x.grad = torch.ones_like(TABLE[0, 0]).expand(x.shape)
    copied = copy.deepcopy(x)
    assert not copied.requires_grad
    assert_same_bits(copied.grad, x.grad)


def test_state_dict_contains_a_plain_tensor():
    layer = torch.nn.Linear(2, 2)
    layer.register_buffer("x", twins()[1])
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    assert type(torch.load(buffer)["x"]) is torch.Tensor
    layer.double()
    assert layer.x.dtype == torch.float64


def test_parameter_made_from_a_one_hot():
    dense, ours = (torch.nn.Parameter(x) for x in twins())
    assert isinstance(ours, torch.nn.Parameter)
    for parameter in (dense, ours):
        (parameter @ TABLE).sum().backward()
    assert_same_bits(to_dense(ours.grad), dense.grad)
    for parameter in (dense, ours):
        torch.optim.SGD([parameter], lr=0.5).step()
    assert_same_bits((ours @ TABLE).detach(), (dense @ TABLE).detach())


# --- In-place writes -----------------------------------------------------------------------


def test_compiled_function_of_a_running_count_or_a_column_matches_torch():
    compiled = torch.compile(lambda count, x, column: (count * x).sum(-1) + column, backend="eager")
    for ids in (IDS, IDS.flip(0), IDS * 0):
        dense, ours = twins(ids=ids)
        results = [
            run(x.cumsum(1), x, x[..., 1])
            for run, x in ((compiled, ours), (compiled._torchdynamo_orig_callable, dense))
        ]
        torch.testing.assert_close(*results)


@statements(
    """
    x[0, 0] = 3.0; x @ W
    x[x > 0] = 5.0; x @ W, x.argmax(-1)
    x.zero_(); x @ W
    x.fill_(1); torch.cat([x, x], -1), x * 2, x.sum(0), x.argmax(-1)
    x.copy_(torch.ones(2, 3, 5) * 2); x.view(6, 5) @ W
    x.mul_(2); x @ W
    x *= 2; x @ W
    x += 1; x @ W
    x /= 2; x @ W
    x.masked_fill_(x > 0, 4.0); x @ W
    x.scatter_(-1, x.argmax(-1, keepdim=True), 0.0); x @ W
    x.scatter_(-1, (x.argmax(-1, keepdim=True) + 1) % 5, 1.0); x @ W
    x.index_fill_(0, torch.tensor([0]), 2.0); x @ W
    torch.add(x, x, out=x); x @ W
    torch.nn.init.ones_(x); x @ W
    F.dropout(x, 0.5, training=False).zero_(); x @ W
    F.dropout(x, 0.0).zero_(); x @ W
    y = x.add_(1); y is x
    y = x[0].add_(1); y @ W, x @ W
    y = x[0]; x.zero_(); y @ W, y.sum()
    y = x[0]; y.zero_(); x @ W, x.sum()
    y = x[...]; y.zero_(); x @ W
    y = x.view(6, 5); x[0, 0] = 3.0; y @ W
    y = x.view(6, 5)[1:3]; y += 1; x @ W
    y = x.view(30); y[3] = 9.0; x @ W
    y = x.flatten(); y[0] = 9; x @ W
    y = x.reshape(6, 5); y[0] = 9; x @ W
    y = x.unsqueeze(0); y.zero_(); x @ W
    y = x.permute(1, 0, 2); y[0] = 2; x @ W
    y = x.permute(1, 0, 2); x[0] = 2; y @ W
    y = x.permute(1, 0, 2).contiguous(); y[0] = 2; x @ W
    y = x.permute(1, 0, 2).reshape(6, 5); y[0] = 2; x @ W
    y = x.expand(2, 3, 5); y.zero_(); x @ W
    y = x.select(0, 0); y[0] = 9; x @ W
    y = x.narrow(0, 0, 1); y[0] = 9; x @ W
    y = x.unbind(0); y[0].zero_(); x @ W
    y = x.split(1); y[1].zero_(); x @ W, y[0] @ W
    y = x.split(5, -1)[0]; y.zero_(); x @ W
    y = torch.cat([x, x], -1); z = y[..., 5:]; z.zero_(); y @ torch.cat([W, W])
    y = torch.cat([x, x], -1); z = y[..., 5:][0]; y.zero_(); z @ W
    y = x[torch.tensor(1)]; y.zero_(); x @ W
    y = x[torch.tensor(-1, dtype=torch.int8)]; x.mul_(2); y @ W
    y = x[torch.tensor(1), 1:3]; y.zero_(); x @ W
    y = x[0, torch.tensor(1)]; y.zero_(); x @ W
    y = x[..., torch.tensor(1)]; y.add_(1); x @ W
    y = x[torch.tensor(1, dtype=torch.uint8)]; y.zero_(); x @ W
    y = x[torch.tensor(True)]; y.zero_(); x @ W
    y = x.select(0, torch.tensor(1)); y.zero_(); x @ W
    y = x.detach(); y.zero_(); x @ W
    y = x.detach(); x.zero_(); y @ W
    y = 1 - x; y[0] = 3; y.clone() * torch.arange(5), y.clone() + 1, y.mT, y.detach() * 2
    y = x.float(); x.zero_(); y @ W, y is x
    y = x.contiguous(); x.zero_(); y @ W, y is x
    y = x.clone(); x.zero_(); y @ W
    y = x.double(); x.zero_(); y @ W.double()
    y = x * 2; x.zero_(); y @ W
    y = x.sum(0); x.zero_(); y @ W
    y = x.flip(0); y[0] = 9; x @ W
    y = x[torch.tensor([0, 1])]; y[0] = 9; x @ W
    y = torch.cat([x]); x.zero_(); y @ W
    y = torch.stack([x, x]); x.zero_(); y @ W
    y = x.mul(2); y.zero_(); x @ W
    x[..., 1].zero_(); x @ W
    x[..., 1] += 2; x @ W
    y = x[..., 1]; y + 1; y.add_(1); x @ W, y, y[0]
    y = x[..., 1]; y + 1; x.zero_(); y + 1, y, y.sum()
    y = x[..., 1]; y.view(6)[0] = 5; x @ W, y
    y = x[..., 1].unsqueeze(0); y.sum(); y.mul_(3); x @ W
    y = x[..., 1]; y.numpy()[0] = 7; x @ W, y.sum()
    y = x[..., 1]; z = y[0]; z.fill_(4); x @ W, y * 1
    y = x.select(-1, 2)[1:]; y.exp(); y[:] = 3; x @ W
    y = x[..., 1]; y.detach().zero_(); x @ W
    y = x[..., 1]; torch.add(y, 1, out=y); x @ W
    y = x.cumsum(1); x.zero_(); y * 1, y.sum(0)
    y = x.cumsum(1); y.zero_(); x @ W, y * x
    y = x.cumsum(1); z = y[0]; z.add_(1); y * x, z.sum()
    y = x.cumsum(1); y.add_(1); y * x
    y = x[..., :4]; x[0] = 2; z = y.flatten(1); x.zero_(); z * 1, z.sum(1)
    y = x[..., :4]; x[0] = 2; z = y.reshape(-1); y.mul_(3); z @ torch.ones(24)
    y = x[..., 1:]; y.mul_(2); z = y.ravel(); y.div_(4); z * 1
    y = x.mT[:, :4]; x[0] = 2; z = y.reshape(2, -1); x.zero_(); z * 1
    y = x[0, :, 1]; z = y.ravel(); y.add_(4); z * 1
    y = x.ravel(); x[0] = 2; y * 1
    y = x[..., :4]; x[0] = 2; z = y.view(6, 4); x.zero_(); z * 1
    y = x[..., 1]; x[0] = 2; z = y.t().flatten(); x.zero_(); z * 1
    y = torch.cat([x, x * 1.5 + 1], -1)[..., 5:]; z = y.flatten(1); y.zero_(); z * 1
    y = x - torch.ones(5); z = y.mT.reshape(2, 15); y.zero_(); z * 1
    y = x.cumsum(1); z = y[:, 1:]; y.add_(x.sum(1, keepdim=True)); z * x[:, 1:], y * x
    y = x.cumsum(1); c = x.sum(0).sum(0); z = y + c; c.zero_(); z * x
    """
)
def test_in_place_writes_take_effect(run):
    dense, ours = twins()
    assert_values(run(ours), run(dense))


@statements(
    """
    y = x.numpy(); x.zero_(); torch.from_numpy(y), x @ W
    y = x.numpy(); y[0] = 7; x[0]
    y = x.numpy(); y[0] = 7; x @ W
    y = x.numpy(); y[0] = 7; x.argmax(-1)
    z = x[0]; y = x.numpy(); y[0] = 7; z @ W
    z = x.view(6, 5); y = z.numpy(); y[0] = 7; x @ W
    y = np.asarray(x[0]); y[:] = 7; x @ W
    y = torch.from_dlpack(x); y[0] = 7; x @ W
    y = x.data; y.zero_(); x @ W
    y = x.view(6, 5).data; y.zero_(); x @ W
    x[..., None].numpy()[0] = 7; x @ W
    x.diagonal(0, 1, 2).data.fill_(2); x @ W, x.sum(0)
    x.unbind(2)[0].data.fill_(3); x @ W
    x[0, 0, 1].data.zero_(); x @ W
    x[0].tensor_split(5, 1)[1].data.fill_(5); x @ W
    z = x[0]; z.as_strided((3,), (5,)).data.fill_(2); x @ W, z @ W
    y = x.reshape(6, 5); x.diagonal(0, 1, 2)[:, None].map_(W[:2, :1, None], lambda a, b: b); y @ W
    x.data = torch.zeros(2, 3, 5); x @ W
    x.set_(torch.zeros(2, 3, 5)); x @ W
    """
)
def test_writes_that_bypass_the_version_counter_take_effect(run):
    dense, ours = twins()
    assert_values(run(ours), run(dense))


def assert_values(actual, expected):
    """Assert equality up to rounding: hotrow's dense products may add in a different order."""
    for one, other in zip(
        *(r if isinstance(r, tuple) else (r,) for r in (actual, expected)), strict=True
    ):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(to_dense(one), other, rtol=1e-6, atol=1e-6)
        else:
            assert one == other


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@statements(
    """
    x.mul_(2); x @ W
    x[0] = 1.0; x @ W
    x += 1; (x @ W), (x * 2)
    x[0].fill_(3.0); x @ W
    y = x[0]; y.mul_(2); (x @ W), (y @ W)
    y = x[0]; x.mul_(2); y @ W
    x.scatter_(2, torch.ones(2, 3, 1).long(), 5.0); x.sum(-1)
    torch.add(x, 1, out=x); x @ W
    F.relu(x.sub_(1), inplace=True); x @ W
    y = x * 2; x.zero_(); (x @ W), (y @ W)
    x.zero_(); x + 0
    x.data.mul_(2); x @ W
    y = x[..., 1:3]; y.data.zero_(); x @ W
"""
)
def test_compiled_write_takes_effect(run, backend):
    def model(ids):
        return run(one_hot(ids, CLASSES, torch.float32))

    compiled = torch.compile(model, backend=backend)
    dense = run(F.one_hot(IDS, CLASSES).float())
    assert_values(model(IDS), dense)
    assert_values(compiled(IDS), dense)


WAYS = grid(["eager", "aot_eager", "export", "strict export"], "aot_eager".__eq__)


@pytest.mark.parametrize("way", WAYS)
@statements(
    """
    x[..., 1:3].mul_(2); x @ W
    x[..., 0].fill_(1); x @ W
    x.diagonal(0, 1, 2).fill_(3); x @ W
    x.chunk(2, -1)[0].add_(1); x @ W
    y = x[..., 1:3]; x.zero_(); y + 0
    y = x.view(6, 5); x.index_fill_(0, x.argmax(-1)[0, :1], 0); y @ W
    y = x.view(6, 5); x[x.argmax(-1)[0, :1]] = 0; y @ W
    y = x.view(6, 5); x[torch.tensor([True, False])] = 0; y @ W
    y = x.view(6, 5); x.masked_fill_((x.argmax(-1) == 2)[..., None], 0); y @ W
    x.masked_fill((x.argmax(-1) == 2)[..., None], 0.0) @ W
    W[:, 0].expand(2, 3, 5).masked_fill(x.bool(), -1e9) + 0
"""
)
def test_compiled_views_share_memory(run, way):
    ours, types = _Model(run), []
    dense = run(F.one_hot(IDS, CLASSES).float())
    ours.record = lambda x: types.append(type(x))
    assert_values(ours(IDS), dense)
    assert types == [OneHot]
    del ours.record
    assert_values(_compile(ours, way)(IDS), dense)


@pytest.mark.parametrize("way", WAYS)
@statements(
    """
    with torch.no_grad(): x[0, 1] = 2; x @ W
    with torch.no_grad(): x.mul_(3); x @ W
    with torch.no_grad(): x.mT[0, 1].fill_(5); x @ W
    y = x.mT; with torch.no_grad(): x[0, 1] = 2; y.mT @ W
    y = x[..., 1:3]; with torch.no_grad(): y.mul_(2); x @ W
    with torch.no_grad(): y = x.exp(); x.exp() + y
    with torch.no_grad(): y = torch.cumsum(x, 0); torch.cumsum(x, 0) + y
    with torch.no_grad(): y = x.softmax(-1); y + x
    with torch.no_grad(): y = (x / 3).bfloat16(); torch.cumsum(y, 0) + x
    with torch.no_grad(): y = x[1]; y + x
    with torch.no_grad(): y = x[..., 1:4]; F.pad(y, (1, 1)) + x
    with torch.no_grad(): y = x.mT; y.mT * 2 + x
    with torch.no_grad(), torch.enable_grad(): y = x.cumsum(0); y @ W
    x[0, 1] = 2; x @ W
    """
)
def test_compiled_code_without_grad(run, way):
    weight = torch.nn.Parameter(torch.arange(1.0, 4.0)[:, None])

    def gradient(model):
        weight.grad = None
        values = model(IDS)
        values.square().sum().backward()
        return values.detach(), weight.grad

    dense = gradient(lambda ids: run(F.one_hot(ids, CLASSES) * weight))
    ours = _Model(run, weight)
    assert_values(gradient(ours), dense)
    assert_values(gradient(_compile(ours, way)), dense)


@exhaustive
@expressions(
    """
    x
    x.mT
    x * 2
    x.float()
    x[..., 0]
    x.view(2, 3, -1, 2)
    """
)
def test_compiled_number_of_classes(run):
    compiled = torch.compile(lambda classes: run(one_hot(IDS, classes)), backend="aot_eager")
    for classes in (8, 10, 12, 14):
        found, expected = compiled(classes), run(F.one_hot(IDS, classes))
        for compute in (torch.exp, lambda x: x.float() @ torch.ones(x.shape[-1], 2)):
            assert_values(compute(found), compute(expected))


def _compile(model, way):
    if "export" in way:
        return torch.export.export(model, (IDS,), strict=way == "strict export").module()
    return torch.compile(model, backend=way, fullgraph=True)


class _Model(torch.nn.Module):
    def __init__(self, run, weight=None):
        super().__init__()
        self.run, self.weight = run, weight

    def forward(self, ids):
        x = one_hot(ids, CLASSES, torch.float32)
        self.record(x)
        return self.run(x if self.weight is None else x * self.weight)

    def record(self, x):
        pass


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of a non-leaf input
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@statements("x[..., 0] = 1; x\n y = x[..., 1:3]; x.mul_(2); x\n z = 1 - x; z.mul_(2); z")
def test_one_hot_changed_before_a_graph_break(run, backend):
    def model(ids):
        x = run(one_hot(ids, CLASSES, torch.float32))
        torch._dynamo.graph_break()
        return x @ TABLE

    expected = run(F.one_hot(IDS, CLASSES).float()) @ TABLE
    assert_values(torch.compile(model, backend=backend)(IDS), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of a non-leaf input
@statements("x.mul_(2)\n x[0].mul_(2)\n x[..., 0].fill_(1)\n x[:1, 0] = 0; x")
def test_compiled_function_cannot_change_a_one_hot_from_outside(run):
    x = one_hot(IDS, CLASSES, torch.float32)
    compiled = torch.compile(lambda x: (run(x), x @ TABLE)[1], backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"make it dense there: x = x.to_dense\(\)"):
        compiled(x)
    assert not x.is_modified
    dense = x.to_dense()
    assert_values(compiled(dense), dense @ TABLE)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of a non-leaf input
@pytest.mark.parametrize("read", [
    lambda x: x[..., :2], lambda x: x[..., 1], lambda x: x.narrow(-1, 0, 3), lambda x: x.flatten(),
    lambda x: x.chunk(2, -1)[1], lambda x: x.mT.diagonal(dim1=-2, dim2=-1),
    lambda x: x.unfold(-1, 2, 2),
])  # fmt: skip
def test_compiled_function_reads_views_of_a_one_hot_from_outside(read):
    x = one_hot(IDS, CLASSES, torch.float32)
    compiled = torch.compile(lambda x: (read(x) * 2, x @ TABLE), backend="aot_eager")
    for found, expected in zip(compiled(x), (read(x.to_dense()) * 2, x @ TABLE), strict=True):
        assert_values(found, expected)
    assert not x.is_modified


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of a non-leaf input
def test_compiled_code_after_a_graph_break_reads_columns():
    def model(ids):
        x = one_hot(ids, CLASSES, torch.float32)
        torch._dynamo.graph_break()
        return x[..., :2] @ TABLE[:2]

    assert_values(torch.compile(model, backend="aot_eager")(IDS), model(IDS))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of a non-leaf input
def test_compiled_function_of_a_leaf_raises_unless_dense():
    compiled = torch.compile(lambda x: x @ TABLE, backend="aot_eager")
    dense, ours = twins(requires_grad=True)
    with pytest.raises(RuntimeError, match=r"make it dense there: x = x.to_dense\(\)"):
        compiled(ours)
    for x in (dense, ours):
        compiled(x.to_dense()).sum().backward()
    assert_same_bits(ours.grad, dense.grad)


def test_in_place_write_in_inference_mode():
    with torch.inference_mode():
        dense, ours = twins()
        view, seen = ours[0], dense[0]
        ours[0] = dense[0] = 2.0
        assert_values((ours @ TABLE, view @ TABLE), (dense @ TABLE, seen @ TABLE))
        assert (ours @ TABLE).is_inference()


# --- Gradient of the one-hot ---------------------------------------------------------------

PRODUCTS = """
    x @ W
    (x @ W).unsqueeze(0)
    (x @ W) @ W.t()
    torch.cat([x, x], -1) @ torch.cat([W, W])
    torch.cat([x, x * 2]) @ W
    torch.cat([x.detach(), x]) @ W
    torch.cat([x, x.detach()]) @ W
    torch.cat([x.detach(), x], -1) @ torch.cat([W, W * 2])
    torch.stack([x.detach(), x]) @ W
    torch.cat([x, torch.ones(2, 3, 2)], -1) @ torch.cat([W, W[:2]])
    torch.cat([torch.ones(2, 3, 2), x], -1) @ torch.cat([W[:2], W])
    torch.cat([x, x], -1)[..., 5:] @ W
    x.flatten(1) @ torch.cat([W] * 3)
    x.view(6, 5) @ W
    x.permute(1, 0, 2) @ W
    x[0] @ W
    x[torch.tensor([1, 1, 0])] @ W
    x[torch.tensor([[True, False, True], [False, True, True]])] @ W
    (x * 2.5) @ W
    (x / 4) @ W
    -x @ W
    x.sum(1) @ W
    x.mean(0) @ W
    x.flip(0) @ W
    x.roll(1, 1) @ W
    x.expand(4, 2, 3, 5) @ W
    x.split(1)[1] @ W
    x.unbind(1)[2] @ W
    x.clone() @ W
    x.double() @ W.double()
    x.half().float() @ W
    x.long().float() @ W + 0 * x.sum()
    F.linear(x, W.t(), W[0, 0].expand(4))
    torch.einsum("bsv,vd->bsd", x, W)
    torch.einsum("bsv,dv->bsd", x, W.t())
    F.bilinear(x, torch.ones(2, 3, 4), W.reshape(1, 5, 4))
    x @ W[:, 0]
    F.dropout(x, 0.5, training=False) @ W
    x.softmax(-1) @ W
    x + 0
    x.view(30) * 2
    x.clone().mul_(2) @ W
    x.clone().zero_() @ W
    x.clone().masked_fill_(torch.ones(2, 3, 1).bool(), 3.0) @ W
"""


@expressions(PRODUCTS)
def test_gradient_of_the_one_hot_matches_the_dense_gradient(run):
    grads = []
    for x in twins(requires_grad=True):
        torch.manual_seed(1)
        out = run(x)
        (out * torch.randint(-3, 4, out.shape).to(out.dtype)).sum().backward()
        grads.append(x.grad)
    assert type(grads[1]) is torch.Tensor
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-6, atol=1e-6)


@statements(
    """
    (x @ W).sum().backward(); (x @ W).sum().backward(); x.grad
    (x @ W).sum().backward(); x.grad = None; (x @ W).sum().backward(); x.grad
    torch.autograd.grad((x @ W).sum(), x)[0]
    torch.autograd.grad((x @ W).sum(), [x], retain_graph=True)[0]
    torch.autograd.grad((x @ W).pow(2).sum(), inputs=x, create_graph=True)[0].detach()
    (x @ W).sum().backward(inputs=[x]); x.grad
    torch.autograd.backward((x @ W).sum(), inputs=[x]); x.grad
    seen = []; x.register_hook(seen.append); (x @ W).sum().backward(); seen[0], x.grad
    x.register_hook(lambda g: g * 2); (x @ W).sum().backward(); x.grad
    h = x.register_hook(lambda g: g * 2); h.remove(); (x @ W).sum().backward(); x.grad
    n = []; x.register_post_accumulate_grad_hook(n.append); (x @ W).sum().backward(); len(n)
    d = x.grad_dtype; x.cumsum(-1).sum().backward(); d, x.grad_dtype, x.grad
    x.retain_grad(); (x @ W).sum().backward(); x.grad
    y = x * 2; y.retain_grad(); (y @ W).sum().backward(); y.grad, x.grad
    y = x * 2; seen = []; y.register_hook(seen.append); (y @ W).sum().backward(); seen[0], x.grad
    y = x[1:]; (y @ W).sum().backward(); (y @ W).sum().backward(); y.exp().sum().backward(); x.grad
    y = x.clone(); (y @ W).sum().backward(); (y @ W).sum().backward(); x.grad
    y = torch.cat([x, x], -1)[..., 5:]; [(y @ W).sum().backward() for _ in range(2)]; x.grad
    y = x.transpose(0, 1).flatten(0, 1); [(y @ W).sum().backward() for _ in range(2)]; x.grad
    y = x[1:]; y.retain_grad(); y.register_hook(torch.abs); (y @ W).sum().backward(); y.grad, x.grad
    y = x[1:]; (y @ W).sum().backward(inputs=[y]); y.grad, x.grad
    y = x[1:]; y.exp().sum().backward(inputs=y); (y @ W).sum().backward(); y.grad, x.grad
    y = x * 2; s = (y @ W).sum(); s.backward(None, True, inputs=[y]); s.backward(); y.grad, x.grad
    y = torch.cat([x, x], -1); y[..., 5:].matmul(W).sum().backward(inputs=[y]); y.grad, x.grad
    y = x * 2; s = (y @ W).sum(); y.retain_grad(); s.backward(); y.detach_(); y.grad
    y = x * 2; s = (y @ W).sum(); y.retain_grad(); y.unsqueeze_(0); (y @ W).sum().backward(); y.grad
    y = x * 2; s = (y @ W).sum(); y.retain_grad(); s.backward(); y.grad = None; y.grad, x.grad
    y = (x @ W).sum(); x.detach().zero_(); y.backward(); x.grad
    x.requires_grad_(False); (x @ W).requires_grad
    x.requires_grad_(requires_grad=False); (x @ W).requires_grad
    x.requires_grad_(requires_grad=True); (x @ W).sum().backward(); x.requires_grad, x.grad
    y = x * 2; s = (y @ W).sum(); y.retain_grad(); y.detach_(); s.backward(); y.grad
    y = x * 2; y.retain_grad(); s = (y @ W).sum(); y.detach_(); s.backward(); y.grad
    y = x * 2; s = (y @ W).sum(); y.retain_grad(); y.mul_(3); (s + (y @ W).sum()).backward(); y.grad
    y = x * 2; (y @ W).sum().backward(None, True, inputs=y); y[0] = 0; y.sum().backward(); y.grad
    x.is_leaf, x.requires_grad, x.detach().requires_grad, x.data.requires_grad
    (x * 2).is_leaf, (x * 2).requires_grad, (x * 2).grad_fn is None
    x.long().requires_grad, x.argmax(-1).requires_grad, (x.long().float() @ W).requires_grad
    torch.autograd.functional.jacobian(lambda t: t @ W, x)
    torch.func.vjp(lambda t: (t @ W).sum(), x)[1](torch.tensor(1.0))[0]
    torch.func.grad(lambda t: (t @ W).sum())(x)
    """
)
def test_autograd_calls_match_the_dense_one_hot(run):
    dense, ours = twins(requires_grad=True)
    assert_values(run(ours), run(dense))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "derive",
    [lambda x: x[1:], lambda x: x.transpose(0, 2), lambda x: x[..., ::2], lambda x: x.diagonal()],
)
def test_requires_grad_cannot_change_while_a_one_hot_has_views(derive, requires_grad):
    x = twins(requires_grad=requires_grad)[1]
    x.requires_grad_(requires_grad)  # changes nothing
    view = derive(x)
    x.requires_grad_(requires_grad)
    with pytest.raises(RuntimeError, match="requires_grad of a one-hot cannot change while"):
        x.requires_grad_(not requires_grad)
    with pytest.raises(RuntimeError, match="requires_grad of a one-hot cannot change while"):
        x.requires_grad = not requires_grad
    assert x.requires_grad == view.requires_grad == requires_grad
    view = x.detach()
    x.requires_grad_(not requires_grad)
    assert x.requires_grad != requires_grad
    assert not view.requires_grad


@pytest.mark.parametrize("derive", [lambda x: x * 2, lambda x: x[1:], lambda x: x.clone().mul_(2)])
def test_retains_grad(derive):
    found = []
    for x in twins(requires_grad=True):
        y = derive(x)
        before = y.retains_grad
        y.retain_grad()
        found.append((before, y.retains_grad))
    assert found[1] == found[0]


def test_a_detached_one_hot_keeps_its_retained_gradient():
    found = []
    for x in twins(requires_grad=True):
        y = x * 2
        loss = (y @ TABLE).sum()
        y.retain_grad()
        loss.backward()
        y.detach_()
        first = y.grad.clone()
        y.requires_grad_().sum().backward()
        found.append((first, y.grad))
    assert_values(found[1], found[0])


def test_requires_grad_by_keyword_makes_a_leaf():
    results = []
    for x in twins():
        assert x.requires_grad_(requires_grad=True) is x
        (x @ TABLE).sum().backward()
        results.append((x.requires_grad, x.is_leaf, x.grad))
    assert_values(results[1], results[0])


def test_optimizers_train_it_like_the_dense_one_hot():
    results = []
    for x in twins(requires_grad=True):
        for make in (torch.optim.SGD, torch.optim.Adam):
            optimizer = make([x], lr=0.1)
            (x @ TABLE).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((x @ TABLE).detach())
    torch.testing.assert_close(results[1], results[0])


def test_no_grad_write_into_a_leaf_that_requires_grad():
    results = []
    for x in twins(requires_grad=True):
        with torch.no_grad():
            x[0] = 2.0
        x @ TABLE
        (x @ TABLE).sum().backward()
        results.append(((x @ TABLE).detach(), x.grad))
    assert_values(results[1], results[0])


@pytest.mark.parametrize("select", [lambda x: x, lambda x: x[1, 2]], ids=["batch", "vector"])
@pytest.mark.parametrize("wanted", ["table", "one-hot"])
def test_second_derivative_matches_torch(wanted, select):
    """Gradient penalties for adversarial training and meta-learning match those of torch."""
    grads = []
    for x in twins(requires_grad=True):
        table = TABLE.clone().requires_grad_()
        rows = select(x) @ table
        of = {"table": table, "one-hot": x}[wanted]
        (first,) = torch.autograd.grad(rows.pow(2).sum(), of, create_graph=True)
        first.pow(2).sum().backward()
        grads.append((first.detach(), x.grad, table.grad))
    for ours, dense in zip(grads[1], grads[0], strict=True):
        assert (ours is None) == (dense is None)
        if dense is not None:
            torch.testing.assert_close(to_dense(ours), dense)


@pytest.mark.parametrize("bag", [False, True])
def test_second_derivative_with_weights_matches_torch(bag):
    dense, ours = twins(requires_grad=True)
    weights = torch.full((2, 3, 1), 0.5, requires_grad=True)

    def penalty(x):
        rows = ((x * weights).sum(1) if bag else x * weights) @ TABLE
        (first,) = torch.autograd.grad(rows.pow(2).sum(), weights, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), weights)[0]

    torch.testing.assert_close(penalty(ours), penalty(dense))


@pytest.mark.parametrize("scale", [lambda x: x.sum(1), lambda x: x * 0.5], ids=["sum", "scale"])
def test_second_derivative_of_a_scaled_leaf_raises_unless_dense(scale):
    """hotrow raises instead of returning a wrong result; a dense one-hot gives the right result."""
    dense, ours = twins(requires_grad=True)
    table = TABLE.clone().requires_grad_()

    def penalty(x):
        rows = scale(x) @ table
        (first,) = torch.autograd.grad(rows.pow(2).sum(), table, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), table)[0]

    with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
        penalty(ours)
    torch.testing.assert_close(penalty(ours + 0), penalty(dense))


# `cumsum` has no rule, so it reads the dense tensor.
@statements(
    """
    x.cumsum(-1); x.requires_grad_(); x.cumsum(-1).pow(2).sum().backward(); x.grad
    x.cumsum(-1); x.requires_grad = True; (x @ W).sum().backward(); x.grad
    x.numpy(); x.requires_grad_(); x.cumsum(-1).pow(2).sum().backward(); x.grad
    x.diagonal(); x.requires_grad_(); x.cumsum(-1).pow(2).sum().backward(); x.grad
    x.cumsum(-1); y = x.detach().requires_grad_(); y.cumsum(-1).sum().backward(); y.grad
    y = x.detach().requires_grad_(); x.cumsum(-1); y.cumsum(-1).sum().backward(); y.grad
    y = x[0]; y.cumsum(-1); y.requires_grad_(); y.cumsum(-1).sum().backward(); y.grad
    x.requires_grad_(); x.cumsum(-1); x.requires_grad_(False); x.cumsum(-1).requires_grad
    x.requires_grad_(); y = x.cumsum(-1); x.requires_grad_(False); y.sum().backward(); x.grad
    x.requires_grad_(); x.cumsum(-1); x.detach()[0] = 2.0; (x @ W).sum().backward(); x.grad, x
    x[0] = 2.0; x.requires_grad_(); (x @ W).pow(2).sum().backward(); x.grad
    y = (x.sum(1) * 0.3).requires_grad_(); y.cumsum(-1).pow(2).sum().backward(); y.grad
"""
)
def test_leaf_keeps_its_gradient_whatever_came_before(run):
    dense, ours = (run(x) for x in twins())
    assert_values(ours, dense)


@statements(
    """
    x.requires_grad_(); x.sum().backward(); x.data[0] = 1; x.detach_(); x.grad
    x.grad = torch.ones(2, 3, 5); x.mul_(2); x.copy_(torch.ones(2, 3, 5)); x.grad
    x.grad = torch.ones(2, 3, 5); x.exp_(); x.grad
    x.grad = torch.ones(2, 3, 5); x.data[0] = 3; x.grad
    x.grad = torch.ones(2, 3, 5); x.data[0] = 3; x.grad = None; x.grad
    x.exp_(); x.grad = torch.ones(2, 3, 5); x.grad
    x.exp_(); x.grad = torch.ones(2, 3, 5); x.requires_grad_(); (x * 2).sum().backward(); x.grad
    x.grad = torch.ones(2, 3, 5); x.exp_(); x.requires_grad_(); (x * 2).sum().backward(); x.grad
    x.grad = torch.ones(2, 3, 5); x.requires_grad_(); (x * 2).sum().backward(); x.grad
    x.exp_().requires_grad_(); x.sum().backward(); x.grad = None; (x @ W).sum().backward(); x.grad
    x.exp_(); x.requires_grad_(); x.sum().backward(); del x.grad; (x @ W).sum().backward(); x.grad
    x.exp_(); x.requires_grad_(); x.sum().backward(); x.detach_(); x.grad
    x.exp_(); x.requires_grad_(); x.sum().backward(); x.requires_grad_(False); x.grad
    x.exp_(); x.requires_grad_(); x.sum().backward(); x.requires_grad_(False); x.grad = None; x.grad
    x.requires_grad_(); x.sum().backward(); x.data.mul_(2); x.grad.zero_(); x.grad
    x.requires_grad_(); x.sum().backward(); x.data[0] = 1; x.requires_grad_(False); x.grad
    x.requires_grad_(); x.data[0] = 1; x.requires_grad = False; x.sum().requires_grad
    x.requires_grad_(); x.sum().backward(); x.data[0] = 1; x.detach_(); x.requires_grad_(); x.grad
    x.requires_grad_(); y = x * 2; y.retain_grad(); y.sum().backward(); y.grad = None; y.grad
    x.requires_grad_(); y = x[1:]; y.retain_grad(); y.sum().backward(); del y.grad; y.grad
    x.requires_grad_(); y = x[1:]; y.retain_grad(); (y @ W).sum().backward(); y.grad, y.grad
    y = x.requires_grad_() * 2; y.exp_(); y.retain_grad(); y.sum().backward(); y.detach_(); y.grad
    y = x.requires_grad_() * 2; y.retain_grad(); y.mul_(x.detach()); y.sum().backward(); y.grad
"""
)
def test_gradient_is_kept_after_a_write(run):
    dense, ours = (run(x) for x in twins())
    assert_values(ours, dense)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.mul_(2),
        lambda x: x.__setitem__(0, 2.0),
        lambda x: x[0].zero_(),
        lambda x: x.flatten(0, 1).add_(1),
        lambda x: torch.relu_(x),
        lambda x: F.relu(x, inplace=True),
        lambda x: x.__iadd__(1),
        lambda x: torch.add(x, 1, out=x),
        lambda x: torch._foreach_mul_([x], 2),
        lambda x: x[:, ::2].add_(1),
        lambda x: x[..., ::2].add_(1),
        lambda x: x[0, 0][..., None].add_(1),
        lambda x: x.diagonal().add_(1),
        lambda x: x.unfold(1, 2, 1).zero_(),
        lambda x: x.as_strided((2, 5), (15, 1)).zero_(),
    ],
)
def test_write_into_a_leaf_raises_as_in_torch(write):
    for x in twins(requires_grad=True):
        with pytest.raises(RuntimeError):
            write(x)
    with pytest.raises(RuntimeError, match=r"torch.no_grad\(\)"):
        x.mul_(2)
    torch.testing.assert_close(to_dense(x), to_dense(twins()[0]))


def test_no_grad_write_into_a_view_of_a_leaf():
    results = []
    for x in twins(requires_grad=True):
        y = x.reshape(-1)
        with torch.no_grad():
            x[:, ::2].add_(1)
            x.diagonal().mul_(2)
            y.mul_(2)
        assert y.sum() == to_dense(y).sum()
        x.cumsum(-1).pow(2).sum().backward()
        results.append((to_dense(x).detach(), x.grad))
    assert_values(results[1], results[0])


@pytest.mark.parametrize(
    ("derive", "factor"),
    [
        (torch.mul, torch.rand(2, 3, 1)),
        (torch.Tensor.__getitem__, torch.tensor([1, 0])),
        (lambda x, index: x.index_select(1, index), torch.tensor([1, 0])),
    ],
)
def test_factor_written_before_the_backward_pass_raises_as_in_torch(derive, factor):
    for x in twins(requires_grad=True):
        written = factor.clone()
        result = derive(x, written)
        written.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def write_data(p):
    p.data.mul_(10)


def write_array(p):
    p.detach().numpy()[:] *= 10


def replace_data(p):
    p.data = p.data * 10


@pytest.mark.parametrize("write", [torch.Tensor.zero_, write_data, write_array, replace_data])
@pytest.mark.parametrize("shape", [(), (1,), (2, 1), (CLASSES,), (2, CLASSES)])
def test_factor_written_before_the_result_is_read(write, shape):
    """Torch's version counter misses most of these writes."""
    results = []
    for x in twins():
        factor = torch.nn.Parameter(torch.rand(shape, generator=torch.Generator().manual_seed(1)))
        scaled = x.sum(1) * factor
        if isinstance(x, OneHot):
            assert isinstance(scaled, OneHot)
            assert scaled._dense is None
        with torch.no_grad():
            write(factor if shape else factor.view(1))
        results.append(scaled.exp())
        results[-1].sum().backward()
        results.append(factor.grad)
    assert_same_bits(results[2], results[0])
    torch.testing.assert_close(results[3], results[1])


def test_default_dtype_changed_before_the_result_is_read():
    results = []
    for make in (F.one_hot, one_hot):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            scaled = make(torch.tensor([2, 0, 1, 1]), 7).sum(0) * 0.1
        finally:
            torch.set_default_dtype(default)
        results.append(scaled.to_dense())
    assert_same_bits(*results)


def test_greedy_coordinate_gradient():
    """A single lookup yields first-order loss estimates for every possible swap of one token."""
    table, head = torch.randn(50, 8), torch.randn(8, 3)
    grads = []
    for make in (
        lambda ids: F.one_hot(ids, 50).float(),
        lambda ids: one_hot(ids, 50, torch.float32),
    ):
        x = make(torch.arange(7) * 3).requires_grad_()
        prefix = torch.ones(1, 2, 8)
        tokens = torch.cat([prefix, (x @ table).unsqueeze(0)], 1)
        (tokens.tanh() @ head).logsumexp(-1).sum().backward()
        grads.append(x.grad)
    assert_same_bits(grads[1], grads[0])


# --- Memory --------------------------------------------------------------------------------


@expressions(
    """
    x @ W
    x.view(-1, 100000) @ W
    (x * torch.ones(8, 4, 1)).sum(1) @ W
    x.mean(1) @ W
    x[torch.tensor([3, 1])] @ W
    x.flip(0) @ W
    x.transpose(0, 1).reshape(-1, 100000) @ W
    torch.cat([x, x]) @ W
    torch.cat([x, torch.ones(8, 4, 2)], -1) @ torch.cat([W, W[:2]])
    torch.stack([x, x]) @ W
    x.expand(3, 8, 4, 100000) @ W
    x.to(torch.float64).to(torch.float32) @ W
    x.clone() @ W
    F.linear(x, W.t())
    torch.einsum("bsv,vd->bsd", x, W)
    x.argmax(-1)
    """
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_pass_allocates_no_zeros(run, requires_grad):
    table = torch.zeros(100_000, 1)
    run.__globals__["W"], before = table, run.__globals__["W"]
    try:
        with LargestAllocation() as largest:
            x = one_hot(torch.zeros(8, 4, dtype=torch.int64), 100_000, torch.float32)
            run(x.requires_grad_(requires_grad))
    finally:
        run.__globals__["W"] = before
    assert largest.size <= 2 * table.nbytes  # a dense one-hot is 32 times as large as the table


def test_backward_pass_allocates_no_zeros_without_requires_grad():
    table = torch.zeros(100_000, 1, requires_grad=True)
    with LargestAllocation() as largest:
        x = one_hot(torch.zeros(8, 4, dtype=torch.int64), 100_000, torch.float32)
        (x * torch.ones(8, 4, 1)).sum(1).matmul(table).sum().backward()
    assert largest.size <= 2 * table.nbytes


# --- Modes ---------------------------------------------------------------------------------


def test_no_grad_and_inference_mode():
    table = TABLE.clone().requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode):
        dense, ours = twins(requires_grad=True)
        with mode():
            assert_alike(ours @ table, dense @ table)
            assert_alike(ours.sum(1) * 2, dense.sum(1) * 2)
        assert_alike(ours @ table, dense @ table)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    dense, ours = twins()
    with torch.autocast("cpu", dtype):
        assert_alike(ours @ TABLE, dense @ TABLE)
        assert_alike(F.linear(ours, TABLE.t()), F.linear(dense, TABLE.t()))
        assert_alike(
            torch.einsum("bsv,vd->bsd", ours, TABLE), torch.einsum("bsv,vd->bsd", dense, TABLE)
        )
        both, sums = torch.cat([ours, ours], -1), torch.cat([TABLE, TABLE])
        found = both @ sums
    assert found.dtype == dtype
    truth = torch.cat([dense, dense], -1).double() @ sums.to(dtype).double()
    sizes = torch.cat([dense, dense], -1).double() @ sums.to(dtype).double().abs()
    assert_rounded(found, truth, 2, sizes)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool], ids=str)
def test_autocast_refuses_what_torch_refuses(dtype):
    dense, ours = twins(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert_alike(outcome(F.linear, ours, TABLE.t()), outcome(F.linear, dense, TABLE.t()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_dtypes(dtype):
    table = TABLE.to(dtype)
    for requires_grad in (False, True):
        dense, ours = twins(dtype, requires_grad)
        assert_alike(ours @ table, dense @ table)
        assert_alike((ours * 0.5) @ table, (dense * 0.5) @ table)
        if requires_grad:
            (ours @ table).sum().backward()
            (dense @ table).sum().backward()
            assert_same_bits(ours.grad, dense.grad)


@expressions(
    """
    torch.vmap(lambda t: t @ W)(x)
    torch.vmap(lambda t: t * 2)(x)
    torch.vmap(lambda w: x @ w)(torch.stack([W, W]))
    torch.func.grad(lambda w: (x @ w).pow(2).sum())(W)
    torch.func.jacrev(lambda w: (x @ w).sum(0))(W)
    torch.func.jvp(lambda w: x @ w, (W,), (W,))[1]
    torch.func.hessian(lambda w: (x @ w).pow(2).sum())(W)
    torch.vmap(lambda i: x[i])(torch.arange(2))
    torch.vmap(lambda i: x[i, :, :2])(torch.arange(2))
    torch.vmap(lambda i: x.index_select(0, i[None]))(torch.arange(2))
    torch.vmap(lambda i: x[torch.stack([i, i])])(torch.arange(2))
    torch.vmap(lambda w: x.select(0, torch.tensor(1)) @ w)(torch.stack([W, W]))
    torch.func.grad(lambda w: (x.narrow(0, torch.tensor(1), 1) @ w).sum())(W)
    """
)
def test_function_transforms(run):
    dense, ours = twins()
    assert_alike(run(ours).detach(), run(dense).detach(), strides=False)


# `cumsum` has no rule for this axis, so it reads the dense tensor.
@statements(
    """
    torch.func.hessian(lambda w: (x.exp() @ w).pow(2).sum())(W); repr(x), x.exp(), x[0] * 2
    torch.func.hessian(lambda w: (x.exp() @ w).pow(2).sum())(W); x.mul_(2); x.data_ptr() > 0, x @ W
    torch.func.grad(lambda w: (x.exp() @ w).sum())(W); torch.from_numpy(x.numpy()), x @ W
    torch.func.grad(lambda w: (x[0].exp() @ w).sum())(W); repr(x[0]), x + 1
    torch.vmap(lambda w: x.exp() @ w)(torch.stack([W, W])); repr(x)
    torch.func.grad(lambda w: (x.mT.cumsum(1).mT @ w).sum())(W); np.asarray(x).sum(), x @ W
    torch.func.grad(lambda w: (x[0].cumsum(0) @ w).sum())(W); x[0] + 1, x + 1
    torch.func.jvp(lambda w: x.cumsum(1) @ w, (W,), (W,)); x.exp(), x.sum(0) + 1
    torch.vmap(lambda w: x.cumsum(1) @ w)(torch.stack([W, W])); x.exp()
    g = torch.func.grad(lambda w: (x.clone().add_(1) @ w).sum())(W); g, x + 0
    g = torch.func.grad(lambda w: (x.clone().mul_(w.sum()) @ w).sum())(W); g, x + 0
    g = torch.func.grad(lambda w: (x.long().float().zero_() @ w).sum())(W); g, x + 0
    torch.func.grad(lambda y: y.cumsum(1).pow(2).sum())(x), x.exp()
    """
)
def test_one_hot_after_a_transform(run):
    dense, ours = twins()
    assert_values(run(ours), run(dense))


@expressions(
    """
    torch.func.grad(lambda w: (x.mul_(2) @ w).sum())(W)
    torch.func.grad(lambda w: (x.zero_() @ w).sum())(W)
    torch.func.grad(lambda w: (x.index_fill_(0, torch.tensor([0]), 0) @ w).sum())(W)
    torch.vmap(lambda w: x.mul_(w.sum()))(torch.stack([W, W]))
    """
)
def test_write_into_an_input_of_a_transform_raises_as_in_torch(run):
    for x in twins():
        with pytest.raises(RuntimeError):
            run(x)
    assert_values(x, twins()[0])


def test_transform_caches_no_tensor_that_becomes_invalid():
    x = one_hot([2, 0, 3], 7, torch.float32)
    torch.func.grad(lambda q: (q * x.unsqueeze(0)[0]).sum() + x.sum(0).sum())(torch.ones(3, 7))
    is_invalid = torch._C._functorch.is_functorch_wrapped_tensor
    assert not is_invalid(meta_tensor(x))
    assert not is_invalid(meta_result(torch.sum, (x, (0,), False)))


def test_created_inside_vmap():
    """This test runs in a subprocess, because the code once crashed the interpreter."""
    code = """
import torch, torch.nn.functional as F
from hotrow.onehot.encoding import one_hot
for body in (lambda o: o, lambda o: o * 2, lambda o: o @ torch.ones(5, 2), lambda o: o.sum(0)):
    ours, dense = (
        torch.vmap(lambda i: body(make(i, 5).float()))(torch.tensor([[1, 0, 4], [2, 2, 3]]))
        for make in (one_hot, F.one_hot)
    )
    assert torch.equal(ours, dense)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-500:])


def test_concurrent_threads_materialize_it_once():
    from concurrent.futures import ThreadPoolExecutor

    ours = twins()[1]
    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(lambda _: ours.exp() is not None and ours.materialize(), range(64)))
    assert_same_numbers(written[0], twins()[0])
    assert isinstance(ours, OneHot)
