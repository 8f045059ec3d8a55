"""Models without large one-hots run like plain PyTorch, until a large one-hot appears."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import hotrow
from hotrow import HotrowError, convert
from hotrow.conversion import sampling
from tests.support.exhaustive import exhaustive
from tests.support.tolerance import assert_same_bits

DEFAULT = sampling.MIN_ENTRIES  # saved here, because a fixture changes MIN_ENTRIES
TRIES, EVERY = 8, 64


class Small(nn.Module):
    """A model that records for each call whether hotrow searched for one-hots."""

    def __init__(self, states=6):
        super().__init__()
        self.states, self.looked = states, []
        self.linear = nn.Linear(states, 3)

    def forward(self, ids, *rest, **named):
        self.looked.append(bool(_get_current_function_mode_stack()))
        return self.linear(F.one_hot(ids, self.states).float())

    def other(self, ids):
        return self.forward(ids)


class Batch:
    """An input whose size hotrow cannot determine."""


class Nothing(Small):
    def forward(self, ids, *rest, **named):
        self.looked.append(bool(_get_current_function_mode_stack()))
        return self.linear(ids.float().unsqueeze(-1).expand(-1, self.states))


IDS = torch.tensor([1, 5, 1, 0])
ENDLESS = []
ENDLESS.append(ENDLESS)


@pytest.fixture
def default_min_entries(monkeypatch):
    monkeypatch.setattr("hotrow.conversion.sampling.MIN_ENTRIES", DEFAULT)


def searching_calls(model, calls, ids=IDS):
    model.looked.clear()
    for _ in range(calls):
        model(ids)
    return [place + 1 for place, each in enumerate(model.looked) if each]


FIRST = [*range(1, TRIES + 1), EVERY, 2 * EVERY]


@pytest.mark.usefixtures("default_min_entries")
@pytest.mark.parametrize("kind", [Small, Nothing])
def test_first_calls_search_and_then_fewer_and_fewer(kind):
    later = [256, 512, 1024, 2048, 3072]
    assert searching_calls(convert(kind()), 3073) == [*FIRST, *later]


def test_model_with_large_one_hots_always_searches():
    assert searching_calls(convert(Small()), 100) == [*range(1, 101)]
    # In a model without one-hots, hotrow searches only a sample of the calls.
    assert searching_calls(convert(Nothing()), 2 * EVERY + 1) == FIRST


class Largest(Small):
    def forward(self, ids):
        self.looked.append(bool(_get_current_function_mode_stack()))
        return F.one_hot(ids, self.states).argmax(-1)


class Fields(Small):
    def forward(self, ids):
        self.looked.append(bool(_get_current_function_mode_stack()))
        half = F.one_hot(ids % 3, 3)
        return self.linear(torch.cat([half, half], -1).float())


@pytest.mark.parametrize(("min_entries", "always"), [(2, True), (3, False)])
def test_one_hot_without_a_product_starts_a_search_if_ten_times_as_large(min_entries, always):
    model = convert(Largest(), min_entries=min_entries)  # 24 entries
    assert searching_calls(model, 20) == [*range(1, 21 if always else 1 + TRIES)]


class Uses(Small):
    """A model that uses a one-hot of 4 x 6 or 4 x 3 entries."""

    def __init__(self, states, use):
        super().__init__(states)
        self.use = use

    def forward(self, ids):
        self.looked.append(bool(_get_current_function_mode_stack()))
        return self.use(F.one_hot(ids % self.states, self.states).float())


@pytest.mark.parametrize(
    ("states", "min_entries", "always", "use"),
    [
        (3, 1, True, lambda x: x.mean(0)),
        (3, 2, False, lambda x: x.mean(0)),  # with fewer than 10 x 2 entries, torch is as fast
        (3, 1, False, lambda x: x.mean(0) + x.softmax(1).mean(0)),
        (3, 1, False, lambda x: (x.mean(0), x)),
        (3, 1, False, lambda x: (x.mean(0), x[:, 1:])),
        (3, 0, True, lambda x: (x.mean(0), x)),
        (6, 2, True, lambda x: (x.mean(0) + 1e-9).log()),  # only the mean is materialized
        (6, 2, False, lambda x: (x.mean(0) + 1e-9).log() + x.softmax(1).mean(0)),
        (6, 2, False, lambda x: x.softmax(1)),
        (6, 2, False, lambda x: x),
        (6, 2, True, lambda x: x.softmax(1).mean(1) + x @ torch.ones(6)),
        (6, 0, False, lambda x: x.softmax(1)),
    ],
)
def test_materialized_one_hot_does_not_make_it_search(states, min_entries, always, use):
    model = convert(Uses(states, use), min_entries=min_entries)
    assert searching_calls(model, 20) == [*range(1, 21 if always else 1 + TRIES)]
    torch.testing.assert_close(model(IDS), use(F.one_hot(IDS % states, states).float()))


@pytest.mark.parametrize(
    ("kind", "min_entries", "always"),
    [(Small, 23, True), (Small, 25, False), (Fields, 11, True), (Fields, 13, False)],
)
def test_one_large_one_hot_or_several_side_by_side_start_a_search(kind, min_entries, always):
    model = convert(kind(), min_entries=min_entries)  # 4 x 6
    assert searching_calls(model, 20) == [*range(1, 21 if always else 1 + TRIES)]


@pytest.mark.usefixtures("default_min_entries")
@pytest.mark.parametrize(
    "more",
    [
        lambda model: model(torch.zeros(5, dtype=torch.int64)),
        lambda model: model(IDS, torch.zeros(1)),
        lambda model: model(IDS, [{"a": (torch.zeros(1),)}]),
        lambda model: model(IDS, named=torch.zeros(1)),
        lambda model: model(IDS, np.zeros(1)),
        lambda model: model(IDS, -1),
        lambda model: model(IDS, np.int64(1)),
        lambda model: model(IDS, Batch()),
        lambda model: model(IDS, "train"),
        lambda model: model(IDS, 2**2000),
        lambda model: model(IDS, [0] * 100),
        lambda model: model(IDS, ENDLESS),
        lambda model: model(ids=torch.zeros(5, dtype=torch.int64)),
        lambda model: model.eval()(IDS),
        lambda model: model.other(IDS),
    ],
)
def test_call_with_a_larger_input_searches(more):
    model = convert(Small())
    searching_calls(model, TRIES + 2)
    assert model.looked[-2:] == [False, False]
    more(model)
    assert model.looked[-1]
    model.train()(IDS)
    assert not model.looked[-1]


@pytest.mark.usefixtures("default_min_entries")
def test_large_batch_after_many_small_ones_is_looked_up_from_then_on():
    model = convert(Small(1000))
    searching_calls(model, 20)
    rows = DEFAULT // 900
    model(torch.zeros(DEFAULT // 1000 - 1, dtype=torch.int64))
    assert not model.looked[-1] or not convert.report(model).findings[0].converted
    model(torch.zeros(rows, dtype=torch.int64))
    outcome = (
        "linear(1000, 3) looked up; linear(1000, 3) ran densely, because torch is as fast with "
        "99,000 entries (limit: 105,043)"
    )
    assert str(convert.report(model)).endswith(outcome)
    assert searching_calls(model, 9, torch.zeros(rows, dtype=torch.int64)) == [*range(1, 10)]
    assert searching_calls(model, 9, torch.zeros(9 * rows, dtype=torch.int64)) == [*range(1, 10)]
    assert not searching_calls(model, 9)  # calls with small batches are still not searched


def test_small_batch_after_large_ones_searches_once():
    model = convert(Small(), min_entries=6 * 48)
    searching_calls(model, TRIES, torch.zeros(50, dtype=torch.int64))
    # The first batch of 40 rows shows that batches of up to 40 rows create no large one-hot.
    for rows, searches in [
        (40, True),
        (40, False),
        (30, False),
        (41, True),
        (49, True),
        (48, False),
    ]:
        model(torch.zeros(rows, dtype=torch.int64))
        assert model.looked[-1] == searches, rows
    model(torch.zeros(50, dtype=torch.int64))
    assert model.looked[-1]
    assert convert.report(model).findings[0].converted


@pytest.mark.usefixtures("default_min_entries")
def test_an_input_that_grows_with_each_call_is_rarely_searched():
    model = convert(Small())
    model.looked.clear()
    for count in range(1, 201):
        model(torch.zeros(count, dtype=torch.int64))
    found = [place + 1 for place, each in enumerate(model.looked) if each]
    assert found == [*range(1, 9), 13, 22, 39, 74, 148]


class Switch(Small):
    """A model whose one-hot is large only if `large` is set, whatever the size of the input."""

    large = False

    def forward(self, ids):
        self.looked.append(bool(_get_current_function_mode_stack()))
        return self.linear(F.one_hot(ids.repeat(20 if self.large else 1), self.states).float())


def test_size_with_and_without_large_one_hots_always_searches():
    model = convert(Switch(), min_entries=6 * 50)
    assert searching_calls(model, TRIES + 2) == [*range(1, TRIES + 1)]
    model.large = True
    assert searching_calls(model, EVERY) == [*range(EVERY - TRIES - 2, EVERY + 1)]
    model.large = False
    assert searching_calls(model, EVERY) == [*range(1, EVERY + 1)]
    assert not any(searching_calls(model, 8, IDS[:3]))


@pytest.mark.usefixtures("default_min_entries")
@pytest.mark.parametrize("arguments", [(IDS, Batch()), (IDS, "train"), (IDS[:0],)])
def test_inputs_of_unknown_size_are_counted_separately(arguments):
    model = convert(Small())
    searching_calls(model, TRIES + 2)
    model.looked.clear()
    for _ in range(5 * EVERY + 1):
        model(*arguments)
    found = [place + 1 for place, each in enumerate(model.looked) if each]
    assert found == [*FIRST, 3 * EVERY, 4 * EVERY, 5 * EVERY]
    model(IDS)
    assert not model.looked[-1]
    model(torch.zeros(5, dtype=torch.int64))
    assert model.looked[-1]


def test_inputs_of_unknown_size_with_large_one_hots_always_search():
    model = convert(Small())
    model.looked.clear()
    for _ in range(20):
        model(IDS, Batch())
    assert all(model.looked)


@pytest.mark.usefixtures("default_min_entries")
def test_small_one_hots_match_torch_bit_for_bit_in_every_call():
    plain = nn.Sequential(Small(), nn.Tanh(), nn.Linear(3, 2))
    model = convert(copy.deepcopy(plain))
    optimizers = [
        torch.optim.Adam(plain.parameters()),
        hotrow.optim.Adam(model.parameters()),
    ]
    for step in range(EVERY + 2):
        ids = torch.randint(6, (20,), generator=torch.Generator().manual_seed(step))
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            each(ids).square().mean().backward()
            optimizer.step()
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert_same_bits(b.grad, a.grad)
            assert_same_bits(b.detach(), a.detach())


@pytest.mark.parametrize(("min_entries", "uses"), [(11, True), (13, False)])
def test_entries_are_counted_in_the_product(min_entries, uses):
    model = convert(Fields(), min_entries=min_entries)  # 4 x 6 entries, half of them in each field
    expected = Fields()
    expected.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(IDS), expected(IDS))
    findings = convert.report(model).findings
    assert {finding.converted for finding in findings} == {uses}
    if not uses:
        why = "linear(6, 3) ran densely, because torch is as fast with 24 entries (limit: 27)"
        assert str(findings[0]).endswith(why)


@pytest.mark.usefixtures("default_min_entries")
@pytest.mark.parametrize(("rows", "columns", "uses"), [(200, 1000, True), (20_000, 16, False)])
def test_one_hot_with_few_columns_is_not_looked_up(rows, columns, uses):
    model = convert(Small(columns))
    model(torch.arange(rows) % columns)
    (finding,) = convert.report(model).findings
    assert finding.converted == uses
    if not uses:
        why = "ran densely, because torch is as fast with 16 columns (limit: 49 columns)"
        assert str(finding).endswith(f"  linear(16, 3) {why}")


def test_hotrow_one_hot_of_any_size_is_looked_up():
    weight = torch.tensor([[1.0], [torch.inf]])
    assert (hotrow.one_hot([0], 2, torch.float32) @ weight).item() == 1.0


def test_min_entries_stays_until_it_is_set_again():
    model = convert(Small(), min_entries=23)
    model(IDS)
    assert convert.report(model).findings[0].converted
    assert type(convert(model)) is type(model)
    assert convert.report(model).findings[0].converted
    convert(model, min_entries=25)
    assert "no one-hots" in str(convert.report(model))  # setting min_entries cleared the report
    model(IDS)
    assert not convert.report(model).findings[0].converted
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(IDS)
        assert not convert.report(other).findings[0].converted


@pytest.mark.parametrize("min_entries", [-1, 2.0, True, "many"])
def test_invalid_min_entries_raises(min_entries):
    with pytest.raises(HotrowError, match=f"min_entries = {min_entries!r}, but it must be a non-"):
        convert(Small(), min_entries=min_entries)


@pytest.mark.usefixtures("default_min_entries")
def test_error_in_a_call_without_a_search_reaches_the_caller():
    model = convert(Small())
    searching_calls(model, TRIES + 2)
    with pytest.raises(RuntimeError, match="Class values must be smaller than num_classes"):
        model(torch.tensor([6]))
    assert not model.looked[-1]
    assert searching_calls(model, EVERY) == [EVERY - TRIES - 3]


@pytest.mark.usefixtures("default_min_entries")
def test_each_method_is_sampled_separately():
    class Player(Small):
        def learn(self, ids):
            return self(ids)

    model = convert(Player(1000))
    for _ in range(TRIES + 2):
        model(IDS)
        model.learn(torch.zeros(DEFAULT // 900, dtype=torch.int64))
    assert model.looked[-2:] == [False, True]


class Scaled(nn.Module):
    """A model that multiplies a one-hot by trainable weights."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Linear(1, 1), nn.Linear(6, 3)

    def forward(self, ids):
        scale = self.scale(ids.unsqueeze(-1).float() / 7)
        return self.linear(F.one_hot(ids, 6).float() * scale)


