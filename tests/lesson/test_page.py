"""Check that the page of `hotrow learn` is self-contained, safe, readable and accessible."""

import itertools
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from playwright.sync_api import Error, Page, expect
from torch.overrides import TorchFunctionMode

from hotrow import lesson
from hotrow.errors import HotrowError
from hotrow.figures.figure import figure
from hotrow.inputs import examples
from hotrow.inputs.text import format_number
from hotrow.inputs.tokenizer import Tokens
from hotrow.lesson.excerpt import MAX_COLUMNS, _find_non_finite_rows
from hotrow.lesson.page import escape_json
from tests.support.browser import OpenPage, RecordedPage
from tests.support.exhaustive import exhaustive, grid
from tests.support.paths import ROOT

FOLDER = Path(lesson.__file__).parent
WORDS = {
    lang: json.loads((FOLDER / "words" / f"{lang}.json").read_text("utf-8"))
    for lang in lesson.LANGUAGES
}
HOSTILE = (
    "</script><img src=/x onerror=alert(1)>",
    '"onmouseover="alert(2)',
    "<!--<script>",
    "\u202e\x1b[31m",
    "`code` **strong** [link](javascript:alert(3)) {row}",
    "word" * 100,
    "词元\u2028",
)

Open = Callable[..., RecordedPage]


@pytest.fixture(scope="module")
def own() -> lesson.Excerpt:
    """A table too large for the page, and a text with hostile tokens."""
    table = torch.randn(30_000, 70, generator=torch.Generator().manual_seed(4))
    ids = [29_999, 7, 0, 500, 7, 1234, 20_000]
    table[500, 1], table[600, 60], table[25_000, 2] = -0.0, torch.nan, torch.inf
    return lesson.user_excerpt(Tokens(ids, HOSTILE), table, title="<b>w</b> in mine.safetensors")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, own: lesson.Excerpt) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("lesson")
    timings = [lesson.Timing(V=50_257, D=768, N=300, matmul_ms=251.5, lookup_ms=0.4)]
    pages = {"plain": lesson.build_page("en"), "own": lesson.build_page("en", own, timings)}
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in pages}


@pytest.fixture
def open_page(open_recorded: OpenPage, files: dict[str, str]) -> Iterator[Open]:
    """Open a page. After the test, check that the page made no requests and logged no messages."""
    opened = []

    def open_page(
        view: str = "lang=en", which: str = "plain", everything: bool = True, **options: Any
    ) -> RecordedPage:
        # Disable smooth scrolling, which would take most of the test's time.
        recorded = open_recorded(
            f"{files[which]}#{view}", **{"reduced_motion": "reduce", **options}
        )
        opened.append(recorded)
        if everything:
            # A fixed speed, because the measured one varies.
            recorded.page.evaluate(
                """speed = {products: 1e9, copies: 1e9};
                   sections.forEach(section => { section.drawn = null });
                   showEverything()"""
            )
        return recorded

    yield open_page
    for recorded in opened:
        recorded.page.wait_for_timeout(50)
        assert {url.partition("#")[0] for url in recorded.requests} <= set(files.values())
        assert recorded.messages == []


# --- the words --------------------------------------------------------------------------------


def test_both_languages_have_the_same_keys_and_each_is_used() -> None:
    english, chinese = WORDS["en"], WORDS["zh-CN"]
    assert list(english) == list(chinese)
    sources = "".join(path.read_text("utf-8") for path in sorted(FOLDER.rglob("*.js")))
    sources += (FOLDER / "skeleton.html").read_text("utf-8")
    quoted = set(re.findall(r'"([a-zA-Z.0-9]+)"', sources))
    assert {key for key in english if key not in quoted} == set()
    said = set(re.findall(r'(?:say|rich|Bad)\(\s*"([^"]+)"', sources))
    assert not re.search(r"(?:say|rich)\(`", sources)  # the search for keys finds only literal ones
    said |= set(re.findall(r'data-(?:word|label)="([^"]+)"', sources))
    assert said - set(english) == set()
    for key in english:
        both = [
            set(re.findall(r"\{(\w+)\}", " ".join(text) if isinstance(text, list) else text))
            for text in (english[key], chinese[key])
        ]
        assert both[1] == both[0] or (isinstance(english[key], list) and both[1] >= both[0]), key


def test_chinese_texts_use_the_glossary_and_chinese_punctuation() -> None:
    text = "\n".join(
        " ".join(each) if isinstance(each, list) else each for each in WORDS["zh-CN"].values()
    )
    for word in (
        "嵌入层",
        "独热编码",
        "查找（查表）",
        "词元（token）",
        "词表",
        "梯度",
        "优化器",
        "词袋",
    ):
        assert word in text
    assert not re.findall("推迟|写出|笔记本|课程|空闲", text)  # one term for each concept
    assert not re.findall(r"[\u4e00-\u9fff][,;:?!]", text)
    assert text.index("词元（token）") == text.index("词元")


# --- opening ----------------------------------------------------------------------------------


def test_page_opens_from_disk_with_a_strict_policy_and_no_requests(open_page: Open) -> None:
    recorded = open_page()
    page = recorded.page
    page.mouse.wheel(0, 30_000)
    page.wait_for_timeout(100)
    assert len(recorded.requests) == 1
    policy = page.get_attribute("meta[http-equiv]", "content") or ""
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert page.locator("script").count() == 2
    assert page.locator("img, iframe, object, embed, form, link[rel=stylesheet]").count() == 0
    with pytest.raises(Error, match="violates the following Content Security Policy"):
        page.add_script_tag(content="document.title = 'taken'")
    assert page.title() == WORDS["en"]["page.title"]
    recorded.messages.clear()  # discard the message about the violation


