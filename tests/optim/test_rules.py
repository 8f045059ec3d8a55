"""Every rule matches torch.optim after hundreds of sparse steps, exactly or in a three-way test.

In exact mode, hotrow's step differs from torch's only in the square root. MKL's square root in
float32 and float64 is not correctly rounded, while hotrow's is. So exact results are compared with
those of torch.optim's code with a correctly rounded root. In the three-way test, hotrow's error
against a higher-precision reference must not exceed that of unchanged torch.optim by more than 2
ulp.
"""

import copy
import functools
import itertools
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hotrow
from hotrow import optim
from hotrow.kernels import operators
from hotrow.kernels.cpu.rows import FACTOR_SETS
from hotrow.kernels.grouping import find_distinct, group, sum_by_row
from hotrow.optim.closed_form.series import LOG_FACTOR, TERMS
from hotrow.optim.ledger import Ledger
from hotrow.optim.updater import RowUpdater, step_together
from hotrow.table.parameter import Table
from hotrow.verify.sameness import SCALES
from tests.support.exhaustive import exhaustive, grid
from tests.support.tolerance import assert_no_worse, assert_same_bits, assert_same_numbers
from tests.support.training import (
    BROKEN_STATES,
    EXTREME_ROWS,
    RULES,
    Batches,
    RowRun,
    configurations,
    label,
    make_torch_optimizer,
    train_broken_row,
    train_dense,
    train_extreme_row,
    train_long_double,
    train_with_low_maximum,
)

CONFIGURATIONS = configurations()
all_configurations = pytest.mark.parametrize(("name", "kwargs"), CONFIGURATIONS, ids=label)

# For each optimizer, the configuration that uses the most terms of its update. Each variant
# of a kernel takes seconds to compile, so `make test` compiles only these configurations. With
# plain torch kernels, `make test` runs all configurations.
RICHEST = [
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
    ("AdamW", {"weight_decay": 0.1}),
    ("Adamax", {"betas": (0.4, 0.9), "weight_decay": 0.01}),
    ("NAdam", {"weight_decay": 0.1, "momentum_decay": 6e-3, "decoupled_weight_decay": True}),
    ("RAdam", {"weight_decay": 0.1}),
    ("Adagrad", {"initial_accumulator_value": 0.1, "lr_decay": 0.02, "weight_decay": 0.01}),
    ("Adadelta", {"lr": 0.3, "weight_decay": 0.01}),
    ("RMSprop", {"weight_decay": 0.1, "centered": True, "momentum": 0.1}),
    ("ASGD", {"t0": 20, "alpha": 0.5, "lambd": 0.01}),
    ("Rprop", {"lr": 1e-3, "step_sizes": (1e-4, 5e-3)}),
]

# Every closed form.
CLOSED_FORMS = [
    ("Adam", {}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {"weight_decay": 0.1}),
    ("AdamW", {"betas": (0.7, 0.9)}),
    ("NAdam", {}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {}),
    ("RAdam", {"betas": (0.5, 0.6)}),
    ("Adamax", {}),
    ("Adamax", {"betas": (0.6, 0.9)}),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.01}),
    ("ASGD", {}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("Adadelta", {}),
    ("Rprop", {}),
    ("RAdam", {"eps": 1.0}),  # as for the steps before the first rectified step
]


def dtype_grid(configurations, first, others, names):
    """Parametrize a test with (name, kwargs, dtype) for all configurations and dtypes.

    `make test` runs only the richest configuration of each optimizer, in the dtype `first`. For
    optimizers in `names`, it also runs the dtypes in `others`.
    """
    cases = [(n, k, dtype) for n, k in configurations for dtype in (first, *others)]
    return pytest.mark.parametrize(
        ("name", "kwargs", "dtype"),
        grid(
            cases,
            lambda name, kwargs, dtype: (
                (name, kwargs) in RICHEST and (dtype == first or name in names)
            ),
        ),
        ids=label,
    )


ROW_CONFIGURATIONS = [
    (n, k) for n, k in CONFIGURATIONS if not RULES[n].needs_dense_step({"weight_decay": 0} | k)
]
# `maximize` is compiled separately, so it is tested in one dtype only.
SIGNED = [(n, k) for n, k in CONFIGURATIONS if not k.get("maximize")]

# True if torch's CPU kernels fuse the same operations as `kernels/cpu/rule_math.py`.
matches_torch_rounding = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@pytest.fixture
def rounded_root(monkeypatch):
    """Make torch's square root correctly rounded."""

    def root(self):
        return torch.from_numpy(np.sqrt(self.numpy()))

    monkeypatch.setattr(torch.Tensor, "sqrt", root)
    monkeypatch.setattr(torch.Tensor, "sqrt_", lambda self: self.copy_(root(self)))


@pytest.fixture
def uncompiled(monkeypatch):
    """Return a function that switches every table to plain torch, as on other devices."""

    def force():
        monkeypatch.setattr(operators, "is_compiled", lambda table: False)

    return force


@functools.cache
def reference(name, kwargs, batches, dtype):
    """Return the result of torch.optim in a dtype, or the rule's own result in long double."""
    if dtype == "wide":
        return train_long_double(name, dict(kwargs), Batches(*batches))
    return train_dense(name, dict(kwargs), Batches(*batches), dtype)[0]


