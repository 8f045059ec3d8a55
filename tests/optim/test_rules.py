"""Every rule against torch.optim, after hundreds of sparse steps: bit for bit, or three ways.

In exact mode all that is not torch's own step is its square root: MKL's in float32 and float64 is
not correctly rounded, ours is. So bits are compared with torch.optim's code over a correctly
rounded root, and torch.optim as it is is held to the three-way rule.
"""

import functools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hotrow import HotrowError
from hotrow.kernels import operators as kernels
from hotrow.kernels.grouping import distinct, group
from hotrow.optim import settle as settling
from hotrow.optim.closed_form.series import DECAY, TERMS
from hotrow.optim.ledger import Ledger
from hotrow.optim.settle import look_up, settle, step
from hotrow.verify.sameness import SCALES
from tests.support.tolerance import assert_no_worse, assert_same_bits, assert_same_numbers
from tests.support.training import (
    RULES,
    Batches,
    Touched,
    configurations,
    dense,
    label,
    optimizer,
    wide,
)

CONFIGURATIONS = configurations()
each = pytest.mark.parametrize(("name", "kwargs"), CONFIGURATIONS, ids=label)
BY_ROWS = [(n, k) for n, k in CONFIGURATIONS if not RULES[n].dense({"weight_decay": 0} | k)]
each_by_rows = pytest.mark.parametrize(("name", "kwargs"), BY_ROWS, ids=label)

# Bit for bit where torch's CPU kernels fuse as `kernels/scalars.py` does.
fused = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@pytest.fixture
def rounded_root(monkeypatch):
    """torch with a correctly rounded square root."""

    def root(self):
        return torch.from_numpy(np.sqrt(self.numpy()))

    monkeypatch.setattr(torch.Tensor, "sqrt", root)
    monkeypatch.setattr(torch.Tensor, "sqrt_", lambda self: self.copy_(root(self)))


@pytest.fixture
def uncompiled(monkeypatch):
    """Plain torch for every table, as on a GPU."""

    def force():
        for module in (kernels, settling):
            monkeypatch.setattr(module, "is_compiled", lambda table: False)

    return force


@functools.cache
def reference(name, kwargs, batches, dtype):
    """torch.optim in a dtype; in long double the rule itself."""
    if dtype == "wide":
        return wide(name, dict(kwargs), Batches(*batches))
    return dense(name, dict(kwargs), Batches(*batches), dtype)[0]


def references(name, kwargs, batches, dtype=torch.float32):
    """torch.optim in the dtype, and what both are held against."""
    truth = "wide" if dtype == torch.float64 else torch.float64
    return tuple(reference(name, kwargs, batches, kind) for kind in (dtype, truth))


def three_ways(name, kwargs, exact, dtype=torch.float32, run=Touched, **batches):
    given = Batches(**batches)
    frozen = given.steps, given.rows, given.columns, given.ids, given.scale
    rival, truth = references(name, tuple(kwargs.items()), frozen, dtype)
    ours, _ = run(name, kwargs, given, dtype, exact).run()
    assert_no_worse(ours, rival, truth)


def test_what_is_dense_is_known():
    dense = [found for found in CONFIGURATIONS if found not in BY_ROWS]
    assert {(name, kwargs["weight_decay"] != 0) for name, kwargs in dense} == {("RMSprop", True)}


def test_every_optimizer_is_covered():
    assert {name for name, _ in CONFIGURATIONS} == set(RULES)
    assert len(CONFIGURATIONS) > 70


def in_dtypes(first, *others):
    """Every configuration in the first dtype; a changed sign, compiled apart, only there."""
    found = [
        (name, kwargs, dtype)
        for name, kwargs in CONFIGURATIONS
        for dtype in (first, *others)
        if dtype == first or not kwargs.get("maximize")
    ]
    return pytest.mark.parametrize(("name", "kwargs", "dtype"), found, ids=label)


