"""The Triton kernels, in Triton's interpreter, return the same bits as the CPU kernels."""

import pytest
import torch

from hotrow.kernels import operators
from hotrow.kernels.cpu.operators import CompiledRows
from hotrow.kernels.grouping import find_distinct, group
from hotrow.kernels.triton import operators as gpu
from hotrow.kernels.triton.batch import CHUNK
from hotrow.kernels.triton.operators import TritonRows
from hotrow.optim.ledger import Ledger
from hotrow.optim.updater import RowUpdater, step_together
from hotrow.verify.sameness import Batches
from tests.support.exhaustive import exhaustive
from tests.support.tolerance import assert_same_bits
from tests.support.training import RULES, RowRun, label

pytestmark = exhaustive

CONFIGURATIONS = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01, "maximize": True}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {"weight_decay": 0.1}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"betas": (0.5, 0.6)}),
    ("Adamax", {"betas": (0.6, 0.9)}),
    ("Adagrad", {"initial_accumulator_value": 0.1}),
    ("Adadelta", {}),
    ("RMSprop", {}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("ASGD", {"t0": 3, "alpha": 0.5, "lambd": 0.01}),
    ("Rprop", {"lr": 1e-3, "step_sizes": (1e-4, 5e-3)}),
]


def train(name, kwargs, dtype, exact=False, steps=10, **sizes):
    batches = Batches(steps=steps, **{"rows": 10, "columns": 5, "ids": 6, **sizes})
    run = RowRun(name, kwargs, batches, dtype, exact)
    table, slots = run.run()
    return run, [table, *slots]


@pytest.mark.parametrize(
    ("name", "kwargs", "dtype"),
    [(name, kwargs, torch.float32) for name, kwargs in CONFIGURATIONS]
    + [(name, kwargs, torch.bfloat16) for name, kwargs in CONFIGURATIONS]
    + [(name, kwargs, torch.float64) for name, kwargs in CONFIGURATIONS[1::3]],
    ids=label,
)
def test_training_has_the_bits_of_the_cpu(name, kwargs, dtype, interpret):
    _, expected = train(name, kwargs, dtype)
    interpret()
    run, found = train(name, kwargs, dtype)
    assert isinstance(run.updater._operators, TritonRows)
    for ours, cpu in zip(found, expected, strict=True):
        assert_same_bits(ours, cpu)


def make_late_run(name, kwargs, dtype, steps, exact=False):
    """Return a run in which every row took step 0 and missed most of the next `steps` steps."""
    batches = Batches(steps=2, rows=8, columns=5, ids=8)
    batches.all_ids = [torch.arange(8), torch.tensor([1, 3, 3, 5, 1, 1, 7, 0])]
    run = RowRun(name, kwargs, batches, dtype, exact)
    run.step(0)
    for _ in range(steps):
        run.ledger.record_step(run.group)
    run.ledger._copies.clear()  # the copy on the GPU lacks these steps
    run.row_steps[:2] += steps // 3  # some rows have missed fewer steps
    return run


@pytest.mark.parametrize("columns", [1, 5, 130])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Rprop"])
def test_a_transposed_table_has_the_bits_of_a_contiguous_one(name, columns, interpret):
    found = []
    for on_gpu in (False, True):
        if on_gpu:
            interpret()
        for transposes in (False, True):
            batches = Batches(steps=6, rows=10, columns=columns, ids=6)
            if transposes:
                batches.weights = batches.weights.t().contiguous().t()
            run = RowRun(name, {}, batches, torch.float32)
            for t in range(6):
                run.step(t)
                if t == 4:
                    looked_up = run.updater.look_up(
                        find_distinct(torch.tensor([[7, 3], [3, 0]]), 10)
                    )
            run.settle()
            assert all(
                each.t().is_contiguous() == (transposes or columns == 1)
                for each in (run.table, *run.slots)
            )
            assert isinstance(run.updater._operators, TritonRows if on_gpu else CompiledRows)
            found.append([looked_up, run.table, *run.slots, run.row_steps])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert_same_bits(one, two)


