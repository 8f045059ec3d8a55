"""Check that the lesson's notebooks run, match their source, and agree in both languages."""

import importlib.util
import json
import re
import sys
import xml.etree.ElementTree as ET

import nbformat
import pytest
import torch

import hotrow
from tests.support.exhaustive import exhaustive
from tests.support.paths import ROOT

LESSONS = ROOT / "lessons"
PAGE_WORDS = ROOT / "src/hotrow/lesson/words"
LANGS = ["en", "zh-CN"]
STEPS = range(1, 13)
HAN = re.compile("[\u4e00-\u9fff]")
# Latin words allowed in Chinese prose, in addition to code.
KEPT = {
    *(
        "hotrow",
        "torch",
        "PyTorch",
        "Python",
        "Jupyter",
        "notebook",
        "GPT",
        "CPU",
        "float",
        "bfloat",
    ),
    *("token", "ID", "V", "D", "N", "x", "SGD", "Adam", "AdamW", "inf", "NaN", "English"),
    *("Sebastian", "Raschka", "github", "com", "rasbt", "LLMs", "from", "scratch"),
    *("datawhalechina", "MLNLP", "World"),
}
DRIFTING = [
    "令牌",
    "标记",
    "独热码",
    "独热表示",
    "one-hot 编码",
    "嵌入表",
    "梯度值",
    "分词",
    "线性变换",
    "推迟",
    "写出的字节",
    "笔记本",
    "课程",
]
TERMS = re.findall(
    r"\S+",
    "嵌入层 嵌入矩阵（查找表） 独热编码 独热向量 查找 词元（token） 词表 权重 梯度 反向传播 "
    "优化器 线性层 矩阵乘法 位置嵌入 批次 词袋 稠密",
)


