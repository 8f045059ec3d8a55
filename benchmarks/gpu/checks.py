"""Check hotrow's promises on a GPU; each function raises an error if its promise is broken.

`tests/gpu` runs the same functions.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import hotrow
from hotrow import HotrowError
from hotrow.kernels.triton.operators import TritonRows
from hotrow.optim.lag import RowLag
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table

# The sizes and step counts of the checks; the tests on the CPU reduce them.
ROWS, COLUMNS, IDS, STEPS, FREQUENT, WIDE = 500, 37, 64, 80, 70_000, 5000
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {"weight_decay": 0.1}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adamax", {}),
    ("Adagrad", {}),
    ("Adadelta", {}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("ASGD", {}),
    ("Rprop", {}),
]


class NotApplicableError(Exception):
    """Raised if a check cannot run on this machine."""


def make_table(
    name: str,
    options: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    device: str = "cuda",
) -> tuple[nn.Embedding, Any]:
    """Return an embedding whose weight is a table, and a hotrow optimizer for it."""
    layer = hotrow.convert(initial_layer().to(device, dtype), min_entries=0)
    assert isinstance(layer.weight, Table)
    return layer, getattr(hotrow.optim, name)(layer.parameters(), **options)


def initial_layer() -> nn.Embedding:
    """Return an embedding that has the same values on every call."""
    torch.manual_seed(0)
    return nn.Embedding(ROWS, COLUMNS)


def batches(steps: int | None = None, device: str = "cuda") -> Iterator[Any]:
    """Yield ids, mostly frequent ones, and the gradients of their rows."""
    random = torch.Generator().manual_seed(1)
    for _ in range(steps or STEPS):
        ids = (torch.rand(IDS, generator=random) ** 4 * ROWS * 0.8).long()
        yield ids.to(device), torch.randn(IDS, COLUMNS, generator=random).to(device)


def train(layer: nn.Embedding, optimizer: Any, given: Any, after: Any = None) -> None:
    """Train on batches with the given gradients."""
    for ids, gradient in given:
        optimizer.zero_grad()
        layer(ids).backward(gradient.to(layer.weight.dtype))
        if after is not None:
            after(layer)
        optimizer.step()


def train_table(
    name: str, options: dict[str, Any], dtype: torch.dtype = torch.float32, device: str = "cuda"
) -> Tensor:
    """Return the table after training with hotrow."""
    layer, optimizer = make_table(name, options, dtype, device)
    train(layer, optimizer, batches(device=device))
    if device == "cuda":
        lag = layer.weight.lag
        assert isinstance(lag, RowLag)
        assert lag._updater is not None
        assert isinstance(lag._updater._operators, TritonRows), "other kernels ran"
        assert name in ("SGD", "Adagrad") or lag.has_stale_rows, "every step settled all rows"
    return layer.weight.detach().clone()


def train_dense(
    name: str, options: dict[str, Any], dtype: torch.dtype, device: str = "cuda"
) -> Tensor:
    """Return the weight after dense training with torch."""
    layer = initial_layer().to(device, dtype)
    optimizer = getattr(torch.optim, name)(layer.parameters(), **options)
    for ids, gradient in batches(device=device):
        # The dense gradient is summed on the CPU, because torch's sums on a GPU vary between runs.
        dense = torch.zeros(ROWS, COLUMNS, dtype=dtype)
        dense.index_add_(0, ids.cpu(), gradient.cpu().to(dtype))
        layer.weight.grad = dense.to(device)
        optimizer.step()
    return layer.weight.detach().clone()


def assert_no_worse(ours: Tensor, rival: Tensor, truth: Tensor) -> None:
    """Assert that hotrow's error is at most torch's error plus 2 ulp."""
    error, allowed = (float((each.double() - truth).abs().max()) for each in (ours, rival))
    allowed += 2 * torch.finfo(ours.dtype).eps * float(truth.abs().max())
    assert error <= allowed, f"error {error:.3g} exceeds {allowed:.3g}"


def each_optimizer_is_no_worse_than_torch() -> str:
    """Compare float32 training on the GPU with torch in float32 and in float64."""
    for name, options in OPTIMIZERS:
        truth = train_dense(name, options, torch.float64)
        rival = train_dense(name, options, torch.float32)
        try:
            assert_no_worse(train_table(name, options), rival, truth)
        except AssertionError as error:
            raise AssertionError(f"{name} {options}: {error}") from None
    return f"passed: {len(OPTIMIZERS)} optimizers"


def bits_compared_with_the_cpu() -> str:
    """Count the values that differ from the results of hotrow's kernels on the CPU."""
    found = []
    for name, options in OPTIMIZERS:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            gpu = train_table(name, options, dtype).cpu()
            cpu = train_table(name, options, dtype, "cpu")
            differ = int((gpu != cpu).sum())
            if differ:
                found.append(f"{name} {options} {dtype}: {differ} of {gpu.numel()} differ")
    return "; ".join(found) or "passed: all bits are equal"


