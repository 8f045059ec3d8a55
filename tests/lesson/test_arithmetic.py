"""The page's arithmetic, run in a browser and compared with torch and hotrow."""

import contextlib
import io
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from playwright.sync_api import Browser, Page

import hotrow
from hotrow import lesson
from hotrow.inputs import examples
from hotrow.inputs.text import format_number, format_size
from hotrow.lesson.page import SCRIPTS
from tests.support.exhaustive import grid
from tests.support.tolerance import assert_no_worse, assert_rounded, assert_same_bits


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("lesson") / "learn.html"
    path.write_text(lesson.build_page("en"), encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    page.evaluate("showEverything()")
    yield page
    page.close()


def bits(table: torch.Tensor) -> str:
    return table.float().numpy().astype(">f4").tobytes().hex()


def from_bits(text: str, width: int) -> torch.Tensor:
    values = np.frombuffer(bytes.fromhex(text), dtype=">f4").astype(np.float32)
    return torch.from_numpy(values).reshape(-1, width)


def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random table of any size and scale that the page allows, and random ids."""
    random.seed(seed)
    generator = torch.Generator().manual_seed(seed)
    rows, columns, count = random.randint(1, 16), random.randint(1, 8), random.randint(1, 16)
    scale = 10.0 ** random.randint(-6, 6)
    table = torch.randn(rows, columns, generator=generator) * scale
    return table, torch.randint(rows, (count,), generator=generator)


# This function runs in the page. Cases and results store all numbers as bits.
FORWARD = """cases => cases.map(({table, width, ids, upstream, soft}) => {
  const rows = split(fromHex(table), width);
  const encoded = oneHot(ids, rows.length);
  const counts = rows.map((_, k) => ids.filter(id => id === k).length);
  const above = split(fromHex(upstream), width);
  return {
    looked: toHex(lookUp(rows, ids).flat()),
    multiplied: toHex(matmul(encoded, rows).flat()),
    last: toHex(rows[0].map((_, j) => products(encoded[0], rows, j).at(-1).sum)),
    gradient: toHex(scatter(ids, above, rows.length, width).flat()),
    transposed: toHex(matmul(transpose(encoded), above).flat()),
    bag: toHex(addRows(lookUp(rows, ids))),
    counted: toHex(matmul([counts], rows).flat()),
    mixed: toHex(matmul([fromHex(soft)], rows).flat()),
  };
})"""


def test_output_gradient_bag_and_mix_match_torch(page: Page) -> None:
    cases, given = [], []
    for seed in range(300):
        table, ids = drawn(seed)
        upstream = torch.randn(len(ids), table.shape[1])
        soft = torch.softmax(torch.randn(len(table)), 0)
        cases.append((table, ids, upstream, soft))
        given.append(
            {
                "table": bits(table),
                "width": table.shape[1],
                "ids": ids.tolist(),
                "upstream": bits(upstream),
                "soft": bits(soft),
            }
        )
    for (table, ids, upstream, soft), found in zip(
        cases, page.evaluate(FORWARD, given), strict=True
    ):
        got = {name: from_bits(text, table.shape[1]) for name, text in found.items()}
        weight = table.clone().requires_grad_()
        output = F.embedding(ids, weight)
        output.backward(upstream)
        encoded = F.one_hot(ids, len(table)).float()
        assert_same_bits(got["looked"], output)
        assert_same_bits(got["multiplied"], output)
        assert_same_bits(got["multiplied"], encoded @ table)
        assert_same_bits(got["last"], output[:1])
        assert_same_bits(got["gradient"], weight.grad)
        assert_same_bits(got["transposed"], weight.grad)
        for name, shares in (("bag", encoded.sum(0)), ("counted", encoded.sum(0)), ("mixed", soft)):
            terms = len(ids) if name == "bag" else len(table)
            truth = (shares.double() @ table.double()).unsqueeze(0)
            sizes = (shares.double() @ table.double().abs()).unsqueeze(0)
            assert_rounded(got[name], truth, terms + 1, sizes)


# --- the step ---------------------------------------------------------------------------------

TRAIN = """cases => cases.map(({rule, options, table, width, batches, upstream}) => {
  const rows = split(fromHex(table), width);
  const ways = {};
  for (const way of ["dense", "skip", "later"]) {
    const found = train(rule, options, rows, batches, fromHex(upstream), way);
    ways[way] = toHex(found.rows.flat());
    ways[`${way}-updates`] = found.updates;
  }
  return ways;
})"""


def trained(
    rule: str, options: dict[str, float], table: torch.Tensor, batches: Any, upstream: torch.Tensor
) -> torch.Tensor:
    weight = torch.nn.Parameter(table.clone())
    lr = options["lr"]
    optimizer: torch.optim.Optimizer
    if rule == "adam":
        betas = options["beta1"], options["beta2"]
        optimizer = torch.optim.Adam([weight], lr=lr, betas=betas, eps=1e-8, foreach=False)
    else:
        momentum = options["momentum"] if rule == "momentum" else 0.0
        optimizer = torch.optim.SGD([weight], lr=lr, momentum=momentum, foreach=False)
    for ids in batches:
        optimizer.zero_grad()
        output = F.embedding(torch.tensor(ids, dtype=torch.long), weight)
        output.backward(upstream.to(table.dtype).expand(output.shape))
        optimizer.step()
    return weight.detach()


def training_cases(rule: str) -> list[dict[str, Any]]:
    found = []
    for seed in range(60):
        table, _ = drawn(seed)
        random.seed(seed)
        batches = [
            [random.randrange(len(table)) for _ in range(random.randint(0, 6))] for _ in range(8)
        ]
        options = {
            "lr": random.choice([0.1, 0.01, 1.0]),
            "momentum": random.choice([0.0, 0.5, 0.9]),
            "beta1": random.choice([0.9, 0.5]),
            "beta2": random.choice([0.999, 0.9]),
            "eps": 1e-8,
        }
        upstream = torch.randn(table.shape[1]) * 10 ** random.randint(-3, 3)
        found.append(
            {
                "rule": rule,
                "options": options,
                "table": bits(table),
                "width": table.shape[1],
                "batches": batches,
                "upstream": bits(upstream),
            }
        )
    return found


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam"])
def test_step_matches_torch_and_settling_later_gives_the_same_bits(page: Page, rule: str) -> None:
    """SGD must match bit for bit. Adam's square root depends on the math library, so
    Adam's error may be as large as torch's."""
    cases = training_cases(rule)
    skipping_differs = 0
    for case, found in zip(cases, page.evaluate(TRAIN, cases), strict=True):
        width, batches = case["width"], case["batches"]
        table, upstream = from_bits(case["table"], width), from_bits(case["upstream"], width)[0]
        dense = from_bits(found["dense"], width)
        rival = trained(rule, case["options"], table, batches, upstream)
        if rule == "adam":
            truth = trained(rule, case["options"], table.double(), batches, upstream)
            assert_no_worse(dense, rival, truth)
        else:
            assert torch.equal(dense, rival)
        assert_same_bits(from_bits(found["later"], width), dense)
        assert found["dense-updates"] == len(table) * len(batches)
        assert found["skip-updates"] == sum(len(set(ids)) for ids in batches)
        skip = from_bits(found["skip"], width)
        never = sorted(set(range(len(table))) - {id for ids in batches for id in ids})
        assert_same_bits(skip[never], table[never])
        assert_same_bits(dense[never], table[never])
        skipping_differs += not torch.equal(skip, dense)
    assert (skipping_differs == 0) == (rule == "sgd")


# --- costs and number formats -----------------------------------------------------------------


def test_cost_matches_hotrow_to_the_last_digit(page: Page) -> None:
    random.seed(0)
    sizes = [(1, 1, 1), (1_000_000, 4096, 65_536), (50_257, 768, 300)]
    for _ in range(200):
        sizes.append(tuple(int(top ** random.random()) for top in (1_000_000, 4096, 65_536)))
    found = page.evaluate(
        """sizes => sizes.map(each => Object.values(costOf(...each)).map(
             way => Object.values(way).map(String)))""",
        sizes,
    )
    V, D, N = sizes[-1]
    page.evaluate("([V, D, N]) => change({V, D, N}, null)", sizes[-1])
    written = hotrow.cost(V, D, N)
    assert page.inner_text("#cost-verdict") == (
        f"With V = {V:,}, D = {D:,} and N = {N:,}, the one-hot matmul writes "
        f"{format_size(written.matmul.bytes_written)}, "
        f"and the lookup writes {format_size(written.lookup.bytes_written)}."
    )
    for (V, D, N), (matmul, lookup) in zip(sizes, found, strict=True):
        expected = hotrow.cost(V, D, N)
        for way, got in ((expected.matmul, matmul), (expected.lookup, lookup)):
            names = ("multiplications", "by_zero", "additions", "bytes_written")
            assert [int(text) for text in got] == [getattr(way, name) for name in names]


def test_numbers_are_formatted_as_in_hotrow_and_python(page: Page) -> None:
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-3, 99999.99, 1e5, 3.4e38, 1e-45, 5.0]
    special += [0.03125, 0.00390625, 112_500.0, 113_500.0, 1024.03125]
    values = torch.cat(
        [
            torch.tensor(special),
            torch.randn(500) * 10.0 ** torch.randint(-12, 12, (500,)),
        ]
    )
    found = page.evaluate(
        """hex => fromHex(hex).map(x =>
             [number(x), literal(x), typed(x), toHex([readReal(typed(x))])])""",
        bits(values),
    )
    for value, (shown, code, text, again) in zip(values, found, strict=True):
        assert shown == format_number(value.item())
        back = torch.stack([torch.tensor(eval(code)), torch.tensor(float(text))])
        assert_same_bits(back, value.expand(2))
        assert again == bits(value)


def test_bfloat16_matches_torch(page: Page) -> None:
    ties = torch.tensor([257.0, 259.0, -257.0, 1.00390625])
    values = torch.cat([ties, torch.randn(1000) * 10.0 ** torch.randint(-20, 20, (1000,))])
    found = page.evaluate("hex => toHex(fromHex(hex).map(bfloat16))", bits(values))
    assert_same_bits(from_bits(found, 1)[:, 0], values.bfloat16().float())


def test_random_values_are_normal_and_follow_the_seed(page: Page) -> None:
    first, again, other = page.evaluate("[normals(3, 4000), normals(3, 4000), normals(4, 4000)]")
    assert first == again != other
    values = torch.tensor(first)
    assert abs(values.mean()) < 0.1
    assert abs(values.std() - 1) < 0.1


# --- the examples' numbers --------------------------------------------------------------------


def shown(page: Page, region: str) -> list[list[str]]:
    """The texts of a table's cells, or the values of its inputs."""
    return page.evaluate(
        """id => [...document.querySelectorAll(`#${id} tbody tr`)].map(line =>
             [...line.querySelectorAll("td")].map(td =>
               td.querySelector("input")?.value ?? td.textContent))""",
        region,
    )


def texts(values: torch.Tensor) -> list[list[str]]:
    return [[format_number(value) for value in row] for row in values.tolist()]


@pytest.mark.parametrize("name", ["A", "B"])
def test_page_shows_the_exact_numbers_of_examples_a_and_b(page: Page, name: str) -> None:
    example = getattr(examples, name)
    table = example.table()
    page.click(f"#preset-{name}")
    ids = torch.tensor(example.ids)
    assert page.input_value("#ids") == ", ".join(map(str, example.ids))
    assert shown(page, "lookup-table") == texts(table)
    for region in ("lookup-output", "product-looked", "product-multiplied", "linear-output"):
        assert shown(page, region) == texts(table[ids])
    one_hot = F.one_hot(ids, len(table)).tolist()
    assert shown(page, "product-onehot") == [[str(value) for value in row] for row in one_hot]
    assert shown(page, "linear-columns") == texts(table.T)
    count = ids.numel() * table.shape[1]
    assert page.inner_text("#product-verdict") == f"Equal: all {count} values bit for bit."
    page.check("#linear-own")
    torch.manual_seed(123)
    linear = torch.nn.Linear(*table.shape, bias=False)
    assert shown(page, "linear-columns") == texts(linear.weight)
    output = linear(F.one_hot(ids, len(table)).float())
    assert shown(page, "linear-output") == texts(output.detach())
    expected = f"NOT equal: 0 of {count} values are the same, bit for bit."
    assert page.inner_text("#linear-verdict") == expected


def test_page_shows_the_known_numbers_of_examples_a_and_b(page: Page) -> None:
    page.click("#preset-A")
    assert shown(page, "lookup-table")[3] == ["-2.8400", "-0.7849", "-1.4096", "-0.4076", "0.7953"]
    page.check("#linear-own")
    assert shown(page, "linear-columns")[0] == ["-0.2039", "0.0166", "-0.2483", "0.1886"]
    page.click("#preset-B")
    assert shown(page, "lookup-table")[5] == ["-2.8400", "-0.7849", "-1.4096"]


def test_page_shows_the_exact_numbers_and_sizes_of_example_c(page: Page) -> None:
    page.click("#preset-C")
    torch.manual_seed(123)
    tokens, positions = torch.nn.Embedding(50_257, 256), torch.nn.Embedding(4, 256)
    batch = torch.randint(50_257, (8, 4))
    both = tokens(batch) + positions(torch.arange(4))
    assert page.input_value("#ids") == ", ".join(map(str, batch[0].tolist()))
    lines = shown(page, "position-output")
    assert lines[0::3] == texts(tokens(batch)[0, :, :5].detach())
    assert lines[1::3] == texts(positions.weight[:, :5].detach())
    assert lines[2::3] == texts(both[0, :, :5].detach())
    note = page.inner_text("#position-note")
    assert "50,257 × 256" in note
    assert "(8, 4, 256)" in note
    assert "50,256 of 50,257 multiplications are by zero" in page.inner_text("#product-count")


# --- "Show this in Python" --------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 20, 31, 32, 128])
def test_random_numbers_are_those_of_torch(page: Page, count: int) -> None:
    """The last digits may differ, just as torch's own digits differ between processors."""
    for seed in (0, 1, 123, 999_999):
        torch.manual_seed(seed)
        expected = torch.randn(count)
        got = page.evaluate("([seed, count]) => toHex(normals(seed, count))", [seed, count])
        torch.testing.assert_close(from_bits(got, 1).flatten(), expected, rtol=0, atol=2e-6)


def test_seed_123_gives_the_table_of_example_a(page: Page) -> None:
    shown = page.evaluate("normals(123, 20).map(value => number(value))")
    assert shown == [format_number(x) for x in examples.A.table().flatten().tolist()]


def test_training_in_the_page_brings_similar_words_together(page: Page) -> None:
    together = page.evaluate("trainings().map(sameGroup)")
    assert together[0] < 20  # out of 60; before training, matches are due to chance
    assert together[-1] == 60
    table = page.evaluate("trainings().at(-1)")
    distances = torch.cdist(torch.tensor(table), torch.tensor(table)).fill_diagonal_(torch.inf)
    nearest = distances.topk(3, largest=False).indices
    assert (nearest % 4 == torch.arange(20)[:, None] % 4).all()


VIEWS = [
    "",
    "table=B",
    "table=C&ids=0, 50256",
    "table=C&rule=momentum",
    "ids=2, 2, 0, 2&upstream=1,2,3,4,5,0.1,0.2,0.3,0.4,0.5,-1,-2,-3,-4,-5,7,7,7,7,7",
    "linear=own&rule=sgd&case=nan&place=3",
    "table=B&linear=own&rule=momentum&case=signed&pick=1",
    "case=range&batches=2, 3 / / 1 / 0, 0&taken=3&size=-2",
    "case=range&outside=1&p=1",
    "case=low&times=517&p=0.3&softA=1&softB=1",
    "case=order&three=1e8, 3, -1e8&p=0&bag=0, 0, 3",
    "case=order&three=1e8, -1e8, 3&p=0.9",
    "ids=0&upstream=1,2,0,4,5&bag=1&beta1=0&beta2=0",
    "ids=1&upstream=1,2,0,4,5&rule=momentum&lr=1&momentum=0",
    "way=product&single=2&factors=2,0,1,0&layout=columns&vocabulary=1000&learned=100&noun=7",
    "V=1000000&D=4096&N=65536&learned=10&noun=7&alone=yes",
    "edited",
]
LISTED = """id => {
  const result = sections.find(each => each.id === id).result(state);
  return JSON.parse(JSON.stringify({result, case: state.case}, (_, value) =>
    typeof value === "bigint" ? String(value)
    : typeof value === "number" ? toHex([value]) : value ?? null));
}"""


def floats(nested: Any) -> Any:
    """Convert the bits in one of the page's results back to numbers."""
    if isinstance(nested, list):
        return [floats(each) for each in nested]
    return from_bits(nested, 1).item()


@pytest.mark.parametrize(
    "view", grid(VIEWS, lambda view: view in ("", "edited") or "&case" in view or "beta" in view)
)
def test_python_code_runs_and_gives_the_numbers_on_the_page(page: Page, view: str) -> None:
    table, ids = drawn(41)
    edited = f"table={table.shape[0]}x{table.shape[1]}.{bits(table)}&ids="
    view = view.replace("edited", edited + ",".join(map(str, ids.tolist())))
    open_view = "view => { history.replaceState(null, '', `#lang=en&${view}`); readAddress(); }"
    page.evaluate(open_view, view)
    assert page.inner_text("#notice") == ""
    sections = page.evaluate("sections.map(each => each.id)")
    assert sections[0] == "hero"
    assert len(sections) == 17
    for section in sections[1:]:  # the first section only shows results of later sections
        code = page.locator(f"#{section}-code").text_content() or ""
        space: dict[str, Any] = {}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, space)
        found = page.evaluate(LISTED, section)
        PYTHON[section](space, found["result"], found["case"])
        shown = page.locator(f"#{section}-prints").text_content() or ""
        assert_prints(shown, printed.getvalue().rstrip("\n"), section)


