"""Signal handlers and other threads can't damage a save, and a save is a snapshot between steps."""

import gc
import signal
import sys
import threading
from unittest import mock

import pytest
import torch

import hotrow
from hotrow import HotrowError, disk, vocabulary
from hotrow.disk import folder as folder_module
from hotrow.disk import journal
from hotrow.disk import store as store_module
from hotrow.table import reading
from tests.disk.folders import COLUMNS, ROWS, train
from tests.support.exhaustive import exhaustive
from tests.support.tolerance import assert_same_bits

BUSY = "was saved, closed or changed during its own save, for example by a signal handler: set a"
# Moments in a save: the record is described, the pages are read, the files are written, and the
# journal is deleted.
MOMENTS = {
    "record": (store_module, "describe_run"),
    "pages": (store_module.Store, "_writes"),
    "files": (journal._Journal, "apply"),
    "mapping": (store_module.MappedTensor, "map_saved"),
}
ALL_MOMENTS = {"rest": (torch, "save"), **MOMENTS}  # a save first serializes the other data


@pytest.fixture
def store(tmp_path):
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(7))
    with disk.create(tmp_path / "t", ROWS, COLUMNS, fill=lambda block: block.copy_(values)) as it:
        train(it, range(3))
        it.save("first")
        train(it, range(3, 6))
        yield it


def call_at(moment, function):
    """Call a function once, at this moment of a save."""
    owner, name = ALL_MOMENTS[moment]
    original, is_called = getattr(owner, name), []

    def replacement(*arguments, **options):
        if not is_called:
            is_called.append(True)
            function()
        return original(*arguments, **options)

    return mock.patch.object(owner, name, replacement)


def assert_contains(store, rest, expected):
    """Close the store, and check that the folder contains these values."""
    store.close()
    disk.verify(store.folder)
    with disk.open(store.folder) as again:
        assert again.rest == rest
        assert_same_bits(again.layer.weight.detach(), expected)


def weights_after(steps):
    layer = hotrow.Embedding(
        ROWS,
        COLUMNS,
        _weight=torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(7)),
    )
    optimizer = hotrow.optim.Adam(hotrow.convert(layer).parameters(), lr=0.05)
    for t in steps:
        random = torch.Generator().manual_seed(t)
        ids = torch.randint(ROWS, (9,), generator=random)
        optimizer.zero_grad()
        (layer(ids) * torch.randn(9, COLUMNS, generator=random)).sum().backward()
        optimizer.step()
    return layer.weight.detach().clone()


# --- Signal handlers -----------------------------------------------------------------------------


class Handler:
    """A signal handler that calls a function."""

    def __init__(self, function):
        self.function, self.errors, self.calls = function, [], 0

    def __enter__(self):
        self._old = signal.signal(signal.SIGUSR1, self._handle)
        return self

    def __exit__(self, *error):
        signal.signal(signal.SIGUSR1, self._old)

    def _handle(self, *arguments):
        self.calls += 1
        try:
            self.function()
        except HotrowError as error:
            self.errors.append(str(error))


def send_signal():
    signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize("moment", ALL_MOMENTS)
def test_a_handler_that_saves_runs_after_the_save(moment, store):
    with Handler(lambda: store.save("handler")) as handler, call_at(moment, send_signal):
        store.save("main")
    assert (handler.calls, handler.errors) == (1, [])
    assert_contains(store, "handler", weights_after(range(6)))


@pytest.mark.parametrize("moment", ALL_MOMENTS)
def test_an_error_of_a_handler_is_raised_after_the_save(moment, store):
    handler = Handler(mock.Mock(side_effect=TimeoutError))
    with handler, call_at(moment, send_signal), pytest.raises(TimeoutError):
        store.save("main")
    assert_contains(store, "main", weights_after(range(6)))


def test_a_handler_that_closes_the_store_runs_after_the_save(store):
    with Handler(store.close) as handler, call_at("files", send_signal):
        store.save("main")
    assert (handler.calls, handler.errors) == (1, [])
    assert_contains(store, "main", weights_after(range(6)))


