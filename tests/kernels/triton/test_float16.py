"""The Triton kernels round float16 tables the same way the CPU does.

Replayed steps give the same bits as torch's operations. Like the compiled kernels for float32 and
bfloat16 tables, a closed form computes in float32 and rounds the row once at the end. On the CPU,
hotrow has no compiled float16 kernels: plain torch code applies the closed forms, and it also
applies them to shorter gaps. So these tests let that code call the compiled closed forms instead.
"""

import functools

import numpy as np
import pytest
import torch

from hotrow.kernels import operators
from hotrow.kernels.default import rows as default_rows
from hotrow.kernels.grouping import group
from hotrow.kernels.triton.operators import TritonRows
from hotrow.table.parameter import Table
from tests.kernels.triton.test_rows import CONFIGURATIONS, sums_in_chunks, sums_of, train
from tests.support.exhaustive import exhaustive
from tests.support.gpu_model import batches, make_training
from tests.support.gpu_model import train as train_model
from tests.support.tolerance import assert_no_worse, assert_same_bits
from tests.support.training import label

pytestmark = exhaustive
CLOSED_FORMS = [each for each in CONFIGURATIONS if each[0] != "Adagrad"]


def in_float16(name, kwargs):
    """Return options with an eps that is not 0 in float16."""
    return kwargs if name in ("SGD", "ASGD", "Rprop") else kwargs | {"eps": 1e-4}


@functools.cache
def compiled_closed_form(apply, compute_factors):
    """Return a compiled function that applies a closed form to one row."""
    from numba import njit

    from hotrow.kernels.cpu.intrinsics import JIT_OPTIONS
    from hotrow.kernels.cpu.rows import find_called, register

    for function in (*find_called(apply), *find_called(compute_factors)):
        register(function)

    @njit(**JIT_OPTIONS)
    def advance(w, slots, t, end_step, coefficients, factors):
        compute_factors(t, end_step, coefficients, factors)
        return apply(w, slots, t, end_step, coefficients, factors)

    return advance


@pytest.fixture
def compiled_closed_forms(monkeypatch):
    """Apply closed forms to the rows of low-precision tables with compiled float32 code."""
    applied = []

    def fast_forward(program, state, index, steps, end_step, coefficients, columns):
        form = program.fast_forward
        advance = compiled_closed_form(form.apply, form.compute_factors)
        factors = np.empty(form.factor_count)
        for i in np.arange(len(steps))[index]:
            if steps[i] < end_step:
                row = [tensor[i, :columns].float().numpy() for tensor in state]
                w, *slots = row
                t = advance(w, tuple(slots), int(steps[i]), end_step, coefficients, factors)
                if t > steps[i]:
                    applied.append(t - steps[i])
                    for tensor, values in zip(state, row, strict=True):
                        tensor[i, :columns] = torch.from_numpy(values).to(tensor.dtype)
                steps[i] = t

    monkeypatch.setattr(default_rows, "fast_forward", fast_forward)
    return applied


@pytest.mark.parametrize(("name", "kwargs"), CONFIGURATIONS, ids=label)
def test_replay_has_the_bits_of_the_cpu(name, kwargs, interpret):
    kwargs = in_float16(name, kwargs)
    _, expected = train(name, kwargs, torch.float16, exact=True)
    interpret()
    _, found = train(name, kwargs, torch.float16, exact=True)
    for ours, cpu in zip(found, expected, strict=True):
        assert_same_bits(ours, cpu)


@pytest.mark.parametrize(("name", "kwargs"), CLOSED_FORMS, ids=label)
def test_closed_forms_have_the_bits_of_the_compiled_ones(
    name, kwargs, interpret, compiled_closed_forms
):
    kwargs = in_float16(name, kwargs)
    sizes = {"steps": 24, "rows": 12, "ids": 3}
    _, expected = train(name, kwargs, torch.float16, **sizes)
    # Adam with coupled decay has no closed form.
    is_replayed = name == "Adam" and "weight_decay" in kwargs
    assert max(compiled_closed_forms, default=0) >= (0 if is_replayed else 8)
    interpret()
    run, found = train(name, kwargs, torch.float16, **sizes)
    assert isinstance(run.updater._operators, TritonRows)
    for ours, cpu in zip(found, expected, strict=True):
        assert bool(cpu.isfinite().all())
        assert_same_bits(ours, cpu)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adamax", "ASGD"])
def test_closed_forms_are_as_accurate_as_torch(name, interpret):
    kwargs = {"lr": 0.1, "momentum": 0.9} if name == "SGD" else in_float16(name, {})
    sizes = {"steps": 30, "rows": 6, "ids": 2, "columns": 3}
    truth = train(name, kwargs, torch.float64, exact=True, **sizes)[1][0]
    rival = train(name, kwargs, torch.float16, exact=True, **sizes)[1][0]
    interpret()
    run, (ours, *_) = train(name, kwargs, torch.float16, **sizes)
    assert run.updater.program.fast_forward.form not in ("replay", "skip")
    assert_no_worse(ours, rival, truth)


def test_duplicates_add_in_batch_order_in_chunks(interpret):
    random = torch.Generator().manual_seed(0)
    counts = torch.tensor([1, 32, 33, 0, 97])
    ids = torch.repeat_interleave(torch.arange(len(counts)), counts)
    ids = ids[torch.randperm(len(ids), generator=random)]
    grads = torch.randn(len(ids), 3, generator=random).half()
    cpu = sums_of(ids, grads, len(counts))
    interpret()
    found = sums_of(ids, grads, len(counts))
    assert_same_bits(found, sums_in_chunks(ids, grads, len(counts)))
    assert_same_bits(found[counts <= 32], cpu[counts <= 32])
    merged = operators.merge_rows(group(ids, grads, len(counts)))
    assert_same_bits(merged.values[merged.ids.flat >= 0], found[counts > 0])


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adamax"])
def test_a_model_trains_as_on_the_cpu(name, interpret, compiled_closed_forms):
    options = {"SGD": {"lr": 0.1, "momentum": 0.9}}.get(name, {"lr": 0.01, "eps": 1e-4})

    def clip(layers):
        torch.nn.utils.clip_grad_value_(layers.parameters(), 2.0)

    def run():
        layers, optimizer = make_training(name, options, dtype=torch.float16)
        train_model(layers, optimizer, batches(12), clip)
        weight = layers[0].weight
        assert isinstance(weight, Table)
        looked_up = layers[0](torch.tensor([[1, 5, 9], [9, 0, 23]])).detach()
        state = [each.clone() for each in optimizer.state[weight].values() if each.dim()]
        return [looked_up, weight.detach().clone(), *state]

    expected = run()
    interpret()
    for ours, cpu in zip(run(), expected, strict=True):
        assert ours.dtype == torch.float16
        assert_same_bits(ours, cpu)