@pytest.mark.skipif(not fused, reason="needs the vectors of x86")
@in_dtypes(torch.float32, torch.float64)
def test_replay_is_bit_for_bit(name, kwargs, dtype, rounded_root):
    batches = Batches(steps=150, seed=1)
    weights, state = dense(name, kwargs, batches, dtype)
    ours, slots = Touched(name, kwargs, batches, dtype).run()
    assert_same_numbers(ours, weights)
    for slot, expected in zip(slots, state, strict=True):
        assert_same_numbers(slot, expected)


@pytest.mark.skipif(not fused, reason="needs the vectors of x86")
@in_dtypes(torch.float16, torch.bfloat16)
def test_low_precision_is_bit_for_bit(name, kwargs, dtype):
    low_precision(name, kwargs, dtype)


@pytest.mark.skipif(not fused, reason="needs the vectors of x86")
@each
def test_bfloat16_in_plain_torch_is_bit_for_bit(name, kwargs, uncompiled):
    uncompiled()
    low_precision(name, kwargs, torch.bfloat16)


def low_precision(name, kwargs, dtype):
    # 64 columns: torch rounds the last elements of an array otherwise than the rest.
    batches = Batches(steps=60, columns=64, seed=2)
    if dtype == torch.float16 and name not in ("SGD", "ASGD", "Rprop"):
        kwargs = kwargs | {"eps": 1e-4}  # 1e-8 is 0 in float16, and 0 / 0 in every idle row
    weights, state = dense(name, kwargs, batches, dtype)
    ours, slots = Touched(name, kwargs, batches, dtype).run()
    assert bool(weights.isfinite().all())
    assert_same_numbers(ours, weights)
    for slot, expected in zip(slots, state, strict=True):
        assert_same_numbers(slot, expected)


class AllScales(Batches):
    """The gradients of the first quarter of the columns are of scale 1, and so on."""

    def grads(self, t):
        return super().grads(t) * torch.tensor(SCALES).repeat_interleave(self.columns // 4)


@each_by_rows
def test_shortcuts_are_no_worse_than_torch(name, kwargs):
    batches = AllScales(columns=4 * 38)
    ours, _ = Touched(name, kwargs, batches, torch.float32, exact=False).run()
    rival, truth = (dense(name, kwargs, batches, d)[0] for d in (torch.float32, torch.float64))
    for quarter in zip(*(each.chunk(4, 1) for each in (ours, rival, truth)), strict=True):
        assert_no_worse(*quarter)


@each_by_rows
def test_replay_is_no_worse_than_torch(name, kwargs):
    three_ways(name, kwargs, exact=True)


# Every form of a jump.
CLOSED = [
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
]
each_closed = pytest.mark.parametrize(("name", "kwargs"), CLOSED, ids=label)
LONG = {"steps": 800, "rows": 120, "ids": 5}


@pytest.mark.parametrize("scale", [1.0, 1e-9])
@each_closed
def test_long_gaps(name, kwargs, scale):
    three_ways(name, kwargs, exact=False, scale=scale, **LONG)


@pytest.mark.parametrize(("name", "kwargs"), [CLOSED[0], CLOSED[10]], ids=label)
def test_longer_gaps(name, kwargs):
    three_ways(name, kwargs, exact=False, steps=2500, rows=300, ids=6)


@pytest.mark.parametrize("scale", [1.0, 1e-9])
@each_closed
def test_long_gaps_in_plain_torch(name, kwargs, scale, uncompiled):
    uncompiled()
    three_ways(name, kwargs, exact=False, scale=scale, **LONG)


@each_closed
def test_long_gaps_in_bfloat16(name, kwargs):
    three_ways(name, kwargs, exact=False, dtype=torch.bfloat16, **LONG)


@pytest.mark.skipif(
    np.finfo(np.longdouble).eps >= np.finfo(np.float64).eps, reason="needs a wider long double"
)
@each_closed
def test_long_gaps_in_float64(name, kwargs, uncompiled):
    if name == "Rprop":
        batches = Batches(**LONG)
        truth = dense(name, kwargs, batches, torch.float64)[0]
        assert_same_numbers(Touched(name, kwargs, batches, torch.float64, False).run()[0], truth)
        return
    shorter = LONG | {"steps": 500}
    three_ways(name, kwargs, exact=False, dtype=torch.float64, **shorter)
    uncompiled()
    three_ways(name, kwargs, exact=False, dtype=torch.float64, **shorter)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=label)
