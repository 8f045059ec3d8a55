"""Test that the English and Chinese READMEs match. tests/docs runs their code."""

import re

import pytest

from tests.support.paths import ROOT

CODE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def pages():
    return [(ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md")]


def test_the_readmes_have_the_same_structure_and_code(pages):
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