@exhaustive
@pytest.mark.parametrize("stride", [17])
def test_a_handler_that_saves_at_any_line_of_a_save_loses_nothing(stride, tmp_path):
    number, reached = 1, True
    files = journal.__file__, folder_module.__file__, store_module.__file__
    expected = weights_after(range(2))
    while reached:
        left = [number]

        def trace(frame, event, argument, left=left):
            if frame.f_code.co_filename not in files:
                return None
            if event == "line":
                left[0] -= 1
                if left[0] == 0:
                    send_signal()
            return trace

        values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(7))
        store = disk.create(
            tmp_path / f"t{number}",
            ROWS,
            COLUMNS,
            fill=lambda block, values=values: block.copy_(values),
        )
        train(store, range(2))
        before = sys.gettrace()
        with Handler(lambda store=store: store.save("handler")) as handler:
            sys.settrace(trace)
            try:
                store.save("main")
            finally:
                sys.settrace(before)
        reached = left[0] <= 0
        assert handler.errors == []
        store.close()
        with disk.open(store.folder) as again:
            assert again.rest in ("main", "handler")
            assert_same_bits(again.layer.weight.detach(), expected)
        number += stride


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", ["save", "close"])
def test_a_save_within_a_save_is_refused_and_changes_nothing(moment, name, store):
    errors = []

    def call():
        with pytest.raises(HotrowError, match=BUSY) as error:
            getattr(store, name)()
        errors.append(error)

    with call_at(moment, call):
        store.save("outer")
    assert len(errors) == 1
    assert_contains(store, "outer", weights_after(range(6)))


def test_a_table_is_not_read_or_resized_within_a_save(store):
    def use():
        for operation in (
            lambda: store.layer.weight.sum(),
            lambda: vocabulary.resize(store.layer, ROWS + 1, optimizer),
        ):
            with pytest.raises(
                HotrowError, match=r"was read during its own step|was saved, closed"
            ):
                operation()

    optimizer = train(store, [6])
    with call_at("pages", use):
        store.save("main")
    gc.collect()
    assert_contains(store, "main", weights_after(range(7)))


def test_a_save_in_a_step_is_refused(store):
    def save():
        with pytest.raises(HotrowError, match=r"was read during its own step"):
            store.save("in the step")

    record_step = hotrow.optim.ledger.Ledger.record_step

    def record_and_save(self, group):
        record_step(self, group)
        save()

    with mock.patch.object(hotrow.optim.ledger.Ledger, "record_step", record_and_save):
        train(store, [6])
    store.save("after")
    assert_contains(store, "after", weights_after(range(7)))


# --- Threads -------------------------------------------------------------------------------------


class Meanwhile:
    """A function that runs in another thread; see `start`."""

    def __init__(self, function):
        self.error = None
        self.has_waited = False
        self._thread = threading.Thread(target=self._run, args=[function])
        self.has_started = False

    def _run(self, function):
        try:
            function()
        except BaseException as error:
            self.error = error

    def start(self):
        """Start the thread, and give it the time to finish if it doesn't wait for this thread."""
        self.has_started = True
        self._thread.start()
        self._thread.join(0.2)
        self.has_waited = self._thread.is_alive()

    def join(self):
        self._thread.join()
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_step_in_another_thread_waits_for_the_save(moment, store):
    optimizer = train(store, [])
    random = torch.Generator().manual_seed(6)
    ids = torch.randint(ROWS, (9,), generator=random)
    optimizer.zero_grad()
    (store.layer(ids) * torch.randn(9, COLUMNS, generator=random)).sum().backward()
    meanwhile = Meanwhile(optimizer.step)
    with call_at(moment, meanwhile.start):
        store.save("before the step")
    meanwhile.join()
    assert meanwhile.has_waited
    with disk_copy(store) as again:
        assert again.rest == "before the step"
        assert_same_bits(again.layer.weight.detach(), weights_after(range(6)))
    store.save("after the step")
    assert_contains(store, "after the step", weights_after(range(7)))


