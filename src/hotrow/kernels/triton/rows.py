"""The Triton kernels: look up rows, apply a step to the rows of a batch, and settle rows.

One program handles one row (for a lookup, one id of the batch), a block of columns at a time.
Lookups and steps launch a program for every id of the batch, because only the device knows how many
ids are distinct.

If an id occurs more than CHUNK times, a step adds its gradients in chunks, so that many programs
share the work. The first chunk starts at the id's first occurrence, so the sum doesn't depend on
other ids. No kernel adds floats atomically, so the results are the same in every run.

No kernel changes a row while `bad_id` contains a bad id from an earlier lookup.
"""
# mypy: ignore-errors
# Triton compiles the functions in this file, so mypy can't check their types.

import triton
import triton.language as tl

from hotrow.kernels.triton import batch as batch_module
from hotrow.kernels.triton import id_check
from hotrow.kernels.triton.closed_forms import advance
from hotrow.kernels.triton.rule_math import add, axpy, is_low, widen

CHUNK = tl.constexpr(batch_module.CHUNK)
NO_BAD_ID = tl.constexpr(id_check.NO_BAD_ID)
POSITION_BITS = tl.constexpr(id_check.POSITION_BITS)


@triton.jit
def load_all(tensors, at, inside):
    """Load the same block of each tensor."""
    values = ()
    for i in tl.static_range(len(tensors)):
        values = values + (tl.load(tensors[i] + at, mask=inside, other=0),)
    return values


@triton.jit
def store_all(tensors, at, inside, values):
    """Store the same block of each tensor."""
    for i in tl.static_range(len(tensors)):
        tl.store(tensors[i] + at, values[i], mask=inside)


@triton.jit
def widen_all(values):
    """Apply `widen` to each value."""
    results = ()
    for i in tl.static_range(len(values)):
        results = results + (widen(values[i]),)
    return results


@triton.jit
def round_all(values, dtype: tl.constexpr):
    """Round each value to a dtype."""
    results = ()
    for i in tl.static_range(len(values)):
        results = results + (values[i].to(dtype),)
    return results


@triton.jit
def load_entry(entries, t, width: tl.constexpr):
    """Return the ledger entry of step t + 1 as a tuple of scalars."""
    values = ()
    for i in tl.static_range(width):
        values = values + (tl.load(entries + t.to(tl.int64) * width + i),)
    return values


@triton.jit
def settle_block(
    w, slots, t, end_step, inside, entries, numbers, arrays,
    update: tl.constexpr, flags: tl.constexpr, width: tl.constexpr,
    form: tl.constexpr, formula: tl.constexpr, is_inexact: tl.constexpr,
):  # fmt: skip
    """Apply the steps from t to `end_step` with a zero gradient; return `(w, slots, step)`."""
    if form == "skip":
        t = tl.maximum(t, end_step)
    else:
        while t < end_step:
            before = t
            if form != "replay":
                if is_low(w.dtype):
                    wide, wide_slots, t = advance(
                        widen(w), widen_all(slots), t, end_step, inside, numbers, arrays,
                        form, formula, is_inexact,
                    )  # fmt: skip
                    w, slots = wide.to(w.dtype), round_all(wide_slots, w.dtype)
                else:
                    w, slots, t = advance(
                        w, slots, t, end_step, inside, numbers, arrays, form, formula, is_inexact
                    )
            if t == before:
                entry = load_entry(entries, t, width)
                w, slots = update(w, tl.zeros_like(w), slots, entry, flags)
                t += 1
    return w, slots, t


@triton.jit
def place_in_table(row, column, columns, pitch):
    """Return where columns of a row are in memory; a transposed table is stored as (D, pitch)."""
    if pitch is None:
        return row * columns + column
    else:
        return column.to(tl.int64) * pitch + row