@pytest.mark.parametrize("lang", grid(lesson.LANGUAGES, "zh-CN".__eq__))
def test_page_starts_in_the_requested_language(
    lang: str, open_recorded: OpenPage, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    path.write_text(lesson.build_page(lang), encoding="utf-8")
    page = open_recorded(path.as_uri()).page
    expect(page.locator("h1")).to_have_text(WORDS[lang]["page.heading"])
    assert page.get_attribute("html", "lang") == lang
    path.write_text(lesson.build_page(None), encoding="utf-8")
    page = open_recorded(path.as_uri(), locale="zh-TW" if lang == "zh-CN" else "fr-FR").page
    expect(page.locator("h1")).to_have_text(WORDS[lang]["page.heading"])


def test_unknown_language_raises() -> None:
    with pytest.raises(HotrowError, match="lang is 'fr', but it must be one of en, zh-CN"):
        lesson.build_page("fr")


# --- every control ----------------------------------------------------------------------------

TYPED = {  # control: (text to type, region that must change)
    "words": ("the cat saw the dog", "#hero-table"),
    "ids": ("0, 0", "#lookup-output"),
    "rows": ("6", "#lookup-table"),
    "columns": ("2", "#lookup-table"),
    "lr": ("0.25", "#step-rows"),
    "beta1": ("0.5", "#step-rows"),
    "beta2": ("0.5", "#step-rows"),
    "size": ("-3", "#step-code"),
    "batches": ("0 / 1", "#step-batches"),
    "bag": ("0", "#bag-table"),
    "seed": ("7", "#position-output"),
    "V": ("10", "#cost-table"),
    "D": ("3", "#cost-chart"),
    "N": ("9", "#cost-verdict"),
    "value-0-0": ("-2.5", "#linear-columns"),
    "upstream-0-0": ("0.125", "#gradient-table"),
}
CHOSEN = {
    "pick": ("1", "#product-list"),
    "column": ("2", "#step-rows"),
    "softA": ("0", "#mix-table"),
    "softB": ("1", "#mix-table"),
    "differ-place": ("3", "#differ-shown"),
    "figure": ("additions", "#cost-chart"),
}
SLID = {
    "taken": ("1", "#step-rows"),
    "p": ("1", "#mix-note"),
    "waste-slider": ("500", "#waste-counts"),
    "meaning-slider": ("50", "#meaning-map"),
    "V-slider": ("100", "#cost-table"),
    "D-slider": ("100", "#cost-table"),
    "N-slider": ("100", "#cost-table"),
}
CHECKED = {
    "way-product": "#hero-table",
    "way-lookup": "#hero-table",
    "layout-columns": "#layer-weight",
    "layout-rows": "#layer-weight",
    "linear-own": "#linear-verdict",
    "rule-momentum": "#step-formula",
    "rule-sgd": "#step-skipped",
    "rule-adam": "#step-formula",
    "linear-copied": "#linear-verdict",
    "case-nan": "#differ-why",
    "case-signed": "#differ-why",
    "case-range": "#differ-shown",
    "case-low": "#differ-shown",
    "case-order": "#differ-shown",
    "case-inf": "#differ-shown",
    "settle": "#step-verdict",
}
ACTIONS = {
    "meaning-play": "#meaning-map",
    "preset-B": "#lookup-table",
    "preset-C": "#lookup-about",
    "preset-A": "#lookup-table",
    "random": "#lookup-table",
    "product-back": "#product-list",
    "product-next": "#product-list",
    "product-play": "#product-list",
    "product-all": "#product-count",
    "meaning-one": "#meaning-map",
    "gradient-repeat": "#gradient-sums",
    "gradient-remove": "#gradient-sums",
}
HIDDEN = {  # control: (choice that shows it, text to type, region that must change)
    "momentum": ("rule-momentum", "0.1", "#step-rows"),
    "outside": ("case-range", "-1", "#differ-shown"),
    "times": ("case-low", "900", "#differ-shown"),
    "three": ("case-order", "1, 2, 3", "#differ-shown"),
}


def content(page: Page, region: str) -> str:
    found = page.evaluate(
        """region => { const e = document.querySelector(region);
           return e.innerHTML + [...e.querySelectorAll("input")].map(i => i.value); }""",
        region,
    )
    return str(found)


def changes(page: Page, region: str, act: Callable[[], Any]) -> None:
    before = content(page, region)
    page.evaluate("announcement = ''")
    act()
    assert content(page, region) != before, region
    assert page.evaluate("announcement"), region  # for screen readers


def type_into(page: Page, id: str, text: str) -> None:
    page.fill(f"#{id}", text)
    page.press(f"#{id}", "Enter")


@exhaustive
def test_every_control_changes_its_region(open_page: Open) -> None:
    page = open_page().page
    known = {*TYPED, *CHOSEN, *SLID, *CHECKED, *HIDDEN}
    found = page.evaluate("[...document.querySelectorAll('input, select')].map(e => e.id)")
    cells = re.compile(r"(value|upstream)-\d+-\d+")
    assert {id for id in found if not cells.fullmatch(id)} == {
        id for id in known if not cells.fullmatch(id)
    }
    buttons = page.evaluate("[...document.querySelectorAll('[data-do]')].map(e => e.dataset.do)")
    assert {*buttons} == {*ACTIONS, "preset-own", "lookup-play"}  # tested separately
    for id, (text, region) in TYPED.items():
        page.click("#preset-A")
        changes(page, region, lambda id=id, text=text: type_into(page, id, text))
    page.click("#preset-A")
    for id, (value, region) in CHOSEN.items():
        changes(page, region, lambda id=id, value=value: page.select_option(f"#{id}", value))
    for id, (value, region) in SLID.items():
        changes(page, region, lambda id=id, value=value: page.fill(f"#{id}", value))
    page.fill("#taken", "4")
    for id, region in CHECKED.items():
        changes(page, region, lambda id=id: page.click(f"#{id}"))
    for id, (chooser, text, region) in HIDDEN.items():
        page.check(f"#{chooser}")
        changes(page, region, lambda id=id, text=text: type_into(page, id, text))
    for name, region in ACTIONS.items():
        page.evaluate("change({shown: 2}, null)")
        button = page.locator(f"[data-do={name}]").first
        changes(page, region, lambda button=button: button.click())


@exhaustive
def test_row_and_chip_buttons_add_and_remove_ids_and_announce_it(open_page: Open) -> None:
    page = open_page().page
    page.click("#row-0")
    assert page.input_value("#ids") == "2, 3, 1, 0"
    expect(page.locator("#live")).to_have_text(
        "Ids 2, 3, 1, 0 selected their rows in this order, so 4 rows were read."
    )
    page.get_by_role("button", name="Remove id 3 at position 1").click()
    assert page.input_value("#ids") == "2, 1, 0"
    expect(page.locator("#ids")).to_be_focused()


def plain(text: str) -> str:
    """Remove the characters that control line breaks."""
    return re.sub("[\u2060\u200b]", "", text).replace("\u00a0", " ")


def stop_time(page: Page) -> None:
    """Stop the page's clock: timers then run only when the test lets time pass."""
    page.clock.install(time=0)
    page.clock.pause_at(1000)


def test_products_play_and_step(open_page: Open) -> None:
    page = open_page(reduced_motion="no-preference").page
    stop_time(page)
    lines = page.locator("#product-list tbody tr")
    page.click("#product-play")
    expect(lines).to_have_count(0)
    page.clock.run_for(1500)
    expect(lines).to_have_count(2)
    page.click("#product-back")  # stops the animation
    expect(lines).to_have_count(1)
    page.clock.run_for(900)
    expect(lines).to_have_count(1)
    page.click("#product-next")
    expect(lines).to_have_count(2)
    page.click("#product-all")
    expect(lines).to_have_count(4)
    expect(page.locator("#product-list tr.zero")).to_have_count(3)
    assert "3 of 4 multiplications are by zero" in page.inner_text("#product-count")


def test_lookup_plays_row_by_row(open_page: Open) -> None:
    page = open_page(reduced_motion="no-preference").page
    stop_time(page)
    lines = page.locator("#lookup-output tbody tr")
    page.get_by_role("button", name="Play the lookup").click()
    for count in (0, 1, 2, 3):
        expect(lines).to_have_count(count)
        page.clock.run_for(700)
    expect(lines).to_have_count(3)


@exhaustive
def test_nothing_plays_with_reduced_motion(open_page: Open) -> None:
    page = open_page().page
    page.get_by_role("button", name="Play the lookup").click()
    page.click("#product-play")
    for region, lines in (("lookup-output", 3), ("product-list", 4)):
        expect(page.locator(f"#{region} tbody tr")).to_have_count(lines, timeout=100)
    assert page.evaluate("document.getAnimations().length") == 0
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"


# --- the claims of the lesson -----------------------------------------------------------------


def test_rows_outside_the_batch_move_with_momentum_and_adam_and_settling_agrees(
    open_page: Open,
) -> None:
    page = open_page().page
    for rule, moved in (("sgd", False), ("momentum", True), ("adam", True)):
        page.check(f"#rule-{rule}")
        expected = "Step 4 changed rows 1, 3," if moved else "Step 4 changed no row outside its"
        assert page.inner_text("#step-moved").startswith(expected)
        last = page.locator("#step-rows tbody td:last-child")
        still = "not used, stayed"
        away = "not used, but moved" if moved else still
        expect(last).to_have_text([still, away, "used", away])
        skipped = "NOT equal: 10 of 20" if moved else "Equal: 20 of 20"
        assert page.inner_text("#step-skipped").startswith(skipped)
        assert page.inner_text("#step-verdict").startswith("Equal: 20 of 20 values")
    work = page.inner_text("#step-work")  # rows 0, 1 and 3 settle at the end
    assert work.startswith("Row updates: dense 16, skip 6, settle later 16.")
    assert "this page replays 10 missed updates" in work
    assert "3 combined updates instead of 10," in work
    page.uncheck("#settle")
    assert page.inner_text("#step-verdict").startswith("NOT equal: 10 of 20 values")
    last = page.locator("#step-rows tbody tr").nth(1).locator("td").nth(4)
    expect(last).to_have_text("1")  # the last step that touched the row
    for option, rule in (("beta1", "adam"), ("momentum", "momentum")):
        page.check(f"#rule-{rule}")
        assert "w keeps changing" in page.inner_text("#step-idle")
        type_into(page, option, "0")
        assert "a row outside the batch does not change" in page.inner_text("#step-idle")
        assert page.inner_text("#step-moved") == "Step 4 changed no row outside its batch."


@exhaustive
def test_inf_in_the_table_spoils_the_product_but_not_the_lookup(open_page: Open) -> None:
    page = open_page().page
    type_into(page, "value-0-2", "inf")
    expected = "NOT equal: 12 of 15 values are the same, bit for bit."
    assert page.inner_text("#product-verdict") == expected
    assert "nan" in page.inner_text("#product-multiplied")
    assert "nan" not in page.inner_text("#product-looked")
    assert page.inner_text("#mix-verdict").startswith("NOT equal:")
    assert page.inner_text("#mix-note") == WORDS["en"]["mix.spoiled"]


@exhaustive
def test_product_loses_the_sign_of_zero_in_the_chosen_row_and_column(open_page: Open) -> None:
    page = open_page("lang=en&case=signed&pick=1&column=2").page
    assert page.inner_text("#differ-verdict") == (
        "Equal as numbers: 14 of 15 values are the same, bit for bit; "
        "the others are zeros with the opposite sign."
    )
    looked, multiplied = (
        page.locator(f"#differ-{name} tbody tr").nth(1).locator("td").nth(2)
        for name in ("first", "second")
    )
    expect(looked).to_have_text("-0.0000")
    expect(multiplied).to_have_text("0.0000")


def test_repeated_id_adds_up_in_order(open_page: Open) -> None:
    page = open_page().page
    assert page.locator("#gradient-sums li").first.inner_text() == "row 2 “fox”, column 0: 1.0000"
    page.click("[data-do=gradient-repeat]")
    assert page.locator("#gradient-sums li").first.inner_text() == (
        "row 2 “fox”, column 0: 1.0000 + 16.0000 = 17.0000"
    )
    uses = page.locator("#gradient-table tbody td:last-child")
    expect(uses).to_have_text(["never: all zero", "1 time", "2 times", "1 time"])
    page.click("#gradient-remove")
    expect(uses).to_have_text(["never: all zero", "1 time", "1 time", "1 time"])
    page.click("#gradient-remove")
    page.click("#gradient-remove")
    expect(page.locator("#gradient-remove")).to_be_disabled()
    type_into(page, "ids", "2, " * 15)
    page.click("[data-do=gradient-repeat]")
    expect(uses.nth(2)).to_have_text("16 times")
    expect(page.locator("[data-do=gradient-repeat]")).to_be_disabled()
    assert page.inner_text("#gradient-full") == "This page can draw at most 16 ids."


@exhaustive
def test_probability_one_on_one_id_is_a_lookup(open_page: Open) -> None:
    page = open_page("lang=en&p=1").page
    assert page.inner_text("#mix-note").endswith("the mix is row 2, as in a lookup.")
    page.fill("#p", "0.3")
    assert page.inner_text("#mix-note").startswith("The mix lies between two rows.")
    page.select_option("#softA", "3")  # the second id is also 3
    assert page.inner_text("#mix-note").endswith("the mix is row 3, as in a lookup.")
    expect(page.locator("#live")).to_have_text(page.inner_text("#mix-note"))


@exhaustive
def test_screen_reader_hears_each_change_once(open_page: Open) -> None:
    page = open_page("lang=en&shown=1").page
    page.evaluate(
        """() => { window.heard = [];
             new MutationObserver(seen => heard.push(...seen))
               .observe(find("live"), {childList: true}); }"""
    )
    # Click twice in one call, so that the second click follows quickly on any machine.
    page.evaluate("() => { find('product-next').click(); find('product-next').click(); }")
    expect(page.locator("#live")).to_have_text("row 2 “fox” 1 × 0.6957 = 0.6957 0.6957")
    page.focus("#taken")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#live")).to_have_text(page.inner_text("#step-moved"))
    page.evaluate(
        """() => { const slider = find("V-slider");
             for (let n = 0; n < 20; n++) {
               slider.stepDown();
               slider.dispatchEvent(new Event("input", {bubbles: true}));
             } }"""
    )
    expect(page.locator("#live")).to_have_text(page.inner_text("#cost-verdict"))
    assert page.evaluate("heard.length") == 3


@exhaustive
def test_cost_sliders_reach_both_ends_from_the_keyboard(open_page: Open) -> None:
    page = open_page("lang=en&V=300&D=300&N=300").page
    # Do what the browser does when you press an arrow key. A thousand real key presses would take
    # many seconds.
    press = """([id, by]) => { const slider = find(id);
      for (let n = 0; n < 1000; n++) {
        slider.stepUp(by);
        slider.dispatchEvent(new Event("input", {bubbles: true}));
      } }"""
    page.evaluate(
        "draw = () => sections.find(each => each.id === 'cost').draw(state, costOf(1, 1, 1))"
    )
    for name, top in (("V", 1_000_000), ("D", 4096), ("N", 65_536)):
        for by, end in ((-1, 1), (1, top)):
            page.evaluate(press, [f"{name}-slider", by])
            assert page.evaluate(f"state.{name}") == end, (name, by)
    page.focus("#D-slider")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("state.D") == 4062


# --- the address ------------------------------------------------------------------------------


def view_of(page: Page) -> list[str]:
    """Everything that the page shows, and the value of every control."""
    found: list[str] = page.evaluate(
        """() => [document.documentElement.lang, document.querySelector("main").innerText,
             ...[...document.querySelectorAll("input:not([id$=-slider]), select")].map(
               e => `${e.value} ${e.checked}`)]"""
    )
    return found


@exhaustive
@pytest.mark.parametrize("lang", grid(lesson.LANGUAGES, "zh-CN".__eq__))
def test_address_restores_the_view_and_the_language(open_page: Open, lang: str) -> None:
    page = open_page().page
    page.click(f"[data-lang={lang}]")
    for id, (text, _) in TYPED.items():
        if id not in ("rows", "columns"):
            type_into(page, id, text)
    type_into(page, "rows", "7")
    type_into(page, "value-3-1", "-0.0")
    type_into(page, "value-4-1", "nan")
    for id, (value, _) in CHOSEN.items():
        page.select_option(f"#{id}", value)
    for id, (value, _) in SLID.items():
        page.fill(f"#{id}", value)
    for id in ("linear-own", "rule-momentum", "settle"):
        if page.locator(f"#{id}").is_enabled():
            page.click(f"#{id}")
    for id, (chooser, text, _) in HIDDEN.items():
        page.check(f"#{chooser}")
        type_into(page, id, text)
    page.wait_for_timeout(300)
    view, address = view_of(page), page.url.partition("#")[2]
    assert view[0] == lang
    again = open_page(address).page
    assert view_of(again) == view
    assert again.url.partition("#")[2] == address


@exhaustive
@pytest.mark.parametrize(
    ("lang", "text", "tokens", "ids"),
    grid(
        [
            (
                "en",
                "My cat’s toy, my  cat’s!",
                ["My", "cat’s", "toy", "my", "<unk>"],
                [0, 1, 2, 3, 1],
            ),
            (
                "zh-CN",
                "猫喜欢鱼，狗喜欢猫。",
                ["猫", "喜欢", "鱼", "狗", "<unk>"],
                [0, 1, 2, 3, 1, 0],
            ),
            ("en", "<b>x</b> <b>", ["b", "x", "<unk>"], [0, 1, 0, 0]),
            ("en", "word", ["word", "<unk>"], [0]),
        ],
        lambda lang, text, tokens, ids: lang == "zh-CN",
    ),
)
def test_own_words_become_a_vocabulary_with_rows_of_torch(
    open_page: Open, lang: str, text: str, tokens: list[str], ids: list[int]
) -> None:
    page = open_page(f"lang={lang}&way=product").page
    assert page.input_value("#words") == {"en": "fox jumps over", "zh-CN": "猫 吃 鱼"}[lang]
    type_into(page, "words", text)
    assert page.evaluate("state.table.tokens") == tokens
    assert page.evaluate("state.ids") == ids
    assert page.input_value("#words") == " ".join(tokens[id] for id in ids)
    torch.manual_seed(123)
    rows = torch.nn.Embedding(len(tokens), 5).weight.detach()
    torch.testing.assert_close(torch.tensor(page.evaluate("state.table.rows")), rows)
    assert page.locator("#hero-words bdi").all_text_contents() == [tokens[id] for id in ids]
    heads = page.locator("#hero-table tbody tr:not(.total) th").all_text_contents()
    assert [head.rpartition("“")[2].rstrip("”") for head in heads] == tokens
    assert page.is_checked("#way-product")
    for label in page.locator("#lookup-table tbody th, #gradient-upstream tbody th").all():
        assert any(f"“{token}”" in label.inner_text() for token in tokens)
    # No id of the sentence selects the last row, so the sections about unused rows make sense.
    assert page.input_value("#differ-place") == str(len(tokens) - 1)
    assert page.inner_text("#differ-verdict").startswith(WORDS[lang]["different"])
    unused = page.locator("#gradient-table tbody tr").nth(len(tokens) - 1)
    assert WORDS[lang]["gradient.never"] in unused.inner_text()
    page.click("#hero-words button >> nth=-1")
    page.wait_for_timeout(300)
    view, address = view_of(page), page.url.partition("#")[2]
    again = open_page(address).page
    assert view_of(again) == view
    page.click("[data-do=random]")  # new numbers for the same words
    assert page.evaluate("state.table.tokens") == tokens
    assert page.evaluate("state.ids") == ids
    type_into(page, "ids", "1, 0")
    assert page.input_value("#words") == f"{tokens[1]} {tokens[0]}"
    page.click("#preset-B")
    assert page.input_value("#words").split() == page.evaluate(
        "placesOf(state.table, state.ids).map(k => tokensOf(state.table)[k])"
    )
    page.click("#preset-C")  # these ids don't have words
    assert page.input_value("#words") == ""


def test_switching_the_language_keeps_the_view_and_rejected_input(open_page: Open) -> None:
    page = open_page("lang=en&table=B&ids=5, 5&rule=sgd").page
    type_into(page, "lr", "quick")
    page.click("[data-lang=zh-CN]")
    assert page.get_attribute("html", "lang") == "zh-CN"
    assert page.input_value("#ids") == "5, 5"
    assert page.input_value("#lr") == "quick"
    expect(page.locator("#lr")).to_have_accessible_description(
        "“quick”不是数字。请写成 0.5、-2 或 1e-3 的形式；嵌入矩阵中也可以填 inf 和 nan。"
    )
    assert page.is_checked("#rule-sgd")
    page.click("[data-lang=en]")
    assert page.locator("h1").inner_text() == WORDS["en"]["page.heading"]


BAD_VIEWS = [
    "ids=99",
    "ids=<img src=x onerror=alert(1)>",
    "table=" + "9" * 30_000,
    "table=own",
    "table=4x5.00",
    "table=4x5.zzzzzzzz",
    "table=99x9.3f800000",
    "table=0x0.",
    "table=__proto__",
    "table=toString",
    "table=1x1.3f800000~",
    "table=1x1.3f800000~a b",
    "table=2x1.3f8000003f800000~a a",
    "table=2x1.3f8000003f800000~a  b",
    "table=1x1.3f800000~\u202ea",
    "table=1x1.3f800000~" + "a" * 17,
    "table=A." + "3f800000" * 20 + "~the over fox jumps",
    "__proto__=1",
    "constructor=1",
    "lang=__proto__",
    "lang=fr",
    "lr=1e999",
    "lr=NaN",
    "case=constructor",
    "rule=toString",
    "taken=9",
    "V=1e9",
    "ids=1&ids=2",
    "javascript:alert(1)",
    "%E0%A4%A",
    "upstream=1",
    "batches=" + "1/" * 99,
]


@exhaustive
@pytest.mark.parametrize("lang", lesson.LANGUAGES)
def test_hostile_address_shows_a_message_and_the_starting_view(open_page: Open, lang: str) -> None:
    page = open_page(f"lang={lang}").page
    start = view_of(page)
    opening = WORDS[lang]["bad.notice"].partition("{")[0]
    for bad in BAD_VIEWS:
        # Call the event handler directly, to save time. The last case uses a real event.
        page.evaluate("bad => { history.replaceState(null, '', `#${bad}`); readAddress(); }", bad)
        assert opening in page.inner_text("#notice"), bad
        assert view_of(page) == start, bad
        page.evaluate("change({ids: [1]}, null)")
    page.evaluate("location.hash = 'ids=3,3'")
    expect(page.locator("#notice")).to_have_text("")
    expect(page.locator("#ids")).to_have_value("3, 3")
    page.evaluate("bad => { location.hash = bad }", BAD_VIEWS[1])
    expect(page.locator("#notice")).to_contain_text(opening)
    assert page.evaluate("({}).polluted") is None


# --- bad input --------------------------------------------------------------------------------

REFUSED = [
    ("ids", "9", "bad.id"),
    ("ids", "-1", "bad.id"),
    ("ids", "1.5", "bad.whole"),
    ("ids", "<b>1</b>", "bad.whole"),
    ("ids", "", "bad.empty"),
    ("ids", "1 " * 17, "bad.many"),
    ("ids", "9" * 15, "bad.id"),
    ("words", "!?", "bad.words"),
    ("words", "a " * 16, "bad.crowd"),
    ("words", "a" * 17, "bad.word"),
    ("rows", "0", "bad.range"),
    ("rows", "2", "bad.shrink"),
    ("columns", "many", "bad.whole"),
    ("lr", "fast", "bad.number"),
    ("lr", "-1", "bad.between"),
    ("lr", "inf", "bad.between"),
    ("lr", "nan", "bad.between"),
    ("lr", "1e400", "bad.huge"),
    ("beta2", "1", "bad.between"),
    ("batches", "1/2/7", "bad.id"),
    ("batches", "1/" * 9, "bad.steps"),
    ("bag", "4", "bad.id"),
    ("V", "0", "bad.range"),
    ("V", "10000000", "bad.range"),
    ("N", "1e3", "bad.whole"),
    ("value-1-1", "one", "bad.number"),
    ("value-1-1", "1e39", "bad.huge"),
    ("value-1-1", "'\"><script>alert(1)</script>", "bad.number"),
    ("upstream-0-0", "", "bad.number"),
]


@exhaustive
@pytest.mark.parametrize("lang", grid(lesson.LANGUAGES, "zh-CN".__eq__))
def test_invalid_input_shows_a_message_at_the_field_and_keeps_the_view(
    open_page: Open, lang: str
) -> None:
    page = open_page(f"lang={lang}").page
    figures = "[...document.querySelectorAll('main td, main .verdict')].map(e => e.textContent)"
    # In Chinese, test each message only once.
    once = {key: (id, text, key) for id, text, key in REFUSED}
    for id, text, key in REFUSED if lang == "en" else once.values():
        before = page.evaluate(figures)
        type_into(page, id, text)
        field = page.locator(f"#{id}")
        parts = re.split(r"\{\w+\}", WORDS[lang][key])
        expect(field).to_have_accessible_description(re.compile(".*".join(map(re.escape, parts))))
        assert field.get_attribute("aria-invalid") == "true"
        error = page.locator(f"#{field.get_attribute('aria-describedby')}")
        assert error.is_visible()
        assert error.locator("*").count() == 0
        assert page.evaluate(figures) == before, (id, text)
        page.click("#preset-A")
        assert page.locator("[aria-invalid]").count() == 0


@exhaustive
def test_full_width_digits_and_commas_are_accepted(open_page: Open) -> None:
    page = open_page("lang=zh-CN").page
    type_into(page, "ids", "２，３、１")
    assert page.input_value("#ids") == "2, 3, 1"
    type_into(page, "value-0-0", "−１．５")
    assert page.input_value("#value-0-0") == "-1.5000"


# --- the user's tokens and table --------------------------------------------------------------


def test_user_tokens_are_shown_as_plain_text(open_page: Open, own: lesson.Excerpt) -> None:
    page = open_page(which="own").page
    assert page.locator("img, iframe, b").count() == 0
    assert page.locator("script").count() == 2
    names = page.evaluate("[...document.querySelectorAll('*')].flatMap(e => e.getAttributeNames())")
    assert not [name for name in names if name.startswith("on")]
    chips = page.locator("#lookup-ids bdi").all_inner_texts()
    assert len(chips) == 7
    assert chips[0] == "29999 “</script><img src=/…”"
    assert chips[3] == r"500 “\u202e\x1b[31m”"
    assert "javascript" not in page.evaluate("[...document.links].map(e => e.href).join()")
    assert "<b>w</b> in mine.safetensors" in page.inner_text("#lookup-about")


@exhaustive
def test_excerpt_of_a_user_table_says_so_and_counts_the_whole_table(
    open_page: Open, own: lesson.Excerpt
) -> None:
    page = open_page(which="own").page
    stored = len(own.labels)
    about = page.inner_text("#lookup-about")
    assert f"The whole table is 30,000 × 70. This page stores {stored} of its rows" in about
    counted = page.inner_text("#product-count")
    assert "29,999 of 30,000 multiplications are by zero" in counted
    assert f"{30_000 - stored:,} of them belong to rows that are not on this page." in counted
    assert f"{7 * 29_999 * 70:,} of {7 * 30_000 * 70:,} multiplications" in counted
    assert page.input_value("#V") == "30000"
    assert own.non_finite_count == 2
    assert "2 rows (the first is row 600) contain an inf or nan" in about
    for section in ("product", "linear", "position", "mix", "differ"):
        verdict = page.inner_text(f"#{section}-verdict")
        assert verdict.startswith("NOT equal over the whole table: 2 rows"), section
        assert verdict.endswith("Only the rows and columns on this page are compared.")
    for section in ("gradient", "step"):  # these sections don't multiply the table's values
        assert page.inner_text(f"#{section}-verdict").startswith("Equal")
    assert f"{stored} of the {stored} products on this page are shown." in counted
    assert "on this page" in page.inner_text("#product-list caption")
    type_into(page, "ids", "3")
    expect(page.locator("#ids")).to_have_accessible_description(re.compile("stores only the rows"))
    expect(page.locator("#cost-measured td").nth(2)).to_have_text("252 ms")
    page.select_option("#figure", "milliseconds")
    assert page.locator("#cost-chart circle").count() == 1
    assert page.locator("#cost-chart path").count() == 0


def test_rows_outside_the_excerpt_are_searched_for_inf_and_nan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hotrow.lesson.excerpt._CHUNK", 40)  # forces many chunks
    table = torch.zeros(1000, 7)
    tokens = Tokens([3], ("a",))
    assert lesson.user_excerpt(tokens, table).non_finite_count == 0
    table[3, 4] = torch.nan  # in the excerpt
    assert lesson.user_excerpt(tokens, table).non_finite_count == 0
    table[3, 5] = torch.inf
    found = lesson.user_excerpt(tokens, table)
    assert (found.non_finite_count, found.first_non_finite) == (1, 3)
    table[999, 0] = table[500, 6] = torch.nan
    assert (lesson.user_excerpt(tokens, table).non_finite_count, found.first_non_finite) == (3, 3)


class LargestIsFinite(TorchFunctionMode):
    """Record the largest number of values that `isfinite` gets at a time."""

    largest = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.isfinite:
            self.largest = max(self.largest, args[0].numel())
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("shape", [(30, 7), (3, 95), (1, 1000), (100, 1)])
def test_wide_and_tall_tables_are_searched_in_blocks_of_limited_size(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    monkeypatch.setattr("hotrow.lesson.excerpt._CHUNK", 40)
    table = torch.zeros(shape)
    last = shape[0] - 1
    with LargestIsFinite() as mode:
        assert _find_non_finite_rows(table, [0]) == (0, None)
        table[last, -1] = torch.nan
        expected = (0, None) if shape[1] <= MAX_COLUMNS and last == 0 else (1, last)
        assert _find_non_finite_rows(table, [0]) == expected
        table[last, :] = torch.inf  # several blocks of the same row
        assert _find_non_finite_rows(table, [0]) == expected
    assert 0 < mode.largest <= 40


def test_values_beyond_float32_raise_and_rounding_is_reported() -> None:
    table = torch.ones(9, 7, dtype=torch.float64)
    assert lesson.user_excerpt(None, table).rounded
    assert not lesson.user_excerpt(None, table.float()).rounded
    table[8, 1] = table[1, 6] = 1e300  # outside the excerpt
    assert lesson.user_excerpt(None, table).non_finite_count == 0
    table[1, 2] = -1e300
    with pytest.raises(HotrowError, match=r"column 2 of the table is -1e\+300, which overflows"):
        lesson.user_excerpt(None, table)


@exhaustive
def test_random_rows_are_not_presented_as_the_users_table(
    open_recorded: OpenPage, tmp_path: Path
) -> None:
    own = lesson.user_excerpt(Tokens([3], ("a",)), row_count=17)
    timing = lesson.Timing(V=30_000_000, D=8, N=8, matmul_ms=2.0, lookup_ms=1.0)
    (tmp_path / "page.html").write_text(lesson.build_page("en", own, [timing]), encoding="utf-8")
    page = open_recorded((tmp_path / "page.html").as_uri()).page
    page.evaluate("showEverything()")
    about = page.inner_text("#lookup-about")
    assert "Your vocabulary has 17 ids, but you passed no table" in about
    assert "The whole table" not in about
    page.select_option("#figure", "milliseconds")  # the chart includes a point beyond a million
    assert float(page.get_attribute("#cost-chart circle", "cx") or "inf") < 640
    assert page.locator("#cost-chart text").all_text_contents()[7:9] == ["1e7", "1e8"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"V": 0}, "V is 0, but it must be an int"),
        ({"D": -3}, "D is -3, but it must be an int"),
        ({"N": 2.0}, "N is 2.0, but it must be an int"),
        ({"V": 2**60}, "but it must be an int in 1..2"),
        ({"matmul_ms": 0.0}, "matmul_ms is 0.0, but it must be in 1e-09..1e"),
        ({"lookup_ms": float("nan")}, "lookup_ms is nan, but it must be in"),
        ({"lookup_ms": "1"}, "lookup_ms is '1', but it must be in"),
    ],
)
def test_invalid_timing_raises(change: dict[str, Any], message: str) -> None:
    with pytest.raises(HotrowError, match=re.escape(message)):
        lesson.Timing(**({"V": 1, "D": 1, "N": 1, "matmul_ms": 1.0, "lookup_ms": 1.0} | change))


