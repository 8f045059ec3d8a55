"""`convert` turns embeddings into tables, and reports which ones it left unchanged and why."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import hotrow
from hotrow import HotrowError, convert
from hotrow.conversion import sampling
from hotrow.conversion.report import NOTHING_FOUND
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table
from tests.support.exhaustive import exhaustive
from tests.support.tolerance import assert_same_bits

DEFAULT = sampling.MIN_ENTRIES  # saved here, because a fixture changes MIN_ENTRIES


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 3)
        self.head = nn.Linear(3, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.table(ids))


def test_module_and_state_dict_keys_stay_the_same():
    model = nn.Sequential(nn.Embedding(9, 3), nn.Sequential(nn.Embedding(3, 2)), nn.Linear(3, 2))
    parameters, keys = list(model.parameters()), list(model.state_dict())
    before = copy.deepcopy(model.state_dict())
    assert convert(model) is model
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == keys
    for key, value in model.state_dict().items():
        assert_same_bits(value, before[key])
    assert isinstance(model[0].weight, Table)
    assert isinstance(model[1][0].weight, Table)
    assert type(model[2].weight) is nn.Parameter


def test_converting_again_changes_nothing():
    model = convert(nn.Embedding(9, 3))
    weight = model.weight
    assert convert(model).weight is weight
    assert str(convert.report(model)) == "(the model)  Embedding(9, 3)  table"


def test_two_embeddings_that_share_a_table_train_like_torch():
    model = nn.ModuleList([hotrow.Embedding(9, 3), nn.Embedding(9, 3)])
    model[1].weight = model[0].weight
    convert(model)
    assert model[0].weight is model[1].weight
    optimizer = hotrow.optim.AdamW(model.parameters(), lr=0.1)
    plain = nn.Embedding.from_pretrained(model[0].weight.detach().clone(), freeze=False)
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    cotangent = torch.randn(2, 3)
    for a, b, step in ((model[0], model[1], optimizer), (plain, plain, other)):
        for _ in range(3):
            step.zero_grad()
            ((a(torch.tensor([1, 4])) + b(torch.tensor([4, 4]))) * cotangent).sum().backward()
            step.step()
    torch.testing.assert_close(model[0].weight.data, plain.weight.data, rtol=1e-6, atol=1e-7)


def tagged(name):
    """Return an embedding whose weight has an attribute that user code has set."""
    layer = nn.Embedding(9, 3)
    setattr(layer.weight, name, True)
    return layer


@pytest.mark.parametrize("name", ["frozen", "rows", "sharded", "is_embedding", "_no_weight_decay"])
@pytest.mark.parametrize("after", [False, True])
def test_usual_tags_of_a_parameter_change_nothing(name, after):
    weights = []
    for library in (torch.optim, hotrow.optim):
        torch.manual_seed(0)
        layer = nn.Embedding(9, 3) if after else tagged(name)
        if library is hotrow.optim:
            convert(layer, min_entries=0)
            assert isinstance(layer.weight, Table)
        if after:
            setattr(layer.weight, name, True)
        optimizer = library.AdamW(layer.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.tensor([1, 4])).sum().backward()
            optimizer.step()
        assert getattr(layer.weight, name) is True
        weights.append(layer.weight.detach().clone())
    torch.testing.assert_close(*weights)
    # Code for FSDP asks for methods of DTensors.
    assert not {"to_local", "full_tensor", "device_mesh"} & {*dir(layer.weight)}


def test_a_large_parameter_whose_attribute_has_a_taken_name_stays_plain(small_tables):
    layer = hotrow.Embedding(9, 3)
    layer.weight.columns = ["a", "b", "c"]
    optimizer = hotrow.optim.AdamW(layer.parameters(), lr=0.1)
    before = layer.weight.detach().clone()
    layer(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert type(layer.weight) is nn.Parameter
    assert layer.weight.columns == ["a", "b", "c"]
    assert not torch.equal(layer.weight, before)
    with pytest.raises(HotrowError, match="has an attribute 'columns', which is also"):
        Table.adopt(layer.weight)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Tied(), "another layer also uses its weight (a tied head), so its gradient is dense"),
        (
            nn.utils.parametrizations.weight_norm(nn.Embedding(9, 3)),
            "its weight is computed from other parameters",
        ),
        (tagged("columns"), "its weight has an attribute columns, whose name tables use"),
        (tagged("lag"), "its weight has an attribute lag, whose name tables use"),
    ],
)
def test_report_says_why_an_embedding_is_not_converted(model, why):
    keys = list(model.state_dict())
    convert(model)
    assert f"stays plain PyTorch: {why}" in str(convert.report(model))
    assert not any(isinstance(parameter, Table) for parameter in model.parameters())
    assert list(model.state_dict()) == keys


def test_convert_and_its_report_do_not_compute_a_weight():
    def calculate(weight):
        raise AssertionError("the weight was computed")

    layer = nn.Embedding(9, 3)
    weight_norm = nn.Module()
    weight_norm.forward = calculate
    nn.utils.parametrize.register_parametrization(layer, "weight", weight_norm, unsafe=True)
    assert "computed from other parameters" in str(convert.report(convert(nn.Sequential(layer))))


def test_model_with_unconverted_embeddings_trains():
    model = convert(Tied())
    optimizer = hotrow.optim.AdamW(model.parameters())
    before = model.table.weight.detach().clone()
    model(torch.tensor([1, 2])).pow(2).sum().backward()
    optimizer.step()
    assert not torch.equal(model.table.weight, before)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_meta_model_converts_and_runs(kind):
    model = convert(kind(9, 3, device="meta"))
    assert model(torch.zeros(2, 4, dtype=torch.int64, device="meta")).device.type == "meta"


def test_report_of_a_model_with_nothing_to_convert():
    found = convert.report(convert(nn.Linear(2, 2)))
    assert str(found) == NOTHING_FOUND


def test_non_module_raises():
    with pytest.raises(HotrowError, match=r"a Tensor, but convert takes a torch\.nn\.Module"):
        convert(torch.zeros(2))


def sum_of_squares(weight):
    return weight.pow(2).sum()


def selected_by_indexing(weight):
    return weight[torch.tensor([1, 2])].sum()


def tied_product(weight):
    return (torch.ones(2, 3) @ weight.T).sum()


@pytest.mark.parametrize(
    ("use", "line", "operation", "advice"),
    [
        (sum_of_squares, 1, "pow", "pass weight_decay=2 * c to SGD or Adam"),
        (selected_by_indexing, 1, "getitem", "use torch.nn.functional.embedding(ids, weight)"),
        (tied_product, 1, "T", ""),
    ],
)
def test_report_says_what_made_a_gradient_dense(use, line, operation, advice):
    model = convert(nn.Sequential(nn.Embedding(9, 3)))
    optimizer = hotrow.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.tensor([1, 2])).sum()
        if step == 2:
            loss = loss + use(model[0].weight)
        loss.backward()
        optimizer.step()
        dense = [each for each in convert.report(model).findings if "dense" in each.why]
        assert len(dense) == (step >= 2)
    location = f"{__file__}:{use.__code__.co_firstlineno + line}"
    expected = f"the gradient was dense in step 3: {operation} at {location} uses the whole table"
    assert expected in str(convert.report(model))
    assert advice in str(convert.report(model))


def test_report_names_the_step_of_a_dense_gradient_of_unknown_origin():
    model = convert(nn.Embedding(9, 3))
    model.weight.grad = torch.ones(9, 3)
    hotrow.optim.SGD(model.parameters(), lr=0.1).step()
    (finding,) = convert.report(model).findings
    assert finding.outcome == (
        "table; torch's dense step ran, because the gradient was dense in step 1"
    )


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_weight_decay_is_the_penalty_that_the_report_says(name):
    ends = []
    for decay, penalty in ((0.0, 0.05), (0.1, 0.0)):
        torch.manual_seed(0)
        layer = nn.Embedding(9, 3).double()
        if decay:
            convert(layer)
        optimizer = getattr(hotrow.optim, name)([layer.weight], lr=0.1, weight_decay=decay)
        for n in range(4):
            optimizer.zero_grad()
            loss = layer(torch.tensor([n, 0])).sin().sum()
            (loss + penalty * layer.weight.pow(2).sum() if penalty else loss).backward()
            optimizer.step()
        ends.append(layer.weight.detach() + 0)
    assert torch.allclose(*ends, rtol=1e-10) == (name != "AdamW")


def test_a_gradient_that_code_assigns_keeps_its_rows():
    layer = convert(nn.Embedding(9, 3))
    optimizer = hotrow.optim.AdamW(layer.parameters())
    loss = layer(torch.tensor([1, 2, 2])).pow(2).sum()
    (layer.weight.grad,) = torch.autograd.grad(loss, layer.weight)
    optimizer.step()
    assert type(layer.weight.grad) is RowGradient
    assert convert.report(layer).findings[0].outcome == "table"


@pytest.fixture
def default_min_entries(monkeypatch):
    monkeypatch.setattr("hotrow.conversion.sampling.MIN_ENTRIES", DEFAULT)


def test_small_embeddings_stay_plain_pytorch_next_to_tables(default_min_entries):
    model = nn.ModuleList([nn.Embedding(5000, 20), nn.EmbeddingBag(4999, 20)])
    rival = copy.deepcopy(model)
    hotrow.convert(model)
    assert type(model[0].weight) is Table
    assert type(model[1].weight) is nn.Parameter
    assert [finding.converted for finding in convert.report(model).findings] == [True, False]
    assert "a dense step is just as fast at this size" in str(convert.report(model))
    ours = hotrow.optim.Adam(model.parameters(), lr=0.1)
    theirs = torch.optim.Adam(rival.parameters(), lr=0.1)
    for t in range(4):
        ids = torch.tensor([[t, 7, 4998], [0, t, t]])
        for layers, optimizer in ((model, ours), (rival, theirs)):
            optimizer.zero_grad()
            sum((layer(ids) ** 2).sum() for layer in layers).backward()
            optimizer.step()
    assert_same_bits(model[1].weight.detach(), rival[1].weight.detach())
    torch.testing.assert_close(model[0].weight.detach(), rival[0].weight.detach())
    assert all(hotrow.convert(layer, min_entries=0) is layer for layer in model)
    assert all(type(layer.weight) is Table for layer in model)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embeddings_of_any_size_become_tables(kind, default_min_entries):
    layer = hotrow.convert(kind(10, 3, sparse=True))
    layer(torch.tensor([[1, 2]])).sum().backward()
    hotrow.optim.Adam(layer.parameters()).step()
    assert type(layer.weight) is Table


def train(layer, count=3):
    optimizer = hotrow.optim.AdamW([layer.weight])
    for n in range(count):
        optimizer.zero_grad()
        layer(torch.tensor([n, 0])).sum().backward()
        optimizer.step()


def test_a_pretrained_tensor_in_scope_does_not_follow_the_training():
    pretrained = torch.randn(9, 3)
    before = pretrained.clone()
    layer = nn.Embedding.from_pretrained(pretrained, freeze=False)
    layer.sparse_buffer = nn.Buffer(torch.eye(3).to_sparse())
    layer.lazy = nn.LazyLinear(3)
    weight = convert(layer).weight
    train(layer)
    assert layer.weight is weight
    assert layer.weight.has_stale_rows  # no alias forced a step to settle rows
    assert torch.equal(pretrained, before)
    (finding,) = convert.report(layer).findings
    assert finding.outcome == (
        "table; its values were copied, because a tensor outside of the model shared its storage"
    )
    assert convert(layer).weight.was_copied


def test_a_tensor_taken_after_conversion_follows_the_training():
    layer = convert(nn.Embedding(9, 3))
    alias = layer.weight.data
    train(layer)
    assert torch.equal(alias, layer.weight)
    assert convert.report(layer).findings[0].outcome == "table"


def _two_weights_with_one_storage():
    model = nn.Sequential(nn.Embedding(9, 3), nn.Linear(3, 9, bias=False))
    model[1].weight.data = model[0].weight.data
    return model


def _view_of_a_larger_buffer():
    layer = nn.Embedding(9, 3)
    layer.weight.data = torch.randn(20, 3)[:9]
    layer.held = [layer.weight.data]
    return nn.Sequential(layer)


def _shared_with_other_processes():
    layer = nn.Embedding(9, 3)
    layer.weight.share_memory_()
    layer.held = [layer.weight.data]
    return nn.Sequential(layer)


def _frozen():
    layer = nn.Embedding.from_pretrained(torch.randn(9, 3))
    layer.held = [layer.weight.data]
    return nn.Sequential(layer)


@pytest.mark.parametrize(
    "make",
    [
        _two_weights_with_one_storage,
        _view_of_a_larger_buffer,
        _shared_with_other_processes,
        _frozen,
    ],
)
def test_storage_that_the_model_shares_on_purpose_stays_shared(make):
    model = make()
    address = model[0].weight.data_ptr()
    convert(model)
    assert isinstance(model[0].weight, Table)
    assert model[0].weight.data_ptr() == address


@exhaustive
def test_the_first_conversion_of_a_process_may_be_in_inference_mode():
    script = """
import torch, hotrow
with torch.inference_mode():
    layer = hotrow.convert(torch.nn.Embedding(50, 4), min_entries=0)
print(type(layer.weight).__name__)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "Table\n"