def disk_copy(store):
    """Open a copy of the folder."""
    copy = store.folder.with_name("copy")
    copy.mkdir()
    for path in store.folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return disk.open(copy)


@pytest.mark.parametrize(
    ("moment", "trained"),
    # A table that has not been trained has no run to describe.
    [(each, True) for each in MOMENTS] + [(each, False) for each in MOMENTS if each != "record"],
)
def test_saves_in_two_threads_wait_for_each_other(moment, trained, store, tmp_path):
    if not trained:
        store.close()
        store = disk.create(tmp_path / "untrained", ROWS, COLUMNS)
    expected = store.layer.weight.detach().clone()
    meanwhile = Meanwhile(lambda: store.save("second"))
    with call_at(moment, meanwhile.start):
        store.save("first")
    meanwhile.join()
    assert meanwhile.has_waited
    assert_contains(store, "second", expected)


def test_close_in_another_thread_waits_for_the_save(store):
    meanwhile = Meanwhile(store.close)
    with call_at("files", meanwhile.start):
        store.save("first")
    meanwhile.join()
    assert meanwhile.has_waited
    assert_contains(store, "first", weights_after(range(6)))


def test_a_save_in_another_thread_waits_for_a_change_of_the_rows(store):
    optimizer = train(store, [6])
    apply, threads = disk.resized_files.ResizedFiles.apply, []

    def apply_and_save(self, *arguments):
        result = apply(self, *arguments)
        threads.append(Meanwhile(lambda: store.save("resized")))
        threads[-1].start()
        return result

    with mock.patch.object(disk.resized_files.ResizedFiles, "apply", apply_and_save):
        vocabulary.resize(store.layer, ROWS + 100, optimizer)
    assert len(threads) == 4
    for thread in threads:
        thread.join()
        assert thread.has_waited
    with torch.no_grad():
        expected = store.layer.weight.detach().clone()
    assert_contains(store, "resized", expected)


@pytest.mark.parametrize("moment", ["create_slot", "row_steps"])
def test_a_save_in_another_thread_waits_until_the_state_is_complete(moment, tmp_path):
    store = disk.create(tmp_path / "t", ROWS, COLUMNS)
    vocabulary.resize(store.layer, ROWS + 100)
    meanwhile, create = Meanwhile(lambda: store.save("first")), getattr(store.state_files, moment)

    def save_and_create(*arguments):
        if not meanwhile.has_started:
            meanwhile.start()
        return create(*arguments)

    with mock.patch.object(store.state_files, moment, save_and_create):
        train(store, range(2))
    meanwhile.join()
    assert meanwhile.has_waited
    expected = store.layer.weight.detach().clone()
    store.save("second")
    assert_contains(store, "second", expected)


def test_a_failed_change_of_the_rows_does_not_stop_saves_in_other_threads(store):
    optimizer = train(store, [6])
    alias = store.layer.weight.data
    with pytest.raises(HotrowError, match="another tensor, such as"):
        vocabulary.resize(store.layer, ROWS + 100, optimizer)
    expected = alias.clone()
    meanwhile = Meanwhile(lambda: store.save("autosave"))
    meanwhile.start()
    meanwhile.join()
    del alias
    assert_contains(store, "autosave", expected)


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_lookup_reads_rows_that_another_thread_has_settled(is_trained, store):
    optimizer = train(store, [6])
    group = reading.find_distinct

    def group_and_settle(*arguments):
        thread = threading.Thread(target=optimizer.state_dict)
        thread.start()
        thread.join()
        return group(*arguments)

    ids = torch.arange(0, ROWS, 3)
    with (
        mock.patch.object(reading, "find_distinct", group_and_settle),
        torch.set_grad_enabled(is_trained),
    ):
        found = store.layer(ids).detach()
    assert_same_bits(found, weights_after(range(7))[ids])