def references(name, kwargs, batches, dtype=torch.float32):
    """Return the results of torch.optim in `dtype` and, as the ground truth, in a wider dtype."""
    truth = "wide" if dtype == torch.float64 else torch.float64
    return tuple(reference(name, kwargs, batches, kind) for kind in (dtype, truth))


def assert_three_way(name, kwargs, exact, dtype=torch.float32, run=RowRun, **options):
    batches = Batches(**options)
    frozen = batches.steps, batches.rows, batches.columns, batches.ids, batches.scale
    rival, truth = references(name, tuple(kwargs.items()), frozen, dtype)
    ours, _ = run(name, kwargs, batches, dtype, exact).run()
    assert_no_worse(ours, rival, truth)


def test_only_rmsprop_with_decay_takes_dense_steps():
    dense_steps = [each for each in CONFIGURATIONS if each not in ROW_CONFIGURATIONS]
    assert {(name, kwargs["weight_decay"] != 0) for name, kwargs in dense_steps} == {
        ("RMSprop", True)
    }


def test_configurations_include_every_optimizer():
    assert {name for name, _ in CONFIGURATIONS} == set(RULES)
    assert len(CONFIGURATIONS) > 70


def test_richest_lists_one_configuration_of_each_optimizer():
    assert [each for each in RICHEST if each not in CONFIGURATIONS] == []
    assert {name for name, _ in RICHEST} == set(RULES)


@pytest.mark.skipif(not matches_torch_rounding, reason="needs torch's AVX2 or AVX-512 kernels")
@pytest.mark.parametrize(
    ("name", "kwargs", "dtype"),
    grid(
        [(n, k, torch.float32) for n, k in CONFIGURATIONS]
        + [(n, k, torch.float64) for n, k in SIGNED],
        lambda name, kwargs, dtype: (
            (name, kwargs) in RICHEST and (dtype == torch.float32 or name == "AdamW")
        ),
    ),
    ids=label,
)
def test_replay_matches_torch_bit_for_bit(name, kwargs, dtype, rounded_root):
    batches = Batches(steps=150, seed=1)
    weights, state = train_dense(name, kwargs, batches, dtype)
    ours, slots = RowRun(name, kwargs, batches, dtype).run()
    assert_same_numbers(ours, weights)
    for slot, expected in zip(slots, state, strict=True):
        assert_same_numbers(slot, expected)


@pytest.mark.skipif(not matches_torch_rounding, reason="needs torch's AVX2 or AVX-512 kernels")
@dtype_grid(SIGNED, torch.float16, [torch.bfloat16], names=("AdamW",))
def test_low_precision_matches_torch_bit_for_bit(name, kwargs, dtype):
    assert_low_precision_bits(name, kwargs, dtype)


@pytest.mark.skipif(not matches_torch_rounding, reason="needs torch's AVX2 or AVX-512 kernels")
@pytest.mark.parametrize(
    ("name", "kwargs"), grid(CONFIGURATIONS, lambda *case: case in RICHEST), ids=label
)
def test_bfloat16_in_plain_torch_matches_torch_bit_for_bit(name, kwargs, uncompiled):
    uncompiled()
    assert_low_precision_bits(name, kwargs, torch.bfloat16)