@each_by_rows
def test_low_precision_is_no_worse_than_torch(name, kwargs, dtype):
    if dtype == torch.float16 and name not in ("SGD", "ASGD", "Rprop"):
        kwargs = kwargs | {"eps": 1e-4}
    three_ways(name, kwargs, exact=False, dtype=dtype, steps=60, columns=7)


def behind(name, kwargs, dtype, gap):
    """A run whose rows are all `gap` steps behind the next one."""
    run = Touched(name, kwargs, Batches(rows=16, columns=5), dtype, exact=False)
    for _ in range(400):
        run.ledger.record(run.group)
    run.last += 400
    grads = group(torch.arange(16), torch.randn(16, 5).to(dtype), 16)
    run.ledger.record(run.group)
    step(run.ledger, run.table, run.slots, run.last, grads)
    for _ in range(gap):
        run.ledger.record(run.group)
    run.last[:4] += gap // 2  # not all alike
    return run, lambda: step(run.ledger, run.table, run.slots, run.last, grads)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=label)
@each_closed
def test_hardly_a_step_is_replayed(name, kwargs, dtype, compiled, uncompiled):
    """What is in the ledger in between is not looked at: it may be NaN."""
    if not compiled:
        uncompiled()
    run, next_step = behind(name, kwargs, dtype, gap=600)
    run.ledger.shortcut.advance(run.ledger.entries(), 1000, dtype)
    for entries in run.ledger._entries.values():
        entries[401 + 100 : 701] = float("nan")
        entries[701 + 100 : 999] = float("nan")
    next_step()
    assert bool(run.table.isfinite().all())
    assert all(bool(slot.isfinite().all()) for slot in run.slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=label)
@each_closed
def test_calls_of_torch_do_not_follow_the_gap(name, kwargs, dtype, uncompiled):
    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls += 1
            return function(*args, **kwargs or {})

    uncompiled()
    found = []
    for gap in (300, 1200):
        _, next_step = behind(name, kwargs, dtype, gap)
        with Count() as count:
            count.calls = 0
            next_step()
        found.append(count.calls)
    assert found[1] <= found[0] + 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=label)
@each
def test_settling_early_and_often_changes_nothing(name, kwargs, dtype):
    batches = Batches(steps=40, columns=5, seed=3)
    plain = Touched(name, kwargs, batches, dtype)
    often = Touched(name, kwargs, batches, dtype)
    random = torch.Generator().manual_seed(0)
    for t in range(batches.steps):
        plain.step(t)
        often.step(t)
        if t % 3 == 0:
            some = torch.randperm(batches.rows, generator=random)[: t % 11]
            often.settle(some)
        if t % 10 == 7:
            often.settle()
            often.settle()
    plain.settle()
    often.settle()
    assert_same_bits(often.table, plain.table)
    for a, b in zip(often.slots, plain.slots, strict=True):
        assert_same_bits(a, b)
    assert torch.equal(often.last, torch.full_like(often.last, batches.steps))


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_reading_with_shortcuts_is_no_worse_than_torch(name):
    kwargs = {"momentum": 0.9, "weight_decay": 0.01} if name == "SGD" else {}
    batches = Batches()
    frozen = batches.steps, batches.rows, batches.columns, batches.ids, batches.scale
    run = Touched(name, kwargs, batches, torch.float32, exact=False)
    for t in range(batches.steps):
        run.step(t)
        if t % 12 == 0:
            run.settle()
    run.settle()
    assert_no_worse(run.table, *references(name, tuple(kwargs.items()), frozen))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=label)