def test_transposed_tables_in_one_step_have_the_bits_of_the_cpu(interpret):
    found = []
    for on_gpu in (False, True):
        if on_gpu:
            interpret()
        batches = Batches(steps=3, rows=16, columns=4, ids=6)
        runs = [RowRun("AdamW", {}, batches, torch.float32)]
        batches.weights = batches.weights.t().contiguous().t()
        runs += [RowRun("AdamW", {}, batches, torch.float32) for _ in range(2)]
        for run in runs[1:]:
            run.ledger = runs[0].ledger
            run.updater = RowUpdater(run.ledger, run.table, run.slots, run.row_steps)
        for t in range(3):
            runs[0].ledger.record_step(runs[0].group)
            grads = group(batches.all_ids[t], batches.gradients(t), 16)
            step_together([(run.updater, grads) for run in runs])
        for run in runs:
            run.settle()
            assert isinstance(run.updater._operators, TritonRows if on_gpu else CompiledRows)
            found.append([run.table, *run.slots])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert_same_bits(one, two)


CLOSED_FORMS = [each for each in CONFIGURATIONS if each[0] != "Adagrad"]


@pytest.mark.parametrize(
    ("name", "kwargs", "dtype", "steps"),
    [
        (name, kwargs, dtype, steps)
        for name, kwargs in CLOSED_FORMS
        for dtype in (torch.float32, torch.float64)
        for steps in (9, 60)
        if dtype == torch.float32 or (steps == 9 and name in ("SGD", "AdamW", "Adamax", "Rprop"))
    ],
    ids=label,
)
def test_long_gaps_have_the_bits_of_the_cpu(name, kwargs, dtype, steps, interpret):
    found = []
    for on_gpu in (False, True):
        if on_gpu:
            interpret()
        run = make_late_run(name, kwargs, dtype, steps)
        # A lookup may store rows on the CPU, but not on a GPU. The step updates all these rows.
        ids = find_distinct(torch.tensor([[7, 3, 0], [3, 7, 7]]), 8)
        looked_up = run.updater.look_up(ids)
        run.step(1)
        run.settle()
        found.append([looked_up, run.table, *run.slots, run.row_steps])
    for cpu, ours in zip(*found, strict=True):
        assert_same_bits(ours, cpu)


def test_a_norm_that_reaches_eps_has_the_bits_of_the_cpu(interpret):
    found = []
    for on_gpu in (False, True):
        if on_gpu:
            interpret()
        kwargs = {"betas": (0.6, 0.9), "eps": 1e-3}
        run = make_late_run("Adamax", kwargs, torch.float32, 100)
        run.slots[1].mul_(torch.tensor([1, 1e-1, 1e-2, 1e-3, 1e-6]))
        run.settle()
        assert bool((run.slots[1] == 1e-3).any())
        found.append([run.table, *run.slots])
    for cpu, ours in zip(*found, strict=True):
        assert_same_bits(ours, cpu)


# --- Sums of duplicates ---------------------------------------------------------------------


def sums_of(ids, grads, row_count):
    """Return the sums that a step uses; SGD with lr = -1 adds them to a table of zeros."""
    table = torch.zeros(row_count, grads.shape[1], dtype=grads.dtype)
    rule = RULES["SGD"]
    options = {"lr": 1.0, "maximize": True}
    optimizer = torch.optim.SGD([torch.nn.Parameter(table.clone())], **options)
    options = dict(optimizer.param_groups[0])
    ledger = Ledger(rule, options)
    updater = RowUpdater(ledger, table, [], torch.zeros(row_count, dtype=torch.int32))
    ledger.record_step(options)
    step_together([(updater, group(ids, grads, row_count))])
    return table


def sums_in_chunks(ids, grads, row_count, scaled=False):
    """Sum in the promised order: within chunks of 32 in batch order, then across the chunks."""
    table = torch.zeros(row_count, grads.shape[1], dtype=grads.dtype)
    for row in range(row_count):
        own = grads[ids == row]
        scale = 1 / len(own) if scaled and len(own) else 1
        chunks = [sum_in_order(own[k : k + 32], scale) for k in range(0, len(own), 32)]
        table[row] = sum_in_order(chunks)
    return table