def test_excerpt_contains_the_selected_rows_and_neighbours_bit_for_bit() -> None:
    table = torch.randn(1000, 3).to(torch.bfloat16)
    tokens = Tokens(list(range(0, 1000, 50)), tuple("abcdefghijklmnopqrst"))
    found = lesson.user_excerpt(tokens, table)
    assert (found.V, found.D, found.omitted_count, len(found.ids)) == (1000, 3, 8, 12)
    assert set(found.ids) < set(found.labels)
    assert {1, 51} <= set(found.labels)
    assert torch.equal(found.rows, table[list(found.labels)].float())
    alone = lesson.user_excerpt(None, torch.zeros(2, 9))
    assert (alone.ids, alone.labels, alone.rows.shape) == ((0, 1), (0, 1), (2, 5))


@pytest.mark.parametrize("table", [torch.zeros(0, 3), torch.zeros(3, 0)])
def test_empty_table_raises(table: torch.Tensor) -> None:
    with pytest.raises(HotrowError, match="the page needs both rows and columns"):
        lesson.user_excerpt(None, table)


def test_data_cannot_end_its_script_element() -> None:
    found = escape_json({"token": HOSTILE})
    assert not re.search(r"[<>&\u2028]", found)
    assert json.loads(found) == {"token": list(HOSTILE)}


