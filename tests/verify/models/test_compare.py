"""Test that compare_models detects every error and reports equality only if it is proven."""

import itertools
import json
import random
import threading
from collections import Counter, OrderedDict, UserDict
from dataclasses import dataclass
from enum import Enum
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hotrow
from hotrow import HotrowError
from hotrow.cli.model_report import to_text
from hotrow.onehot.parts import Field
from hotrow.onehot.rules import contraction, indexing, losses, products
from hotrow.table.parameter import Table
from hotrow.verify.models.compare import compare_models
from hotrow.verify.models.inputs import Inputs
from hotrow.verify.models.products import ProductCounter
from hotrow.verify.models.results import collect_results, named_leaves
from hotrow.verify.models.splice import ProductSplice
from hotrow.verify.models.trial import Trial
from hotrow.verify.models.truth import is_as_close
from tests.support.exhaustive import exhaustive, grid

pytestmark = pytest.mark.usefixtures("small_tables")


class Policy(nn.Module):
    """A linear layer applied to a one-hot, followed by other layers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Dropout(0.4))
        self.head = nn.Linear(8, 3)

    def forward(self, states):
        return self.head(self.net(F.one_hot(states, 16).float()))


class Fields(nn.Module):
    """A linear layer applied to three one-hot fields and to dense columns that require grad."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.dense = nn.Linear(3, 3, dtype=dtype)
        self.linear = nn.Linear(33, 6, dtype=dtype)
        self.head = nn.Linear(6, 2, dtype=dtype)
        self.dtype = dtype

    def forward(self, ids, features):
        fields = [F.one_hot(ids[:, i], 10).to(self.dtype) for i in range(3)]
        x = torch.cat([fields[0], self.dense(features), *fields[1:]], -1)
        return self.head(torch.tanh(self.linear(x)))


class Bag(nn.Module):
    """Adds up scaled one-hots and multiplies the sums by a matrix."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, 5))

    def forward(self, ids, weights):
        return (F.one_hot(ids, 40).float() * weights).sum(1) @ self.table


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.dense = nn.Bilinear(12, 4, 3), nn.Linear(4, 4)

    def forward(self, ids, x):
        return self.layer(F.one_hot(ids, 12).float(), self.dense(x))


IDS = torch.randint(10, (64, 3), generator=torch.Generator().manual_seed(1))
FEATURES = torch.randn(64, 3, generator=torch.Generator().manual_seed(2))
STATES = torch.randint(16, (50,), generator=torch.Generator().manual_seed(3))
BAGS = torch.randint(40, (30, 7), generator=torch.Generator().manual_seed(4))


def run(model, inputs, **options):
    return compare_models(model, inputs, **({"seconds": 0} | options))


def verdicts(found):
    return {each.name: each.verdict for each in found.agreements}


def test_policy_is_equal_bit_for_bit_and_multiplies_no_zeros():
    found = run(Policy, STATES)
    assert found
    assert found.equal is True
    assert found.verdict == "equal: the same numbers, none of the zeros"
    assert verdicts(found) == {
        "output": "bitwise",
        **{
            f"gradient of {name}": "bitwise"
            for name in ("net.0.weight", "net.0.bias", "head.weight", "head.bias")
        },
    }
    assert found.tables == ("net.0.weight",)
    assert found.notes == ()
    forward, both = found.costs
    assert (forward.name, both.name) == ("forward", "forward and gradient")
    assert (forward.plain_multiplications, forward.converted_multiplications) == (50 * 16 * 8, 0)
    assert both.plain_multiplications == hotrow.cost(16, 8, 50).matmul.multiplications
    assert both.converted_multiplications == 0
    assert forward.plain.bytes_peak > forward.converted.bytes_peak > 0
    assert len(forward.plain.milliseconds) == len(forward.converted.milliseconds) == 1
    [finding] = found.findings
    assert finding.converted
    assert f"{__file__}:" in finding.what


def test_model_is_not_changed():
    model = Policy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert run(model, STATES)
    assert type(model) is Policy
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(type(each) is nn.Parameter for each in model.parameters())
    assert all(each.grad is None for each in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_finding_says_why_a_one_hot_is_not_converted():
    class Normed(Policy):
        def forward(self, states):
            return F.layer_norm(F.one_hot(states, 16).float(), (16,))

    found = run(Normed, STATES)
    assert found
    assert found.verdict == "equal: nothing was converted, so nothing is saved"
    outcome = "falls back to a dense one-hot: layer_norm needs every column"
    assert [each.outcome for each in found.findings] == [outcome]
    assert "\n  not converted\n" in to_text(found)
    assert "nothing was converted" in to_text(found)


def test_verdict_says_that_nothing_was_converted():
    found = run(lambda: nn.Linear(3, 2), torch.randn(4, 3))
    assert found
    assert found.findings == ()
    assert "  nothing was converted: the model doesn't multiply by one-hots\n" in to_text(found)
    assert found.costs[1].plain_multiplications == 0
    found = run(Policy, STATES, to="matmul")
    assert "  nothing was converted: the model has no embedding layers\n" in to_text(found)


# --- within rounding --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_of_several_rows_are_equal_within_rounding(dtype):
    found = run(lambda: Fields(dtype), (IDS, FEATURES.to(dtype)))
    assert found
    assert found.verdict == "equal within rounding: the same sums, none of the zeros"
    assert set(verdicts(found).values()) <= {"bitwise", "zeros", "rounding"}
    assert verdicts(found)["gradient of dense.weight"] == "rounding"
    forward, both = found.costs
    each = 64 * 6
    assert (forward.plain_multiplications, forward.converted_multiplications) == (
        each * 33,
        each * 3,
    )
    assert (both.plain_multiplications, both.converted_multiplications) == (each * 99, each * 9)


def test_half_precision_has_its_own_bound():
    found = run(lambda: Fields(torch.bfloat16), (IDS, FEATURES.bfloat16()))
    assert "different" not in verdicts(found).values()
    assert found or found.verdict.startswith("inconclusive: ")


def test_bound_under_autocast_uses_the_dtype_of_the_product():
    class Cast(Fields):
        def forward(self, ids, features):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(ids, features).float()

    found = run(Cast, (IDS, FEATURES))
    assert "different" not in verdicts(found).values()
    assert found.verdict.startswith("equal within rounding")


def test_inconclusive_if_the_run_with_products_fails():
    class Checkpointed(Fields):
        def inner(self, ids, features):
            return super().forward(ids, features)

        def forward(self, ids, features):
            return checkpoint(self.inner, ids, features, use_reentrant=False)

    found = run(Checkpointed, (IDS, FEATURES))
    assert found.verdict.startswith("inconclusive: ")
    assert "the run with the original one-hot products failed: CheckpointError" in found.notes[0]


def test_weighted_bags_and_bilinear_products():
    found = run(Bag, (BAGS, torch.rand(30, 7, 1)))
    assert found
    assert found.costs[0].plain_multiplications == 30 * 40 * 5
    assert found.costs[0].converted_multiplications == 30 * 7 * 5
    found = run(Bilinear, (STATES % 12, torch.randn(50, 4)))
    assert found
    assert found.costs[0].plain_multiplications == 50 * 12 * 4 * 3
    assert found.costs[0].converted_multiplications == 0


def count_words(ids):
    return F.one_hot(ids, 40).float().sum(1)


def average_words(ids):
    return F.one_hot(ids, 40).float().mean(1)


def weigh_words(ids):
    signs = 1.5 - 3 * (torch.arange(ids.shape[1]) % 2)
    return (F.one_hot(ids, 40).float() * signs[:, None]).sum(1)


@pytest.mark.parametrize(
    "change",
    [
        lambda scores: F.relu(scores, inplace=True),
        lambda scores: scores.mul_(2),
        lambda scores: scores.masked_fill_(torch.arange(64) < 8, 0),
        lambda scores: scores.__setitem__((slice(None), 0), 0) or scores,
    ],
)
def test_lookups_whose_result_is_changed_in_place_are_compared(change):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(40, 64)

        def forward(self, ids):
            return change(self.linear(count_words(ids)))

    found = run(Model, BAGS)
    assert found.verdict == "equal within rounding: the same sums, none of the zeros"
    assert found.notes == ()


@pytest.mark.parametrize("encode", [count_words, average_words, weigh_words])
@pytest.mark.parametrize("pads", [False, True])
def test_bags_with_repeated_ids_are_equal_within_rounding(encode, pads):
    """A product multiplies once by the count of an id, but a lookup adds its row many times."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(40, 64)
            self.weight = nn.Parameter(torch.randn(40, 64))

        def forward(self, ids):
            return self.linear(encode(ids)), encode(ids) @ self.weight

    lengths = torch.arange(64)[:, None] % 5
    ids = torch.randint(40, (64, 20))
    ids = torch.where(torch.arange(20) < lengths, ids, 0) if pads else ids % 3
    found = run(Model, ids)
    assert found.verdict == "equal within rounding: the same sums, none of the zeros"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scales", [{"beta": -2, "alpha": 0.3}, {"alpha": -1.7}, {"beta": 0}])