def assert_low_precision_bits(name, kwargs, dtype):
    # Use 64 columns, because torch rounds the last elements of an array differently.
    batches = Batches(steps=60, columns=64, seed=2)
    if dtype == torch.float16 and name not in ("SGD", "ASGD", "Rprop"):
        kwargs = kwargs | {"eps": 1e-4}  # 1e-8 is 0 in float16, so idle rows would become 0 / 0
    weights, state = train_dense(name, kwargs, batches, dtype)
    ours, slots = RowRun(name, kwargs, batches, dtype).run()
    assert bool(weights.isfinite().all())
    assert_same_numbers(ours, weights)
    for slot, expected in zip(slots, state, strict=True):
        assert_same_numbers(slot, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_does_not_depend_on_the_number_of_columns(dtype, uncompiled):
    uncompiled()
    wide = RowRun("SGD", {"momentum": 0.9}, Batches(steps=40, columns=64), dtype)
    narrow = RowRun("SGD", {"momentum": 0.9}, Batches(steps=40, columns=64), dtype)
    narrow.table, narrow.slots = narrow.table[:, :7].clone(), [each[:, :7] for each in narrow.slots]
    narrow.updater = RowUpdater(narrow.ledger, narrow.table, narrow.slots, narrow.row_steps)
    gradients = narrow.batches.gradients
    narrow.batches.gradients = lambda t: gradients(t)[:, :7].contiguous()
    assert_same_bits(narrow.run()[0], wide.run()[0][:, :7])


class AllScales(Batches):
    """Batches whose gradients have a different scale in each quarter of the columns."""

    def gradients(self, t):
        return super().gradients(t) * torch.tensor(SCALES).repeat_interleave(self.columns // 4)


@pytest.mark.parametrize(
    ("name", "kwargs"), grid(ROW_CONFIGURATIONS, lambda *case: case in CLOSED_FORMS), ids=label
)
def test_closed_forms_are_no_worse_than_torch(name, kwargs):
    batches = AllScales(columns=4 * 38)
    ours, _ = RowRun(name, kwargs, batches, torch.float32, exact=False).run()
    rival, truth = (
        train_dense(name, kwargs, batches, d)[0] for d in (torch.float32, torch.float64)
    )
    for quarter in zip(*(each.chunk(4, 1) for each in (ours, rival, truth)), strict=True):
        assert_no_worse(*quarter)


@pytest.mark.parametrize(
    ("name", "kwargs"), grid(ROW_CONFIGURATIONS, lambda *case: case in RICHEST), ids=label
)
def test_replay_is_no_worse_than_torch(name, kwargs):
    assert_three_way(name, kwargs, exact=True)


def closed_form_grid(values, decisive):
    """Combine each closed form with each value; `make test` runs only `decisive` combinations."""
    cases = [(*case, value) for case in CLOSED_FORMS for value in values]
    return grid(cases, lambda name, kwargs, value: decisive(name, value))


LONG_RUN = {"steps": 800, "rows": 120, "ids": 5}


@pytest.mark.parametrize(
    ("name", "kwargs", "scale"),
    closed_form_grid(
        [1.0, 1e-9], lambda name, scale: scale == 1 and name in ("Adam", "RAdam", "SGD", "RMSprop")
    ),
    ids=label,
)
def test_long_gaps_are_no_worse_than_torch(name, kwargs, scale):
    assert_three_way(name, kwargs, exact=False, scale=scale, **LONG_RUN)


@exhaustive
@pytest.mark.parametrize(("name", "kwargs"), [CLOSED_FORMS[0], CLOSED_FORMS[10]], ids=label)
def test_longer_gaps_are_no_worse_than_torch(name, kwargs):
    assert_three_way(name, kwargs, exact=False, steps=2500, rows=300, ids=6)


@exhaustive
@pytest.mark.parametrize(
    ("name", "kwargs", "scale"),
    closed_form_grid(
        [1.0, 1e-9],
        lambda name, scale: scale == 1 and name in ("SGD", "Adamax", "Rprop"),
    ),
    ids=label,
)
def test_long_gaps_in_plain_torch_are_no_worse_than_torch(name, kwargs, scale, uncompiled):
    uncompiled()
    assert_three_way(name, kwargs, exact=False, scale=scale, **LONG_RUN)


@pytest.mark.parametrize("compiled", grid([True, False], bool))
@pytest.mark.parametrize(
    "dtype", grid([torch.float32, torch.float64], lambda dtype: dtype == torch.float32)
)
def test_the_norm_of_adamax_stops_at_eps_as_in_torch(dtype, compiled, uncompiled):
    if not compiled:
        uncompiled()
    batches = Batches(**LONG_RUN)
    for options, rtol in (({}, 1e-3), ({"eps": 0.1}, 1e-3 if dtype == torch.float32 else 1e-12)):
        _, (_, norms) = RowRun("Adamax", options, batches, dtype, exact=False).run()
        _, (_, expected) = train_dense("Adamax", options, batches, dtype)
        torch.testing.assert_close(norms, expected, rtol=rtol, atol=0.0)


@exhaustive
@pytest.mark.parametrize("name", ["Adam", "NAdam", "RAdam", "Adamax"])
def test_coupled_decay_is_replayed_in_plain_torch(name, uncompiled):
    uncompiled()
    runs = [
        RowRun(name, {"weight_decay": 0.1}, Batches(steps=60), torch.float32, exact).run()
        for exact in (False, True)
    ]
    for found, expected in zip((runs[0][0], *runs[0][1]), (runs[1][0], *runs[1][1]), strict=True):
        assert_same_bits(found, expected)


@exhaustive
@pytest.mark.parametrize(
    ("name", "kwargs"),
    CLOSED_FORMS,
    ids=label,
)
def test_long_gaps_in_bfloat16_are_no_worse_than_torch(name, kwargs):
    assert_three_way(name, kwargs, exact=False, dtype=torch.bfloat16, **LONG_RUN)


@exhaustive
@pytest.mark.skipif(
    np.finfo(np.longdouble).eps >= np.finfo(np.float64).eps,
    reason="needs a long double wider than float64",
)
@pytest.mark.parametrize(
    ("name", "kwargs"),
    CLOSED_FORMS,
    ids=label,
)
def test_long_gaps_in_float64_are_no_worse_than_torch(name, kwargs, uncompiled):
    if name == "Rprop":
        batches = Batches(**LONG_RUN)
        truth = train_dense(name, kwargs, batches, torch.float64)[0]
        assert_same_numbers(RowRun(name, kwargs, batches, torch.float64, False).run()[0], truth)
        return
    shorter = LONG_RUN | {"steps": 500}
    assert_three_way(name, kwargs, exact=False, dtype=torch.float64, **shorter)
    uncompiled()
    assert_three_way(name, kwargs, exact=False, dtype=torch.float64, **shorter)


@dtype_grid(ROW_CONFIGURATIONS, torch.float16, [torch.bfloat16], names=("AdamW",))
def test_low_precision_is_no_worse_than_torch(name, kwargs, dtype):
    if dtype == torch.float16 and name not in ("SGD", "ASGD", "Rprop"):
        kwargs = kwargs | {"eps": 1e-4}
    assert_three_way(name, kwargs, exact=False, dtype=dtype, steps=60, columns=7)


def make_lagging_run(name, kwargs, dtype, gap):
    """Return a run whose rows have missed up to `gap` steps, and a function that takes a step."""
    run = RowRun(name, kwargs, Batches(rows=16, columns=5), dtype, exact=False)
    for _ in range(400):
        run.ledger.record_step(run.group)
    run.row_steps += 400
    grads = group(torch.arange(16), torch.randn(16, 5).to(dtype), 16)
    run.ledger.record_step(run.group)
    step_together([(run.updater, grads)])
    for _ in range(gap):
        run.ledger.record_step(run.group)
    run.row_steps[:4] += gap // 2  # some rows have missed fewer steps
    return run, lambda: step_together([(run.updater, grads)])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("name", "kwargs", "dtype"),
    closed_form_grid(
        [torch.float32, torch.float64, torch.bfloat16],
        lambda name, dtype: dtype == torch.float32 or name == "AdamW",
    ),
    ids=label,
)
def test_closed_forms_replay_few_steps(name, kwargs, dtype, compiled, uncompiled):
    """Closed forms don't read the ledger entries they skip; in this test, these are NaN."""
    if not compiled:
        uncompiled()
    run, next_step = make_lagging_run(name, kwargs, dtype, gap=600)
    run.ledger.closed_form.compute_coefficients(run.ledger.entries(), 1000, dtype)
    entries = run.ledger.entries()
    entries[401 + 100 : 701] = float("nan")
    entries[701 + 100 : 999] = float("nan")
    next_step()
    assert bool(run.table.isfinite().all())
    assert all(bool(slot.isfinite().all()) for slot in run.slots)


@pytest.mark.parametrize(
    ("name", "kwargs", "dtype"),
    closed_form_grid([torch.float32, torch.bfloat16], lambda _, dtype: dtype == torch.float32),
    ids=label,
)
def test_the_number_of_torch_calls_does_not_grow_with_the_gap(name, kwargs, dtype, uncompiled):
    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls += 1
            return function(*args, **kwargs or {})

    uncompiled()
    found = []
    for gap in (300, 1200):
        _, next_step = make_lagging_run(name, kwargs, dtype, gap)
        with Count() as count:
            count.calls = 0
            next_step()
        found.append(count.calls)
    assert found[1] <= found[0] + 20


@dtype_grid(CONFIGURATIONS, torch.float32, [torch.float64, torch.bfloat16], names=("AdamW",))
def test_settling_early_and_often_changes_nothing(name, kwargs, dtype):
    batches = Batches(steps=40, columns=5, seed=3)
    plain = RowRun(name, kwargs, batches, dtype)
    often = RowRun(name, kwargs, batches, dtype)
    random = torch.Generator().manual_seed(0)
    for t in range(batches.steps):
        plain.step(t)
        often.step(t)
        if t % 3 == 0:
            rows = torch.randperm(batches.rows, generator=random)[: t % 11]
            often.settle(rows)
        if t % 10 == 7:
            often.settle()
            often.settle()
    plain.settle()
    often.settle()
    assert_same_bits(often.table, plain.table)
    for a, b in zip(often.slots, plain.slots, strict=True):
        assert_same_bits(a, b)
    assert torch.equal(often.row_steps, torch.full_like(often.row_steps, batches.steps))


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_reading_with_closed_forms_is_no_worse_than_torch(name):
    kwargs = {"momentum": 0.9, "weight_decay": 0.01} if name == "SGD" else {}
    batches = Batches()
    frozen = batches.steps, batches.rows, batches.columns, batches.ids, batches.scale
    run = RowRun(name, kwargs, batches, torch.float32, exact=False)
    for t in range(batches.steps):
        run.step(t)
        if t % 12 == 0:
            run.settle()
    run.settle()
    assert_no_worse(run.table, *references(name, tuple(kwargs.items()), frozen))


@pytest.mark.parametrize(
    ("name", "dtype", "exact"),
    grid(
        itertools.product(sorted(RULES), [torch.float32, torch.bfloat16], [True, False]),
        lambda name, dtype, exact: dtype == torch.float32 and (name == "SGD" or not exact),
    ),
    ids=label,
)
def test_the_number_of_threads_does_not_change_the_result(name, dtype, exact, threads, monkeypatch):
    found = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        monkeypatch.setattr("hotrow.kernels.cpu.threads.VALUES_PER_THREAD", 1)
        batches = Batches(steps=25, rows=900, ids=700, columns=50)
        found.append(RowRun(name, {}, batches, dtype, exact).run()[0])
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])