# --- accessibility and layout -----------------------------------------------------------------


@exhaustive
def test_keyboard_reaches_every_control(open_page: Open) -> None:
    page = open_page().page
    reached = set()
    for _ in range(260):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.id || document.activeElement.dataset?.do")
        )
    wanted = page.evaluate(
        """() => [...document.querySelectorAll("input, select, button, summary, [tabindex='0']")]
             .filter(e => e.checkVisibility() && !e.disabled && e.id && e.type !== "radio")
             .map(e => e.id)"""
    )
    assert set(wanted) - reached == set()
    page.focus("#row-0")
    page.keyboard.press("Enter")
    assert page.input_value("#ids") == "2, 3, 1, 0"
    page.focus("#rule-adam")
    page.keyboard.press("ArrowLeft")
    assert page.is_checked("#rule-momentum")
    page.focus("#taken")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#taken-now") == "3 of 4"
    page.focus("#lookup .python summary")
    page.keyboard.press("Enter")
    assert page.is_visible("#lookup-code")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


@exhaustive
@pytest.mark.parametrize(
    ("lang", "which"),
    list(itertools.product(lesson.LANGUAGES, ("plain", "own"))),
)
def test_only_wide_regions_scroll_at_360_pixels(open_page: Open, lang: str, which: str) -> None:
    page = open_page(f"lang={lang}", which, width=360).page
    page.locator("details").evaluate_all("all => all.forEach(each => { each.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    too_wide = page.evaluate(
        """() => [...document.querySelectorAll('body *')]
            .filter(e => !e.closest('.wide') && e.getBoundingClientRect().right > 360)
            .map(e => e.outerHTML.slice(0, 80))"""
    )
    assert too_wide == []
    scrolling = page.evaluate(
        """() => [...document.querySelectorAll('.wide')]
            .filter(e => e.scrollWidth > e.clientWidth)
            .map(e => [getComputedStyle(e).overflowX, e.tabIndex, e.ariaLabel !== ''])"""
    )
    assert scrolling
    assert all(each == ["auto", 0, True] for each in scrolling)


@exhaustive
@pytest.mark.parametrize("lang", lesson.LANGUAGES)
def test_no_table_is_cut_off_on_the_left(open_page: Open, lang: str) -> None:
    page = open_page(f"lang={lang}", "own").page
    for width in (360, 800, 1088, 1216, 1280, 1920):
        page.set_viewport_size({"width": width, "height": 800})
        cut = page.evaluate(
            """() => [...document.querySelectorAll("main table")].filter(table => {
                 const left = each => each.getBoundingClientRect().left;
                 const regions = [];
                 for (let e = table; (e = e.parentElement.closest(".wide")); ) regions.push(e);
                 return table.checkVisibility() &&
                   regions.some(each => left(table) < left(each) - 0.5 || left(each) < 0);
               }).map(table => table.caption.textContent)"""
        )
        assert cut == [], width


@pytest.fixture(scope="module")
def axe() -> str:
    return resources.files("axe_core_python").joinpath("axe.min.js").read_text("utf-8")


@exhaustive
@pytest.mark.parametrize(
    ("lang", "scheme", "which"), [("en", "dark", "own"), ("zh-CN", "light", "own")]
)
def test_axe_finds_no_violations(
    open_page: Open, axe: str, lang: str, scheme: str, which: str
) -> None:
    page = open_page(f"lang={lang}", which, scheme=scheme).page
    type_into(page, "lr", "quick")
    page.locator("details").evaluate_all("all => all.forEach(each => { each.open = true })")
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert [(each["id"], each["nodes"][0]["html"]) for each in found["violations"]] == []
    assert len(found["passes"]) > 20
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


@exhaustive
def test_tables_have_captions_and_headers_and_inputs_have_names(open_page: Open) -> None:
    page = open_page("lang=en&case=range").page
    tables = page.locator("main table")
    assert tables.count() > 15
    for table in tables.all():
        expect(table).to_have_accessible_name(re.compile(r"\w"))
        assert table.locator("tbody th[scope=row]").count() == table.locator("tbody tr").count()
    for control in page.locator("input:visible, select:visible").all():
        expect(control).to_have_accessible_name(re.compile(r"\w|β"))


def test_equality_is_stated_in_words_as_well_as_color(open_page: Open) -> None:
    page = open_page("lang=en&linear=own").page
    assert page.inner_text("#linear-verdict").startswith("NOT equal:")
    expect(page.locator("#step-rows strong.different").first).to_contain_text("≠")
    expect(page.locator("#preset-A")).to_have_attribute("aria-pressed", "true")


@exhaustive
def test_page_and_figure_use_the_same_colors_for_both_methods(open_page: Open) -> None:
    page = open_page().page
    drawn = ET.fromstring(figure("cost", D=768, N=300).svg)
    for line, mark in (("curve", "path.matmul"), ("dashed", "path.lookup")):
        css = next(
            path.get("class", "").split()
            for path in drawn.iter("{http://www.w3.org/2000/svg}path")
            if f"hr-{line}" in path.get("class", "")
        )
        [name] = (each.removeprefix("hr-") for each in css if each != f"hr-{line}")
        page.evaluate("([name]) => { document.body.style.color = `var(--${name})` }", [name])
        colours = [
            page.locator(f"#cost-chart {mark}").evaluate("e => getComputedStyle(e).stroke"),
            page.evaluate("getComputedStyle(document.body).color"),
        ]
        assert colours[0] == colours[1], mark


# --- the core path ----------------------------------------------------------------------------

CORE = ("row", "vector", "layer", "waste", "meaning")


