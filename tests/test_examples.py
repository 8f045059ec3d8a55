"""The examples, made small: both trainings end with the same losses, and it would show if not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = {
    "language_model": ["--steps=60", "--rows=4096", "--width=16", "--batch=16", "--lr=0.01"],
    "recommender": ["--steps=60", "--rows=2000", "--width=16", "--batch=512", "--lr=0.01"],
}
HELD_OUT = {
    "language_model": {"held-out loss"},
    "recommender": {"held-out log loss", "held-out AUC"},
}
# Run as a reader would, but with another optimizer in hotrow's place.
OTHER = """
import sys
import hotrow, {example}
for name in ("Adam", "AdamW"):
    mine = getattr(hotrow.optim, name)
    def slower(*args, lr, mine=mine, **kwargs):
        return mine(*args, lr=lr * 0.99, **kwargs)
    setattr(hotrow.optim, name, slower)
sys.exit({example}.main(sys.argv[1:]))
"""


def python(*words):
    command = [sys.executable, "-W", "error", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES)


def printed(output):
    """{what: (torch's figure, hotrow's)} of each line that has both."""
    line = re.compile(r"^(\S.*?) {2,}([\d.]+) +([\d.]+)(?: +[\d.]+ x)?$", re.MULTILINE)
    return {what: (a, b) for what, a, b in line.findall(output)}


@pytest.mark.parametrize("example", SMALL)
def test_both_end_with_the_same_losses(example):
    done = python(f"{example}.py", *SMALL[example])
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    assert done.stdout.endswith("\nthe same losses, to every digit printed\n")
    assert "NOT" not in done.stdout
    figures = printed(done.stdout)
    losses = {k: v for k, v in figures.items() if k.startswith("step ") and "loss" in k}
    assert len(losses) == 6  # a block is ten steps
    losses |= {k: v for k, v in figures.items() if k.startswith("held-out")}
    assert HELD_OUT[example] <= set(losses)
    for a, b in losses.values():
        assert re.fullmatch(r"\d\.\d{4}", a)
        assert a == b


@pytest.mark.parametrize("example", SMALL)
def test_what_was_learned_and_what_it_took(example):
    done = python(f"{example}.py", *SMALL[example], "--seed=1")
    figures = printed(done.stdout)
    (loss,) = (float(v[0]) for k, v in figures.items() if k.startswith("held-out") and "loss" in k)
    (baseline,) = map(
        float, re.findall(r"^  .*(?:unigram|base rate).* ([\d.]+)$", done.stdout, re.M)
    )
    assert loss < baseline
    for what in ("step (median), ms", "all steps, s"):
        assert all(float(figure) > 0 for figure in figures[what])
    dense, rows = map(float, figures["gradients, MB"])
    assert rows < dense


@pytest.mark.parametrize("example", SMALL)
def test_another_optimizer_is_found_out(example):
    done = python("-c", OTHER.format(example=example), *SMALL[example])
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.endswith("\nNOT the same losses\n")
    assert "<- NOT the same" in done.stdout


@pytest.mark.parametrize("example", SMALL)
def test_the_two_lines_that_change(example):
    text = (EXAMPLES / f"{example}.py").read_text()
    rule, theirs = re.search(r"= torch\.optim\.(\w+)\(dense\.(.*)\)\n", text).groups()
    assert f"    model = hotrow.convert(model)\n    optimizer = hotrow.optim.{rule}(model." in text
    assert f"hotrow.optim.{rule}(model.{theirs})\n" in text  # the same arguments


@pytest.mark.parametrize("example", SMALL)
def test_help(example):
    done = python(f"{example}.py", "--help")
    assert done.returncode == 0
    for option in ("--steps", "--rows", "--width", "--batch", "--lr", "--seed"):
        assert option in done.stdout