def test_hyperparameters_may_change_at_any_step():
    """Closed forms account for changes to betas, eps and weight decay during the run."""
    batches = Batches(steps=500, schedule=False)
    results = {}
    for kind in (torch.float32, torch.float64, "ours"):
        dtype = torch.float32 if kind == "ours" else kind
        run = RowRun("AdamW", {}, batches, dtype, exact=False)
        torch_optimizer, parameter = make_torch_optimizer("AdamW", {}, batches.weights.to(dtype))
        group_ = run.group if kind == "ours" else torch_optimizer.param_groups[0]
        for t in range(batches.steps):
            group_["betas"] = (0.9, 0.999) if t < 300 else (0.85, 0.99)
            group_["eps"] = 1e-8 if t < 200 else 1e-5
            group_["weight_decay"] = 0.1 * (t % 50 < 25)
            if kind == "ours":
                run.base_lr = 1e-3 * (1 + t % 7)
                run.step(t)
                continue
            group_["lr"] = 1e-3 * (1 + t % 7)
            grouped = group(batches.all_ids[t], batches.gradients(t).to(dtype), batches.rows)
            parameter.grad = torch.zeros_like(parameter).index_copy_(
                0, grouped.ids.rows, sum_by_row(grouped)
            )
            torch_optimizer.step()
        if kind == "ours":
            run.settle()
        results[kind] = run.table if kind == "ours" else parameter.detach()
    assert_no_worse(results["ours"], results[torch.float32], results[torch.float64])