class Twice(nn.Module):
    """A model that runs a checkpointed block twice."""

    def __init__(self, block):
        super().__init__()
        self.block = block()

    def forward(self, ids):
        return sum(checkpoint(self.block, ids, use_reentrant=False) for _ in range(2))


class Late(Twice):
    """A model that creates no one-hot in its first calls, then a large one from the same input."""

    def forward(self, ids):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls <= TRIES:
            return next(self.block.parameters()) * 2
        return super().forward(ids)


class Gate(Scaled):
    def forward(self, ids):
        return F.one_hot(ids, 6).float() * self.scale(ids.unsqueeze(-1).float() / 7)


@pytest.mark.usefixtures("default_min_entries")
@pytest.mark.parametrize(
    "make",
    [
        lambda: Twice(Small),
        lambda: Twice(Scaled),
        lambda: Twice(Gate),
        pytest.param(lambda: Late(lambda: Small(50_000)), marks=exhaustive),
    ],
)
def test_checkpoint_recomputes_with_the_same_search(make):
    plain = make()
    model = convert(copy.deepcopy(plain))
    for call in range(2 * EVERY + 1):
        for each in (plain, model):
            with torch.no_grad():
                if call % 3:
                    each(IDS)  # nothing to recompute
            each(IDS).square().mean().backward()
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, msg=name)