NUMBER = re.compile(r"-?\d[\d.]*(?:e[+-]\d+)?")
ROUNDED = {"vector", "mix", "step", "meaning"}  # the last digit depends on the order of addition


def assert_prints(shown: str, printed: str, section: str) -> None:
    """Check that the page shows what the section's code prints."""
    if section not in ROUNDED:
        assert shown == printed, section
        return
    assert NUMBER.sub("#", shown).split() == NUMBER.sub("#", printed).split(), section
    values, expected = (list(map(float, NUMBER.findall(text))) for text in (shown, printed))
    largest = max(map(abs, expected), default=0)
    for value, other in zip(values, expected, strict=True):
        assert math.isclose(value, other, rel_tol=2e-4, abs_tol=2e-4 * largest), section


PRINTED = "cases => cases.map(({bits, width}) => tensorText(split(fromHex(bits), width)))"


def test_tensors_are_printed_as_torch_prints_them(page: Page) -> None:
    tables = [drawn(seed)[0] for seed in range(60)]
    tables += [torch.tensor([[0.0, -0.0]]), torch.tensor([[-3.0, 0.0, torch.nan]])]
    tables += [table.round() for table in tables[:40]]
    for n, table in enumerate(tables[:60:3]):
        special = table.clone()
        special.view(-1)[n % table.numel()] = (torch.inf, -torch.inf, torch.nan, -0.0)[n % 4]
        tables.append(special)
    tables.append(torch.tensor([[0.00005, 0.5], [1e-4, 12345.03125]]))  # ties and widths
    cases = [{"bits": bits(table), "width": table.shape[1]} for table in tables]
    assert page.evaluate(PRINTED, cases) == [str(table) for table in tables]
    rows = [table[0].tolist() for table in tables if table.isfinite().all()]
    one_dimensional = "rows => rows.map(row => tensorText(row))"
    assert page.evaluate(one_dimensional, rows) == [str(torch.tensor(row)) for row in rows]
    integers = [[4, 8, 16], [0], [-3, 100]]
    shown = page.evaluate("rows => rows.map(integersText)", integers)
    assert shown == [str(torch.tensor(row)) for row in integers]
    half = torch.tensor([256.0]).bfloat16()
    assert page.evaluate("tensorText([256], {suffix: 'dtype=torch.bfloat16'})") == str(half)