def test_closed_forms_overflow_in_the_same_elements_as_replay():
    batches = Batches(steps=30)
    for name in ("Adam", "NAdam", "RAdam", "Adamax", "RMSprop", "SGD", "Adadelta"):
        runs = []
        for exact in (True, False):
            run = RowRun(name, {}, batches, torch.float32, exact)
            for t in range(batches.steps):
                run.step(t)
                if t == 5:
                    big = torch.full((1, batches.columns), 1e25)
                    big[0, :3] = torch.tensor([float("inf"), float("nan"), 1.0])
                    run.ledger.record_step(run.group)
                    where = torch.tensor([39])
                    step_together([(run.updater, group(where, big, 40))])
            run.settle()
            runs.append(run.table)
        assert torch.equal(runs[0].isfinite(), runs[1].isfinite())
        assert bool(runs[0][:39].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=exhaustive)])
def test_adamax_stays_finite_with_large_gradients_as_in_torch(dtype):
    batches = Batches(steps=30, rows=20, ids=2, scale=1e32)
    truth = train_dense("Adamax", {}, batches, dtype)[0]
    assert bool(truth.isfinite().all())
    assert bool(RowRun("Adamax", {}, batches, dtype, False).run()[0].isfinite().all())


def test_rules_that_leave_idle_rows_unchanged_replay_nothing():
    assert RULES["Adagrad"].idle_rows_unchanged({"weight_decay": 0, "eps": 1e-10, "lr": 0.1})
    assert not RULES["Adagrad"].idle_rows_unchanged({"weight_decay": 0, "eps": 0, "lr": 0.1})
    assert RULES["SGD"].idle_rows_unchanged({"momentum": 0, "weight_decay": 0, "lr": 0.1})
    assert not RULES["SGD"].idle_rows_unchanged({"momentum": 0.9, "weight_decay": 0, "lr": 0.1})
    for name in ("SGD", "Adagrad"):
        run = RowRun(name, {}, Batches(steps=20), torch.float32)
        assert run.ledger.idle_rows_unchanged
        lazy = run.run()[0]
        run = RowRun(name, {}, Batches(steps=20), torch.float32)
        run.ledger.idle_rows_unchanged = False
        assert_same_numbers(run.run()[0], lazy)


@pytest.mark.parametrize("compiled", [True, False])
def test_settling_to_an_earlier_step_changes_nothing(compiled, uncompiled):
    if not compiled:
        uncompiled()
    run = RowRun("SGD", {"momentum": 0.9}, Batches(steps=5), torch.float32)
    table = run.run()[0].clone()
    rows = torch.arange(len(table))
    run.updater.settle(rows, step_count=3)
    assert run.row_steps.tolist() == [5] * len(rows)
    assert_same_bits(run.table, table)


def test_a_batch_without_rows_and_a_table_without_columns():
    none = torch.empty(0, dtype=torch.int64)
    for columns in (0, 3):
        run = RowRun("AdamW", {}, Batches(steps=3, columns=columns), torch.float32)
        run.run()
        before = [each.clone() for each in (run.table, *run.slots, run.row_steps)]
        run.updater.settle(none)
        grads = group(none, torch.empty(0, columns), 40)
        assert sum_by_row(grads).shape == (0, columns)
        run.ledger.record_step(run.group)
        step_together([(run.updater, grads)])
        found = run.updater.look_up(find_distinct(none, 40))
        assert found.shape == (0, columns)
        assert run.table.shape == (40, columns)
        for each, expected in zip((run.table, *run.slots, run.row_steps), before, strict=True):
            assert torch.equal(each, expected)


def test_a_ledger_does_not_accept_another_form():
    run = RowRun("Adam", {}, Batches(steps=2), torch.float32)
    run.step(0)
    assert run.ledger.accepts(run.group)
    assert not run.ledger.accepts(run.group | {"amsgrad": True})