class TrainsItself(Twice):
    """A model whose method also runs the backward pass."""

    def train_step(self, ids, backward):
        backward(super().forward(ids).square().mean())


@pytest.mark.parametrize("to", ["lookup", "matmul"])
@pytest.mark.parametrize("backward", [torch.Tensor.backward, torch.autograd.backward])
def test_a_method_may_run_the_backward_pass_of_a_checkpoint(backward, to):
    plain = TrainsItself(Scaled)
    model = convert(copy.deepcopy(plain), to, min_entries=0)
    for each in (plain, model):
        each.train_step(IDS, backward)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad)
    if to == "lookup":
        outcomes = [finding.outcome for finding in convert.report(model).findings]
        assert any("looked up" in outcome for outcome in outcomes)


@pytest.mark.usefixtures("default_min_entries")
def test_checkpointed_calls_always_search():
    model = convert(Twice(Small))
    for _ in range(TRIES):
        model(IDS).sum().backward()
    assert model.block.looked == [True] * (4 * TRIES)  # two calls, and their recomputation


@pytest.mark.usefixtures("default_min_entries")
@pytest.mark.filterwarnings("ignore")
def test_traced_model_does_not_search():
    model = convert(Small())
    traced = torch.jit.trace(model, IDS, check_trace=False)
    assert not model.looked[-1]
    torch.testing.assert_close(traced(IDS), model(IDS))
    assert model.looked[-1]