@pytest.mark.parametrize("name", sorted(RULES))
def test_the_number_of_threads_changes_nothing(name, dtype, exact, threads, monkeypatch):
    found = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        monkeypatch.setattr("hotrow.kernels.cpu.threads.ENOUGH", 1)
        batches = Batches(steps=25, rows=900, ids=700, columns=50)
        found.append(Touched(name, {}, batches, dtype, exact).run()[0])
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])


def test_hyperparameters_may_change_at_any_step():
    """betas, eps and decay change under way: shortcuts do not jump over it."""
    batches = Batches(steps=500, schedule=False)
    results = {}
    for kind in (torch.float32, torch.float64, "ours"):
        dtype = torch.float32 if kind == "ours" else kind
        run = Touched("AdamW", {}, batches, dtype, exact=False)
        torchs, parameter = optimizer("AdamW", {}, batches.weights.to(dtype))
        group_ = run.group if kind == "ours" else torchs.param_groups[0]
        for t in range(batches.steps):
            group_["betas"] = (0.9, 0.999) if t < 300 else (0.85, 0.99)
            group_["eps"] = 1e-8 if t < 200 else 1e-5
            group_["weight_decay"] = 0.1 * (t % 50 < 25)
            if kind == "ours":
                run.base = 1e-3 * (1 + t % 7)
                run.step(t)
                continue
            group_["lr"] = 1e-3 * (1 + t % 7)
            grouped = group(batches.all_ids[t], batches.grads(t).to(dtype), batches.rows)
            parameter.grad = torch.zeros_like(parameter).index_copy_(
                0, grouped.at.rows, grouped.sums()
            )
            torchs.step()
        if kind == "ours":
            run.settle()
        results[kind] = run.table if kind == "ours" else parameter.detach()
    assert_no_worse(results["ours"], results[torch.float32], results[torch.float64])


def test_a_row_that_overflows_does_so_as_in_torch():
    batches = Batches(steps=30)
    for name in ("Adam", "NAdam", "RAdam", "Adamax", "RMSprop", "SGD", "Adadelta"):
        runs = []
        for exact in (True, False):
            run = Touched(name, {}, batches, torch.float32, exact)
            for t in range(batches.steps):
                run.step(t)
                if t == 5:
                    big = torch.full((1, batches.columns), 1e25)
                    big[0, :3] = torch.tensor([float("inf"), float("nan"), 1.0])
                    run.ledger.record(run.group)
                    where = torch.tensor([39])
                    step(run.ledger, run.table, run.slots, run.last, group(where, big, 40))
            run.settle()
            runs.append(run.table)
        assert torch.equal(runs[0].isfinite(), runs[1].isfinite())
        assert bool(runs[0][:39].isfinite().all())


def test_large_gradients_leave_adamax_as_finite_as_torch():
    for dtype in (torch.float32, torch.bfloat16):
        batches = Batches(steps=30, rows=20, ids=2, scale=1e32)
        truth = dense("Adamax", {}, batches, dtype)[0]
        assert bool(truth.isfinite().all())
        assert bool(Touched("Adamax", {}, batches, dtype, False).run()[0].isfinite().all())


def test_a_still_rule_replays_nothing():
    assert RULES["Adagrad"].still({"weight_decay": 0, "eps": 1e-10, "lr": 0.1})
    assert not RULES["Adagrad"].still({"weight_decay": 0, "eps": 0, "lr": 0.1})
    assert RULES["SGD"].still({"momentum": 0, "weight_decay": 0, "lr": 0.1})
    assert not RULES["SGD"].still({"momentum": 0, "weight_decay": 0, "lr": float("inf")})
    assert not RULES["SGD"].still({"momentum": 0.9, "weight_decay": 0, "lr": 0.1})
    for name in ("SGD", "Adagrad"):
        run = Touched(name, {}, Batches(steps=20), torch.float32)
        assert run.ledger.still
        lazy = run.run()[0]
        run = Touched(name, {}, Batches(steps=20), torch.float32)
        run.ledger.still = False
        assert_same_numbers(run.run()[0], lazy)