@pytest.mark.parametrize(
    ("name", "exact", "compiled"),
    grid(
        itertools.product(RULES, [True, False], [True, False]),
        lambda name, exact, compiled: name == "SGD" or not exact,
    ),
)
def test_a_lookup_returns_settled_rows(name, exact, compiled, uncompiled):
    if not compiled:
        uncompiled()
    run = RowRun(name, {}, Batches(steps=120, rows=300, ids=20), torch.float32, exact)
    for t in range(120):
        run.step(t)
    ids = torch.arange(300).repeat(2).flip(0)
    every, seen = (run.table, *run.slots), run.row_steps.clone()
    before, settled = ([each.clone() for each in every] for _ in range(2))
    RowUpdater(run.ledger, settled[0], settled[1:], seen.clone()).settle(torch.arange(300))
    found = run.updater.look_up(find_distinct(ids, 300))
    assert_same_bits(found, settled[0][ids])
    # The lookup stores only rows for which it replayed many steps.
    written = run.row_steps > seen
    for was, now, then in zip(before, every, settled, strict=True):
        assert_same_bits(now[written], then[written])
        assert_same_bits(now[~written], was[~written])
    if compiled:
        assert not written[seen >= 118].any()
        fast_forwards = run.ledger.idle_rows_unchanged or run.ledger.closed_form is not None
        assert bool(written[seen < 118].all()) != fast_forwards


@pytest.mark.parametrize("name", ["AdamW", "Adamax", "SGD"])
def test_rows_that_share_factors_settle_as_if_alone(name):
    options = {"momentum": 0.9} if name == "SGD" else {}
    run = RowRun(name, options, Batches(rows=8), torch.float32, exact=False)
    for _ in range(2 * FACTOR_SETS + 50):
        run.ledger.record_step(run.group)
    generator = torch.Generator().manual_seed(0)
    for slot in run.slots:
        slot.uniform_(0.5, 1, generator=generator)
    run.row_steps[:] = torch.tensor([7, FACTOR_SETS + 7, 2 * FACTOR_SETS + 7, 9] * 2)
    alone = [[each.clone() for each in (run.table, *run.slots)] for _ in range(8)]
    for row, (table, *slots) in enumerate(alone):
        RowUpdater(run.ledger, table, slots, run.row_steps.clone()).settle(torch.tensor([row]))
    run.updater.settle(torch.arange(8))
    for k, each in enumerate((run.table, *run.slots)):
        assert_same_bits(each, torch.stack([alone[row][k][row] for row in range(8)]))
    assert not torch.equal(run.table[0], run.table[1])


def test_the_ledger_keeps_every_entry_as_it_grows():
    rule = RULES["SGD"]
    options = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "dampening": 0.0}
    options |= {"maximize": False, "nesterov": False}
    ledger = Ledger(rule, options)
    for i in range(1000):
        ledger.record_step(options | {"lr": float(i)})
    assert ledger.entries()[:, 3].tolist() == [-float(i) for i in range(1000)]


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16", "float16"])
def test_grouped_gradients_sum_to_torchs_dense_gradient(kind):
    dtype = getattr(torch, kind)
    for count, columns in ((0, 4), (1, 1), (300, 7), (5000, 33)):
        ids = torch.randint(0, 50, (count,)).clamp(max=40)
        grads = torch.randn(count, columns).to(dtype)
        grads[: count // 9] = -0.0
        grads[ids == 40] = -0.0  # all gradients of one row; their sum is 0.0
        weight = torch.zeros(50, columns, dtype=dtype, requires_grad=True)
        torch.nn.functional.embedding(ids, weight).backward(grads)
        grouped = group(ids, grads, 50)
        assert torch.equal(grouped.ids.rows.sort()[0], ids.unique())
        assert_same_bits(sum_by_row(grouped), weight.grad[grouped.ids.rows])


class OffByOne(RowRun):
    def settle(self, rows=None):
        every = torch.arange(len(self.table))
        self.updater.settle(every, self.ledger.length - 1)


class DroppedEntry(RowRun):
    def step(self, t):
        super().step(t)
        if t == 20:
            self.row_steps[self.row_steps <= t] += 1


class DecayTwice(RowRun):
    def step(self, t):
        append = self.ledger.append
        self.ledger.append = lambda entry: append((entry[0] ** 2, *entry[1:]))
        super().step(t)
        self.ledger.append = append


class SkippedRow(RowRun):
    def settle(self, rows=None):
        super().settle((self.row_steps > 0).nonzero()[:, 0])


class DroppedDuplicate(RowRun):
    def step(self, t):
        ids = self.batches.all_ids[t]
        earlier = [i in ids[:k].tolist() for k, i in enumerate(ids.tolist())]
        compute_gradients, self.batches.ids = self.batches.gradients, len(ids)
        gradients = compute_gradients(t)
        gradients[torch.tensor(earlier)] = 0
        self.batches.gradients = lambda t: gradients
        super().step(t)
        self.batches.gradients = compute_gradients


MUTANTS = (OffByOne, DroppedEntry, DecayTwice, SkippedRow, DroppedDuplicate)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant, exact):
    batches = Batches(steps=60)
    frozen = batches.steps, batches.rows, batches.columns, batches.ids, batches.scale
    rival, truth = references("AdamW", (), frozen)
    assert_no_worse(RowRun("AdamW", {}, batches, torch.float32, exact).run()[0], rival, truth)
    wrong = mutant("AdamW", {}, batches, torch.float32, exact).run()[0]
    with pytest.raises(AssertionError, match="the rival's error plus 2 ulp"):
        assert_no_worse(wrong, rival, truth)