def test_hero_shows_both_ways_and_counts_the_zeros(open_page: Open) -> None:
    page = open_page(everything=False).page

    def counts() -> list[str]:
        return page.locator("#hero-counts dd").all_inner_texts()

    rows = page.locator("#hero-output tbody tr")
    looked_up = rows.all_inner_texts()
    assert len(looked_up) == 3
    assert counts() == ["0", "0", "5"]
    assert page.inner_text("#hero-for").startswith("For “fox”, an embedding layer copies one row")
    assert page.inner_text("#hero-verdict").startswith("Only row 2 is read")
    assert not page.is_visible("#hero-table tr.total")
    page.check("#way-product")
    assert page.is_visible("#hero-table tr.total")
    assert counts() == ["20", "15", "20"]
    assert rows.all_inner_texts() == looked_up
    assert page.inner_text("#hero-verdict") == (
        "Equal to the looked-up row: all 5 values bit for bit "
        "(every binary digit, not just 4 decimals)."
    )
    assert page.inner_text("#hero-for").startswith("For “fox”, a linear layer multiplies each row")
    factors = page.locator("#hero-table tr:not(.total) td:first-of-type")
    assert factors.all_inner_texts() == ["0 ×", "0 ×", "1 ×", "0 ×"]
    page.click("#hero-words button:last-child")
    assert factors.all_inner_texts() == ["0 ×", "1 ×", "0 ×", "0 ×"]


@exhaustive
def test_a_word_travels_to_the_output_unless_motion_is_reduced(open_page: Open) -> None:
    for motion, most in (("no-preference", 1), ("reduce", 0)):
        page = open_page(everything=False, reduced_motion=motion).page
        # The observer sees each change, even if the animation ends before the test looks again.
        page.evaluate(
            """() => {
                 window.most = {".flying": 0, "tr.coming": 0};
                 new MutationObserver(() => {
                   for (const each in most)
                     most[each] = Math.max(most[each], document.querySelectorAll(each).length);
                 }).observe(document, {attributes: true, childList: true, subtree: true});
               }"""
        )
        page.click("#hero-words button:last-child")
        expect(page.locator("tr.coming")).to_have_count(0)
        expect(page.locator(".flying")).to_have_count(0)
        assert page.evaluate("most") == {".flying": most, "tr.coming": most}


@exhaustive
def test_a_second_word_ends_the_first_animation(open_page: Open) -> None:
    page = open_page(everything=False, reduced_motion="no-preference").page
    page.check("#way-product")
    for place in (0, 1, 2):
        page.locator("#hero-words button").nth(place).click()
    expect(page.locator("tr.coming, .flying, tr.dim")).to_have_count(0)
    assert page.locator("#hero-counts dd").all_inner_texts() == ["20", "15", "20"]


@exhaustive
@pytest.mark.parametrize("lang", lesson.LANGUAGES)
def test_each_section_asks_first_and_shows_the_rest_after_the_answer(
    open_page: Open, lang: str
) -> None:
    page = open_page(f"lang={lang}", everything=False).page
    page.evaluate("document.querySelectorAll('.fold').forEach(fold => { fold.open = true })")
    asked = page.evaluate("questions.map(({id, right, answers}) => [id, right, answers.length])")
    sections = page.evaluate("sections.map(each => each.id)")
    assert [id for id, _, _ in asked] == sections[1:]
    words = WORDS[lang]
    for id, right, count in asked:
        after = page.locator(f"#{id} .after")
        assert not after.is_visible()
        for wrong in set(range(count)) - {right}:
            page.click(f"#{id}-answer-{wrong}")
            assert after.is_visible()
            # The reason says why this answer is wrong, then why the other one is right.
            reason = page.inner_text(f"#{id}-reason")
            parts = page.evaluate(
                """([id, wrong]) => {
                     const question = questions.find(each => each.id === id);
                     const values = question.values?.(question.asked) ?? {};
                     return [say(question.not[wrong], values), say(question.why, values)];
                   }""",
                [id, wrong],
            )
            assert all(len(part) > 8 for part in parts)
            assert reason == (" " if lang == "en" else "").join([words["ask.wrong"], *parts])
        page.click(f"#{id}-answer-{right}")
        reason = page.inner_text(f"#{id}-reason")
        assert reason == (" " if lang == "en" else "").join([words["ask.right"], parts[1]])
        assert page.get_attribute(f"#{id}-answer-{right}", "aria-pressed") == "true"
        assert page.get_attribute(f"#{id}-answer-{wrong}", "aria-pressed") == "false"


def test_a_question_can_be_skipped_and_a_shared_view_shows_everything(open_page: Open) -> None:
    page = open_page(everything=False).page
    page.click("#row .skip")
    assert page.is_visible("#row-table")
    right = page.locator("#row .question .right")
    assert right.all_inner_texts() == ["the 4th from the top"]
    assert page.inner_text("#row-reason") == "Row 0 comes first, so row 3 is the 4th from the top."
    assert not page.is_visible("#vector-table")
    assert page.evaluate("document.activeElement.id") == "row-answer-0"
    page = open_page("lang=en&single=2", everything=False).page
    assert page.is_visible("#vector-table")


@exhaustive
def test_answers_are_right_for_every_table(open_page: Open) -> None:
    page = open_page("lang=en&table=B", everything=False).page
    assert page.is_visible("#layer-sum")  # before the answer
    assert "id 3" in page.inner_text("#row-question")
    page.click("#row-answer-1")
    assert page.inner_text("#row-verdict").startswith("Id 3 is row 3, the 4th from the top")
    page.click("#vector-answer-1")
    doubled = [format_number(2 * x) for x in examples.B.table()[1].tolist()]
    assert page.locator("#vector-table tr.total td").all_inner_texts()[1:] == doubled
    page.click("#layer-answer-1")
    assert page.locator("#layer-weight tbody tr").count() == 1 + 3
    assert "all 3 values bit for bit" in page.inner_text("#layer-verdict")
    column = [format_number(x) for x in examples.B.table()[:, 0].tolist()]
    factors = [int(k == examples.B.ids[0]) for k in range(len(column))]
    terms = [
        f"{factor} × ({value})" if "-" in value else f"{factor} × {value}"
        for factor, value in zip(factors, column, strict=True)
    ]
    answer = column[examples.B.ids[0]]
    expected = f"output 0 = {' + '.join(terms)} = {answer}"
    assert plain(page.inner_text("#layer-sum")) == expected
    page.check("[name=layout][value=rows]")
    row = ", ".join(format_number(x) for x in examples.B.table()[examples.B.ids[0]].tolist())
    note = plain(page.inner_text("#layer-note"))
    assert note.endswith(f"The lookup returns this row and multiplies nothing: [{row}].")


@exhaustive
def test_vector_is_one_hot_only_with_a_single_one(open_page: Open) -> None:
    page = open_page().page
    verdict = page.locator("#vector-verdict")
    expect(verdict).to_have_text("One-hot: the sum is row 2. 15 of 20 products are zero.")
    page.click("#factor-0")
    expect(verdict).to_have_text("[1, 0, 1, 0] is not one-hot: 2 rows are added.")
    page.click("#factor-2")
    page.click("#factor-2")
    page.click("#factor-0")
    expect(verdict).to_have_text(
        "[2, 0, 0, 0] is not one-hot: the sum is row 0, doubled. Click the 2 until it is 1."
    )
    page.click("#factor-0")
    expect(verdict).to_contain_text("every row is multiplied by 0, so the sum is zero")
    page.click("#factor-0")
    expect(verdict).to_contain_text("One-hot")
    assert page.evaluate("document.activeElement.id") == "factor-0"


@exhaustive
def test_the_zeros_are_drawn_to_scale_and_only_the_product_pays_for_them(open_page: Open) -> None:
    page = open_page().page

    def squares() -> float:
        area: float = page.evaluate(
            """[...document.querySelectorAll("#waste-zeros i")].reduce((sum, e) => {
                 const box = e.getBoundingClientRect(); return sum + box.width * box.height }, 0)"""
        )
        cell = page.evaluate("parseInt(find('waste-zeros').style.getPropertyValue('--cell'))")
        assert cell == {"4": 24}.get(page.inner_text("#waste-now")[4:], cell)
        return area / cell**2

    lookups = []
    for place, size in (("0", 4), ("500", 448), ("1000", 50_257)):
        page.fill("#waste-slider", place)
        assert page.inner_text("#waste-now") == f"V = {size:,}"
        assert squares() == pytest.approx(size)
        cells = page.locator("#waste-counts tbody td").all_inner_texts()
        assert cells[0] == f"{size * 768:,}"
        assert cells[2] == f"{(size - 1) * 768:,}"
        lookups.append(cells[1::2])
    assert lookups[0] == lookups[1] == lookups[2]


@exhaustive
def test_training_moves_the_words_and_a_click_names_the_nearest(open_page: Open) -> None:
    page = open_page(reduced_motion="no-preference").page
    before = page.locator("#noun-0 circle").get_attribute("cx")
    stop_time(page)
    page.click("[data-do=meaning-play]")
    page.clock.run_for(6000)
    expect(page.locator("#meaning-now")).to_contain_text("step 100, loss ")
    assert page.locator("#noun-0 circle").get_attribute("cx") != before
    verdict = page.inner_text("#meaning-verdict")
    assert "10 of 60 belonged to the word’s own group" in verdict
    assert verdict.endswith("before training, and 60 of 60 at step 100.")
    page.focus("#noun-7")
    page.keyboard.press("Enter")
    near = page.inner_text("#meaning-near")
    assert near.startswith("Nearest to “bus” at step 100: ")
    rows = re.findall(r"\[(.*?)\]", plain(near))
    snapshots = page.evaluate("[snapshots[100][7], snapshots[0][7]]")
    assert rows == [", ".join(map(format_number, row)) for row in snapshots]
    assert page.evaluate("document.activeElement.id") == "noun-7"


@exhaustive
@pytest.mark.parametrize("lang", lesson.LANGUAGES)
def test_one_sentence_moves_one_row(open_page: Open, lang: str) -> None:
    page = open_page(f"lang={lang}&learned=10&noun=7").page
    places = """() => NOUNS.map((_, k) => document.querySelector(`#noun-${k} circle`))
        .map(e => e.getAttribute("cx") + " " + e.getAttribute("cy"))"""
    before = page.evaluate(places)
    assert page.inner_text("#meaning-alone") == ""
    sentence = page.evaluate("sentenceText(firstSentence(7))")
    assert sentence in page.inner_text("#meaning-one")
    page.click("#meaning-one")
    after = page.evaluate(places)
    assert [k for k in range(20) if before[k] != after[k]] == [7]
    values = "{n: 20, moved: 1, still: 19, learned: 10, sentence, word: nounText(7)}"
    line = page.evaluate(f"sentence => say('meaning.alone', {values})", sentence)
    assert page.inner_text("#meaning-alone") == line
    # The Python code on the page takes the same step.
    space: dict[str, Any] = {}
    exec(page.text_content("#meaning-code") or "", space)
    shown = page.evaluate("sections.find(each => each.id === 'meaning').result(state).table")
    torch.testing.assert_close(
        space["embedding"].weight.detach(), torch.tensor(shown), rtol=0, atol=1e-5
    )
    changed = (space["embedding"].weight != space["before"]).any(1)
    assert changed.nonzero().flatten().tolist() == [7]
    outside = page.evaluate(
        """() => [0, 1, 3, 10, 30, 100].flatMap((learned) => NOUNS.map((_, noun) => {
             change({learned, noun}, null);
             change({alone: "yes"}, null);
             const [circle] = document.querySelectorAll(`#noun-${noun} circle`);
             const [x, y] = ["cx", "cy"].map(name => Number(circle.getAttribute(name)));
             return x > 7 && x < 633 && y > 7 && y < 383 ? null : [learned, noun, x, y];
           })).filter(Boolean)"""
    )
    assert outside == []
    page.fill("#meaning-slider", "11")  # moving the slider hides the message
    assert page.inner_text("#meaning-alone") == ""