# The nouns and verbs of the page's section "The rows learn".
WORDS = {
    lang: [
        word
        for key in ("meaning.nouns", "meaning.verbs")
        for word in json.loads((PAGE_WORDS / f"{lang}.json").read_text("utf-8"))[key].split()
    ]
    for lang in LANGS
}


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("lesson_build", LESSONS / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclass looks up the module here
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cells(build):
    return build.parse(build.SOURCE.read_text())


@pytest.fixture(scope="module")
def committed(build):
    return {lang: nbformat.read(LESSONS / name, 4) for lang, name in build.FILES.items()}


@pytest.fixture(scope="module")
def prose(committed):
    """The Markdown cells of each notebook."""
    return {
        lang: [cell.source for cell in book.cells if cell.cell_type == "markdown"]
        for lang, book in committed.items()
    }


def code_cells(book):
    return [cell for cell in book.cells if cell.cell_type == "code"]


def shown(cell):
    """The output of a cell, without measured numbers or the words in figures."""
    measured = "measured" in cell.metadata.get("tags", [])
    found = []
    for output in cell.outputs:
        assert output.output_type in ("stream", "execute_result")
        assert output.get("name") != "stderr", output.text
        if output.output_type == "stream":
            found.append(without_times(output.text) if measured else translated(output.text))
        elif "image/svg+xml" in output.data:
            found.append("figure" if measured else numbers(output.data["image/svg+xml"]))
        else:
            found.append(output.data["text/plain"])
    return found


def without_times(text):
    """The text without numbers, and without the note that appears on a busy machine."""
    text = re.sub("The machine is busy: .*\n", "", text)
    return re.sub(" +", " ", re.sub(r"[\d.]+", "#", text))


def translated(text):
    """Return the text with the nouns and verbs of “The rows learn” in English."""
    for chinese, english in zip(*(WORDS[lang] for lang in ("zh-CN", "en")), strict=True):
        text = re.sub(f"(?<!{HAN.pattern}){chinese}(?!{HAN.pattern})", english, text)
    return text


def numbers(svg):
    """The numbers in a figure."""
    texts = [
        element.text for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]
    return [text for text in texts if re.fullmatch(r"-?[\d.,]+(e[+-]\d+)?", text)]


# Build and run


@exhaustive
@pytest.mark.parametrize("lang", LANGS)
def test_committed_notebooks_match_a_fresh_build_and_run(build, cells, committed, lang):
    again = build.run(build.notebook(cells, lang))
    book = committed[lang]
    assert again.metadata == book.metadata
    assert [(c.cell_type, c.id, c.source, c.metadata) for c in again.cells] == [
        (c.cell_type, c.id, c.source, c.metadata) for c in book.cells
    ]
    for new, old in zip(code_cells(again), code_cells(book), strict=True):
        assert new.execution_count == old.execution_count
        if "measured" in new.metadata.get("tags", []):
            assert shown(new) == shown(old)
        else:
            assert new.outputs == old.outputs, new.source


def test_build_leaves_cells_with_sliders_to_the_reader(committed):
    for book in committed.values():
        cells = [cell for cell in code_cells(book) if "@interact" in cell.source]
        assert len(cells) == 2
        for cell in cells:
            assert cell.metadata.tags == ["skip-execution"]
            assert not cell.outputs


def cells_to_slider(cells):
    """Return the notebook's cells up to the first slider."""
    place = next(n for n, cell in enumerate(cells) if getattr(cell, "kind", "") == "slider")
    return cells[: place + 1]


def test_slider_is_a_widget_that_changes_the_figure(cells, monkeypatch):
    # nbclient sometimes waits forever for a cell that shows a widget, so run the code without it.
    code = "\n".join(cell.code for cell in cells_to_slider(cells) if hasattr(cell, "code"))
    widgets, figures = [], []
    monkeypatch.setattr("ipywidgets.widgets.interaction.display", widgets.append)
    monkeypatch.setattr("IPython.display.display", figures.append)
    made = {"__name__": "lesson"}
    exec(compile(code, "lesson", "exec"), made)
    [widget] = widgets
    [slider, _] = widget.children
    for id in (slider.max, slider.min):
        slider.value = id
        weight = made["embedding"].weight
        assert figures[-1].svg == hotrow.figure("lookup", weight, id, lang="en").svg


@exhaustive
def test_without_ipywidgets_a_slider_cell_shows_an_example(build, cells):
    absent = build.Code("import sys\n\nsys.modules['ipywidgets'] = None")
    book = build.notebook([absent, *cells_to_slider(cells)], "en")
    book.cells[-1].metadata.tags = []
    [output] = build.run(book).cells[-1].outputs
    assert "1.3010" in numbers(output.data["image/svg+xml"])


@pytest.mark.parametrize(("lang", "page"), [("en", "README.md"), ("zh-CN", "README.zh-CN.md")])
def test_readme_shows_the_lookup_figure_and_links_both_notebooks_first(build, lang, page):
    figure = build.FIGURES[lang]
    assert figure.read_text(encoding="utf-8") == build.first_figure(lang)
    first = (LESSONS.parent / page).read_text(encoding="utf-8").split("\n## ")[0]
    assert f"](docs/{figure.name})" in first
    for name in build.FILES.values():
        assert f"](lessons/{name})" in first


@exhaustive
def test_suggested_changes_run(cells, prose):
    code = "\n".join(
        cell.code for cell in cells if hasattr(cell, "code") and cell.kind != "measured"
    )
    for old, new in (
        ("ids = torch.tensor([2, 3, 1])", "ids = torch.tensor([0, 0, 3])"),
        ("repeated = torch.tensor([2, 3, 2])", "repeated = torch.tensor([1, 1, 1])"),
    ):
        assert code.count(old) == 1
        code = code.replace(old, new)
        for lang in LANGS:
            assert f"`{new}`" in "".join(prose[lang]) or f"`{new[-10:-1]}`" in "".join(prose[lang])
    try:
        exec(compile(code, "lesson", "exec"), {"__name__": "lesson"})
    finally:
        torch.set_printoptions(profile="default")


@pytest.mark.parametrize(
    ("ids", "sizes"),
    [("[3]", "4, 5"), ("[2, 3, 1]", "7, 6"), ("[0]", "4, 1"), ("[8, 8, 8, 0, 8]", "9, 2")],
)
def test_notebook_runs_with_other_ids_and_sizes(cells, ids, sizes):
    # Skip the steps that use other tables, because they take most of the time.
    step, code = 0, []
    for cell in cells:
        if hasattr(cell, "code"):
            code += [cell.code] * (step not in (4, 5, 7, 9, 11, 12))
        elif found := re.match(r"## (\d+)\. ", cell.words["en"]):
            step = int(found[1])
    code = "\n".join(code)
    for old, new in (
        ("ids = torch.tensor([2, 3, 1])", f"ids = torch.tensor({ids})"),
        ("V, D = 4, 5 ", f"V, D = {sizes} "),
    ):
        assert code.count(old) == 1
        code = code.replace(old, new)
    try:
        exec(compile(code, "lesson", "exec"), {"__name__": "lesson"})
    finally:
        torch.set_printoptions(profile="default")


@pytest.mark.parametrize("change", ["V, D = 3, 5 ", "V, D = 4, 5  # [4]"])
def test_ids_and_sizes_that_do_not_fit_raise(cells, change):
    code = next(cell.code for cell in cells if hasattr(cell, "code") and "V, D =" in cell.code)
    code = code.replace("V, D = 4, 5 ", change)
    if "[4]" in change:
        code = code.replace("[2, 3, 1]", "[4]")
    with pytest.raises(AssertionError, match="make V"):
        exec(code, {"torch": torch, "nn": torch.nn})


def test_wrong_claim_fails_the_build(build):
    source = "\n---\n```python\nassert 1 + 1 == 3\n```\n"
    with pytest.raises(Exception, match="AssertionError"):
        build.run(build.notebook(build.parse(source), "en"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("<!-- en -->\nA\n```python\n1\n```\n", "text without a translation"),
        ("<!-- en -->\nA\n<!-- zh-CN -->\n甲\n```python\n1\n```\nB\n", "after a block of code: B"),
        ("A\n<!-- en -->\nB\n", "before the first mark: A"),
    ],
)
def test_incomplete_source_raises(build, source, message):
    with pytest.raises(ValueError, match=message):
        build.parse(f"\n---\n{source}")


def test_chinese_lines_join_without_a_space(build):
    english, chinese = "A\nb", "甲，\n乙。\nB\n1. 丙。\n2. 丁"
    source = f"\n---\n<!-- en -->\n{english}\n<!-- zh-CN -->\n{chinese}\n```python\n1\n```\n"
    [text, _] = build.parse(source)
    books = [build.notebook([text], lang).cells[0].source for lang in LANGS]
    assert books == ["A\nb", "甲，乙。B\n1. 丙。\n2. 丁"]


# The same in both languages


def test_code_is_the_same_except_for_the_language(committed):
    english, chinese = (
        [cell.source.splitlines() for cell in code_cells(committed[lang])] for lang in LANGS
    )
    different = [
        (a, b)
        for left, right in zip(english, chinese, strict=True)
        for a, b in zip(left, right, strict=True)
        if a != b
    ]
    comment = "  # the language of the figures and words"
    assert different == [(f'lang = "en"{comment}', f'lang = "zh-CN"{comment}')]


def test_outputs_are_the_same(committed):
    english, chinese = ([shown(cell) for cell in code_cells(committed[lang])] for lang in LANGS)
    assert english == chinese
    assert sum(map(len, english)) > 20


def test_every_figure_is_in_the_notebooks_language(committed):
    for lang, book in committed.items():
        figures = [
            ET.fromstring(output.data["image/svg+xml"])
            for cell in code_cells(book)
            for output in cell.outputs
            if "image/svg+xml" in output.get("data", {})
        ]
        assert [figure.get("lang") for figure in figures] == [lang] * 8
        assert all(bool(HAN.search("".join(f.itertext()))) == (lang == "zh-CN") for f in figures)
        kinds = re.findall(r'hotrow\.figure\("(\w+)"', "".join(c.source for c in code_cells(book)))
        assert kinds == [*["lookup"] * 4, *["product"] * 2, "gradient", "cost", "cost"]


def test_each_notebook_links_the_other_on_its_first_line(prose):
    assert prose["en"][0].startswith("English | [简体中文](embedding-vs-linear.zh-CN.ipynb)\n")
    assert prose["zh-CN"][0].startswith("[English](embedding-vs-linear.ipynb) | 简体中文\n")


@pytest.mark.parametrize("lang", LANGS)
def test_each_of_twelve_steps_has_an_assertion(committed, lang):
    step, asserted = 0, {}
    for cell in committed[lang].cells:
        if cell.cell_type == "code":
            asserted[step] = asserted.get(step, 0) + cell.source.count("assert ")
        elif found := re.match(r"## (\d+)\. ", cell.source):
            assert int(found[1]) == step + 1
            step += 1
    assert step == STEPS[-1]
    assert all(asserted[step] for step in STEPS)


# Language


def words_alone(text):
    """Prose without code, link targets, book titles and markup."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|</?\w+>|(?<!\*)\*[A-Z][^*]*\*", " ", text)
    return re.sub(r"[εΣ√]", " ", text)


def test_english_prose_has_no_chinese(prose):
    for text in prose["en"]:
        assert not HAN.search(text.replace("[简体中文]", "")), text


def test_chinese_prose_has_no_english(prose):
    for text in prose["zh-CN"]:
        left = set(re.findall("[A-Za-z]+", words_alone(text))) - KEPT
        assert not left, text
        assert HAN.search(text)


def test_chinese_prose_has_chinese_punctuation(prose):
    for text in prose["zh-CN"]:
        words = words_alone(text)
        assert not re.search(f"{HAN.pattern}[,.;:?!()]|[,.;:?!(]{HAN.pattern}", words), text


def test_chinese_prose_uses_the_glossary(prose):
    chinese = "\n".join(prose["zh-CN"])
    for term in TERMS:
        assert term in chinese, term
    for term in DRIFTING:
        assert term not in chinese, term
    assert chinese.index("词元（token）") == chinese.index("词元")
    assert chinese.count("词元（token）") == 1


def test_ids_in_the_prose_appear_in_the_code(committed):
    for book in committed.values():
        code = "\n".join(cell.source for cell in code_cells(book))
        for cell in book.cells:
            if cell.cell_type == "markdown":
                for ids in re.findall(r"\[\d(?:, \d)*\]", cell.source):
                    assert ids in code or ids in ("[0, 0, 3]", "[1, 1, 1]"), ids


def test_numbers_in_the_prose_are_the_same(prose):
    for english, chinese in zip(prose["en"], prose["zh-CN"], strict=True):
        pair = [
            sorted(re.findall(r"-?\d[\d,.]*\d", words_alone(text))) for text in (english, chinese)
        ]
        assert pair[0] == pair[1], (english, chinese)


EXAMPLES = """
0.3374 -0.1778 -0.3035 -0.5880 1.5810
1.3010 1.2753 -0.2010 -0.1606 -0.4015
0.6957 -1.8061 -1.1589 0.3255 -0.6315
-2.8400 -0.7849 -1.4096 -0.4076 0.7953
-0.2039 0.0166 -0.2483 0.1886
-0.4260 0.3665 -0.3634 -0.3975
-0.3159 0.2264 -0.1847 0.1871
-0.4244 -0.3034 -0.1836 -0.0983
-0.3814 0.3274 -0.1179 0.1605
0.3374 -0.1778 -0.1690
0.9178 1.5810 1.3010
1.2753 -0.2010 -0.1606
-0.4015 0.9666 -1.1481
-1.1589 0.3255 -0.6315
-2.8400 -0.7849 -1.4096
0 0 1 0
0 0 0 1
0 1 0 0
""".strip().splitlines()


@pytest.mark.parametrize("lang", LANGS)
def test_words_and_sentences_of_step_5_are_those_of_the_page(cells, lang):
    code = next(cell.code for cell in cells if hasattr(cell, "code") and "verbs = {" in cell.code)
    made = {"lang": lang, "print": lambda *words: None}
    exec(code, made)
    assert [*made["words"], *made["verbs"]] == WORDS[lang]


@pytest.mark.parametrize("lang", LANGS)
def test_outputs_contain_the_numbers_of_the_examples(committed, lang):
    texts = [
        text for c in code_cells(committed[lang]) for text in shown(c) if isinstance(text, str)
    ]
    lines = [
        re.findall(r"-?\d[\d.]*", line)
        for text in texts
        if "[" in text
        for line in text.splitlines()
    ]
    for row in EXAMPLES:
        assert row.split() in lines, row
    assert "equal, 15 of 15 values bit for bit" in "".join(texts)
    assert "+1 x -2.8400 = -2.8400" in "".join(texts)
    assert "(8, 4, 256) + (4, 256) = (8, 4, 256)" in "".join(texts)
    assert not re.search(r"x -2\.8400 = +2\.8400", "".join(texts))
