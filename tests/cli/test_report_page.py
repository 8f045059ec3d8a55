"""Test that the report page is self-contained, safe, readable and accessible in a browser."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from playwright.sync_api import expect

from hotrow import compare
from hotrow.cli import report
from hotrow.inputs import examples
from tests.support.browser import OpenPage, RecordedPage

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=/x onerror=alert(2)>",
    '"onmouseover="alert(3)',
    "</style><iframe src=/y>",
    "&lt;svg onload=alert(4)&gt;",
    "\u202e\x1b[31m",
    "word" * 100,
    "词元",
]
TITLES = [examples.A.title, "<script>document.title='taken'</script> & \"more\"", "poisoned"]


Open = Callable[..., RecordedPage]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a page with three reports: Example A, hostile texts and unequal results."""
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(5000, 300, generator=generator)
    poisoned = torch.randn(40, 3, generator=generator)
    poisoned[7] = torch.nan
    ids = list(range(0, 4000, 500))
    comparisons = [
        compare(examples.A.table(), examples.A.ids, title=TITLES[0], seconds=0),
        compare(table, ids, tokens=HOSTILE, title=TITLES[1], seconds=0),
        compare(poisoned, [1, 2] * 100, title=TITLES[2], seconds=0),
    ]
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report.to_html(comparisons), encoding="utf-8")
    return path


@pytest.fixture
def open_page(open_recorded: OpenPage, file: Path) -> Open:
    return partial(open_recorded, file.as_uri())


def test_the_page_opens_from_disk_without_requests_or_messages(open_page: Open, file: Path) -> None:
    recorded = open_page()
    recorded.page.mouse.wheel(0, 20_000)
    for item in recorded.page.locator(".ids li").all():
        item.hover()
    recorded.page.wait_for_timeout(200)
    assert recorded.requests == [file.as_uri()]
    assert recorded.messages == []


def test_requests_and_dialogs_are_recorded(open_page: Open) -> None:
    recorded = open_page()
    recorded.page.goto("about:blank")  # leave the report: its security policy blocks scripts
    recorded.page.set_content("<script>alert('seen')</script><img src='http://127.0.0.1:9/x'>")
    recorded.page.wait_for_timeout(200)
    assert "http://127.0.0.1:9/x" in recorded.requests
    assert "seen" in recorded.messages


def test_hostile_texts_stay_text(open_page: Open) -> None:
    page = open_page().page
    assert page.locator("script, img, iframe, object, embed, form, b").count() == 0
    handlers = "[...document.querySelectorAll('*')].flatMap(e => e.getAttributeNames())"
    assert not [name for name in page.evaluate(handlers) if name.startswith("on")]
    assert page.title() == "hotrow: one-hot matmul and lookup, NOT equal"
    expect(page.get_by_role("heading", level=2)).to_have_text(TITLES)
    shown = page.locator("section").nth(1).locator(".ids bdi").all_text_contents()
    assert shown[:2] == [HOSTILE[0][:23] + "…", HOSTILE[1][:23] + "…"]
    assert shown[2] == HOSTILE[2]
    assert shown[5:] == [r"\u202e\x1b[31m", ("word" * 6)[:23] + "…", "词元"]


def test_at_360_pixels_only_wide_parts_scroll(open_page: Open) -> None:
    page = open_page(360).page
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("document.documentElement.clientWidth") == 360
    too_wide = page.evaluate(
        """() => [...document.querySelectorAll('body *')]
            .filter(e => !e.closest('.wide') && e.getBoundingClientRect().right > 360)
            .map(e => e.outerHTML.slice(0, 80))"""
    )
    assert too_wide == []
    scrolling = page.evaluate(
        """() => [...document.querySelectorAll('.wide')]
            .filter(e => e.scrollWidth > e.clientWidth)
            .map(e => getComputedStyle(e).overflowX)"""
    )
    assert scrolling
    assert set(scrolling) == {"auto"}


@pytest.mark.parametrize("width", [360, 1280])
def test_figures_keep_a_readable_size(open_page: Open, width: int) -> None:
    heights = open_page(width).page.evaluate(
        """() => [...document.querySelectorAll('figure svg text')]
            .filter(e => e.textContent.trim())
            .map(e => e.getBoundingClientRect().height)"""
    )
    assert len(heights) > 100
    assert min(heights) >= 11


# Return the lowest contrast (WCAG 2.2) between any text outside the figures and its background.
CONTRAST = """() => {
  const parse = color => {
    const [r, g, b, a = 1] = color.match(/[0-9.]+/g).map(Number);
    return [r, g, b, a];
  };
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = e => {
    for (; e; e = e.parentElement) {
      const color = parse(getComputedStyle(e).backgroundColor);
      if (color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; node = walker.nextNode();) {
    const e = node.parentElement;
    if (!node.data.trim() || e.closest('svg, style')) continue;
    const pair = [parse(getComputedStyle(e).color), behind(e)].map(luminance);
    found.push([(Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05), node.data.slice(0, 40)]);
  }
  found.sort((a, b) => a[0] - b[0]);
  return {
    texts: found.length,
    least: found[0],
    paper: luminance(behind(document.body)),
  };
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_enough_contrast(open_page: Open, scheme: str) -> None:
    page = open_page(scheme=scheme).page
    found = page.evaluate(CONTRAST)
    assert found["texts"] > 50
    assert found["least"][0] >= 4.5, found["least"]
    assert (found["paper"] < 0.1) == (scheme == "dark")


def test_verdicts_do_not_depend_on_color(open_page: Open) -> None:
    verdicts = open_page().page.locator(".verdict").all_text_contents()
    assert [text.split(":")[0] for text in verdicts] == ["equal", "equal", "NOT equal"]


def test_language_landmarks_and_headings(open_page: Open) -> None:
    page = open_page().page
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("meta[name=viewport]").count() == 1
    expect(page.get_by_role("main")).to_have_count(1)
    expect(page.get_by_role("contentinfo")).to_have_count(1)
    levels = [
        int(tag[1])
        for tag in page.evaluate(
            "[...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].map(e => e.tagName)"
        )
    ]
    assert levels == [1, *[2, 3, 3, 3] * len(TITLES)]


def test_each_figure_and_image_has_a_name(open_page: Open) -> None:
    page = open_page().page
    figures, drawings = page.get_by_role("figure"), page.get_by_role("img")
    assert figures.count() == drawings.count() == 15
    for number in range(15):
        expect(figures.nth(number)).to_have_accessible_name(
            re.compile(rf"^Figure {number % 5 + 1}\. \w")
        )
        expect(drawings.nth(number)).to_have_accessible_name(re.compile(r"\w"))
    identifiers = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(identifiers) == len(set(identifiers))


def test_tables_have_headers(open_page: Open) -> None:
    page = open_page().page
    costs = page.locator("section").first.locator("table.numbers")
    headers = costs.get_by_role("columnheader").all_text_contents()
    assert headers == ["forward and gradient", "one-hot matmul", "lookup", "ratio"]
    expect(costs.get_by_role("rowheader")).to_have_count(5)
    same = page.locator("section").first.locator("table").first
    assert same.get_by_role("rowheader").all_text_contents() == ["output", "gradient"]