@exhaustive
def test_the_verdict_counts_neighbors_of_the_same_group(open_page: Open) -> None:
    page = open_page("lang=en&learned=100").page
    groups = torch.tensor(page.evaluate("NOUNS.map((_, k) => groupOf(k))"))
    for learned in (0, 100):
        distances = torch.cdist(*2 * [torch.tensor(page.evaluate(f"snapshots[{learned}]"))])
        near = distances.fill_diagonal_(torch.inf).topk(3, largest=False).indices
        same = int((groups[near] == groups[:, None]).sum())
        page.evaluate(f"change({{learned: {learned}}}, null)")
        verdict = page.inner_text("#meaning-verdict")
        if learned:
            assert verdict.endswith(f" before training, and {same} of 60 at step {learned}.")
        else:
            assert f"neighbors, {same} of 60 belong " in verdict
            assert verdict.endswith(" before training.")
    assert "own group (animals, food, people or vehicles)" in page.inner_text("#meaning-verdict")


@exhaustive
def test_shares_are_rounded_but_never_to_all(open_page: Open) -> None:
    page = open_page().page
    shares = page.evaluate("[1, 4, 45, 1000, 50257, 1000000].map(share)")
    assert shares == ["0%", "75%", "97.78%", "99.9%", "99.998%", "99.9999%"]


@exhaustive
def test_slider_moves_after_a_press_beside_it(open_page: Open) -> None:
    page = open_page().page
    slider = page.locator("#waste-slider")
    slider.scroll_into_view_if_needed()
    box = slider.bounding_box()
    assert box is not None
    end, middle = box["x"] + box["width"], box["y"] + box["height"] / 2
    page.mouse.move(end + 4, middle)
    page.mouse.down()
    page.mouse.move(end - 200, middle - 20, steps=5)
    page.mouse.up()
    assert page.evaluate("getSelection().toString()") == ""
    # A slider inside selected text must also move: pressing it must not drag the text.
    page.evaluate("getSelection().selectAllChildren(document.querySelector('#waste'))")
    page.mouse.move(box["x"] + 8, middle)
    page.mouse.down()
    page.mouse.move(end, middle, steps=8)
    page.mouse.up()
    assert page.inner_text("#waste-now") == "V = 50,257"


@exhaustive
@pytest.mark.parametrize("lang", lesson.LANGUAGES)
def test_tables_use_the_free_width_before_they_scroll(open_page: Open, lang: str) -> None:
    page = open_page(f"lang={lang}", width=1280).page
    scrolling = page.evaluate(
        """() => [...document.querySelectorAll(".fold .wide:has(> table)")]
            .filter(e => !e.parentElement.matches(".pair") && e.scrollWidth > e.clientWidth)
            .filter(e => e.clientWidth < e.closest("section").clientWidth + 150)
            .map(e => e.id)"""
    )
    assert scrolling == []
    assert page.evaluate("document.documentElement.scrollWidth") == 1280