def test_scaled_products_are_equal_within_rounding(scales, dtype):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(40, 64, dtype=dtype))
            self.bias = nn.Parameter(torch.randn(64, dtype=dtype))

        def forward(self, ids):
            counts = F.one_hot(ids, 40).to(dtype).sum(1)
            return torch.addmm(self.bias, counts, self.weight, **scales)

    for seed in range(3):
        found = run(Model, BAGS, seed=seed)
        assert found
        assert found.costs[1].converted_multiplications == 0


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("code", ["float", "default dtype", "FloatTensor"])
def test_recurrent_layers_are_compared(kind, code):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = kind(40, 5)

        def forward(self, ids):
            if code == "float":
                return self.layer(F.one_hot(ids, 40).float())
            if code == "FloatTensor":
                return self.layer(F.one_hot(ids, 40).type(torch.FloatTensor))
            start = torch.zeros(1, ids.shape[1], 5)
            start = (start, start) if kind is nn.LSTM else start
            return self.layer(F.one_hot(ids, 40) * 1.0, start)

    found = run(Recurrent, BAGS)
    assert found
    assert verdicts(found)["gradient of layer.weight_hh_l0"] == "bitwise"


def test_view_of_a_parameter_has_a_bound():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(6, 50))

        def forward(self, ids):
            x = F.one_hot(ids, 40).float().sum(1)
            return torch.tanh(x @ self.table[:, 10:].t())

    found = run(Part, BAGS)
    assert found
    assert verdicts(found)["gradient of table"] == "rounding"


def test_weight_used_twice_and_in_another_operation():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(40, 40)

        def forward(self, ids):
            x = F.one_hot(ids, 40).float()
            return self.linear(torch.tanh(self.linear(x.sum(1)) + self.linear(x[:, 0])))

    assert run(Twice, BAGS)


def test_computed_weight_is_inconclusive_if_rows_add_up():
    class Computed(nn.Module):
        def __init__(self):
            super().__init__()
            self.raw = nn.Parameter(torch.randn(40, 5))

        def forward(self, ids):
            return F.one_hot(ids, 40).float() @ (self.raw.exp() * 0.3)

    found = run(Computed, torch.tensor([3] * 500 + [4] * 300), seed=3)
    assert verdicts(found)["output"] == "bitwise"
    assert "different" not in verdicts(found).values()


