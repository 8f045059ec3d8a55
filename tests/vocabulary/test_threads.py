"""Test vocabularies that several threads or forked processes use."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

import hotrow
from hotrow import HotrowError
from hotrow.kernels.cpu import keys as kernels
from hotrow.optim.interrupts import PostponedSignals
from hotrow.vocabulary import Vocabulary, key_vocabulary
from hotrow.vocabulary.counts import RowCounts
from hotrow.vocabulary.keys import TextKeys
from hotrow.vocabulary.layers import VocabularyLayers

KEYS = {str: ["a", "b", "c"], int: [7, -8, 9]}


def table_layer(rows, columns=2):
    return hotrow.convert(nn.Embedding(rows, columns), min_entries=0)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.mark.parametrize("key_type", [str, int])
def test_other_threads_see_new_keys_when_the_layer_has_their_rows(key_type, pool, monkeypatch):
    layer, keys = table_layer(1), KEYS[key_type]
    words = Vocabulary(layer, key_type=key_type, unknown="row")
    words.admit(keys[:1])
    set_row_count, seen = VocabularyLayers.set_row_count, []

    def read():
        state = words.state_dict()
        return (words.look_up(keys).tolist(), len(words), words.keys(), keys[1] in words), state

    def set_row_count_and_read(layers, change):
        set_row_count(layers, change)
        seen.append(pool.submit(read).result(timeout=20))

    monkeypatch.setattr(VocabularyLayers, "set_row_count", set_row_count_and_read)
    words.admit(keys)
    ((found, state),) = seen
    assert found == ([1, 0, 0], 2, keys[:1], False)
    assert Vocabulary.load(state, table_layer(1)).keys() == keys[:1]
    assert read()[0] == ([1, 2, 3], 4, keys, True)


def test_a_snapshot_contains_new_keys_together_with_their_counts(pool, monkeypatch):
    words = Vocabulary(table_layer(1), unknown="row", admit_after=2)
    words.admit(["a"])
    before, states = words.state_dict(), []
    enter = PostponedSignals.__enter__

    def read_and_enter(context):  # at each moment at which another thread could read
        if not pool_is_reading:
            pool_is_reading.append(True)
            states.append(pool.submit(words.state_dict).result(timeout=20))
            pool_is_reading.clear()
        enter(context)

    pool_is_reading = []
    with monkeypatch.context() as patch:
        patch.setattr(PostponedSignals, "__enter__", read_and_enter)
        words.admit(["a", "b", "b"])
    after = words.state_dict()
    assert len(states) > 3
    for state in states:
        expected = before if len(state["keys"]) == 0 else after
        assert all(map(np.array_equal, state.values(), expected.values()))


def test_lookups_of_integer_keys_are_right_while_keys_are_added(pool):
    layer = table_layer(1)
    words = Vocabulary(layer, key_type=int, unknown="row")
    known = np.arange(64) * 10**12
    rows = words.admit(known)
    is_done = threading.Event()

    def count_wrong():
        wrong = 0
        while not is_done.is_set():
            wrong += not torch.equal(words.look_up(known), rows)
        return wrong

    wrong = pool.submit(count_wrong)
    for first in range(0, 10**6, 10**5):
        words.admit(np.arange(first, first + 10**5) * 3 + 1)
    is_done.set()
    assert wrong.result(timeout=20) == 0


def test_a_slow_save_does_not_replace_a_later_one(tmp_path, pool, monkeypatch):
    words = Vocabulary(table_layer(1), unknown="row")
    path, write = tmp_path / "words.safetensors", key_vocabulary.write_keys
    is_writing, is_later_save_done = threading.Event(), threading.Event()

    def write_slowly(*arguments):
        if not is_writing.is_set():
            is_writing.set()
            is_later_save_done.wait(timeout=0.5)
        write(*arguments)

    monkeypatch.setattr(key_vocabulary, "write_keys", write_slowly)
    first = pool.submit(words.save, path)
    is_writing.wait(timeout=20)
    words.admit(["a"])
    words.save(path)
    is_later_save_done.set()
    first.result(timeout=20)
    assert Vocabulary.load(path, table_layer(1)).keys() == ["a"]


def test_new_rows_may_be_computed_in_another_thread(pool):
    encoder = table_layer(5)
    optimizer = hotrow.optim.AdamW(encoder.parameters())
    encoder(torch.tensor([0, 1])).sum().backward()
    optimizer.step()

    def init(rows):
        rows[:] = pool.submit(encoder, torch.tensor([2])).result(timeout=20)

    layer = table_layer(1)
    words = Vocabulary(layer, unknown="row", init=init)
    words.admit(["a"])
    assert torch.equal(layer.weight[1], encoder.weight[2])


def test_a_hook_of_the_optimizer_may_read_the_vocabulary(pool):
    layer = table_layer(1)
    optimizer = hotrow.optim.AdamW(layer.parameters())
    is_in_hook, is_in_admit = threading.Event(), threading.Event()
    words = Vocabulary(layer, optimizer, unknown="row", init=lambda _: is_in_admit.set())

    def add_keys(optimizer, state):
        is_in_hook.set()
        assert is_in_admit.wait(timeout=20)
        return {**state, "words": words.state_dict()}

    optimizer.register_state_dict_post_hook(add_keys)
    state = pool.submit(optimizer.state_dict)
    is_in_hook.wait(timeout=20)
    words.admit(["a"])
    assert state.result(timeout=20)["words"]["keys"] == []


@pytest.mark.parametrize("operation", ["look_up", "admit", "save", "counts"])
def test_a_signal_handler_may_wait_for_another_thread(operation, tmp_path, pool, monkeypatch):
    words, path = Vocabulary(table_layer(1), unknown="row"), tmp_path / "words.safetensors"
    run = {
        "look_up": lambda: words.look_up(["a"]),
        "admit": lambda: words.admit(["a"]),
        "save": lambda: words.save(path),
        "counts": lambda: words.counts,
    }[operation]
    results = []

    def wait(*_):
        results.append(pool.submit(words.save, path).result(timeout=20))

    def interrupt(method):
        def raise_signal_once(*arguments):
            if not is_raised:
                is_raised.append(True)
                signal.raise_signal(signal.SIGUSR1)
            return method(*arguments)

        return raise_signal_once

    is_raised = []
    for each in ("find", "append", "to_list"):
        monkeypatch.setattr(TextKeys, each, interrupt(getattr(TextKeys, each)))
    monkeypatch.setattr(RowCounts, "seen", property(interrupt(RowCounts.seen.fget)))
    old_handler = signal.signal(signal.SIGUSR1, wait)
    try:
        run()
    finally:
        signal.signal(signal.SIGUSR1, old_handler)
    assert results == [None]


def exit_code_of_fork(run, fork=os.fork):
    """Return the exit code of a forked process that calls `run`: 0 if it returns True."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this process has threads
        child = fork()
    if child == 0:
        threading.Timer(20, os._exit, [1]).start()
        try:
            os._exit(0 if run() is True else 2)
        finally:
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_no_lookup_compiles_a_kernel(monkeypatch):
    """The lock of a lookup and that of the files of kernels would wait for each other in a fork."""
    found = Mock(wraps=kernels.find_rows)
    monkeypatch.setattr(kernels, "find_rows", found)
    words = Vocabulary(table_layer(1), key_type=int, unknown="row")
    assert found.called
    read_only = np.arange(4)
    read_only.flags.writeable = False
    unaligned = np.frombuffer(bytearray(33), np.int64, 4, 1)
    for batch in (read_only, unaligned, np.arange(8)[::2], np.arange(4, dtype=">i8"), [1]):
        words.look_up(batch)
        words.admit(batch)
    for kernel in (found._mock_wraps, kernels.insert_keys):
        assert len(kernel.signatures) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_fork_waits_for_a_thread_that_is_writing_the_keys(pool, monkeypatch):
    words, append = Vocabulary(table_layer(1), unknown="row"), TextKeys.append
    is_appending = threading.Event()

    def append_slowly(keys, new):
        append(keys, new[:1])
        is_appending.set()
        time.sleep(0.2)
        append(keys, new[1:])

    monkeypatch.setattr(TextKeys, "append", append_slowly)
    change = pool.submit(words.admit, ["a", "b"])
    is_appending.wait(timeout=20)
    assert exit_code_of_fork(lambda: words.look_up(["a"]).tolist() in ([0], [1])) == 0
    change.result(timeout=20)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_process_that_c_code_has_forked_can_fork_again(pool):
    """Such code may omit the functions that run before a fork, as uWSGI does."""
    words = Vocabulary(table_layer(2), keys=["a"], unknown="row")

    def fork_in_c():
        child = ctypes.PyDLL(None).fork()
        if child == 0:
            ctypes.pythonapi.PyOS_AfterFork_Child()
        return child

    def fork_again():
        assert exit_code_of_fork(lambda: words.look_up(["a"]).tolist() == [1]) == 0
        thread = threading.Thread(target=words.look_up, args=(["a"],), daemon=True)
        thread.start()
        thread.join(timeout=10)
        return not thread.is_alive()

    assert exit_code_of_fork(fork_again, fork_in_c) == 0


