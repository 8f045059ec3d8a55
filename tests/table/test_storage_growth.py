"""Storages that grow in place keep their values, whether or not their pages move."""

import mmap
import sys

import pytest
import torch

from hotrow.table import storage_growth
from hotrow.table.storage_growth import MIN_BYTES, fill_with_zeros, grow_storage

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux moves pages")


@pytest.fixture
def moves(monkeypatch):
    """Record whether each attempt to move pages succeeds; make the attempts in `failing` fail."""
    results, failing = [], set()
    move = storage_growth._move_pages

    def record(source, target, length):
        if (target - source) % mmap.PAGESIZE:
            pytest.skip("the C library has reused freed memory, where alignment is not fixed")
        results.append(len(results) not in failing and move(source, target, length))
        return results[-1]

    record.results, record.failing = results, failing
    monkeypatch.setattr(storage_growth, "_move_pages", record)
    monkeypatch.setattr(storage_growth, "_abandoned", [])
    return record


def example(count):
    values = torch.arange(count, dtype=torch.int32)
    return values, values.clone()


def physical_bytes(tensor):
    """Return how many bytes of a tensor are in physical memory."""
    first = tensor.data_ptr() // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        flags = torch.frombuffer(
            bytearray(file.read(tensor.nbytes // mmap.PAGESIZE * 8)), dtype=torch.int64
        )
    return int((flags < 0).sum()) * mmap.PAGESIZE


@LINUX
@pytest.mark.parametrize("extra", [0, 1, 12345])
def test_growing_moves_pages_and_keeps_every_value(moves, extra):
    values, expected = example(MIN_BYTES // 4 + extra)
    alias = values[5:]
    storage = values.untyped_storage()
    for factor in (2, 3):
        grow_storage(storage, values.nbytes * factor)
        assert storage.nbytes() == values.nbytes * factor
        assert storage.resizable()
        assert torch.equal(values, expected)
        assert torch.equal(alias, expected[5:])
    assert moves.results == [True] * 4
    spare = torch.empty(0, dtype=torch.int32).set_(storage)[len(values) :]
    assert physical_bytes(spare) < spare.nbytes / 4
    spare.fill_(7)  # all of the new memory can be used
    assert torch.equal(values, expected)


@LINUX
@pytest.mark.parametrize("failing", [0, 1])
def test_if_pages_do_not_move_values_are_copied(moves, failing):
    moves.failing.add(failing)
    values, expected = example(MIN_BYTES // 4)
    grow_storage(values.untyped_storage(), 2 * values.nbytes)
    assert torch.equal(values, expected)
    assert moves.results == [True, False][1 - failing :]
    # If the very first attempt failed, hotrow doesn't try to move pages again.
    grow_storage(values.untyped_storage(), 4 * values.nbytes)
    assert torch.equal(values, expected)
    assert len(moves.results) == (1 if failing == 0 else 4)


@LINUX
def test_a_hole_is_filled_before_values_are_copied(moves, monkeypatch):
    move = storage_growth._move_pages
    libc = storage_growth.libc()

    def fail(source, target, length):
        if not moves.results:
            return move(source, target, length)
        first, size = storage_growth._whole_pages(target, length)
        assert libc.munmap(first, size) == 0
        return False

    libc.munmap.argtypes = libc.mremap.argtypes[:2]
    monkeypatch.setattr(storage_growth, "_move_pages", fail)
    values, expected = example(MIN_BYTES // 4)
    grow_storage(values.untyped_storage(), 2 * values.nbytes)
    assert torch.equal(values, expected)


def test_small_or_shared_memory_is_not_moved(moves):
    small, expected = example(1000)
    grow_storage(small.untyped_storage(), 2 * small.nbytes)
    assert torch.equal(small, expected)
    array = torch.ones(MIN_BYTES // 4).numpy()
    assert not storage_growth._is_movable(torch.from_numpy(array).untyped_storage())
    shared = torch.ones(MIN_BYTES // 4).share_memory_()
    assert not storage_growth._is_movable(shared.untyped_storage())
    assert not moves.results


def test_too_little_memory_is_an_error_before_anything_changes(moves):
    values, expected = example(MIN_BYTES // 4)
    with pytest.raises(RuntimeError, match="memory"):
        grow_storage(values.untyped_storage(), 1 << 60)
    assert torch.equal(values, expected)
    assert not moves.results


@pytest.mark.parametrize("columns", [1, 3, 5000])
@pytest.mark.parametrize("written", [None, 0, 700, -1])
def test_rows_are_filled_with_zeros(columns, written):
    storage_rows = MIN_BYTES // 4 // columns + 1000
    memory = torch.empty(storage_rows, columns)
    grow_storage(memory.untyped_storage(), 2 * memory.nbytes)
    rows = memory.as_strided((2 * storage_rows, columns), (columns, 1))[storage_rows:]
    before, rows, after = rows[:1], rows[1:2001], rows[2001:2002]
    before.fill_(1)
    after.fill_(1)
    if written is not None:
        rows[written] = 7
    fill_with_zeros(rows)
    assert not rows.any()
    assert before.all()
    assert after.all()


@LINUX
def test_pages_that_were_never_written_are_not_filled():
    memory = torch.empty(MIN_BYTES)
    rows = memory[12345:]
    before = physical_bytes(rows)
    assert before < rows.nbytes / 4
    fill_with_zeros(rows)
    assert physical_bytes(rows) <= before + 2 * mmap.PAGESIZE
    assert not rows.any()


@LINUX
def test_pages_are_filled_if_the_system_does_not_list_them(monkeypatch):
    def fail(*arguments, **options):
        raise PermissionError

    monkeypatch.setattr(storage_growth, "open", fail, raising=False)
    rows = torch.empty(MIN_BYTES)
    fill_with_zeros(rows)
    assert physical_bytes(rows) > rows.nbytes * 0.9
    assert not rows.any()


def test_memory_of_others_is_filled():
    shared = torch.ones(MIN_BYTES // 4).share_memory_()
    array = torch.from_numpy(torch.ones(MIN_BYTES // 4).numpy())
    for rows in (shared, array, torch.ones(3, 2), torch.ones(0, 2), torch.ones(2**12, 2**12).t()):
        fill_with_zeros(rows)
        assert not rows.any()