class Sums(nn.Module):
    """Sums rows by id; the rows and the scores are parameters."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.rows = nn.Parameter(torch.randn(5000, 64, generator=generator))
        self.scores = nn.Parameter(torch.rand(5000, 500, generator=generator))
        self.register_buffer("codes", torch.zeros(500, 64))

    def encode(self, ids):
        return F.one_hot(ids, 500).to(self.rows.dtype)

    def forward(self, ids):
        return self.encode(ids).T @ self.rows


class Weighted(Sums):
    def forward(self, ids):
        return (self.encode(ids) * self.scores).T @ self.rows


class Equation(Sums):
    def forward(self, ids):
        return torch.einsum("nd,nc->dc", self.rows, self.encode(ids))


class Added(Sums):
    def forward(self, ids):
        return torch.addmm(self.codes, self.encode(ids).T, self.rows)


class Averages(Sums):
    def forward(self, ids):
        x = self.encode(ids)
        with torch.no_grad():
            means = (x.T @ self.rows) / x.sum(0).clamp(min=1)[:, None]
            self.codes.mul_(0.9).add_(means, alpha=0.1)
        return x @ self.codes


class Totals(Sums):
    def forward(self, ids):
        return (self.encode(ids) * self.scores).sum(0)


class Loss(Sums):
    def forward(self, ids):
        return F.cross_entropy(self.scores, self.encode(ids))


# About 10 rows for each id, so that the rounding bound is tight.
MANY_IDS = torch.randint(500, (5000,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "model",
    grid([Sums, Weighted, Equation, Added, Averages], lambda model: model in (Weighted, Averages)),
)
def test_sums_of_rows_by_id_are_equal_within_a_proven_bound(model):
    found = run(model, MANY_IDS)
    assert found
    assert set(verdicts(found).values()) <= {"bitwise", "zeros", "rounding"}
    assert not found.notes


@pytest.mark.parametrize("model", [Totals, Loss])
def test_results_without_a_bound_are_compared_with_a_float64_run(model):
    found = run(model, MANY_IDS)
    assert found
    assert verdicts(found)["output"] in ("bitwise", "rounding")
    if verdicts(found)["output"] == "rounding":
        assert "the converted model is as close to a float64 run as the plain" in found.notes[0]


def test_is_as_close_rejects_errors_larger_than_rounding():
    truth = torch.linspace(1, 2, 50, dtype=torch.float64)
    plain = truth.float()
    other = torch.nextafter(plain, torch.tensor(3.0))
    assert is_as_close(truth, plain, other)
    wrong = plain.clone()
    wrong[7] *= 1 + 2**-18
    assert not is_as_close(truth, plain, wrong)
    wrong[7] = torch.nan
    assert not is_as_close(truth, plain, wrong)
    assert not is_as_close(truth, plain * (1 + 2**-10), plain)  # could hide an error
    assert not is_as_close(None, plain, other)
    assert not is_as_close(truth, truth, truth)  # float64 is not a reference for float64


def test_amplified_rounding_is_inconclusive():
    class Steep(Fields):
        def forward(self, ids, features):
            return torch.sin(super().forward(ids, features) * 1e7)

    found = run(Steep, (IDS, FEATURES))
    assert not found
    assert verdicts(found)["output"] == "unsure"
    assert found.verdict.startswith("inconclusive: ")
    assert "due to rounding, but no error bound confirms it" in " ".join(to_text(found).split())


def test_nondeterministic_model_is_inconclusive():
    calls = iter(range(10**6))

    class Drifting(Policy):
        def forward(self, states):
            return super().forward(states) + next(calls)

    found = run(Drifting, STATES)
    assert not found
    assert verdicts(found)["output"] == "unsure"
    assert "the plain model is not deterministic" in found.notes[0]


# --- errors that compare_models must detect ---------------------------------------------------


def broken(monkeypatch, name, change):
    real = getattr(products, name)
    monkeypatch.setattr(products, name, lambda *given, **kw: change(real(*given, **kw)))


CHANGES = {
    "scaled": lambda rows: rows * (1 + 2**-16),
    "one value": lambda rows: torch.cat([rows[:1] + 2**-12, rows[1:]]),
    "no gradient": lambda rows: rows.detach() + 0 * rows,
    "half the gradient": lambda rows: rows / 2 + (rows / 2).detach(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_wrong_lookup_is_caught(monkeypatch, change):
    broken(monkeypatch, "look_up", change)
    found = run(Policy, STATES)
    assert not found
    assert "different" in verdicts(found).values()
    assert "rounding" not in verdicts(found).values()


@exhaustive
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_wrong_bag_is_caught_next_to_rounding(monkeypatch, change):
    broken(monkeypatch, "look_up_bags", change)
    found = run(Fields, (IDS, FEATURES))
    assert not found
    assert verdicts(found)["gradient of linear.weight"] == "different"


def test_wrong_one_hot_is_caught(monkeypatch):
    """The lookup and the product agree here, because both get the same wrong one-hot."""
    real = products.product

    def shifted(x, weight, columns=False):
        for part in x.parts:
            if hasattr(part, "ids"):
                part.ids.copy_((part.ids + 1) % part.width)
        return real(x, weight, columns)

    monkeypatch.setattr(products, "product", shifted)
    found = run(Policy, STATES)
    assert verdicts(found)["output"] == "different"
    assert found.verdict.startswith("NOT equal")


SUM_CHANGES = CHANGES | {"off by one row": lambda rows: rows.roll(1, 0)}


@pytest.mark.parametrize(
    ("model", "change"),
    grid(
        itertools.product([Sums, Added], SUM_CHANGES),
        lambda model, change: model is Sums and change in ("one value", "off by one row"),
    ),
)
def test_wrong_sum_of_rows_is_caught(monkeypatch, change, model):
    real, changed = contraction.scatter_rows, SUM_CHANGES[change]
    monkeypatch.setattr(contraction, "scatter_rows", lambda *given: changed(real(*given)))
    found = run(model, MANY_IDS)
    assert found.verdict.startswith("NOT equal")
    assert "different" in verdicts(found).values()
    assert "rounding" not in verdicts(found).values()


def test_buffer_off_by_one_row_is_caught(monkeypatch):
    real = contraction.scatter_rows
    monkeypatch.setattr(contraction, "scatter_rows", lambda *given: real(*given).roll(1, 0))
    assert verdicts(run(Averages, MANY_IDS))["buffer codes"] == "different"


def test_wrong_results_without_a_bound_are_not_equal(monkeypatch):
    weights, reduced = Field.weights_or_ones, losses._reduced
    monkeypatch.setattr(
        Field, "weights_or_ones", lambda self, dtype: weights(self, dtype) * (1 + 2**-14)
    )
    monkeypatch.setattr(losses, "_reduced", lambda *given: reduced(*given) * (1 + 2**-14))
    for model in (Totals, Loss):
        assert not run(model, MANY_IDS)


def test_row_missing_from_a_gradient_is_caught(monkeypatch):
    from hotrow.table.autograd import LookUp

    real = LookUp.backward

    def lossy(ctx, gradient):
        gradient = gradient.clone()
        gradient[-1] = 0
        return real(ctx, gradient)

    monkeypatch.setattr(LookUp, "backward", staticmethod(lossy))
    found = run(Policy, STATES)
    assert verdicts(found)["gradient of net.0.weight"] == "different"
    assert verdicts(found)["gradient of head.weight"] == "bitwise"


class Sliced(nn.Module):
    """Slices a one-hot off a concatenation, so the gradient of the other columns is zero."""

    def __init__(self, is_random=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 3))
        self.columns = nn.Parameter(torch.randn(50, 4))
        self.calls = iter(range(10**6)) if is_random else iter([0] * 10**6)

    def forward(self, states):
        x = torch.cat([F.one_hot(states, 16).float(), self.columns], -1)
        return x[:, :16] @ self.weight + next(self.calls)

    def __deepcopy__(self, memo):
        copy = type(self)()
        copy.load_state_dict(self.state_dict())
        copy.calls = self.calls
        return copy


@pytest.mark.parametrize("is_random", [False, True])
def test_missing_gradient_is_different(monkeypatch, is_random):
    name = "gradient of columns"
    if not is_random:
        assert run(Sliced(), STATES)
    monkeypatch.setattr(indexing, "keep_in_graph", lambda parts, *_: parts)
    found = run(Sliced(is_random), STATES)
    assert verdicts(found)[name] == "different"
    assert verdicts(found)["output"] == ("unsure" if is_random else "bitwise")
    assert found.verdict.startswith("NOT equal")


def test_nan_in_an_unselected_row_is_not_equal_and_explained():
    model = Policy().eval()
    model.net[0].weight.data[2, 5] = torch.nan
    found = run(model, torch.tensor([1, 2]))
    assert not found
    assert found.verdict.startswith("NOT equal")
    assert "net.0.weight contains inf or NaN. 0 x inf is NaN" in found.notes[0]


@pytest.mark.parametrize("runs", [1, 4, 10])
def test_late_failure_of_only_the_converted_model_is_an_internal_error(runs):
    class Model(Policy):
        calls = 0

        def forward(self, states):
            self.calls += isinstance(self.net[0].weight, Table)
            if self.calls > runs:
                raise KeyError("odd")
            return super().forward(states)

    with pytest.raises(RuntimeError, match="only the converted model raises KeyError: 'odd'"):
        run(Model, STATES)


def test_failure_of_only_the_converted_model_is_an_internal_error(monkeypatch):
    def fail(*_, **__):
        raise KeyError("odd")

    monkeypatch.setattr(products, "product", fail)
    with pytest.raises(RuntimeError, match="only the converted model raises"):
        run(Policy, STATES)


# --- inputs and outputs -----------------------------------------------------------------------


@dataclass
class Answer:
    scores: torch.Tensor
    best: torch.Tensor


class Odd(nn.Module):
    """A model that returns every kind of output, has state, and writes to an input."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 4), nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(16))
        self.table = nn.Embedding(16, 4)

    def forward(self, states, *, extra, flag=None):
        states += 1
        one_hot = F.one_hot(states, 16)
        self.seen += one_hot.sum(0)
        scores = self.norm(self.linear(one_hot.float()) + self.table(states)) * extra
        wave = torch.complex(scores, -scores)
        return Answer(scores, scores.argmax(-1)), {"wave": wave, "bool": scores > 0}, 3, flag, "x"