FORK_WITH_A_SIGNAL = """
import os, signal, threading

os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGUSR1))

import torch
from hotrow.vocabulary import Vocabulary

words, results = Vocabulary(torch.nn.Embedding(1, 2), unknown="row"), []

def look_up(*_):
    thread = threading.Thread(target=words.look_up, args=(["a"],), daemon=True)
    thread.start()
    thread.join(timeout=10)
    results.append(thread.is_alive())

signal.signal(signal.SIGUSR1, look_up)
child = os.fork()
if child:
    os.waitpid(child, 0)
    assert results == [False], results
else:
    os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_signal_handler_may_wait_for_another_thread_during_a_fork():
    """The handler runs in the first Python function after the signal, which may be a fork's."""
    result = subprocess.run([sys.executable, "-c", FORK_WITH_A_SIGNAL], timeout=60, check=False)
    assert result.returncode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("change", ["admit", "evict"])
def test_a_process_that_is_forked_in_the_middle_of_a_change_cannot_change_more(
    change, pool, monkeypatch
):
    words = Vocabulary(table_layer(3), keys=["a", "b"], unknown="row")
    set_row_count = VocabularyLayers.set_row_count
    is_changing, is_forked = threading.Event(), threading.Event()

    def set_row_count_and_wait(layers, change):
        set_row_count(layers, change)
        is_changing.set()
        assert is_forked.wait(timeout=20)

    monkeypatch.setattr(VocabularyLayers, "set_row_count", set_row_count_and_wait)
    call = {"admit": lambda: words.admit(["c"]), "evict": lambda: words.evict(2)}[change]
    running = pool.submit(call)
    is_changing.wait(timeout=20)
    reads = [
        lambda: words.look_up(["b"]).tolist() == [2],
        lambda: words.keys() == ["a", "b"],
        lambda: "b" in words,
        lambda: words.counts.tolist() == [0, 0, 0],
        lambda: words.state_dict()["keys"] == ["a", "b"],
    ]
    assert all(read() for read in reads)  # in the parent, these threads are right

    def use():
        for read in reads:
            if change == "admit":
                assert read()
            else:
                with pytest.raises(HotrowError, match="this process was forked while another"):
                    read()
        with pytest.raises(HotrowError, match="this process was forked while another thread"):
            words.admit(["b"])
        with pytest.raises(HotrowError, match="this process was forked while another thread"):
            words.evict(1)
        return True

    assert exit_code_of_fork(use) == 0
    is_forked.set()
    running.result(timeout=20)
    assert words.look_up(["b"]).tolist() == [2 if change == "admit" else 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_can_use_a_vocabulary_that_a_thread_is_changing(tmp_path, pool):
    is_in_init, is_forked = threading.Event(), threading.Event()

    def init(rows):
        is_in_init.set()
        assert is_forked.wait(timeout=20)

    layer = table_layer(1)
    words = Vocabulary(layer, unknown="row", init=init)
    change = pool.submit(words.admit, ["a"])
    is_in_init.wait(timeout=20)

    def use():
        is_forked.set()
        words.admit(["b"])
        words.save(tmp_path / "words.safetensors")
        return words.keys() == ["b"]

    assert exit_code_of_fork(use) == 0
    is_forked.set()
    change.result(timeout=20)
    assert words.keys() == ["a"]