@triton.jit(do_not_specialize=["number", "rows", "pitch"])
def look_up(
    table, slots, row_steps, ids, output, batch, clock, entries, numbers, arrays,
    bad_id, has_bad_id, number, rows, columns, pitch,
    update: tl.constexpr, flags: tl.constexpr, width: tl.constexpr,
    form: tl.constexpr, formula: tl.constexpr, is_inexact: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Set output[k] to row ids[k] with all missed steps applied, and batch[k] to the id.

    The row itself doesn't change. With form "read", no steps are applied. For an id out of range,
    batch[k] is -1, the output is 0, and `bad_id` gets the lookup's number and the id's position.
    """
    k = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + k).to(tl.int64)
    is_bad = (row < 0) | (row >= rows)
    if is_bad:
        tl.atomic_min(bad_id, (number.to(tl.int64) << POSITION_BITS) + k)
        tl.store(has_bad_id, 1)
        row = row * 0
    tl.store(batch + k, tl.where(is_bad, -1, row))
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = (column < columns) & (not is_bad)
        at = place_in_table(row, column, columns, pitch)
        w = tl.load(table + at, mask=inside, other=0)
        if form != "read" and form != "skip":
            # A table without rows has no step count to load.
            end_step = tl.load(clock)
            t = tl.load(row_steps + row, mask=not is_bad, other=end_step)
            if t < end_step:
                state = load_all(slots, at, inside)
                w, state, t = settle_block(
                    w, state, t, end_step, inside, entries, numbers, arrays,
                    update, flags, width, form, formula, is_inexact,
                )  # fmt: skip
        tl.store(output + k * columns + column, w, mask=column < columns)


@triton.jit(do_not_specialize=["count", "pitch"])
def settle(
    table, slots, row_steps, rows, count, clock, entries, numbers, arrays, bad_id, columns, pitch,
    update: tl.constexpr, flags: tl.constexpr, width: tl.constexpr,
    form: tl.constexpr, formula: tl.constexpr, is_inexact: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """Apply all missed steps to the distinct `rows`, or to rows 0 to count - 1."""
    end_step = tl.load(clock)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for i in range(first, tl.minimum(first + ROWS, count)):
        row = i
        if HAS_ROWS:
            row = tl.load(rows + i)
        t = tl.load(row_steps + row)
        if t < end_step:
            if form != "skip":
                for begin in range(0, columns, BLOCK):
                    column = begin + tl.arange(0, BLOCK)
                    inside = column < columns
                    at = place_in_table(row, column, columns, pitch)
                    w = tl.load(table + at, mask=inside, other=0)
                    state = load_all(slots, at, inside)
                    w, state, _ = settle_block(
                        w, state, t, end_step, inside, entries, numbers, arrays,
                        update, flags, width, form, formula, is_inexact,
                    )  # fmt: skip
                    tl.store(table + at, w, mask=inside)
                    store_all(slots, at, inside, state)
            tl.debug_barrier()  # see `step`
            tl.store(row_steps + row, end_step)


@triton.jit
def first_position(ids, value, begin, end):
    """Return the first position from `begin` whose id is at least `value`; `end` if there is none.

    The ids are sorted, so the position for `value + 1` follows the last id equal to `value`.
    """
    low, high = begin, end
    while low < high:
        middle = (low + high) // 2
        if tl.load(ids + middle) < value:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def is_at(ids, i, value, count):
    """Return whether position i exists and contains the id `value`."""
    exists = (i >= 0) & (i < count)
    return exists & (tl.load(ids + i, mask=exists, other=0) == value)


@triton.jit
def short_end(ids, i, value, count):
    """Return the position after the chunk of equal ids that begins at position i."""
    others = 1 + tl.arange(0, CHUNK)
    exists = (others < CHUNK) & (i + others < count)
    found = tl.load(ids + i + others, mask=exists, other=-1)
    return i + 1 + tl.sum((exists & (found == value)).to(tl.int32), 0)


@triton.jit
def place_of(i, is_first):
    """Return where the sum of the chunk that begins at position i is stored.

    Sums are stored only for ids that occur more than CHUNK times. Of the chunks of these ids that
    begin within CHUNK consecutive positions, at most one is the first chunk of its id, and at most
    one is a later chunk.
    """
    return (2 * (i // CHUNK) + is_first.to(tl.int32)).to(tl.int64)


@triton.jit
def add_gradients(
    grads, order, scales, begin, end, columns, column, inside, zero, AHEAD: tl.constexpr
):  # fmt: skip
    """Return the sum of grads[order[begin:end]] in this order, starting at 0.

    With `scales`, multiply each gradient by its scale. Each addition, with the multiplication, is
    rounded once to the gradient's dtype. AHEAD gradients are loaded at once.
    """
    total = zero
    for k in range(begin, end, AHEAD):
        for u in tl.static_range(AHEAD):
            exists = k + u < end
            position = tl.load(order + k + u, mask=exists, other=0).to(tl.int64)
            g = tl.load(grads + position * columns + column, mask=inside & exists, other=0)
            if scales is None:
                total = tl.where(exists, add(total, g), total)
            else:
                scale = tl.load(scales + position, mask=exists, other=0)
                total = tl.where(exists, axpy(total, g, scale), total)
    return total


@triton.jit(do_not_specialize=["count"])
def sum_chunks(
    ids, order, grads, scales, sums, count, columns, BLOCK: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """For each id that occurs more than CHUNK times, store the sums of its chunks."""
    i = tl.program_id(0)
    row = tl.load(ids + i)
    is_first = not is_at(ids, i - 1, row, count)
    is_long = is_at(ids, i + CHUNK, row, count)
    may_continue = is_at(ids, i - CHUNK, row, count)
    if (row >= 0) & ((is_first & is_long) | may_continue):
        begin = i
        if may_continue:
            begin = first_position(ids, row, i * 0, i)
        if (i - begin) % CHUNK == 0:
            end = short_end(ids, i, row, count)
            for start in range(0, columns, BLOCK):
                column = start + tl.arange(0, BLOCK)
                inside = column < columns
                zero = tl.zeros([BLOCK], grads.dtype.element_ty)
                total = add_gradients(
                    grads, order, scales, i, end, columns, column, inside, zero, AHEAD
                )
                at = place_of(i, i == begin) * columns + column
                tl.store(sums + at, total, mask=inside)


@triton.jit
def sum_row(
    ids, order, grads, scales, sums, i, row, count, columns, column, inside,
    zero, AHEAD: tl.constexpr,
):  # fmt: skip
    """Return the sum of the gradients of the id whose first position is i."""
    total = zero
    if is_at(ids, i + CHUNK, row, count):
        end = first_position(ids, row + 1, i + CHUNK + 1, count)
        for k in range(i, end, CHUNK * AHEAD):
            for u in tl.static_range(AHEAD):
                j = k + u * CHUNK
                at = place_of(j, j == i) * columns + column
                g = tl.load(sums + at, mask=inside & (j < end), other=0)
                total = tl.where(j < end, add(total, g), total)
    else:
        end = short_end(ids, i, row, count)
        total = add_gradients(grads, order, scales, i, end, columns, column, inside, zero, AHEAD)
    return total


@triton.jit(do_not_specialize=["count"])
def merge(
    ids, order, grads, scales, sums, rows, values, count, columns,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """If i is an id's first position, set rows[i] to the id and values[i] to its gradients' sum.

    At all other positions, and for the id -1, set rows[i] to -1 and values[i] to 0.
    """
    i = tl.program_id(0)
    row = tl.load(ids + i)
    is_first = (row >= 0) & (not is_at(ids, i - 1, row, count))
    tl.store(rows + i, tl.where(is_first, row, -1))
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        total = tl.zeros([BLOCK], grads.dtype.element_ty)
        if is_first:
            total = sum_row(
                ids, order, grads, scales, sums, i, row, count, columns, column, inside, total,
                AHEAD,
            )  # fmt: skip
        tl.store(values + i.to(tl.int64) * columns + column, total, mask=inside)


@triton.jit
def load_pointers(addresses, tensors):
    """Load one pointer per tensor from consecutive addresses; the pointers are multiples of 16."""
    pointers = ()
    for i in tl.static_range(len(tensors)):
        pointer = tl.load(addresses + i).to(tensors[i].dtype)
        pointers = pointers + (tl.multiple_of(pointer, 16),)
    return pointers


@triton.jit(do_not_specialize=["table_count", "count", "rows", "pitch"])
def step(
    table, slots, row_steps, addresses, table_count, ids, order, grads, sums, clock, entries,
    numbers, arrays, bad_id, count, rows, columns, pitch,
    update: tl.constexpr, flags: tl.constexpr, width: tl.constexpr,
    form: tl.constexpr, formula: tl.constexpr, is_inexact: tl.constexpr,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Settle the row of each distinct id, then apply a step with the sum of its gradients.

    With `addresses`, the ids belong to several tables; see `DeviceIds.join`. The kernel then uses
    only the types of the arguments `table`, `slots` and `row_steps`.
    """
    i = tl.program_id(0)
    row_id = tl.load(ids + i)
    is_first = not is_at(ids, i - 1, row_id, count)
    if is_first & (row_id >= 0) & (tl.load(bad_id) == NO_BAD_ID):
        row, row_count = row_id.to(tl.int64), rows.to(tl.int64)
        if addresses is not None:
            own = addresses + (row_id % table_count) * (len(slots) + 3)
            row = row // table_count
            row_count = tl.load(own)
            row_steps, table = load_pointers(own + 1, (row_steps, table))
            slots = load_pointers(own + 3, slots)
        # A frozen row doesn't change, because its step count is greater than the clock.
        now = tl.load(clock)
        t = tl.load(row_steps + row, mask=row < row_count, other=now + 1)
        if t <= now:
            for begin in range(0, columns, BLOCK):
                column = begin + tl.arange(0, BLOCK)
                inside = column < columns
                at = place_in_table(row, column, columns, pitch)
                w = tl.load(table + at, mask=inside, other=0)
                state = load_all(slots, at, inside)
                g = sum_row(
                    ids, order, grads, None, sums, i, row_id, count, columns, column, inside,
                    tl.zeros_like(w), AHEAD,
                )  # fmt: skip
                w, state, _ = settle_block(
                    w, state, t, now, inside, entries, numbers, arrays,
                    update, flags, width, form, formula, is_inexact,
                )  # fmt: skip
                w, state = update(w, g, state, load_entry(entries, now, width), flags)
                tl.store(table + at, w, mask=inside)
                store_all(slots, at, inside, state)
            # Every warp loads the step count, but only one thread stores it. Wait until all warps
            # have loaded it; otherwise, a late warp would load the new count and skip its columns.
            tl.debug_barrier()
            tl.store(row_steps + row, now + 1)


@triton.jit
def advance_clock(clock, bad_id):
    """Count a step, unless an earlier lookup had a bad id."""
    if tl.load(bad_id) == NO_BAD_ID:
        tl.store(clock, tl.load(clock) + 1)