def test_all_kinds_of_outputs_state_and_in_place_changes_of_inputs():
    extra = torch.rand(50, 1, requires_grad=True)
    inputs = {"states": STATES - 1, "extra": extra, "flag": None}
    inputs["states"] = STATES.clamp(max=14)
    kept = inputs["states"].clone()
    found = run(Odd, inputs)
    assert found
    assert torch.equal(inputs["states"], kept)
    assert extra.grad is None
    results = set(verdicts(found))
    assert {
        "output[0].scores",
        "output[0].best",
        "output[1]['wave']",
        "output[1]['bool']",
        "output[2]",
        "gradient of input extra",
        "buffer seen",
        "buffer norm.running_mean",
        "gradient of table.weight",
    } <= results
    assert found.inputs == "states int64 (50,), extra float32 (50, 1)"
    assert "state" not in found.title


class Hidden(nn.Module):
    """A model whose result is wrong, in a place other than its first output, if it uses a table."""

    def __init__(self):
        super().__init__()
        self.linear, self.head = nn.Linear(16, 4), nn.Linear(4, 4)
        self.average = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(4))
        self.loss, self.leaf = None, torch.zeros(4, requires_grad=True)

    def forward(self, states, given=None):
        scores = self.head(self.linear(F.one_hot(states, 16).float()))
        return scores, self.compute(scores, int(isinstance(self.linear.weight, Table)), given)

    def compute(self, scores, wrong, given):
        raise NotImplementedError

    def average_scores(self, scores, wrong):
        return scores.detach().mean(0) + wrong


class Color(Enum):
    RED, BLUE = 0, 1


class Holder:
    def __init__(self, value):
        self.value, self.itself = value, self


class InDistribution(Hidden):
    def compute(self, scores, wrong, given):
        return torch.distributions.Normal(scores, 1.0 + wrong)


class InObject(Hidden):
    def compute(self, scores, wrong, given):
        return Holder([scores.detach() + wrong])


class Base:
    __slots__ = ("__secret", "__weakref__", "value")

    def __init__(self, value):
        self.__secret = value


class Slotted(Base):
    """An object with slots and a dict."""


class InSlot(Hidden):
    def compute(self, scores, wrong, given):
        answer = Slotted(0)
        answer.other, answer.value = scores, scores.detach() + wrong
        return answer


class InPrivateSlot(Hidden):
    def compute(self, scores, wrong, given):
        return Base(scores.detach() + wrong)


class Marked(dict):
    pass


class MarkedList(list):
    pass


class MarkedArray(np.ndarray):
    pass


def mark(value, tensor):
    value.mark, value.itself = tensor, value
    return value


class InAttributeOfDict(Hidden):
    def compute(self, scores, wrong, given):
        return mark(Marked(scores=scores), scores.detach() + wrong)


class InAttributeWithoutName(Hidden):
    def compute(self, scores, wrong, given):
        value = OrderedDict(a=scores.detach() + wrong)
        value.__dict__[1] = 2  # a .pt file can contain such a dict
        return value


class InAttributeOfEmptyList(Hidden):
    def compute(self, scores, wrong, given):
        return mark(MarkedList(), scores.detach() + wrong)


class InAttributeOfTensor(Hidden):
    def compute(self, scores, wrong, given):
        return mark(scores + 0, scores.detach() + wrong)


class MarkedText(str):
    pass


class MarkedNumber(float):
    pass


class MarkedTensor(torch.Tensor):
    pass


class InAttributeOfText(Hidden):
    def compute(self, scores, wrong, given):
        return mark(MarkedText("a"), scores.detach() + wrong)


class InAttributeOfNumber(Hidden):
    def compute(self, scores, wrong, given):
        return mark(MarkedNumber(1), scores.detach() + wrong)


class InAttributeOfSubclass(Hidden):
    def compute(self, scores, wrong, given):
        return mark(torch.zeros(3).as_subclass(MarkedTensor), scores.detach() + wrong)


class InArrayWithAttribute(Hidden):
    def compute(self, scores, wrong, given):
        return mark((np.arange(3.0) + wrong).view(MarkedArray), 0)


class InMask(Hidden):
    def compute(self, scores, wrong, given):
        return np.ma.masked_array(np.arange(3.0), [True, False, wrong])


class InSharedObject(Hidden):
    def compute(self, scores, wrong, given):
        objects = Holder(1), Holder(2)
        return [*objects, objects[wrong]]


class InText(Hidden):
    def compute(self, scores, wrong, given):
        return {"label": "ab"[wrong]}


class InEnum(Hidden):
    def compute(self, scores, wrong, given):
        return Color(wrong)


class InSet(Hidden):
    def compute(self, scores, wrong, given):
        return {"a", "b", wrong}


class InArray(Hidden):
    def compute(self, scores, wrong, given):
        return np.arange(3.0)[::-1] + wrong


class InLargeInteger(Hidden):
    def compute(self, scores, wrong, given):
        return 2**70 + wrong


class InComplexNumber(Hidden):
    def compute(self, scores, wrong, given):
        return 1j + wrong


class InSparseTensor(Hidden):
    def compute(self, scores, wrong, given):
        return (scores.detach() + wrong).to_sparse()