def test_no_rows_and_no_columns():
    for columns in (0, 3):
        run = Touched("AdamW", {}, Batches(steps=3, columns=columns), torch.float32)
        run.run()
        none = torch.empty(0, dtype=torch.int64)
        settle(run.ledger, run.table, run.slots, run.last, none)
        grads = group(none, torch.empty(0, columns), 40)
        step(run.ledger, run.table, run.slots, run.last, grads)


def test_a_change_of_form_is_refused():
    run = Touched("Adam", {}, Batches(steps=2), torch.float32)
    run.step(0)
    run.group["amsgrad"] = True
    with pytest.raises(HotrowError, match="settle every row, then begin a new ledger"):
        run.step(1)
    assert len(run.ledger) == 1


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_a_look_up_reads_what_settling_would_leave(name, exact, compiled, uncompiled):
    if not compiled:
        uncompiled()
    run = Touched(name, {}, Batches(steps=120, rows=300, ids=20), torch.float32, exact)
    for t in range(120):
        run.step(t)
    ids = torch.arange(300).repeat(2).flip(0)
    every, seen = (run.table, *run.slots), run.last.clone()
    before, settled = ([each.clone() for each in every] for _ in range(2))
    settle(run.ledger, settled[0], settled[1:], seen.clone(), torch.arange(300))
    found = look_up(run.ledger, run.table, run.slots, run.last, distinct(ids, 300))
    assert_same_bits(found, settled[0][ids])
    # What was much work is kept, and nothing else is written.
    kept = run.last > seen
    for was, now, then in zip(before, every, settled, strict=True):
        assert_same_bits(now[kept], then[kept])
        assert_same_bits(now[~kept], was[~kept])
    if compiled:
        assert not kept[seen >= 118].any()
        jumps = run.ledger.still or run.ledger.shortcut is not None
        assert bool(kept[seen < 118].all()) != jumps


def test_the_ledger_grows():
    rule = RULES["SGD"]
    given = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "dampening": 0.0}
    given |= {"maximize": False, "nesterov": False}
    ledger = Ledger(rule, given)
    for i in range(1000):
        ledger.record(given | {"lr": float(i)})
    assert ledger.entries()[:, 3].tolist() == [-float(i) for i in range(1000)]
    assert ledger.entries(np.float32).dtype == np.float32


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16", "float16"])
def test_grouping_adds_as_torchs_dense_gradient(kind):
    dtype = getattr(torch, kind)
    for count, columns in ((0, 4), (1, 1), (300, 7), (5000, 33)):
        ids = torch.randint(0, 50, (count,)).clamp(max=40)
        grads = torch.randn(count, columns).to(dtype)
        grads[: count // 9] = -0.0
        weight = torch.zeros(50, columns, dtype=dtype, requires_grad=True)
        torch.nn.functional.embedding(ids, weight).backward(grads)
        grouped = group(ids, grads, 50)
        assert torch.equal(grouped.at.rows, ids.unique())
        assert_same_bits(grouped.sums(), weight.grad[grouped.at.rows])


class OffByOne(Touched):
    def settle(self, rows=None):
        every = torch.arange(len(self.table))
        settle(self.ledger, self.table, self.slots, self.last, every, len(self.ledger) - 1)


class DroppedEntry(Touched):
    def step(self, t):
        super().step(t)
        if t == 20:
            self.last[self.last <= t] += 1


class DecayTwice(Touched):
    def step(self, t):
        append = self.ledger.append
        self.ledger.append = lambda entry: append((entry[0] ** 2, *entry[1:]))
        super().step(t)
        self.ledger.append = append


class SkippedRow(Touched):
    def settle(self, rows=None):
        super().settle((self.last > 0).nonzero()[:, 0])


class DroppedDuplicate(Touched):
    def step(self, t):
        ids = self.batches.all_ids[t]
        earlier = [i in ids[:k].tolist() for k, i in enumerate(ids.tolist())]
        kept, self.batches.ids = self.batches.grads, len(ids)
        grads = kept(t)
        grads[torch.tensor(earlier)] = 0
        self.batches.grads = lambda t: grads
        super().step(t)
        self.batches.grads = kept


MUTANTS = (OffByOne, DroppedEntry, DecayTwice, SkippedRow, DroppedDuplicate)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant, exact):
    batches = Batches(steps=60)
    frozen = batches.steps, batches.rows, batches.columns, batches.ids, batches.scale
    rival, truth = references("AdamW", (), frozen)
    assert_no_worse(Touched("AdamW", {}, batches, torch.float32, exact).run()[0], rival, truth)
    wrong = mutant("AdamW", {}, batches, torch.float32, exact).run()[0]
    with pytest.raises(AssertionError, match="the rival's and 2 ulp"):
        assert_no_worse(wrong, rival, truth)


