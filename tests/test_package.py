"""Test the package's public names, its imports, and its wheel."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hotrow
from tests.support.exhaustive import exhaustive, grid
from tests.support.paths import ROOT


def test_there_are_few_public_names():
    assert len(hotrow.__all__) <= 12
    assert sorted(hotrow.__all__) == sorted(
        [name for name in vars(hotrow) if not name.startswith("_") and _is_public(name)]
        + ["__version__"]
    )


def _is_public(name):
    """Return whether the name is public. Among the submodules, only `optim` is public."""
    return name == "optim" or not isinstance(getattr(hotrow, name), type(hotrow))


def test_public_docstrings_have_examples():
    for name in (
        "Embedding",
        "EmbeddingBag",
        "OneHotLinear",
        "check",
        "compare",
        "convert",
        "cost",
        "figure",
    ):
        assert ">>>" in getattr(hotrow, name).__doc__, name


def test_importing_loads_nothing_heavy_except_torch():
    code = (
        "import sys, torch; before = set(sys.modules); import hotrow; "
        "print(*(set(sys.modules) - before), sep='\\n')"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {"numba", "rich", "typer", "click", "jinja2", "tokenizers", "safetensors"}
    heavy |= {"torch._dynamo", "torch._inductor", "matplotlib", "pandas"}
    assert {name for name in loaded if name.split(".")[0] in heavy or name in heavy} == set()
    others = {name for name in loaded if name.split(".")[0] != "hotrow"}
    assert len(others) < 30, others


def test_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d\S*)\] - \d{4}-\d\d-\d\d$", changelog, re.MULTILINE)
    assert released[0] == hotrow.__version__


@exhaustive
def test_the_wheel_works_alone(tmp_path):
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT], check=True
    )
    (wheel,) = tmp_path.glob("hotrow-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert "hotrow/py.typed" in names
    assert "_hotrow_command.py" in names
    assert "hotrow/cli/templates/report.html" in names
    lesson = Path(hotrow.__file__).parent / "lesson"
    sources = [path for path in lesson.rglob("*.*") if path.suffix != ".pyc"]
    assert {f"hotrow/lesson/{path.relative_to(lesson).as_posix()}" for path in sources} < set(names)
    assert not [name for name in names if name.startswith("tests") or ".venv" in name]
    assert not [name for name in names if "benchmarks" in name]
    (metadata,) = (tmp_path / "site").glob("hotrow-*.dist-info/METADATA")
    package_page = metadata.read_text("utf-8")
    assert "\nDescription-Content-Type: text/markdown\n" in package_page
    assert "\n# hotrow\n" in package_page
    # The package page can't link to local files.
    assert re.findall(r"\]\((?!https:)[^)]*\)", package_page) == []
    page = tmp_path / "report.html"
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); "
        f"from hotrow.cli import main as cli; "
        f"assert cli.__file__.startswith({str(tmp_path)!r}); "
        f"from hotrow.inputs import examples; examples.ALL = (examples.A,); "
        f"sys.argv = ['hotrow', 'compare', '--html', {str(page)!r}]; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "equal, 15 of 15 values bit for bit" in done.stdout
    assert page.read_text().startswith("<!doctype html>")
    learn = [sys.executable, "-m", "hotrow", "learn", "--print-path"]
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path / "site"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    for folder in (tmp_path / "site").rglob("*"):
        if folder.is_dir():
            folder.chmod(0o555)  # the installed package may be read-only
    done = subprocess.run(learn, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_text("utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("name", grid(["disk", "distributed", "vocabulary"], "disk".__eq__))
def test_subpackages_are_imported_when_they_are_first_used(name):
    code = f"import sys, hotrow; assert 'hotrow.{name}' not in sys.modules; hotrow.{name}.__all__"
    subprocess.run([sys.executable, "-c", code], check=True)