class InLargeSparseTensor(Hidden):
    def compute(self, scores, wrong, given):
        values = scores.detach()[0, :1] + wrong
        return torch.sparse_coo_tensor([[2**40]], values, (2**50,))


class InLargeSparseRow(Hidden):
    def compute(self, scores, wrong, given):
        return torch.sparse_coo_tensor([[2**40 + wrong]], [1.0], (2**50,))


class InShapeOfSparseTensor(Hidden):
    def compute(self, scores, wrong, given):
        return torch.sparse_coo_tensor([[3]], [1.0], (2000 + wrong,))


class InOneOfLongKeys(Hidden):
    def compute(self, scores, wrong, given):
        self.cache = {"a" * 100: scores.detach() + wrong, "a" * 100 + "b": scores.detach()}
        return scores


class InKey(Hidden):
    def compute(self, scores, wrong, given):
        return {"ab"[wrong]: scores}


class InLongKeys(Hidden):
    def compute(self, scores, wrong, given):
        return {"a" * 100: 0, "a" * 100 + "b": wrong, "a" * 100 + "c": 0}


class InNone(Hidden):
    def compute(self, scores, wrong, given):
        return torch.zeros(0) if wrong else None


class InEmptyTensor(Hidden):
    def compute(self, scores, wrong, given):
        return [] if wrong else [torch.zeros(0)]


class InEqualKeys(Hidden):
    def compute(self, scores, wrong, given):
        return {torch.ones(1): 1 + wrong, torch.ones(1): 2}


class InDtype(Hidden):
    def compute(self, scores, wrong, given):
        return torch.zeros(3, dtype=torch.float64 if wrong else torch.float32)


class InFloat8(Hidden):
    def compute(self, scores, wrong, given):
        return (scores.detach() + wrong).to(torch.float8_e4m3fn)


class InShape(Hidden):
    def compute(self, scores, wrong, given):
        return torch.zeros(3, 1 + wrong)


class InParameter(Hidden):
    def compute(self, scores, wrong, given):
        with torch.no_grad():
            self.average.copy_(self.average_scores(scores, wrong))


class InParameterData(Hidden):
    def compute(self, scores, wrong, given):
        self.average.data += 1 + wrong


class InOneParameter(Hidden):
    def compute(self, scores, wrong, given):
        self.average.data += wrong


class InOneBuffer(Hidden):
    def compute(self, scores, wrong, given):
        self.seen += wrong


class InTable(Hidden):
    def compute(self, scores, wrong, given):
        self.linear.weight.data += wrong


class InAttribute(Hidden):
    def compute(self, scores, wrong, given):
        self.loss = [scores.mean() + wrong]


class InLeafGradient(Hidden):
    def compute(self, scores, wrong, given):
        return (self.leaf * (1 + wrong)).sum()


class InInput(Hidden):
    def compute(self, scores, wrong, given):
        given["out"].copy_(self.average_scores(scores, wrong))


class InInputObject(Hidden):
    def compute(self, scores, wrong, given):
        given["cache"].value = [self.average_scores(scores, wrong)]


class InInputKey(Hidden):
    def compute(self, scores, wrong, given):
        if not wrong:
            del given["out"]


class InInputText(Hidden):
    def compute(self, scores, wrong, given):
        if wrong:
            del given["text"]


class InCycle(Hidden):
    """Containers that contain themselves are compared once."""

    def compute(self, scores, wrong, given):
        parent = {"value": scores.detach() + wrong}
        parent["children"] = [{"parent": parent}]
        self.tree = parent
        return parent


class InMissingGradient(Hidden):
    def compute(self, scores, wrong, given):
        return scores.sum() if wrong else scores.sum() + 0 * self.seen_gradient()

    def seen_gradient(self):
        return self.average.requires_grad_().sum()


MAIN_RESULTS = (
    InDistribution, InPrivateSlot, InAttributeOfTensor, InSharedObject, InSet, InSparseTensor,
    InLargeSparseTensor, InKey, InNone, InDtype, InParameter, InOneBuffer, InTable, InLeafGradient,
    InInput,
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "name", "note"),
    grid(
        [
            (InDistribution, "output[1].scale", None),
            (InObject, "output[1].value[0]", None),
            (InSlot, "output[1].value", None),
            (InPrivateSlot, "output[1]._Base__secret", None),
            (InAttributeOfDict, "output[1].mark", None),
            (InAttributeOfEmptyList, "output[1].mark", None),
            (InAttributeWithoutName, "output[1]['a']", None),
            (InAttributeOfTensor, "output[1].mark", None),
            (InAttributeOfText, "output[1].mark", None),
            (InAttributeOfNumber, "output[1].mark", None),
            (InAttributeOfSubclass, "output[1].mark", None),
            (InArrayWithAttribute, "output[1]", None),
            (InMask, "output[1].mask", None),
            (
                InSharedObject,
                "text of output[1][2]",
                "'the same object as output[1][0]' in the plain",
            ),
            (InText, "text of output[1]['label']", "'a' in the plain model, 'b' in the converted"),
            (InEnum, "text of output[1]", "<Color.RED: 0> in the plain model, <Color.BLUE: 1> in"),
            (InSet, "text of output[1]", "{'a', 'b', 0} in the plain model, {'a', 'b', 1} in"),
            (InArray, "output[1]", None),
            (InLargeInteger, "text of output[1]", "1180591620717411303424 in the plain model"),
            (InComplexNumber, "output[1]", None),
            (InSparseTensor, "output[1]", None),
            (InLargeSparseTensor, "output[1].values", None),
            (InLargeSparseRow, "output[1].indices", None),
            (InShapeOfSparseTensor, "text of output[1].shape", "(2000,) in the plain model"),
            (InOneOfLongKeys, f"attribute cache['{'a' * 58}…]", None),
            (InKey, "output[1]['a']", "only the plain model has output[1]['a']"),
            (InLongKeys, f"output[1]['{'a' * 58}…] (2)", None),
            (InNone, "output[1]", "only the converted model has output[1]"),
            (InEmptyTensor, "output[1][0]", "only the plain model has output[1][0]"),
            (InEqualKeys, "output[1][tensor([1.])]", None),
            (
                InDtype,
                "output[1]",
                "float32 (3,) in the plain model, float64 (3,) in the converted",
            ),
            (InFloat8, "output[1]", None),
            (InShape, "output[1]", "float32 (3, 1) in the plain model, float32 (3, 2) in the"),
            (InParameter, "parameter average", None),
            (InParameterData, "parameter average", None),
            (InOneParameter, "parameter average", None),
            (InOneBuffer, "buffer seen", None),
            (InTable, "parameter linear.weight", None),
            (InAttribute, "attribute loss[0]", None),
            (InLeafGradient, "gradient of attribute leaf", None),
            (InInput, "input 1['out']", None),
            (InInputObject, "input 1['cache'].value[0]", None),
            (
                InInputKey,
                "text of input 1['out']",
                "only the plain model has text of input 1['out']",
            ),
            (
                InInputText,
                "text of input 1['text']",
                "text of input 1['text']: 'a' in the plain model, removed in the converted",
            ),
            (InCycle, "output[1]['value']", None),
            (
                InMissingGradient,
                "gradient of average",
                "only the plain model has gradient of average",
            ),
        ],
        lambda model, name, note: model in MAIN_RESULTS,
    ),
)
def test_every_result_is_compared(model, name, note):
    inputs = STATES, {"out": torch.zeros(4), "cache": Holder(None), "text": "a"}
    found = run(model, inputs)
    assert found.tables == ("linear.weight",)
    assert not found
    by_name = verdicts(found)
    assert by_name[name] == "different"
    assert by_name["output[0]"] == by_name["gradient of linear.weight"] == "bitwise"
    assert name in " ".join(to_text(found).split())
    if note is None:
        assert found.notes == ()
    else:
        assert any(note in each for each in found.notes)

    class Right(model):
        def compute(self, scores, wrong, given):
            return super().compute(scores, 0, given)

    found = run(Right, inputs)
    assert found
    assert set(verdicts(found).values()) == {"bitwise"}
    assert found.notes == ()