@pytest.mark.usefixtures("default_min_entries")
def test_exported_model_looks_up_rows_after_calls_without_a_search():
    model = convert(Small())
    searching_calls(model, TRIES + 2)
    assert not model.looked[-1]
    exported = torch.export.export(model, (IDS,), strict=False)
    assert "aten.embedding" in exported.graph_module.code
    torch.testing.assert_close(exported.module()(IDS), model(IDS))
    assert not any(searching_calls(model, TRIES))


def test_sequential_passes_one_hots_between_modules():
    class Encode(nn.Module):
        def forward(self, ids):
            return F.one_hot(ids, 6).float()

    model = nn.Sequential(Encode(), nn.Linear(6, 3))
    expected = model(IDS)
    assert convert(model) is model
    assert_same_bits(model(IDS).detach(), expected.detach())
    assert str(convert.report(model)).endswith("linear(6, 3) looked up")
    assert type(nn.Sequential(nn.Linear(6, 3))) is type(convert(nn.Sequential(nn.Linear(6, 3))))
    assert isinstance(model[:1], nn.Sequential)


@pytest.mark.usefixtures("default_min_entries")
def test_report_mentions_the_default_min_entries():
    model = convert(Small(), min_entries=0)
    model(IDS)
    why = "linear(6, 3) looked up; by default, products run densely below 100,000 entries, as here"
    assert str(convert.report(model)).endswith(why)


def test_report_of_a_small_one_hot_without_a_product_names_the_fallback():
    class Normed(Small):
        def forward(self, ids):
            return F.layer_norm(F.one_hot(ids, 6).float(), (6,))

    model = convert(Normed(), min_entries=1000)
    model(IDS)
    why = "falls back to a dense one-hot: layer_norm needs every column"
    assert str(convert.report(model)).endswith(why)


def test_method_that_runs_while_the_module_is_loaded():
    class Loaded(Small):
        def __setstate__(self, state):
            self.other_states = self.doubled(3)
            super().__setstate__(state)

        def doubled(self, number):
            return 2 * number

    globals()["Loaded"] = Loaded
    Loaded.__qualname__ = "Loaded"
    model = convert(Loaded())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.other_states == 6
        assert_same_bits(other(IDS).detach(), model(IDS).detach())


@pytest.mark.parametrize("convert", [convert, lambda model: model])
def test_compiled_step_calls_its_hooks_once(convert):
    model = convert(nn.Embedding(6, 3))
    optimizer = hotrow.optim.Adam(model.parameters())
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        optimizer.zero_grad()
        model(IDS).sum().backward()
        step()
    assert seen == 3 * ["before", "after"]