COMPARED = """pairs => pairs.map(pair => pair.map(fromHex)).map(([a, b]) =>
  [torchEqual(a, b), allClose(a, b), allClose(a, b, 1e-6)])"""


def test_equality_is_that_of_torch(page: Page) -> None:
    values = [0.0, -0.0, 1e-7, 1.0, 1 + 2**-17, 1 + 2**-15, math.nan, math.inf, -math.inf]
    pairs = [torch.tensor([[a], [b]]) for a in values for b in values]
    found = page.evaluate(COMPARED, [[bits(a), bits(b)] for a, b in pairs])
    for (a, b), got in zip(pairs, found, strict=True):
        close = [torch.allclose(a, b), torch.allclose(a, b, atol=1e-6)]
        assert got == [str(torch.equal(a, b)), *map(str, close)], (a, b)


def same(tensor: torch.Tensor, nested: Any) -> None:
    expected = torch.tensor(floats(nested))
    assert_same_bits(tensor.reshape(expected.shape).float(), expected)


def near(tensor: torch.Tensor, nested: Any, terms: int = 20) -> None:
    """Check equality within rounding, because the order of addition is unspecified."""
    expected = torch.tensor(floats(nested))
    sizes = expected.double().abs() + float(expected.abs().max())
    assert_rounded(tensor.reshape(expected.shape), expected.double(), 4 * terms, sizes)