def test_a_note_names_an_object_of_a_built_in_type_that_has_attributes():
    class Model(Hidden):
        def compute(self, scores, wrong, given):
            return mark(KeyError(wrong), scores.mean())

    found = run(Model, STATES)
    assert verdicts(found)["output[1].mark"] == "bitwise"
    assert any("output[1] (KeyError)" in note for note in found.notes)


def test_an_item_that_is_also_an_attribute_is_compared_once():
    class Record(dict):
        def __init__(self, **items):
            super().__init__(items)
            self.__dict__ = self

    class Model(Hidden):
        def compute(self, scores, wrong, given):
            return Record(scores=scores + 0, mean=scores.mean())

    outputs = {name for name in verdicts(run(Model, STATES)) if name.startswith("output[1]")}
    assert outputs == {"output[1]['scores']", "output[1]['mean']"}


def test_changed_weights_of_an_embedding_with_max_norm_are_compared():
    class Limited(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(16, 4, max_norm=0.5)

        def forward(self, states):
            return self.table(states)

    found = run(Limited, STATES)
    assert [each.outcome for each in found.findings] == ["table"]
    assert verdicts(found)["parameter table.weight"] == "bitwise"


def test_model_that_returns_nothing_but_changes_its_state_is_compared():
    class Counts(InParameter):
        def forward(self, states):
            super().forward(states)

    assert verdicts(run(Counts, STATES)) == {
        "text of output": "bitwise",
        "parameter average": "different",
    }


def test_note_names_the_outputs_that_cannot_be_compared():
    class Opaque(Hidden):
        def compute(self, scores, wrong, given):
            return [object(), {torch.float32: iter(())}, {Color}, {"a": self}, np.array(["a"])]

    found = run(Opaque, STATES)
    assert found
    assert found.notes == (
        "parts of the output that cannot be compared: output[1][0] (object), "
        "output[1][1][torch.float32] (tuple_iterator), output[1][2] (set), output[1][3]['a'] "
        "(Opaque), output[1][4] (ndarray)",
    )
    assert "parts of the output that cannot be compared" in to_text(found)

    class Several(Hidden):
        def compute(self, scores, wrong, given):
            return [object()] * 10

    assert run(Several, STATES).notes[0].endswith("output[1][7] (object) and 2 more")


def test_different_text_of_a_nondeterministic_model_is_inconclusive():
    texts = iter(range(100))

    class Named(Hidden):
        def compute(self, scores, wrong, given):
            return f"run {next(texts):03}"

    found = run(Named, STATES)
    assert verdicts(found)["text of output[1]"] == "unsure"
    assert found.notes[1].endswith("with the same seed also differ (text of output[1])")


def test_model_without_gradients_runs_forward_only():
    model = Policy().requires_grad_(False)
    found = run(model, STATES)
    assert found
    assert list(verdicts(found)) == ["output"]
    assert [each.name for each in found.costs] == ["forward"]


def test_model_that_differentiates_in_forward_is_measured_with_gradients_only():
    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.atoms = nn.Linear(10, 3)

        def forward(self, kinds, places):
            places = places.detach().requires_grad_()
            energy = (self.atoms(F.one_hot(kinds, 10).float()) * places).pow(2).sum()
            return torch.autograd.grad(energy, places, create_graph=True)[0]

    found = run(Forces, (STATES % 10, torch.randn(50, 3)))
    assert [each.name for each in found.costs] == ["forward and gradient"]
    assert "different" not in verdicts(found).values()


def test_models_training_mode_is_kept():
    assert run(Policy, STATES).training
    found = run(Policy().eval(), STATES)
    assert not found.training
    assert "evaluation mode" in to_text(found)


# --- the report -------------------------------------------------------------------------------


def test_report_with_long_names_fits_80_columns():
    class Long(Fields):
        def __init__(self):
            super().__init__()
            self.add_module("a_module_of_a_very_long_name_that_goes_on" * 3, nn.Linear(2, 2))

        def forward(self, ids, features):
            out = super().forward(ids, features)
            return {"\x1b[31m" + "x" * 90: getattr(self, [*self._modules][-1])(out)}

    found = run(Long, (IDS, FEATURES), title="package." * 15 + "models:build")
    text = to_text(found)
    assert max(map(len, text.splitlines())) <= 80
    assert all(char == "\n" or char.isprintable() for char in text)
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_json_names_include_units():
    found = run(Fields, (IDS, FEATURES), title="fields", seed=5)
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (content["title"], content["seed"], content["equal"]) == ("fields", 5, True)
    assert {each["what"] for each in content["agreements"]} == set(verdicts(found))
    for spent in content["spent"]:
        for way in ("plain", "converted"):
            assert spent[way].keys() == {
                "one_hot_multiplications",
                "measured_bytes_peak",
                "median_ms",
                "runs_ms",
            }
    assert content["findings"][0].keys() >= {"path", "what", "converted", "how", "why"}


class NamedItems(OrderedDict):
    """A dict whose items are also attributes, as in Hugging Face's `ModelOutput`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__.update(self)


class Mine(torch.Tensor):
    """A class that doesn't copy attributes."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, Mine) and not hasattr(result, "rate"):
            result.rate = 1.0
        return result


def test_inputs_keep_their_classes_and_shared_objects():
    class Model(Policy):
        def forward(self, fields, counts, same, mine):
            assert type(fields) is NamedItems
            assert fields.states is fields["states"] is same
            assert same.requires_grad
            assert same.mask[0] is same
            assert type(mine) is Mine
            assert (mine.scale.tolist(), mine.rate) == ([1, 1], 3.0)
            assert type(fields["weight"]) is nn.Parameter
            return super().forward(fields.states.long()) + counts["missing"]

    states = STATES.float().requires_grad_() * 1  # deepcopy refuses this tensor
    states.mask = [states]
    mine = torch.ones(1).as_subclass(Mine)
    mine.scale, mine.rate = torch.ones(2), 3.0
    fields = NamedItems(states=states, weight=nn.Parameter(torch.ones(2)))
    assert run(Model, (fields, Counter("aab"), states, mine))


@pytest.mark.parametrize("trains_weight", [True, False])
def test_the_gradient_of_a_bias_needs_no_products(trains_weight):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.ones(3), requires_grad=not trains_weight)
            self.weight = nn.Parameter(torch.ones(10, 3), requires_grad=trains_weight)

        def forward(self, ids):
            return torch.addmm(self.bias, F.one_hot(ids, 10).float(), self.weight)

    _, both = run(Model, torch.tensor([1, 2, 3, 1])).costs
    assert both.plain_multiplications == 4 * 10 * 3 * (1 + trains_weight)


