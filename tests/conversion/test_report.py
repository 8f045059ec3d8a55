"""The report names each use of a one-hot, what became of it, and the limit that applies to it."""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hotrow
from hotrow import convert
from hotrow.conversion.report import NOTHING_FOUND
from hotrow.conversion.uses import COUNT_SIZE, SmallSize
from hotrow.onehot import size_limits

LIMIT = (
    100  # min_entries: products are looked up from here, sums of rows by id from 10 times as many
)
COLUMNS = 40


class Model(nn.Module):
    """Applies an expression to the one-hot `x` of the ids."""

    def __init__(self, text, rows, columns=COLUMNS):
        super().__init__()
        self.code, self.columns = compile(text, "<model>", "eval"), columns
        self.w = nn.Parameter(torch.randn(columns, 3))
        self.rows, self.scores = torch.randn(rows, 3), torch.rand(rows, columns)

    def forward(self, ids):
        names = {"x": F.one_hot(ids, self.columns).float(), "torch": torch, "F": F}
        return eval(self.code, names | vars(self) | dict(self.named_parameters()))


def finding_of(text, rows=30, columns=COLUMNS):
    model = convert(Model(text, rows, columns), min_entries=LIMIT)
    model(torch.arange(rows) % columns)
    (finding,) = convert.report(model).findings
    return finding


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("x.mean(0)", "mean over the batch"),
        ("x.mean(0, keepdim=True)", "mean over the batch"),
        ("x.sum(0)", "sum over the batch"),
        ("x.sum(0, keepdim=True) / 30", "sum over the batch"),
        ("x.sum(0).log()", "sum over the batch"),
        ("x.sum(0, keepdim=True).softmax(-1)", "sum over the batch"),
        ("x.sum(0).clamp(min=1)[:, None] * w", "sum over the batch"),
        ("x.amax(0)", "amax over the batch"),
        ("x.bool().any(0)", "any over the batch"),
    ],
)
@pytest.mark.parametrize("columns", [20, 80])  # fewer columns than rows, or more
def test_counts_are_a_use_whatever_the_model_does_with_them(text, what, columns):
    finding = finding_of(text, rows=60, columns=columns)
    assert finding.converted
    assert finding.outcome == f"{what} computed from the ids"


def test_counts_of_a_small_one_hot_are_no_reason_to_convert():
    finding = finding_of("x.mean(0)", rows=4)
    assert not finding.converted
    assert finding.outcome == (
        "mean over the batch counted the ids, but torch is as fast with 160 entries (limit: 1,000)"
    )


def test_a_bag_with_a_product_is_looked_up_and_its_fallback_is_named():
    bags = "x.reshape(15, 2, -1).sum(1)"
    assert finding_of(f"{bags} @ w").outcome == "matmul(40, 3) looked up"
    finding = finding_of(f"{bags}.softmax(-1)")
    assert finding.why == "falls back to a dense one-hot: softmax needs every column"
    small = finding_of("x.reshape(2, 2, -1).sum(1) @ w", rows=4)
    assert small.why.startswith("matmul(40, 3) ran densely, because torch is as fast with 80 ")


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("(x * scores).sum(1)", "mul ran densely, because torch is as fast with 960 entries "
         "(limit: 3,001)"),
        ("x - scores + scores", "sub ran densely, because torch is as fast with 960 entries "
         "(limit: 3,001)"),
        ("(x.T @ rows, x @ w)", "matmul(40, 3) looked up; sum of rows by id (matmul) ran densely, "
         "because torch is as fast with 960 entries (limit: 1,002)"),
        ("(x.T @ rows, x @ w, (x * scores).sum())", "matmul(40, 3) looked up; "
         "sum of rows by id (matmul) ran densely, because torch is as fast with 960 entries "
         "(limit: 1,002); mul ran densely, because torch is as fast with 960 entries "
         "(limit: 3,001)"),
        ("x.T @ x", "count of pairs of ids (matmul) ran densely, because torch is as fast with "
         "960 entries (limit: 1,002)"),
        ("F.cross_entropy(scores, x)", "cross_entropy ran densely, because torch is as fast with "
         "960 entries (limit: 3,001)"),
        ("x.nonzero()", "nonzero ran densely, because torch is as fast with 960 entries "
         "(limit: 3,001)"),
    ],
)  # fmt: skip
def test_each_use_that_ran_densely_is_named_with_its_limit(text, outcome):
    assert finding_of(text, rows=24).outcome == outcome


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("x.T @ rows", "sum of rows by id (matmul)"),
        ("torch.einsum('nd,nc->cd', rows, x)", "sum of rows by id (einsum)"),
        ("torch.einsum('nc,nc->n', x, scores)", "entries at the ids (einsum)"),
        ("x.T @ x", "count of pairs of ids (matmul)"),
        ("torch.einsum('nc,nc->n', x, x)", "comparison of ids (einsum)"),
        ("(x - scores + scores) @ w", "straight-through"),
        ("x - scores", "sub"),
    ],
)
def test_uses_have_recognizable_names(text, name):
    finding = finding_of(text, rows=90)
    products = "matmul(40, 3) looked up, " if "@ w" in text else ""
    assert finding.outcome == f"{products}{name} computed from the ids"


def test_a_product_that_was_looked_up_only_in_large_batches():
    model = convert(Model("x @ w", 3), min_entries=LIMIT)
    for rows in (1, 2, 3):
        model(torch.arange(rows))
    (finding,) = convert.report(model).findings
    assert finding.outcome == (
        "matmul(40, 3) looked up; matmul(40, 3) ran densely, because torch is as fast with "
        "80 entries (limit: 101)"
    )