def sum_in_order(values, scale=1):
    total = torch.zeros_like(values[0]) if len(values) else 0
    for value in values:
        total = total.add(value, alpha=scale)
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_duplicates_add_in_batch_order_in_chunks(dtype, interpret):
    random = torch.Generator().manual_seed(0)
    counts = [1, 31, 32, 33, 64, 65, 0, 97]
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = ids[torch.randperm(len(ids), generator=random)]
    grads = torch.randn(len(ids), 3, generator=random).to(dtype)
    cpu = sums_of(ids, grads, len(counts))
    interpret()
    found = sums_of(ids, grads, len(counts))
    assert_same_bits(found, sums_in_chunks(ids, grads, len(counts)))
    few = torch.tensor(counts) <= CHUNK
    assert_same_bits(found[few], cpu[few])
    merged = operators.merge_rows(group(ids, grads, len(counts)))
    stored = merged.ids.flat >= 0
    assert merged.ids.flat[stored].tolist() == [i for i, count in enumerate(counts) if count]
    assert_same_bits(merged.values[stored], found[merged.ids.flat[stored].long()])
    assert not merged.values[~stored].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_gradients_scaled_by_frequency_add_in_chunks(dtype, interpret):
    # torch rounds a bfloat16 scale only in rows that fill a vector register, so the rows are long.
    random = torch.Generator().manual_seed(0)
    counts = [3, 32, 33, 70, 0, 7]
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = ids[torch.randperm(len(ids), generator=random)]
    grads = torch.randn(len(ids), 64, generator=random).to(dtype)

    def dense(ids, grads):
        return torch.ops.aten.embedding_dense_backward(grads, ids, len(counts), -1, True)

    interpret()
    merged = operators.merge_rows(group(ids, grads, len(counts)), scale_by_frequency=True)
    stored = merged.ids.flat >= 0
    found = torch.zeros(len(counts), 64, dtype=dtype)
    found[merged.ids.flat[stored].long()] = merged.values[stored]
    few = torch.tensor(counts) <= CHUNK
    assert_same_bits(found[few], dense(ids, grads)[few])
    in_chunks = sums_in_chunks(ids, grads, len(counts), scaled=True)
    assert_same_bits(found, in_chunks)
    assert not torch.equal(found, dense(ids, grads))  # torch on the CPU doesn't add in chunks


def test_the_sum_of_a_row_does_not_depend_on_other_ids(interpret):
    interpret()
    random = torch.Generator().manual_seed(0)
    ids = torch.tensor([3] * 70 + [1] * 5)[torch.randperm(75, generator=random)]
    grads = torch.randn(75, 3, generator=random)
    others = torch.randint(4, 9, (41,), generator=random)
    place = torch.cat([torch.arange(75.0), torch.rand(41, generator=random) * 75]).argsort()
    more_ids = torch.cat([ids, others])[place]
    more_grads = torch.cat([grads, torch.randn(41, 3, generator=random)])[place]
    assert_same_bits(sums_of(more_ids, more_grads, 9)[:4], sums_of(ids, grads, 9)[:4])


@pytest.mark.parametrize("count", [0, 1])
def test_empty_and_single_batches(count, interpret):
    interpret()
    ids = torch.zeros(count, dtype=torch.int64)
    grads = torch.ones(count, 3)
    assert float(sums_of(ids, grads, 4).sum()) == 3 * count


def test_ids_without_rows_are_skipped(interpret):
    interpret()
    ids = torch.tensor([-1, 2, -1, 2] * 20)
    found = sums_of(ids, torch.ones(80, 3), 4)
    assert found[:, 0].tolist() == [0, 0, 40, 0]


# --- Several tables -----------------------------------------------------------------------------