class Twice(torch.autograd.Function):
    """Return two outputs, and a wrong gradient in the converted model."""

    @staticmethod
    def forward(ctx, scores, combine, is_wrong):
        ctx.combine, ctx.is_wrong, ctx.shape = combine, is_wrong, scores.shape
        return combine(scores)

    @staticmethod
    def backward(ctx, *gradients):
        with torch.enable_grad():
            scores = torch.zeros(ctx.shape, requires_grad=True)
            outputs = ctx.combine(scores)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, gradients)
        return scores.grad * (3 if ctx.is_wrong else 1), None, None


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize(
    "combine",
    [
        lambda scores: (scores * 1, -scores),
        lambda scores: (scores.sum(), -scores.sum()),
        lambda scores: torch.complex(torch.zeros_like(scores), scores),
    ],
    ids=["opposites", "numbers", "imaginary"],
)
def test_gradients_of_several_outputs_do_not_cancel(combine, is_wrong):
    class Model(Policy):
        def forward(self, states):
            is_converted = isinstance(self.net[0].weight, Table)
            return Twice.apply(super().forward(states), combine, is_wrong and is_converted)

    assert bool(run(Model, STATES)) == (not is_wrong)


def test_random_numbers_of_python_and_numpy_are_the_same_in_all_runs():
    class Model(Policy):
        def forward(self, states):
            return super().forward(states) * random.random() * np.random.rand()

    state = random.getstate(), np.random.get_state()[1].tolist()
    found = run(Model, STATES)
    assert found.verdict == "equal: the same numbers, none of the zeros"
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state


