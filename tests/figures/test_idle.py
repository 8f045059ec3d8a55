"""Test that the "idle" figure has one bar per range, and that the lengths are proportional."""

import re
import xml.etree.ElementTree as ET

import pytest
from torch import nn

from hotrow import HotrowError, figure, vocabulary
from hotrow.figures.idle import BAR_WIDTH
from hotrow.vocabulary import Statistics

EXAMPLE = Statistics(
    1234, 1000, 2, 0, 0, 0, "steps that rows have missed",
    ((0, 0, 300), (1, 1, 0), (2, 3, 1200), (4, 7, 1)),
)  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"


def texts_and_bars(drawing):
    root = ET.fromstring(drawing.svg)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    bars = [each for each in root.iter(f"{SVG}rect") if "hr-picked" in each.get("class")]
    return texts, [float(bar.get("width")) for bar in bars]


@pytest.mark.parametrize("lang", ["en", "zh-CN"])
def test_bars_and_counts(lang):
    drawing = figure("idle", statistics=EXAMPLE, lang=lang)
    texts, bars = texts_and_bars(drawing)
    assert texts[3:] == ["0", "300", "1", "0", "2–3", "1,200", "4–7", "1"]
    assert bars == pytest.approx([BAR_WIDTH / 4, BAR_WIDTH, BAR_WIDTH / 1200], abs=0.05)
    description = ET.fromstring(drawing.svg).find(f"{SVG}desc").text
    assert [int(n) for n in re.findall(r"\d+", description.replace(",", ""))] == [
        1234, 1000, 2, 0, 300, 1, 0, 2, 3, 1200, 4, 7, 1,
    ]  # fmt: skip
    assert figure("idle", statistics=EXAMPLE, lang=lang) == drawing


def test_a_vocabulary():
    words = vocabulary.Vocabulary(nn.Embedding(1, 2), unknown="row")
    words.admit(["a", "b"])
    words.admit(["b"])
    texts, _ = texts_and_bars(figure("idle", statistics=vocabulary.stats(words)))
    assert texts == [
        "Idle rows of the vocabulary",
        "3 rows, 2 ever touched",
        "rows by the number of batches since admit last used them",
        *("0", "1", "1", "1", "2–3", "1"),
    ]


def test_errors():
    with pytest.raises(HotrowError, match="statistics is a int, but it must be a Statistics"):
        figure("idle", statistics=3)
    with pytest.raises(HotrowError, match="contain no idle times"):
        figure("idle", statistics=vocabulary.stats(nn.Embedding(2, 2)))