class Altered(Touched):
    """A run whose jumps are given other numbers than they should be."""

    def __post_init__(self):
        super().__post_init__()
        advance = self.ledger.shortcut.advance

        def altered(*arguments):
            memo = advance(*arguments)
            return None if memo is None else self.alter(*memo)

        self.ledger.shortcut.advance = altered


class NeighboursSums(Altered):
    """k is one too large."""

    def alter(self, sums, *rest):
        return np.concatenate([sums[1:], sums[-1:]]), *rest


class DroppedTerm(Altered):
    """The term of the first power of the distance."""

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
        sums[:, DECAY] *= 1.01
        return sums, *rest


class WrongMomentum(Altered):
    def alter(self, sums, first, b1, *rest):
        return sums, first, b1**1.01, *rest


class NoBound(Altered):
    """Every row jumps, whatever the terms leave out."""

    def alter(self, *memo):
        return *memo[:-1], 1e30


class NeighboursBlock(Altered):
    """A block one step too early."""

    def alter(self, blocks, ends, first):
        return blocks, np.concatenate([ends[:1], ends[:-1]]), first


class OtherLimits(Altered):
    def alter(self, since, smallest, largest):
        return since, smallest * 2e4, largest


JUMP_MUTANTS = [
    *(
        (mutant, name, kwargs, torch.float32)
        for name, kwargs in (CLOSED[2], CLOSED[5], CLOSED[6])
        for mutant in (NeighboursSums, DroppedTerm, WrongMomentum)
    ),
    *((WrongDecay, *CLOSED[i], torch.float32) for i in (2, 5)),
    *((NeighboursSums, *CLOSED[i], torch.float32) for i in (1, 7, 8)),
    (DroppedTerm, "Adamax", {"eps": 0.5}, torch.float32),
    *((NeighboursBlock, *CLOSED[i], torch.float32) for i in (10, 11)),
    (NeighboursBlock, *CLOSED[12], torch.float32),
    (OtherLimits, *CLOSED[14], torch.float32),
    (NoBound, *CLOSED[0], torch.float32),
    (NoBound, *CLOSED[3], torch.float64),
    (DroppedHigherTerm, *CLOSED[4], torch.float64),
    (OtherLimits, *CLOSED[14], torch.bfloat16),
]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("mutant", "name", "kwargs", "dtype"), JUMP_MUTANTS, ids=label)
def test_mutants_of_jumps_are_caught(mutant, name, kwargs, dtype, compiled, uncompiled):
    if not compiled:
        uncompiled()
    batches = {"steps": 300, "rows": 60, "ids": 5}
    three_ways(name, kwargs, False, dtype, **batches)
    with pytest.raises(AssertionError, match="the rival's and 2 ulp"):
        three_ways(name, kwargs, False, dtype, mutant, **batches)