def low_precision_is_no_worse_than_torch() -> str:
    """Compare bfloat16 and float16 training with torch on the CPU, and with float64.

    torch on a GPU rounds less often; see docs/how-to/gpu.md. The check compares mean errors,
    because in these dtypes, the maximum depends on chance.
    """
    for name, options in OPTIMIZERS:
        for dtype in (torch.bfloat16, torch.float16):
            chosen = options if name in ("SGD", "ASGD", "Rprop") else options | {"eps": 1e-4}
            truth = train_dense(name, chosen, torch.float64, "cpu")
            rival = train_dense(name, chosen, dtype, "cpu")
            error, allowed = (
                float((each.double() - truth).abs().mean())
                for each in (train_table(name, chosen, dtype).cpu(), rival)
            )
            assert error <= 1.01 * allowed, f"{name} {chosen} {dtype}: {error:.3g} > {allowed:.3g}"
    return "passed"


def results_are_deterministic() -> None:
    """Train twice, and compare the results bit for bit."""
    for name, options in OPTIMIZERS[:6]:
        first, second = (train_table(name, options) for _ in range(2))
        assert torch.equal(first, second), f"{name}: two runs differ"


def duplicates_add_in_chunks_of_32() -> None:
    """Compare the GPU's sums with sums that the CPU computes in the promised order."""
    random = torch.Generator().manual_seed(0)
    others = torch.randint(0, 20, (2000,), generator=random)
    ids = torch.cat([torch.full((FREQUENT,), 3), others[:FREQUENT]])
    ids = ids[torch.randperm(len(ids), generator=random)]
    gradient = torch.randn(len(ids), COLUMNS, generator=random)
    layer = hotrow.convert(nn.Embedding(20, COLUMNS).cuda(), min_entries=0)
    with torch.no_grad():
        layer.weight.zero_()
    optimizer = hotrow.optim.SGD(layer.parameters(), lr=1.0, maximize=True)
    layer(ids.cuda()).backward(gradient.cuda())
    optimizer.step()
    found = layer.weight.detach().cpu()
    for row in range(20):
        own = gradient[ids == row]
        chunks = torch.zeros(-(-len(own) // 32), 32, COLUMNS)
        chunks.view(-1, COLUMNS)[: len(own)] = own
        sums = torch.zeros(len(chunks), COLUMNS)
        for k in range(32):  # adding a 0 at the end of the last chunk changes nothing
            sums += chunks[:, k]
        total = torch.zeros(COLUMNS)
        for each in sums:
            total += each
        assert torch.equal(found[row], total), f"row {row} of {len(own)} gradients"


@contextmanager
def refuse_waits() -> Iterator[None]:
    """Make torch raise an error if the CPU waits for the GPU."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def a_step_never_waits() -> None:
    """Train under torch's synchronization check, with and without gradient clipping."""
    clip = functools.partial(clip_gradients)
    for name, options in OPTIMIZERS[:6]:
        for after in (None, clip):
            layer, optimizer = make_table(name, options)
            train(layer, optimizer, batches(5))
            given = list(batches(3))
            with refuse_waits():
                train(layer, optimizer, given, after)


def clip_gradients(layer: nn.Embedding) -> None:
    """Clip the gradient's norm."""
    nn.utils.clip_grad_norm_(layer.parameters(), 0.5)


def a_bad_id_raises_and_changes_nothing() -> None:
    """Look up an out-of-range id, and check that the lookup has no effect on training."""
    layer, optimizer = make_table("AdamW", {})
    twin, other = make_table("AdamW", {})
    train(layer, optimizer, batches(5))
    train(twin, other, batches(5))
    try:
        gradient = torch.ones(2, COLUMNS, device="cuda")
        train(layer, optimizer, [(torch.tensor([1, ROWS + 3], device="cuda"), gradient)])
        torch.cuda.synchronize()
        layer(torch.tensor([1], device="cuda"))
    except HotrowError as error:
        message = str(error)
    else:
        message = "no error"
    assert f"input[1] = {ROWS + 3}" in message, message
    train(layer, optimizer, batches(3))
    train(twin, other, batches(3))
    assert torch.equal(layer.weight.detach(), twin.weight.detach())


def a_pending_bad_id_is_found_before_a_state_dict() -> None:
    """Save the state, or step only one of two tables, while the GPU has not seen a bad id yet."""
    saves = lambda layers, optimizer: optimizer.state_dict()  # noqa: E731
    splits = lambda layers, optimizer: train(layers[1], optimizer, batches(1))  # noqa: E731
    for change in (saves, splits):
        layers, optimizer = make_two_tables()
        twins, other = make_two_tables()
        try:
            torch.cuda.synchronize()
            torch.cuda._sleep(10**9)  # about half a second
            layers[0](torch.tensor([1, ROWS + 3], device="cuda")).sum().backward()
            layers[1](torch.tensor([1], device="cuda")).sum().backward()
            optimizer.step()
            change(layers, optimizer)
        except HotrowError as error:
            message = str(error)
        else:
            message = "no error"
        assert f"input[1] = {ROWS + 3}" in message, message
        for ours, twin in zip(layers, twins, strict=True):
            assert torch.equal(ours.weight.detach(), twin.weight.detach())
            found, expected = optimizer.state[ours.weight], other.state[twin.weight]
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            for layer, each in ((ours, optimizer), (twin, other)):
                train(layer, each, batches(2))
            assert torch.equal(ours.weight.detach(), twin.weight.detach())


def make_two_tables() -> tuple[Any, Any]:
    """Return two tables that have taken five steps together, and their optimizer."""
    layers: Any = nn.ModuleList([initial_layer(), initial_layer()]).to("cuda")
    layers = hotrow.convert(layers, min_entries=0)
    optimizer = hotrow.optim.AdamW(layers.parameters(), weight_decay=0.1)
    for ids, gradient in batches(5):
        optimizer.zero_grad()
        for layer in layers:
            layer(ids).backward(gradient)
        optimizer.step()
    optimizer.zero_grad()
    return layers, optimizer


def a_graph_replays_steps() -> None:
    """Capture a step in a CUDA graph, replay it, and compare with steps without a graph."""
    for name, options in OPTIMIZERS:
        layer, optimizer = make_table(name, options)
        twin, other = make_table(name, options)
        given = list(batches(20))
        base_lr = optimizer.param_groups[0]["lr"]
        static_ids, static_gradient = (each.clone() for each in given[0])

        def step(layer: Any = layer, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            layer(static_ids).backward(static_gradient)  # noqa: B023
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            train(layer, optimizer, given[:3])
        torch.cuda.current_stream().wait_stream(side)
        train(twin, other, given[:3])
        optimizer.prepare_capture()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for t, (ids, gradient) in enumerate(given[3:]):
            for each in (optimizer, other):
                each.param_groups[0]["lr"] = base_lr * (1 + t % 3)
            static_ids.copy_(ids)
            static_gradient.copy_(gradient)
            optimizer.replay(graph)
            train(twin, other, [(ids, gradient)])
        assert torch.equal(layer.weight.detach(), twin.weight.detach()), name


def an_alias_shows_dense_values() -> None:
    """Keep a reference to `weight.data` during training, and compare it with the table."""
    layer, optimizer = make_table("AdamW", {})
    train(layer, optimizer, batches(3))
    alias = layer.weight.data
    train(layer, optimizer, batches(3))
    assert torch.equal(alias, layer.weight.detach())
    del alias
    train(layer, optimizer, batches(3))
    lag = layer.weight.lag
    assert lag is not None
    assert lag.has_stale_rows


def backward_keeps_rows_unmerged() -> None:
    """Check that backward doesn't merge a gradient that no other code refers to."""
    layer, _ = make_table("AdamW", {})
    for ids, gradient in batches(2):
        layer.zero_grad()
        (layer(ids) * 1).backward(gradient)
        grad = layer.weight.grad
        assert isinstance(grad, RowGradient)
        assert not grad.row_storage.is_merged, "backward merged the gradient"


def accumulation_and_scaling() -> None:
    """Accumulate two batches under a GradScaler with autocast; compare with the CPU."""
    found = []
    for device in ("cuda", "cpu"):
        layer, optimizer = make_table("AdamW", {}, device=device)
        scaler = torch.amp.GradScaler(device, init_scale=8.0)
        given = list(batches(6, device))
        for (ids, gradient), (more, again) in zip(given[::2], given[1::2], strict=True):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16):
                output = layer(ids), layer(more)
            scaler.scale((output[0] * gradient).sum() + (output[1] * again).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        found.append(layer.weight.detach().cpu())
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def state_dicts_move_between_devices() -> None:
    """Train on the GPU and continue on the CPU, and the other way around."""
    reference = train_table("AdamW", {}, device="cpu")
    for first, second in (("cuda", "cpu"), ("cpu", "cuda")):
        layer, optimizer = make_table("AdamW", {}, device=first)
        given = list(batches(device="cpu"))
        train(layer, optimizer, [(i.to(first), g.to(first)) for i, g in given[: STEPS // 2]])
        saved = copy.deepcopy((layer.state_dict(), optimizer.state_dict()))
        layer, optimizer = make_table("AdamW", {}, device=second)
        layer.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(layer, optimizer, [(i.to(second), g.to(second)) for i, g in given[STEPS // 2 :]])
        torch.testing.assert_close(layer.weight.detach().cpu(), reference, rtol=1e-5, atol=1e-6)


def a_model_moves_after_convert() -> None:
    """Convert on the CPU, move to the GPU, and train."""
    layer = hotrow.convert(initial_layer(), min_entries=0).to("cuda")
    assert isinstance(layer.weight, Table)
    optimizer = hotrow.optim.AdamW(layer.parameters())
    train(layer, optimizer, batches())
    expected = train_table("AdamW", {})
    assert torch.equal(layer.weight.detach(), expected)


def steps_on_another_stream() -> None:
    """Train on a stream other than the default one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = train_table("AdamW", {})
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(found, train_table("AdamW", {}))


def a_compiled_model_trains() -> None:
    """Train a model under torch.compile."""
    found = []
    for compiled in (False, True):
        layer, optimizer = make_table("AdamW", {})
        model: Any = torch.compile(layer) if compiled else layer
        for ids, gradient in batches(10):
            optimizer.zero_grad()
            (model(ids) * gradient).sum().backward()
            optimizer.step()
        found.append(layer.weight.detach().clone())
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def tables_on_a_second_gpu() -> None:
    """Train on a GPU other than the current one."""
    if torch.cuda.device_count() < 2:
        raise NotApplicableError("there is only one GPU")
    layer, optimizer = make_table("AdamW", {}, device="cuda:1")
    train(layer, optimizer, batches(device="cuda:1"))
    assert torch.equal(layer.weight.detach().cpu(), train_table("AdamW", {}).cpu())


def ids_beyond_a_block() -> None:
    """Train a table so wide that it needs several blocks of columns; compare it with torch's."""
    torch.manual_seed(0)
    layer = hotrow.convert(nn.Embedding(50, WIDE).cuda(), min_entries=0)
    dense = nn.Embedding(50, WIDE).cuda()
    with torch.no_grad():
        dense.weight.copy_(layer.weight)
    optimizers = hotrow.optim.AdamW(layer.parameters()), torch.optim.AdamW(dense.parameters())
    for t in range(10):
        ids = torch.tensor([t, 0, t], device="cuda")
        for module, optimizer in zip((layer, dense), optimizers, strict=True):
            optimizer.zero_grad()
            module(ids).pow(2).sum().backward()
            optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), dense.weight.detach(), rtol=1e-5, atol=1e-6)


CHECKS: tuple[Callable[[], str | None], ...] = (
    each_optimizer_is_no_worse_than_torch,
    bits_compared_with_the_cpu,
    low_precision_is_no_worse_than_torch,
    results_are_deterministic,
    duplicates_add_in_chunks_of_32,
    a_step_never_waits,
    a_bad_id_raises_and_changes_nothing,
    a_pending_bad_id_is_found_before_a_state_dict,
    a_graph_replays_steps,
    an_alias_shows_dense_values,
    backward_keeps_rows_unmerged,
    accumulation_and_scaling,
    state_dicts_move_between_devices,
    a_model_moves_after_convert,
    steps_on_another_stream,
    a_compiled_model_trains,
    tables_on_a_second_gpu,
    ids_beyond_a_block,
)