def in_python_differ(space: dict[str, Any], result: Any, case: str) -> None:
    found = result[case]
    if case == "range":
        assert space["known"] == found["known"]
    else:
        same(space["looked"], found["looked"])
        expected = torch.tensor(floats(found["multiplied"]))
        got = space["multiplied"].float().reshape(expected.shape)
        assert torch.equal(got.nan_to_num(9e9), expected.nan_to_num(9e9))


def in_python_cost(space: dict[str, Any], result: Any, _: str) -> None:
    for way in ("matmul", "lookup"):
        for name, text in result[way].items():
            assert getattr(getattr(space["cost"], way), name) == int(text)


def in_python_step(space: dict[str, Any], result: Any, _: str) -> None:
    near(space["dense"], result["dense"]["rows"])
    near(space["later"], result["later"]["rows"])


def in_python_mix(space: dict[str, Any], result: Any, _: str) -> None:
    same(space["soft"], result["soft"])
    near(space["mixed"], result["mixed"])
    near(space["added"], result["added"])


def in_python_waste(space: dict[str, Any], result: Any, _: str) -> None:
    assert [space["V"] * space["D"], space["zeros"]] == [
        from_bits(result[name], 1).item() for name in ("all", "zeros")
    ]


def in_python_idea(space: dict[str, Any], result: Any, _: str) -> None:
    same(space["looked"], result["looked"])
    near(space["Q"], result["scores"])
    near(space["gathered"], result["gathered"])
    near(space["added"], result["added"])
    same(space["counts"], result["counts"])