class Altered(RowRun):
    """A run whose closed form has wrong coefficients."""

    def __post_init__(self):
        super().__post_init__()
        compute_coefficients = self.ledger.closed_form.compute_coefficients

        def altered(*arguments):
            coefficients = compute_coefficients(*arguments)
            return None if coefficients is None else self.alter(*coefficients)

        self.ledger.closed_form.compute_coefficients = altered


class NextStepSums(Altered):
    """Use the sums of the next step instead of those of the current step."""

    def alter(self, sums, *rest):
        return np.concatenate([sums[1:], sums[-1:]]), *rest


class DroppedTerm(Altered):
    """Drop the series term with the first power of the distance."""

    def alter(self, sums, *rest):
        sums = sums.copy()
        sums[:, 1] = 0
        return sums, *rest


class DroppedHigherTerm(Altered):
    def alter(self, sums, *rest):
        sums = sums.copy()
        sums[:, TERMS // 2] = 0
        return sums, *rest


class WrongDecay(Altered):
    def alter(self, sums, *rest):
        sums = sums.copy()
        sums[:, LOG_FACTOR] *= 1.01
        return sums, *rest


class WrongMomentum(Altered):
    def alter(self, sums, first, b1, *rest):
        return sums, first, b1**1.01, *rest


class NoBound(Altered):
    """Fast-forward every row, however large the remainder."""

    def alter(self, *coefficients):
        return *coefficients[:-1], 1e30


class PreviousBlock(Altered):
    """Use blocks that end one step too early."""

    def alter(self, blocks, ends, *rest):
        return blocks, np.concatenate([ends[:1], ends[:-1]]), *rest


class OtherLimits(Altered):
    def alter(self, since, smallest, largest):
        return since, smallest * 2e4, largest


CLOSED_FORM_MUTANTS = [
    *(
        (mutant, name, kwargs, torch.float32)
        for name, kwargs in (CLOSED_FORMS[2], CLOSED_FORMS[5], CLOSED_FORMS[6])
        for mutant in (NextStepSums, DroppedTerm, WrongMomentum)
    ),
    *((WrongDecay, *CLOSED_FORMS[i], torch.float32) for i in (2, 5)),
    *((NextStepSums, *CLOSED_FORMS[i], torch.float32) for i in (1, 7, 8)),
    (DroppedTerm, "Adamax", {"eps": 0.5}, torch.float32),
    *((PreviousBlock, *CLOSED_FORMS[i], torch.float32) for i in (10, 11)),
    (PreviousBlock, *CLOSED_FORMS[12], torch.float32),
    (OtherLimits, *CLOSED_FORMS[14], torch.float32),
    (NoBound, *CLOSED_FORMS[0], torch.float32),
    (NoBound, *CLOSED_FORMS[3], torch.float64),
    (DroppedHigherTerm, *CLOSED_FORMS[4], torch.float64),
    (OtherLimits, *CLOSED_FORMS[14], torch.bfloat16),
]


@pytest.mark.parametrize(
    ("mutant", "name", "kwargs", "dtype", "compiled"),
    grid(
        [(*case, compiled) for case in CLOSED_FORM_MUTANTS for compiled in (True, False)],
        lambda mutant, name, kwargs, dtype, compiled: compiled and dtype == torch.float32,
    ),
    ids=label,
)
def test_mutants_of_closed_forms_are_caught(mutant, name, kwargs, dtype, compiled, uncompiled):
    if not compiled:
        uncompiled()
    batches = {"steps": 300, "rows": 60, "ids": 5}
    assert_three_way(name, kwargs, False, dtype, **batches)
    with pytest.raises(AssertionError, match="the rival's error plus 2 ulp"):
        assert_three_way(name, kwargs, False, dtype, mutant, **batches)


# --- amsgrad with a maximum that is less than the second moment -----------------------------------


@pytest.mark.parametrize("change", ["toggle", "reset"])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_maximum_below_the_second_moment(change, compiled, uncompiled):
    if not compiled:
        uncompiled()
    (weights, maximum), (torch_weights, torch_maximum) = (
        train_with_low_maximum(library, change) for library in (optim, torch.optim)
    )
    assert_same_bits(maximum, torch_maximum)
    torch.testing.assert_close(weights, torch_weights, rtol=1e-5, atol=1e-5)


# --- Options at which a closed form would overflow ------------------------------------------------


@exhaustive
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"lr": 1.0, "weight_decay": 0.9}),
        ("AdamW", {"lr": 0.3, "weight_decay": 1.0, "amsgrad": True}),
        ("AdamW", {"lr": 0.1, "weight_decay": 0.3, "betas": (0.99, 0.999)}),
        ("AdamW", {"lr": 3.0, "weight_decay": 1.0}),  # the factor is negative
        ("NAdam", {"lr": 0.5, "weight_decay": 0.9, "decoupled_weight_decay": True}),
        ("RAdam", {"lr": 0.5, "weight_decay": 0.9, "decoupled_weight_decay": True}),
        ("Adam", {"lr": 0.1, "eps": 1e-39}),
        ("NAdam", {"lr": 0.1, "eps": 1e-39}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=exhaustive)])