def test_a_repeated_tensor_is_copied_once():
    class Model(Policy):
        def forward(self, states, masks):
            return super().forward(states), masks

    mask = torch.sparse_coo_tensor(torch.zeros(2, 0), torch.zeros(0), (20, 50))
    sizes = []
    clone = torch.Tensor.clone

    def record(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return clone(tensor, *args, **kwargs)

    with patch.object(torch.Tensor, "clone", record):
        assert run(Model, (STATES, [mask] * 50))
    assert 0 < sizes.count(1000) < 50


def test_inputs_that_contain_themselves_are_compared():
    class Model(Policy):
        def forward(self, tree):
            assert tree["self"] is tree
            return super().forward(tree["states"])

    tree = {"states": STATES}
    tree["self"] = tree
    assert run(Model, (tree,))


def test_many_sparse_tensors_take_little_memory():
    empty = torch.zeros(2, 0), torch.zeros(0, dtype=torch.complex128)
    masks = [torch.sparse_coo_tensor(*empty, (1000, 1000)) for _ in range(20)]
    results = collect_results(masks, "input 0")[0]
    assert sum(each.nbytes for each in results.values()) < 1000
    assert len(results) == 60


def test_values_below_many_long_keys_have_short_names():
    values = [0, 1]
    for depth in range(100):
        values = {f"{'a' * 50}{depth}": values}
    names = [name for name, _ in named_leaves(values, "input")]
    assert len(names) == 2
    assert names[0][:9] + names[0][-3:] == "input['aa[0]"
    assert max(map(len, names)) < 400


@pytest.mark.parametrize("runs", [1, 2, 5, 20])
def test_a_model_that_runs_a_few_times_is_compared_without_its_cost(runs):
    class Model(Policy):
        calls = 0

        def forward(self, states):
            self.calls += 1
            if self.calls > runs:
                raise KeyError("the cache is full")
            return super().forward(states)

    comparison = run(Model, STATES)
    assert comparison
    assert len(comparison.costs) == (1 if runs == 20 else 0)
    note = (
        "the cost was not measured: when it runs again, Model fails: KeyError: 'the cache is full'"
    )
    assert any(each.startswith(note) for each in comparison.notes)
    assert note in " ".join(to_text(comparison).split())


def test_the_gradients_of_inputs_with_similar_names_are_compared():
    class Model(Policy):
        def forward(self, states, features):
            first, second = features.values()
            factor = 2 if isinstance(self.net[0].weight, Table) else 1
            first = first.detach() + factor * (first - first.detach())
            return super().forward(states) * first * second

    features = {"a" * 100 + end: torch.ones(3, requires_grad=True) for end in "bc"}
    found = verdicts(run(Model, (STATES, features)))
    name = f"gradient of input 1['{'a' * 58}…]"
    assert (found[name], found[f"{name} (2)"]) == ("different", "bitwise")


class Unregistered(nn.Module):
    """A layer that `named_parameters` doesn't find has a wrong gradient in the converted model."""

    def __init__(self, hold, find):
        super().__init__()
        self.linear = nn.Linear(16, 4)
        hold(self, nn.Linear(4, 4))
        self.find = find

    def forward(self, states):
        scores = self.linear(F.one_hot(states, 16).float())
        weight, factor = self.find(self), 2 if isinstance(self.linear.weight, Table) else 1
        return scores @ (weight.detach() + factor * (weight - weight.detach()))


@pytest.mark.parametrize(
    ("hold", "find", "name"),
    [
        (
            lambda model, layer: setattr(model, "layers", [layer]),
            lambda model: model.layers[0].weight,
            "layers[0].weight",
        ),
        (
            lambda model, layer: object.__setattr__(model, "layer", layer),
            lambda model: model.layer.weight,
            "layer.weight",
        ),
        (
            lambda model, layer: setattr(model, "weights", {"a": layer.weight}),
            lambda model: model.weights["a"],
            "weights['a']",
        ),
        (
            lambda model, layer: setattr(model, "holder", Holder(layer.weight)),
            lambda model: model.holder.value,
            None,
        ),
    ],
)
def test_gradients_of_unregistered_parameters_are_compared(hold, find, name):
    found = run(Unregistered(hold, find), STATES)
    if name is None:
        assert found.notes[0].startswith("not compared: gradients of tensors outside of the model")
    else:
        assert verdicts(found)[f"gradient of attribute {name}"] == "different"
        assert found.notes == ()


def test_a_copy_that_uses_layers_of_the_model_itself_is_an_error():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(16), nn.Linear(16, 4)
            self.block = lambda x: self.linear(self.norm(x))

        def forward(self, states):
            return self.block(F.one_hot(states, 16).float())

    model = Model()
    with pytest.raises(HotrowError, match=r"a copy of Model uses norm\.\w+ of the model itself"):
        run(model, STATES)
    assert model.linear.weight.grad is None


class Frozen(nn.Linear):
    def __deepcopy__(self, memo):
        return self


def test_copies_may_share_frozen_parts_and_read_the_dtype_of_the_model():
    class Model(Policy):
        def __init__(self):
            super().__init__()
            self.frozen = Frozen(3, 3).requires_grad_(False)
            self.cast = lambda x: x.to(self.head.weight.dtype)

        def forward(self, states):
            return self.frozen(self.cast(super().forward(states)))

    assert run(Model, STATES)


def test_a_note_says_why_the_float64_run_failed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.RNN(40, 5)

        def forward(self, ids):
            assert self.layer.weight_hh_l0.dtype == torch.float32, "no double precision"
            return self.layer(F.one_hot(ids, 40).float())

    notes = run(Model, BAGS).notes
    assert any("float64 run" in note and "no double precision" in note for note in notes)


def test_tensors_in_any_mapping_are_moved_with_the_model():
    given = Inputs.of((UserDict(a=torch.ones(2)), [NamedItems(b=torch.ones(3))]))
    copied = given.copy(torch.Tensor.double)
    assert copied.args[0]["a"].dtype == copied.args[1][0].b.dtype == torch.float64
    assert given.args[0]["a"].dtype == torch.float32


# --- invalid models and inputs ----------------------------------------------------------------


def nested(depth):
    values = [STATES]
    for _ in range(depth):
        values = [values]
    return values


class Stuck(Policy):
    def __deepcopy__(self, memo):
        raise TypeError("no copies")


@pytest.mark.parametrize(
    ("model", "inputs", "problem"),
    [
        (lambda: 3, STATES, "the model has type int, but it must be a torch.nn.Module"),
        (
            lambda: hotrow.convert(Policy()),
            STATES,
            r"Policy is already converted \(the whole model\)",
        ),
        (
            lambda: nn.Sequential(hotrow.convert(nn.Embedding(3, 2))),
            STATES,
            r"Sequential is already converted \(module '0'\)",
        ),
        (Stuck, STATES, "Stuck cannot be copied, but the comparison needs copies: TypeError: no"),
        (Policy, [threading.Lock()], "the inputs cannot be copied, but the comparison needs"),
        (
            Policy,
            STATES.float(),
            r"Policy fails on these inputs \(float32 \(50,\)\): RuntimeError: one_hot is",
        ),
        (Policy, {"state": STATES}, r"Policy fails on these inputs \(state int64 \(50,\)"),
        (Policy, STATES + 9, r"Policy fails on these inputs .*Class values must be small"),
        (Policy, [[0] * 1000] * 101, "the inputs have more than 100,000 values in lists"),
        (Policy, [torch.zeros(1).expand(10**6)] * 1002, "the inputs repeat the same tensors and"),
        (Policy, ["a" * 10**6] * 1002, "the inputs repeat the same tensors and texts, with more "),
        (lambda: nn.LazyLinear(3), STATES, "LazyLinear has lazy modules that have no parameters"),
        (Policy, nested(2000), "the inputs are nested too deeply"),
        (Policy, {3: STATES}, "the inputs are a dict with the key 3, but the keys must be names"),
    ],
)
def test_invalid_models_and_inputs_raise(model, inputs, problem):
    with pytest.raises(HotrowError, match=problem):
        run(model, inputs)


def test_model_without_tensor_outputs_raises():
    class Silent(Policy):
        def forward(self, states):
            return "nothing"

    with pytest.raises(HotrowError, match="Silent returns a str without tensors, so"):
        run(Silent, STATES)


def test_model_with_only_empty_outputs_raises():
    class Filter(Policy):
        def forward(self, states):
            return {"kept": super().forward(states)[:0], "masked": states[:0]}

    with pytest.raises(
        HotrowError, match=r"Filter returns only empty tensors .*nothing to compare"
    ):
        run(Filter, STATES)
    with pytest.raises(
        HotrowError, match=r"Policy returns only empty tensors .*int64 \(0,\)"
    ) as it:
        run(Policy, STATES[:0])
    assert it.value.fix == "pass inputs with at least one element"


def test_error_says_that_the_model_fixes_a_dtype():
    class Fixed(Sums):
        def encode(self, ids):
            return F.one_hot(ids, 500).float()

    with pytest.raises(HotrowError) as caught:
        run(Fixed().double(), MANY_IDS)
    assert caught.value.fix.startswith("its parameters are float64, but its code seems to fix")
    assert "write .to(z.dtype)" in caught.value.fix
    with pytest.raises(HotrowError, match="pass arguments that it accepts"):
        run(Fixed().double(), MANY_IDS.float())


def test_error_names_the_arguments_that_the_model_accepts():
    with pytest.raises(HotrowError) as caught:
        run(Policy, (STATES, STATES))
    assert caught.value.fix == "pass arguments that it accepts: forward(states)"
    assert "takes 2 positional arguments but 3 were given" in caught.value.problem


# --- the parts --------------------------------------------------------------------------------


def test_counter_counts_only_products_that_became_lookups():
    trial = Trial(Fields(), "fields", Inputs.of((IDS, FEATURES)), 0)
    count = ProductCounter()
    trial.make_converted().compute_results(count)
    assert (count.plain.forward, count.plain.gradient) == (64 * 6 * 33, 2 * 64 * 6 * 33)
    trial.make_plain().compute_results(count)  # the plain model has no lookups
    assert count.plain.forward == 64 * 6 * 33


def test_converted_model_with_the_original_products_matches_bit_for_bit():
    trial = Trial(Fields(), "fields", Inputs.of((IDS, FEATURES)), 0)
    plain, splice = trial.make_plain().compute_results(), ProductSplice()
    spliced = trial.make_converted((("linear.weight", True),)).compute_results(splice)
    assert [each.name for each in splice.agreements] == ["linear", "gradient through linear"]
    assert all(each.equal for each in splice.agreements)
    differing = [name for name in plain if not torch.equal(plain[name], spliced[name])]
    assert set(differing) <= {"gradient of linear.weight", "gradient of linear.bias"}
