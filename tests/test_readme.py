"""Both READMEs say the same, in two languages; tests/docs runs their code."""

import re

import pytest

from tests.support.paths import ROOT

CODE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def pages():
    return [(ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md")]


def test_the_readmes_are_twins(pages):
    english, chinese = pages
    assert english.startswith("English | [简体中文](README.zh-CN.md)\n")
    assert chinese.startswith("[English](README.md) | 简体中文\n")
    assert CODE.findall(english) == CODE.findall(chinese)
    marks = [re.findall(r"^(#+|- \*\*|- |\| )", page, re.MULTILINE) for page in pages]
    assert marks[0] == marks[1]


def test_every_file_linked_exists(pages):
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", page):
            assert (ROOT / target).exists(), target


def test_the_first_page_of_the_documentation_shows_the_same(pages):
    first = (ROOT / "docs" / "index.md").read_text()
    assert CODE.findall(first)[0] == CODE.findall(pages[0])[0]
    times = re.findall(r"^\|.* ms .*$", pages[0], re.MULTILINE)
    assert len(times) > 3
    assert re.findall(r"^\|.* ms .*$", first, re.MULTILINE) == times