def in_python_meaning(space: dict[str, Any], result: Any, _: str) -> None:
    expected = torch.tensor(floats(result["table"]))
    torch.testing.assert_close(
        space["embedding"].weight.detach(), expected.reshape(-1, 2), rtol=0, atol=2e-5
    )


PYTHON: dict[str, Any] = {
    "row": lambda space, result, _: same(space["output"].detach(), result["output"]),
    "vector": lambda space, result, _: near(space["output"], result["sum"]),
    "layer": lambda space, result, _: same(space["output"], result["output"]),
    "waste": in_python_waste,
    "meaning": in_python_meaning,
    "lookup": lambda space, result, _: same(space["output"], result["output"]),
    "product": lambda space, result, _: same(space["output"], result["multiplied"]),
    "linear": lambda space, result, _: near(space["output"], result["output"]),
    "gradient": lambda space, result, _: same(space["gradient"], result["gradient"]),
    "step": in_python_step,
    "mix": in_python_mix,
    "position": lambda space, result, _: same(space["output"], result["output"]),
    "idea": in_python_idea,
    "differ": in_python_differ,
    "cost": in_python_cost,
    "model": lambda space, _, __: hotrow.convert.report(space["model"]),
}


def test_page_includes_every_source_file() -> None:
    folder = Path(lesson.__file__).parent
    assert sorted(SCRIPTS) == sorted(path.name for path in (folder / "script").iterdir())
    assert sorted(f"{lang}.json" for lang in lesson.LANGUAGES) == sorted(
        path.name for path in (folder / "words").iterdir()
    )
    assert json.loads((folder / "words" / "en.json").read_text("utf-8"))
