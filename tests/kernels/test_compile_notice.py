"""A line at a terminal while a kernel compiles, none when it is quick or nobody looks."""

import io
import time

import pytest

from hotrow.kernels import compile_notice
from hotrow.kernels.compile_notice import show_compile_notice


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(compile_notice, "DELAY_SECONDS", 0.01)
    monkeypatch.setattr(compile_notice, "_compiled_kernels", set())


def seen(monkeypatch, stream, wait, times=1):
    monkeypatch.setattr("sys.stderr", stream)
    for _ in range(times):
        with show_compile_notice("kernel", "hotrow.optim.rules.adam"):
            deadline = time.monotonic() + wait
            while time.monotonic() < deadline and not stream.getvalue():
                time.sleep(0.001)
    return stream.getvalue()


def test_a_long_wait_is_said_once(quick, monkeypatch):
    text = seen(monkeypatch, Terminal(), 30)
    assert text == "hotrow.optim.rules.adam: compiling for this machine, once; a few seconds\n"
    assert len(text) <= 80
    assert seen(monkeypatch, Terminal(), 0.1) == ""


def test_nobody_looks(quick, monkeypatch):
    assert seen(monkeypatch, io.StringIO(), 0.1) == ""


def test_it_was_quick(monkeypatch):
    monkeypatch.setattr(compile_notice, "_compiled_kernels", set())
    assert seen(monkeypatch, Terminal(), 0) == ""


def test_what_failed_is_not_done(quick, monkeypatch):
    with pytest.raises(ZeroDivisionError), show_compile_notice("kernel", "hotrow.optim.rules.adam"):
        raise ZeroDivisionError
    assert "compiling" in seen(monkeypatch, Terminal(), 30)