def step_tables(name, kwargs, ids_of_tables, columns, dtype=torch.float32):
    """Train tables that share a ledger for three steps; return their values and states."""
    runs = []
    for k, size in enumerate(columns):
        batches = Batches(steps=3, rows=12 + k, columns=size, ids=4, seed=k)
        runs.append(RowRun(name, kwargs, batches, dtype, exact=False))
    ledger = runs[0].ledger
    for run in runs[1:]:
        run.updater.ledger = ledger
    random = torch.Generator().manual_seed(0)
    for t in range(3):
        ledger.record_step(runs[0].group)
        pairs = []
        for run, ids in zip(runs, ids_of_tables, strict=True):
            values = torch.randn(len(ids), run.table.shape[1], generator=random).to(dtype)
            grads = group((ids + t).where(ids >= 0, ids), values, len(run.table))
            pairs.append((run.updater, operators.merge_rows(grads) if t == 1 else grads))
        step_together(pairs)
    return [each for run in runs for each in (run.table, *run.slots, run.row_steps)]


@pytest.mark.parametrize(
    ("name", "kwargs", "dtype"),
    [
        ("AdamW", {}, torch.float32),
        ("AdamW", {"amsgrad": True}, torch.bfloat16),
        ("SGD", {"lr": 0.1}, torch.float64),
    ],
    ids=label,
)
def test_tables_that_step_together_have_the_bits_of_separate_steps(
    name, kwargs, dtype, interpret, monkeypatch
):
    interpret()
    ids = [torch.tensor([0, 3, 0, -1]), torch.tensor([9]), torch.empty(0, dtype=torch.int64)]
    ids += [torch.tensor([2, 9, -1, 2] * 11), torch.tensor([5, 5])]
    real, launches = gpu._step_joined, []

    def record(tables, *others):
        launches.append(len(tables))
        real(tables, *others)

    monkeypatch.setattr(gpu, "_step_joined", record)
    together = step_tables(name, kwargs, ids, (3, 3, 3, 3, 2), dtype)
    assert launches == [4, 1] * 3  # a table with an empty batch is included
    monkeypatch.setattr(gpu, "ALIGNMENT", 1 << 40)  # no tensor has this alignment
    separate = step_tables(name, kwargs, ids, (3, 3, 3, 3, 2), dtype)
    assert launches[6:] == [1, 1, 1, 1] * 3
    for ours, expected in zip(together, separate, strict=True):
        assert_same_bits(ours, expected)


# --- Wide tables, grids ---------------------------------------------------------------------


def test_a_row_wider_than_a_block(interpret, monkeypatch):
    _, expected = train("AdamW", {}, torch.float32, steps=4, columns=19)
    interpret()
    monkeypatch.setattr("hotrow.kernels.triton.operators.MAX_BLOCK", 8)
    _, found = train("AdamW", {}, torch.float32, steps=4, columns=19)
    for ours, cpu in zip(found, expected, strict=True):
        assert_same_bits(ours, cpu)


def test_settling_all_rows_equals_settling_given_rows(interpret):
    interpret()
    found = []
    for rows in (None, torch.tensor([7, 0, 3, 1, 2, 6, 5, 4])):
        run = make_late_run("AdamW", {}, torch.float32, 20)
        run.updater.settle(rows)
        found.append([run.table, *run.slots, run.row_steps])
    for every, given in zip(*found, strict=True):
        assert_same_bits(every, given)
    assert set(found[0][-1].tolist()) == {21}


def test_a_lookup_stores_no_row(interpret):
    interpret()
    run = make_late_run("Adam", {"weight_decay": 0.1}, torch.float32, 12)
    before = [run.table.clone(), run.row_steps.clone()]
    run.updater.look_up(find_distinct(torch.tensor([1, 7]), 8))
    assert_same_bits(run.table, before[0])
    assert_same_bits(run.row_steps, before[1])


def test_the_ledger_uploads_only_what_changed(interpret, monkeypatch):
    from hotrow.kernels.triton.ledger import DeviceLedger

    interpret()
    run = make_late_run("AdamW", {"betas": (0.3, 0.5)}, torch.float32, 300)
    run.step(1)
    sizes, real = [], DeviceLedger._upload

    def upload(self, copy, values, change):
        sizes.append(change.stop - change.start)
        real(self, copy, values, change)

    monkeypatch.setattr(DeviceLedger, "_upload", upload)
    run.ledger.record_step(run.group)
    run.settle()
    window = run.ledger.closed_form.window
    assert window < 60
    assert max(sizes) <= window + 2