def test_losses_of_the_small_model_are_those_of_torch(open_page: Open) -> None:
    page = open_page("lang=en&learned=100").page
    code = page.text_content("#meaning-code") or ""
    code = code.replace("loss.backward()", "losses.append(loss.item()); loss.backward()")
    space: dict[str, Any] = {"losses": []}
    exec(code, space)
    found = torch.tensor(page.evaluate("losses"))
    torch.testing.assert_close(found[:100], torch.tensor(space["losses"]), rtol=0, atol=1e-5)
    pairs = list(zip(space["nouns"].tolist(), space["verbs"].tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    # The best guess gives the same probability to each verb that occurs with the noun.
    share = torch.zeros(20, 16).index_put(tuple(torch.tensor(pairs).T), torch.tensor(1.0))
    best = (share / share.sum(1, keepdim=True)).log()[space["nouns"], space["verbs"]]
    lowest = -best.mean()
    assert lowest < found[100]
    shown = (
        f"started at {found[0]:.2f} and is now {found[100]:.2f}. It can’t fall below {lowest:.2f}:"
    )
    assert shown in page.inner_text("#meaning-loss")
    with torch.no_grad():
        scores = space["embedding"].weight[0] @ space["output"].T
    guess = dict(zip(WORDS["en"]["meaning.verbs"].split(), scores.softmax(0).tolist(), strict=True))
    said = re.findall(r"(\w+)( ✓)? (\d+)%", plain(page.inner_text("#meaning-guess")))
    assert [verb for verb, _, _ in said] == sorted(guess, key=guess.__getitem__)[:-5:-1]
    follows = {verb for noun, verb in pairs if noun == 0}
    for verb, mark, percent in said:
        assert abs(int(percent) - 100 * guess[verb]) < 0.6
        assert bool(mark) == (WORDS["en"]["meaning.verbs"].split().index(verb) in follows)


def boxes(page: Page, selector: str) -> list[list[float]]:
    """The position and size of each element, in tenths of a pixel."""
    found: list[list[float]] = page.evaluate(
        """selector => [...document.querySelectorAll(selector)].map(e => {
             const box = e.getBoundingClientRect();
             const sizes = [box.left, box.top + scrollY, box.width, box.height];
             return sizes.map(x => Math.round(10 * x));
           })""",
        selector,
    )
    return found


@exhaustive
@pytest.mark.parametrize(
    ("lang", "width"),
    list(itertools.product(lesson.LANGUAGES, (1280, 360))),
)
def test_picking_a_word_or_a_way_moves_nothing(open_page: Open, lang: str, width: int) -> None:
    page = open_page(f"lang={lang}", everything=False, width=width).page
    parts = "#hero button, #hero label, #hero td, #hero th, #hero dt, #hero-verdict, #row"
    before = boxes(page, parts)
    assert len(before) > 50
    for way in ("product", "lookup"):
        page.check(f"#way-{way}")
        for button in page.locator("#hero-words button").all():
            button.click()
            assert boxes(page, parts) == before, way
    page.click("#row .skip")
    parts = "#row button, #row td, #row th"
    before = boxes(page, parts)
    for button in page.locator("#row-ids button").all():
        button.click()
        assert boxes(page, parts) == before


@exhaustive
@pytest.mark.parametrize("width", [1280, 360])
def test_answers_and_factors_move_nothing(open_page: Open, width: int) -> None:
    page = open_page(everything=False, width=width).page
    for id in CORE:
        parts = f"#{id} .question button:not(.skip)"
        before = boxes(page, parts)
        for n in range(len(before)):
            page.click(f"#{id}-answer-{n}")
            assert boxes(page, parts) == before, id
    parts = "#vector-table button, #vector-table td, #vector-table th"
    before = boxes(page, parts)
    for k in (0, 0, 3, 1):
        page.click(f"#factor-{k}")
        assert boxes(page, parts) == before


@exhaustive
def test_an_answered_question_does_not_change(open_page: Open) -> None:
    page = open_page(everything=False).page
    question = page.locator("#row .question")
    page.click("#row-answer-0")
    before = question.inner_text()
    assert "id 3" in before
    page.click("#row-ids button:first-child")
    assert page.inner_text("#row-verdict").startswith("Id 0 is row 0")
    assert question.inner_text() == before
    page.click("#row-answer-1")
    assert page.inner_text("#row-question").endswith("Which row does id 3 pick?")
    assert page.inner_text("#row-reason").startswith("Right. Row 0 comes first, so row 3 is")
    page.click("[data-lang=zh-CN]")
    assert page.inner_text("#row-question").endswith("ID 3 对应的是哪一行？")
    page.evaluate("unfold('lookup')")
    page.evaluate("change({ids: [1]}, null)")  # an unanswered question changes with the ids
    assert "查找 ID 1，" in page.inner_text("#lookup-question")
    page.click("#lookup .skip")
    page.evaluate("change({ids: [0]}, null)")
    assert "查找 ID 1，" in page.inner_text("#lookup-question")


@exhaustive
def test_sum_and_verdict_appear_when_every_row_was_visited(open_page: Open) -> None:
    page = open_page(everything=False, reduced_motion="no-preference").page
    stop_time(page)
    results = page.locator("#hero-verdict, #hero-table tr.total")
    page.check("#way-product")
    for passed, counted in ((0, "5"), (350, "10"), (350, "15"), (400, "20")):
        page.clock.run_for(passed)
        assert page.locator("#hero-counts dd").first.inner_text() == counted
        assert [each.is_visible() for each in results.all()] == [False, False]
    page.clock.run_for(700)
    assert [each.is_visible() for each in results.all()] == [True, True]


@exhaustive
def test_rows_have_the_same_colors_in_all_core_figures(open_page: Open) -> None:
    page = open_page().page
    page.check("#layout-rows")
    colors = """selector => [...document.querySelectorAll(selector)].slice(0, 4).map(e =>
        getComputedStyle(e).color)"""
    wanted = page.evaluate(colors, "#row-ids button")
    assert len(set(wanted)) == 4
    for figure_id in ("hero-table", "row-table", "vector-table", "layer-weight"):
        assert page.evaluate(colors, f"#{figure_id} tbody th") == wanted, figure_id
    page.check("#layout-columns")
    assert page.evaluate(colors, "#layer-weight thead th span") == wanted


def test_the_product_shows_the_numbers_that_it_multiplies(open_page: Open) -> None:
    page = open_page().page
    page.click("#factor-1")
    page.click("#factor-1")
    cell = page.locator("#vector-table tbody tr").nth(1).locator("td").nth(1)
    value = examples.A.table()[1, 0].item()
    shown = [f"2 × {format_number(value)}", format_number(2 * value)]
    assert plain(cell.inner_text()).split("\n") == shown
    # The note below the table explains the last digit of one of the cells.
    note = page.locator("#vector-table + .note").inner_text()
    decimals = "with six decimals, the table’s number is"
    assert plain(note).endswith(f"So {shown[0]} is shown as {shown[1]}: {decimals} {value:.6f}.")
    page.set_viewport_size({"width": 360, "height": 800})
    assert plain(cell.inner_text()).split() == [*shown[0].split(), shown[1]]
    assert page.locator("#vector-table").evaluate("e => e.scrollWidth <= e.clientWidth")
    for factor in (0, 1, 3):
        page.click(f"#factor-{factor}")
    cells = page.locator("#vector-table tbody tr:not(.total) td.value").all_inner_texts()
    factors = [1, 0, 1, 1]
    for text, value in zip(cells, examples.A.table().flatten().tolist(), strict=True):
        row = cells.index(text) // 5
        product = format_number(factors[row] * value or 0.0)
        assert plain(text).split() == [str(factors[row]), "×", format_number(value), product]


LABELS = """steps => steps.flatMap(step => {
  change({learned: step}, null);
  const rects = selector =>
    [...document.querySelectorAll(selector)].map(e => e.getBoundingClientRect());
  const [dots, labels] = [rects("#meaning-map circle"), rects("#meaning-map text.label")];
  const frame = find("meaning-map").getBoundingClientRect();
  const share = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
  return labels.flatMap((label, k) => [
    ...dots.map((dot, n) => share(label, dot) && `step ${step}: label ${k} covers dot ${n}`),
    ...labels.map((other, n) => n < k && share(label, other) && `step ${step}: labels ${k}, ${n}`),
    (label.left < frame.left || label.right > frame.right) && `step ${step}: label ${k} is cut off`,
  ]).filter(Boolean);
})"""


@exhaustive
@pytest.mark.parametrize(
    ("lang", "width"),
    list(itertools.product(lesson.LANGUAGES, (1280, 360))),
)
def test_labels_of_the_map_cover_no_dot(open_page: Open, lang: str, width: int) -> None:
    page = open_page(f"lang={lang}", width=width).page
    assert page.locator("#meaning-map text.label").count() == 20
    assert page.evaluate(LABELS, [0, 1, 2, 3, 5, 8, 12, 16, 20, 25, 30, 40, 50, 75, 100]) == []
    # Labels are checked above. Nothing else can cover a dot: halos are drawn before all dots.
    drawn = page.evaluate(
        "[...document.querySelectorAll('#meaning-map svg > *')].map(e => e.classList[0] ?? '')"
    )
    assert drawn.index("noun") > max(n for n, name in enumerate(drawn) if name == "halo")


@exhaustive
def test_training_button_stays_and_says_that_it_runs(open_page: Open) -> None:
    page = open_page(reduced_motion="no-preference").page
    stop_time(page)
    button = page.locator("#meaning-train")
    page.evaluate("document.documentElement.style.scrollBehavior = 'auto'; scrollTo(0, 0)")
    page.evaluate("find('meaning-train').scrollIntoView(false)")  # the map is out of view
    before = boxes(page, "#meaning-train, #meaning-slider")
    texts = [button.inner_text()]
    button.click()
    map_box = page.evaluate("find('meaning-map').getBoundingClientRect().toJSON()")
    assert map_box["bottom"] <= page.evaluate("innerHeight")
    for passed in (0, 1000, 1000, 4000):
        page.clock.run_for(passed)
        texts.append(button.inner_text())
        assert boxes(page, "#meaning-train, #meaning-slider") == before
    assert texts == ["Train", "Training…", "Training…", "Training…", "Train again"]


@exhaustive
def test_focus_ring_of_a_word_is_around_its_dot(open_page: Open) -> None:
    page = open_page().page
    ring = """() => { const e = document.activeElement;
        return [e.id, getComputedStyle(e).outlineStyle,
                getComputedStyle(e.firstChild).stroke !== "none"] }"""
    page.click("#noun-7 circle")
    assert page.evaluate(ring) == ["noun-7", "none", False]
    page.keyboard.press("Tab")
    assert page.evaluate(ring) == ["noun-8", "none", True]
    page.keyboard.press("Enter")
    assert page.evaluate(ring) == ["noun-8", "none", True]
    page.click("#meaning-map text.label >> nth=3")  # clicking a label also chooses its word
    assert page.evaluate(ring) == ["noun-3", "none", False]


@exhaustive
@pytest.mark.parametrize("lang", lesson.LANGUAGES)
def test_sentences_in_the_text_are_training_sentences(open_page: Open, lang: str) -> None:
    page = open_page(f"lang={lang}").page
    sentences = page.evaluate(
        "SENTENCES.map(([noun, verb]) => say('meaning.sentence', "
        "{noun: nounText(noun), verb: verbText(verb)}))"
    )
    quoted = re.findall("“([^”_]+)”", WORDS[lang]["meaning.text"])
    assert len(quoted) >= 2
    assert set(quoted) < set(sentences)


@exhaustive
def test_an_edit_ends_the_training(open_page: Open) -> None:
    page = open_page(reduced_motion="no-preference").page
    stop_time(page)
    page.click("[data-do=meaning-play]")
    page.clock.run_for(300)
    page.fill("#meaning-slider", "20")
    page.clock.run_for(5000)
    expect(page.locator("#meaning-now")).to_contain_text("step 20, loss ")
    expect(page.locator("#meaning-train")).to_have_text("Train")


@exhaustive
def test_an_animation_leaves_a_text_that_is_being_typed(open_page: Open) -> None:
    page = open_page(reduced_motion="no-preference").page
    stop_time(page)
    page.click("[data-do=lookup-play]")
    for field in ("#ids", "#value-0-0"):
        page.focus(field)
        page.keyboard.press("Control+a")
        page.keyboard.type("3")
        page.clock.run_for(700)
        assert page.input_value(field) == "3"
    page.click("#row-title")
    page.clock.run_for(5000)
    assert page.input_value("#ids") == "3"
    assert page.input_value("#value-0-0") == "3.0000"
    assert page.locator("#lookup-output tbody tr").count() == 1


@exhaustive
def test_the_selected_word_stays_selected_if_an_earlier_id_is_removed(open_page: Open) -> None:
    page = open_page("lang=en&ids=2,3,1&pick=1").page
    assert page.input_value("#pick") == "1"
    page.click("#lookup-ids li:nth-child(1) button")
    assert page.input_value("#ids") == "3, 1"
    assert page.input_value("#pick") == "0"


@exhaustive
def test_near_words_look_near(open_page: Open) -> None:
    page = open_page("lang=en&learned=100").page
    shown = page.evaluate(
        """() => NOUNS.map((_, k) => ["cx", "cy"].map(name =>
            Number(document.querySelector(`#noun-${k} circle`).getAttribute(name))))"""
    )
    drawn = torch.tensor(shown)
    rows = torch.tensor(page.evaluate("snapshots[100]"))
    ratio = torch.cdist(drawn, drawn) / torch.cdist(rows, rows).fill_diagonal_(1)
    far = torch.cdist(rows, rows) > 0.2  # points are rounded to a tenth of a pixel
    assert ratio[far].max() < 1.02 * ratio[far].min()


@exhaustive
def test_screen_reader_hears_the_answer_and_the_chosen_word(open_page: Open) -> None:
    page = open_page(everything=False, reduced_motion="reduce").page
    page.click("#vector-answer-0")
    expect(page.locator("#live")).to_have_text(page.inner_text("#vector-reason"))
    page.click("#hero-words button:last-child")
    expect(page.locator("#live")).to_have_text(page.inner_text("#hero-verdict"))


@exhaustive
def test_language_can_change_while_a_row_travels(open_page: Open) -> None:
    recorded = open_page(everything=False, reduced_motion="no-preference")
    page = recorded.page
    page.check("#way-product")
    page.click("[data-lang=zh-CN]")
    expect(page.locator("tr.coming, .flying, tr.dim")).to_have_count(0)
    assert page.locator("#hero-output tbody tr").count() == 3
    assert recorded.messages == []


@exhaustive
def test_an_id_has_one_color_in_every_figure(open_page: Open) -> None:
    page = open_page("lang=en&ids=3,1").page
    classes = page.evaluate(
        """() => [...document.querySelectorAll("main tr.picked, main tr.used, main tr.drift")]
            .filter(e => /row 1|id 1\b/.test(e.cells[0].textContent))
            .map(e => [...e.classList].find(name => /^h\\d$/.test(name)))"""
    )
    assert len(classes) > 4
    assert set(classes) == {"h1"}
    assert page.locator("#step-rows tr.drift.h1").count() == 1
    color = "e => getComputedStyle(e).backgroundColor"
    word = page.evaluate("getComputedStyle(document.querySelector('#row-ids .h2')).color")
    assert page.locator("#waste-zeros span").evaluate(color) == word  # the square belongs to id 2


@exhaustive
def test_cells_are_colored_by_their_values(open_page: Open) -> None:
    page = open_page().page
    cells = page.evaluate(
        """() => [...document.querySelectorAll("#hero-table td.value")].map(e =>
             [Number(e.textContent), e.className, e.style.getPropertyValue("--strength")])"""
    )
    largest = max(abs(value) for value, _, _ in cells)
    for value, names, strength in cells:
        assert names == f"value {'below' if value < 0 else 'above'}"
        assert abs(int(strength[:-1]) - 100 * abs(value) / largest) <= 1


@exhaustive
def test_every_matrix_is_colored_by_value(open_page: Open) -> None:
    page = open_page("lang=en&linear=own").page
    uncolored = page.evaluate(
        """() => [...document.querySelectorAll("main .wide td")]
            .filter(e => /^-?\\d+\\.\\d{4}$/.test(e.textContent) && !e.classList.contains("value"))
            .map(e => e.closest(".wide").id)"""
    )
    assert set(uncolored) == {"product-list", "step-rows"}  # lists of steps, not matrices
    strengths = """id => [...document.querySelectorAll(`#${id} td.value`)]
        .map(e => parseInt(e.style.getPropertyValue("--strength")))"""
    for id in ("linear-columns", "gradient-table"):
        assert max(page.evaluate(strengths, id)) == 100
        assert len(set(page.evaluate(strengths, id))) > 4


@exhaustive
def test_minus_zero_in_an_address_is_zero(open_page: Open) -> None:
    page = open_page("lang=en&softA=-0&ids=-0, 1&p=-0").page
    found = page.evaluate("[state.softA, state.ids[0], state.p].map((n) => Object.is(n, 0))")
    assert found == [True, True, True]


@exhaustive
def test_rows_of_a_mix_add_up_to_it(open_page: Open) -> None:
    page = open_page("lang=en&softA=2&softB=3&p=0.75").page
    rows = page.locator("#mix-table tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].slice(1).map(cell => Number(cell.textContent)))"
    )
    for first, second, mix in zip(*rows, strict=True):
        assert abs(first + second - mix) < 2e-4


@exhaustive
def test_a_choice_shows_the_state_after_the_answer(open_page: Open) -> None:
    page = open_page(everything=False).page
    page.evaluate("unfold('mix')")
    page.click("#mix-answer-1")
    assert [page.input_value("#softA"), page.input_value("#softB")] == ["2", "3"]


@exhaustive
def test_products_with_inf_are_shown(open_page: Open) -> None:
    page = open_page().page
    page.fill("#value-0-0", "inf")
    page.keyboard.press("Tab")
    cell = page.locator("#vector-table tbody tr").first.locator("td.value").first
    assert "nan" in cell.inner_text()


@exhaustive
@pytest.mark.parametrize("lang", grid(lesson.LANGUAGES, "zh-CN".__eq__))
def test_first_bit_for_bit_is_explained(open_page: Open, lang: str) -> None:
    words, meaning = {
        "en": ("bit for bit", " (every binary digit, not just 4 decimals)"),
        "zh-CN": ("逐位相同", "（不只是显示出来的四位小数相同，每个二进制位都相同）"),
    }[lang]
    for view in ("way=product", "way=lookup&layout=columns"):
        text = open_page(f"lang={lang}&{view}").page.inner_text("main")
        assert text.partition(words)[2].startswith(meaning), view


@exhaustive
@pytest.mark.parametrize(
    ("lang", "width"),
    grid(itertools.product(lesson.LANGUAGES, (1280, 360)), lambda lang, width: width == 360),
)
def test_counting_the_zeros_moves_nothing(open_page: Open, lang: str, width: int) -> None:
    page = open_page(f"lang={lang}", everything=False, width=width).page
    page.click("#waste .skip")
    parts = "#waste-slider, #waste-now, #waste-counts tr, #waste-verdict, #waste-zeros, #meaning"
    for place in range(0, 1001, 25):
        page.fill("#waste-slider", str(place))
        found = [[left, top, height] for left, top, _, height in boxes(page, parts)]
        if place == 0:
            before = found
        assert found == before, place
    assert len(before) == 10
    picture = page.locator("#waste-zeros i").first.bounding_box()
    frame = page.locator("#waste-zeros").bounding_box()
    assert picture is not None
    assert frame is not None
    assert picture["height"] < frame["height"] < picture["height"] + 10


@exhaustive
def test_a_change_draws_only_the_sections_that_depend_on_it(open_page: Open) -> None:
    page = open_page().page
    page.evaluate(
        """() => { window.drawn = []; sections.forEach(each => {
             const draw = each.draw;
             each.draw = (...all) => { drawn.push(each.id); draw.call(each, ...all); };
           }) }"""
    )

    def drawn_by(code: str) -> list[str]:
        found: list[str] = page.evaluate(f"() => {{ drawn.length = 0; {code}; return drawn }}")
        return found

    others = page.evaluate("sections.filter(each => !each.uses).map(each => each.id)")
    assert len(others) == 10
    assert drawn_by("change({vocabulary: 999}, null)") == ["waste"]
    assert drawn_by("change({learned: 7}, null)") == ["meaning"]
    assert drawn_by("change({noun: 3}, null)") == ["meaning"]
    assert drawn_by("change({alone: 'yes'}, null)") == ["meaning"]
    assert drawn_by("change({lr: 0.5}, null)") == others
    assert drawn_by("draw()") == others  # an animation changes what is shown, but not the state
    assert {*others, "hero", "layer"} <= {*drawn_by("change({ids: [3]}, null)")}


@exhaustive
@pytest.mark.parametrize("learned", grid((0, 20, 100), (20).__eq__))
def test_all_figures_follow_one_sentence(open_page: Open, learned: int) -> None:
    """Check all that the page says about the words against the same training in torch."""
    page = open_page(f"lang=en&learned={learned}&noun=6").page
    names, verbs = (WORDS["en"][f"meaning.{each}"].split() for each in ("nouns", "verbs"))
    seen = []
    for now in (f"step {learned}", f"step {learned} + 1 sentence"):
        start = now == "step 0"  # the sentences then say "before training"
        at = "before training" if start else f"at {now}"
        space: dict[str, Any] = {}
        exec(page.text_content("#meaning-code") or "", space)
        rows, output = space["rows"], space["output"].detach()
        scores = rows @ output.T
        first = verbs.index("reads")
        said = plain(page.inner_text("#meaning-first") + page.inner_text("#meaning-score"))
        terms = [f"({x:.4f})" if x < 0 else f"{x:.4f}" for x in (*rows[6], *output[first])]
        assert "“girl” has id 6 here" in said
        assert "Its current score for “reads” is:" in said
        assert said.endswith(
            f"{terms[0]} × {terms[2]} + {terms[1]} × {terms[3]} = {scores[6, first]:.4f}"
        )
        loss = F.cross_entropy(scores[space["nouns"]], space["verbs"]).item()
        assert page.inner_text("#meaning-now") == f"{now}, loss {loss:.2f}"
        was = "is" if start else "and is now"
        assert f" {was} {loss:.2f}" in page.inner_text("#meaning-loss")
        distances = torch.cdist(rows, rows).fill_diagonal_(torch.inf)
        nearest = distances.argsort(1)[:, :3]
        near = plain(page.inner_text("#meaning-near"))
        assert f"The row of “girl” is [{rows[6, 0]:.4f}, {rows[6, 1]:.4f}]." in near
        assert ("Before training, it was" in near) != start
        assert f"“girl” {at}: {', '.join(names[k] for k in nearest[6])}." in near
        bold = page.locator("#meaning-map text.label.near").all_text_contents()
        assert sorted(bold) == sorted(names[k] for k in nearest[6])
        same_group = int((nearest % 4 == torch.arange(20)[:, None] % 4).sum())
        verdict = page.inner_text("#meaning-verdict")
        assert f" {same_group} of 60 {'belong' if start else at}" in verdict
        assert verdict.endswith(f" {at}.")
        chance, best = scores[6].softmax(0).topk(4)
        guess = plain(page.inner_text("#meaning-guess")).replace(" ✓", "")
        assert f" {at}: " in guess
        for k, x in zip(best.tolist(), chance.tolist(), strict=True):
            assert f"{verbs[k]} {100 * x:.0f}%" in guess
        seen.append((near, guess, said))
        update = plain(page.inner_text("#meaning-update"))
        if now.endswith("sentence"):
            old, gradient = space["before"][6], space["embedding"].weight.grad[6]
            texts = [f"[{x:.4f}, {y:.4f}]" for x, y in (old, gradient, rows[6])]
            assert update.endswith(f"{texts[0]} − 1 × {texts[1]} = {texts[2]}")
            assert not space["embedding"].weight.grad[torch.arange(20) != 6].any()
        else:
            assert update == ""
            page.click("#meaning-one")
    assert all(a != b for a, b in zip(*seen, strict=True))


@exhaustive
def test_code_has_an_install_line_and_is_saved_as_a_file(open_page: Open) -> None:
    recorded = open_page()
    page = recorded.page
    page.locator("details.python").evaluate_all("all => all.forEach(each => { each.open = true })")
    readme = (ROOT / "README.md").read_text("utf-8")
    for id in page.evaluate("sections.filter(each => each.code).map(each => each.id)"):
        code = page.text_content(f"#{id}-code") or ""
        needs_hotrow = id in ("step", "cost", "model")
        assert ("import hotrow" in code) == needs_hotrow
        install = "pip install -c constraints.txt ." if needs_hotrow else "pip install torch"
        assert install in code.partition("import ")[0]
        assert install in readme or not needs_hotrow
        assert page.inner_text(f"#{id}-prints") != ""
    with page.expect_download() as download:
        page.click("#step-file")
    assert download.value.suggested_filename == "lesson-step.py"
    assert download.value.path().read_text("utf-8") == page.text_content("#step-code")
    recorded.requests[:] = [each for each in recorded.requests if not each.startswith("data:")]


@exhaustive
def test_four_sentences_of_the_page_are_those_of_torch(open_page: Open) -> None:
    page = open_page("lang=en&ids=2, 3, 1, 2").page
    table, ids = examples.A.table(), torch.tensor([2, 3, 1, 2])
    one_hot = F.one_hot(ids, 4).float()
    kept = one_hot * (table[ids] @ table.T)
    upstream = torch.arange(1.0, 21).reshape(4, 5)
    cells = page.locator("#idea-kept tbody td").all_inner_texts()
    assert cells == [format_number(x) if x else "0" for x in kept.flatten().tolist()]

    def values(numbers: torch.Tensor) -> str:
        return f"[{', '.join(map(format_number, numbers.tolist()))}]"

    shown = {
        "looked": f"row 2 = {values((one_hot @ table)[0])}",
        "gathered": values(kept.sum(1)),
        "added": f"row 2 = {values((one_hot.T @ upstream)[2])}",
        "counts": "[0, 1, 2, 1]",
    }
    for name, text in shown.items():
        assert plain(page.inner_text(f"#idea-{name}")) == text
    total = 4 * 5 + 4 + 4 * 5 + 4
    assert f"all {total} values bit for bit" in page.inner_text("#idea-verdict")
    type_into(page, "value-0-0", "inf")
    assert page.inner_text("#idea-verdict").startswith("NOT equal:")


@exhaustive
def test_no_text_shows_an_object_and_the_table_with_inf_is_shown(open_page: Open) -> None:
    for case in ("inf", "nan", "signed", "range", "low", "order"):
        page = open_page(f"lang=en&case={case}&place=0&column=1").page
        text = page.inner_text("main").replace("undefined values", "")
        assert not re.search("\\[object|undefined|NaN", text)
        chosen = page.locator("#differ-table td.chosen")
        if case in ("inf", "nan"):
            assert chosen.all_inner_texts() == [case]
        assert chosen.count() == 1 or case in ("range", "low", "order")
        assert page.is_visible("#differ-table") == (case in ("inf", "nan", "signed"))


@exhaustive
@pytest.mark.parametrize("lang", lesson.LANGUAGES)
@pytest.mark.parametrize("way", ["lookup", "product"])
def test_core_path_fits_a_phone_without_scrolling(open_page: Open, lang: str, way: str) -> None:
    page = open_page(f"lang={lang}&way={way}&vocabulary=50257", width=360).page
    regions = ".core div.wide"  # excludes the Python code
    assert page.locator(regions).count() == 6
    too_wide = """regions => [...document.querySelectorAll(regions)]
        .filter(region => region.scrollWidth > region.clientWidth).map(region => region.id)"""
    assert page.evaluate(too_wide, regions) == []
    page.check("input[name=layout] >> nth=1")
    assert page.evaluate(too_wide, regions) == []


@exhaustive
def test_chart_draws_no_zero(open_page: Open) -> None:
    page = open_page("lang=en&figure=multiplications").page
    assert page.locator("#cost-chart path").count() == 1
    assert page.inner_text("#cost-zero") == WORDS["en"]["cost.zero"]
    page.select_option("#figure", "additions")
    assert page.locator("#cost-chart path").count() == 2
    assert page.inner_text("#cost-zero") == ""


@pytest.mark.parametrize("lang", lesson.LANGUAGES)
def test_core_screens_are_short(lang: str) -> None:
    """A screen has at most 80 words; a Chinese word is counted as 1.7 characters."""
    for id in CORE:
        text = WORDS[lang][f"{id}.title"] + " " + WORDS[lang][f"{id}.text"]
        text += " " + WORDS[lang].get(f"{id}.learn", "")
        size = len(text.split()) if lang == "en" else len(text) / 1.7
        assert size <= 80, id


@exhaustive
def test_python_code_can_be_copied(open_page: Open) -> None:
    page = open_page().page
    page.click("#lookup .python summary")
    page.locator("#lookup .python button").click()
    expect(page.locator("#live")).to_have_text(
        re.compile(
            "|".join(re.escape(WORDS["en"][f"python.{key}"]) for key in ("copied", "select"))
        )
    )


def test_address_of_a_section_opens_it(open_page: Open) -> None:
    page = open_page("step", everything=False).page
    assert page.is_visible("#step-question")
    assert not page.is_visible("#gradient-question")
    assert page.inner_text("#notice") == ""
    assert page.evaluate("document.querySelector('#step').getBoundingClientRect().top") < 100


@exhaustive
def test_random_values_turn_an_excerpt_into_a_whole_table(open_page: Open) -> None:
    page = open_page(which="own").page
    held = page.locator("#lookup-table tbody tr").count()
    page.click("[data-do=random]")
    assert page.inner_text("#lookup-table caption") == f"The table: {held} × 5"
    assert page.input_value("#ids") == "2, 3, 1"
    assert page.inner_text("#position-note") == WORDS["en"]["position.random"]
    page.click("#preset-own")
    assert "30,000 × 70" in page.inner_text("#lookup-about")


@exhaustive
def test_print_hides_the_controls(open_page: Open) -> None:
    page = open_page().page
    page.emulate_media(media="print")
    assert not page.is_visible("#product-next")
    assert page.is_visible("#product-list")