def test_idle_rows_with_extreme_options(name, options, dtype):
    found = []
    for library in (optim, torch.optim):
        layer = torch.nn.Embedding(3, 2, _weight=torch.ones(3, 2, dtype=dtype))
        if library is optim:
            layer = hotrow.convert(layer, min_entries=0)
            assert isinstance(layer.weight, Table)
        optimizer = getattr(library, name)(layer.parameters(), **options)
        for step in range(700):
            optimizer.zero_grad()
            layer(torch.tensor([0, 1] if step in (0, 400) else [0])).sum().backward()
            optimizer.step()
        found.append(layer.weight.detach().clone())
    torch.testing.assert_close(*found, rtol=1e-4, atol=0)


@pytest.mark.parametrize("eps", [0.0, 1e-30, 2e-16])
@pytest.mark.parametrize("name", ["Adam", "NAdam", "RAdam"])
@pytest.mark.parametrize("compiled", grid([True, False], bool))
def test_a_second_moment_that_underflows(name, eps, compiled, uncompiled):
    if not compiled:
        uncompiled()
    found = []
    for library in (optim, torch.optim):
        layer = torch.nn.Embedding(2, 1, _weight=torch.full((2, 1), 0.5))
        if library is optim:
            layer = hotrow.convert(layer, min_entries=0)
            assert isinstance(layer.weight, Table)
        options = {"lr": 1e-3, "betas": (0.95, 0.95), "eps": eps}
        optimizer = getattr(library, name)(layer.parameters(), **options)
        for step in range(600):
            optimizer.zero_grad()
            # The row that is in each batch gets larger gradients, which don't underflow.
            rows = layer(torch.tensor([0, 1] if step == 0 else [0]))
            (rows[0] + 1e-18 * rows[1:].sum()).sum().backward()
            optimizer.step()
            if step % 50 == 0:
                layer.weight.norm()  # settles the rows, and rounds their state
        found.append(layer.weight.detach().clone())
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("name", "options", "weight"), EXTREME_ROWS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=exhaustive)])
@pytest.mark.parametrize("compiled", grid([True, False], bool))
def test_a_row_with_infinite_values_or_factors(name, options, weight, dtype, compiled, uncompiled):
    if not compiled:
        uncompiled()
    ours, theirs = (
        train_extreme_row(library, name, options, weight, dtype) for library in (optim, torch.optim)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize(("name", "options", "slot", "value"), BROKEN_STATES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=exhaustive)])
@pytest.mark.parametrize(
    ("compiled", "weight"),
    grid(
        itertools.product((True, False), (None, math.nan)),
        lambda compiled, weight: compiled and weight is None,
    ),
)
def test_idle_rows_with_a_broken_state(
    name, options, slot, value, dtype, compiled, weight, uncompiled
):
    if not compiled:
        uncompiled()
    for missed_steps in (3, 60):
        ours, theirs = (
            train_broken_row(library, name, options, slot, value, missed_steps, dtype, weight)
            for library in (optim, torch.optim)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize(("name", "options"), [
    ("SGD", {"momentum": 0.9}), ("ASGD", {}), ("RMSprop", {}), ("RMSprop", {"centered": True}),
    ("Adadelta", {}), ("Adagrad", {}), ("Adam", {}), ("Adam", {"amsgrad": True}), ("NAdam", {}),
    ("RAdam", {}), ("Adamax", {}), ("Rprop", {}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("compiled", [True, False])
def test_weights_restored_after_a_nan_gradient(name, options, compiled, uncompiled):
    """Load the last good weights, but keep the optimizer, whose state contains NaN."""
    if not compiled:
        uncompiled()
    weights = []
    for library in (optim, torch.optim):
        layer = torch.nn.Embedding(5, 2, _weight=torch.ones(5, 2))
        if library is optim:
            layer = hotrow.convert(layer, min_entries=0)
            assert isinstance(layer.weight, Table)
        optimizer = getattr(library, name)(layer.parameters(), lr=0.01, **options)
        for step in range(20):
            if step == 1:
                good = copy.deepcopy(layer.state_dict())
            if step == 2:
                layer.load_state_dict(good)
            optimizer.zero_grad()
            rows = [0, 1, 2, 3] if step == 0 else [0, 1] if step == 1 else [2, 3]
            (layer(torch.tensor(rows)) * (math.nan if step == 1 else 1.0)).sum().backward()
            optimizer.step()
        if library is optim:
            assert layer.weight.has_stale_rows == (name != "Adagrad")
        weights.append(layer.weight.detach().clone())
    torch.testing.assert_close(*weights, rtol=1e-5, atol=0, equal_nan=True)
