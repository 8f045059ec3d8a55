"""A terminal shows a message while a kernel compiles, unless compilation is fast."""

import io
import time

import pytest

from hotrow.kernels import compile_notice
from hotrow.kernels.compile_notice import show_compile_notice
from tests.support.exhaustive import exhaustive


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def short_delay(monkeypatch):
    monkeypatch.setattr(compile_notice, "DELAY_SECONDS", 0.01)
    monkeypatch.setattr(compile_notice, "_compiled_kernels", set())


def shown_text(monkeypatch, stream, wait, times=1):
    monkeypatch.setattr("sys.stderr", stream)
    for _ in range(times):
        with show_compile_notice("kernel", "hotrow.optim.rules.adam"):
            deadline = time.monotonic() + wait
            while time.monotonic() < deadline and not stream.getvalue():
                time.sleep(0.001)
    return stream.getvalue()


@exhaustive
def test_a_slow_compilation_shows_one_message(short_delay, monkeypatch):
    text = shown_text(monkeypatch, Terminal(), 30)
    assert text == "hotrow.optim.rules.adam: compiling once for this machine (a few seconds)\n"
    assert len(text) <= 80
    assert shown_text(monkeypatch, Terminal(), 0.1) == ""


@exhaustive
def test_no_message_without_a_terminal(short_delay, monkeypatch):
    assert shown_text(monkeypatch, io.StringIO(), 0.1) == ""


def test_no_message_for_a_fast_compilation(monkeypatch):
    monkeypatch.setattr(compile_notice, "_compiled_kernels", set())
    assert shown_text(monkeypatch, Terminal(), 0) == ""


def test_the_message_appears_again_after_a_failed_compilation(short_delay, monkeypatch):
    with pytest.raises(ZeroDivisionError), show_compile_notice("kernel", "hotrow.optim.rules.adam"):
        raise ZeroDivisionError
    assert "compiling" in shown_text(monkeypatch, Terminal(), 30)