def test_a_one_hot_with_too_few_columns_for_its_limit():
    size = SmallSize(1536, 256, 3_000_000, 8)
    assert size.limit is None
    assert str(size) == "6 columns (limit: 9 columns)"


@pytest.mark.parametrize(
    "check", ["is_too_small_to_look_up", "is_too_small_to_scatter", "is_too_small"]
)
@pytest.mark.parametrize("columns", [40, 60, 100, 1000])
def test_the_limit_is_the_size_from_which_the_ids_are_used(check, columns, monkeypatch):
    found = []

    class Line:
        creation_cost = 1
        min_entries = 100_000

        def record_small_size(self, *size):
            found.append(SmallSize(*size))

    def is_small(rows):
        x = hotrow.one_hot(torch.zeros(rows, dtype=torch.int64), columns, torch.float32)
        x.origins = frozenset([Line()])
        return getattr(size_limits, check)(x)

    assert is_small(1)
    limit = found[0].limit
    if limit is None:
        assert columns == 40
        assert check != "is_too_small"
        assert is_small(200_000)
        return
    rows = -(-limit // columns)
    assert is_small(rows - 1)
    assert not is_small(rows)


def documented_limits():
    page = Path(__file__).parents[2] / "docs/how-to/min-entries.md"
    rows = re.findall(r"^\| (\w.*?) \| (.*) \|$", page.read_text(), re.MULTILINE)
    table = {name: cells.split(" | ") for name, cells in rows}
    return {
        name.split(":")[0]: [
            None if each == "never" else int(each.replace(",", "")) for each in cells
        ]
        for name, cells in table.items()
        if all(re.fullmatch(r"[\d,]+|never", each) for each in cells)
    }


def test_the_documented_limits_are_those_of_the_code():
    default = 100_000
    row_cost, bag_cost = size_limits.ROW_COST, size_limits.BAG_COST
    kinds = {
        "products": (1, row_cost),
        "products of multi-hots": (size_limits.BAG_SIZE, bag_cost),
        "counts": (COUNT_SIZE, 0),
        "sums of rows": (size_limits.SCATTER_SIZE, row_cost),
        "masks, other sums and losses": (size_limits.OTHER_SIZE, size_limits.ENTRY_COST),
    }
    expected = {
        name: [
            SmallSize(columns, 1, size * default, cost * default).limit
            for columns in (6, 40, 60, 100, 1_000)
        ]
        for name, (size, cost) in kinds.items()
    }
    assert documented_limits() == expected


# --- Embeddings, and models without one-hots ----------------------------------------------------


@pytest.fixture
def _default_min_entries(monkeypatch):
    monkeypatch.setattr("hotrow.conversion.sampling.MIN_ENTRIES", 100)


@pytest.mark.usefixtures("_default_min_entries")
def test_reasons_why_a_large_embedding_stays_plain():
    def why(model):
        (finding,) = convert.report(model).findings
        assert not finding.converted
        return finding.why.removeprefix("stays plain PyTorch: ")

    plain = nn.Sequential(nn.Embedding(50, 3))
    assert why(plain) == "hotrow.convert was not called on it; call hotrow.convert(model)"
    assert why(convert(plain, min_entries=1000)) == "it has fewer than min_entries=1,000 entries"
    converted = convert(nn.Sequential(nn.Embedding(50, 3)))
    converted[0].weight = nn.Parameter(torch.zeros(50, 3))
    replaced = "its weight was replaced after hotrow.convert; convert it again"
    assert why(converted) == replaced

    class Later(nn.Module):
        def forward(self, ids):
            return self.table(ids)

    model = convert(Later())
    model.table = nn.Embedding(50, 3)
    assert why(model) == (
        "hotrow.convert was not called on it, or it was added, copied or loaded later; call "
        "hotrow.convert(model)"
    )
    convert(model)
    assert why(nn.Embedding(4, 3)).startswith("a dense step is just as fast")
    assert convert.report(copy.deepcopy(model)).findings[0].outcome == "table"


def test_the_report_says_which_one_hots_it_lists():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 2))

        def forward(self, x):
            return x @ self.table

    model = convert(Plain())
    model(hotrow.one_hot(torch.tensor([1, 2]), 5, torch.float32))
    assert str(convert.report(model)) == NOTHING_FOUND
    assert "hotrow.one_hot needs no conversion" in NOTHING_FOUND


def test_the_report_names_the_operations_and_columns_of_the_code():
    class Networks(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.lstm = nn.Conv1d(300, 4, 3), nn.LSTM(300, 3)
            self.bilinear = nn.Bilinear(300, 2, 5)

        def forward(self, ids, other):
            x = F.one_hot(ids, 300).float()
            total = self.conv(x.mT).sum() + self.lstm(x)[0].sum() + self.bilinear(x, other).sum()
            return total + torch.zeros(4, 21, 32).scatter_(1, ids[:, None] % 21, 1).sum()

    model = convert(Networks(), min_entries=0)
    model(torch.randint(300, (4, 32)), torch.randn(4, 32, 2))
    one_hot, zeros = convert.report(model).findings
    names = ("conv1d(300, 4, 3)", "lstm(300, 3)", "bilinear(300, 2, 5)")
    assert one_hot.how.startswith(", ".join(f"{name} looked up" for name in names))
    assert zeros.what.startswith("zeros.scatter, 21 columns, ")
