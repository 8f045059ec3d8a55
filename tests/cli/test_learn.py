"""Test the page, the output and the exit codes of `hotrow learn`."""

import json
import os
import re
import sys
import webbrowser
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hotrow import HotrowError
from hotrow.lesson import times
from hotrow.lesson.location import cache_folder
from tests.support.command_line import Run, save_tokenizer

WORDS = {"[UNK]": 0, "the": 1, "same": 2, "numbers": 3}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records the addresses that `hotrow learn` would open in a browser."""
    found: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: found.append(url) or True)
    return found


@pytest.fixture
def learn(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    run_hotrow: Run,
    opened: list[str],
) -> Run:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "platform", "linux")
    table = torch.arange(20.0).reshape(4, 5)
    save_file({"wte.weight": table}, tmp_path / "one.safetensors")
    save_file({"a": table, "b": table + 1}, tmp_path / "two.safetensors")
    save_tokenizer(WORDS, tmp_path / "words.json")
    (tmp_path / "odd.json").write_text('{"comparisons": [{"rows": 1}]}')
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_hotrow("learn", *arguments)


def data_of(path: Path) -> Any:
    found = re.search(r'id="data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_is_written_and_opened(learn: Run, opened: list[str]) -> None:
    found = learn()
    page = cache_folder() / "learn.html"
    assert (found.code, found.err) == (0, "")
    assert found.out == f"Opened the lesson: {page}\n"
    assert opened == [page.as_uri()]
    assert [table["name"] for table in data_of(page)["tables"]] == ["A", "B", "C"]
    assert data_of(page)["lang"] is None


def test_print_path_prints_only_the_path(learn: Run, opened: list[str]) -> None:
    found = learn("--print-path", "--lang", "zh-CN")
    assert (found.code, found.out) == (0, f"{cache_folder() / 'learn.html'}\n")
    assert opened == []
    assert data_of(Path(found.out.strip()))["lang"] == "zh-CN"


def test_no_open_opens_nothing(learn: Run, opened: list[str]) -> None:
    assert learn("--no-open").out.startswith("Open the lesson in a browser: ")
    assert opened == []


def test_save_writes_a_page_to_share(learn: Run, opened: list[str], tmp_path: Path) -> None:
    path = tmp_path / "lesson.html"
    found = learn("--save", str(path), "--lang", "zh-CN")
    assert (found.code, found.out) == (0, f"Saved the lesson: {path}\n")
    assert opened == []
    assert data_of(path)["lang"] == "zh-CN"
    assert "file:" not in path.read_text("utf-8")  # no links to local files
    assert path.stat().st_size < 300_000
    found = learn("--save", str(tmp_path / "missing" / "lesson.html"))
    assert found.code == 2
    assert "there is no folder" in found.err


def test_without_a_browser_it_prints_the_path(learn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    found = learn()
    assert (found.code, found.err) == (0, "")
    assert found.out.startswith("Open the lesson in a browser: ")


def test_a_text_sets_the_tokens(learn: Run) -> None:
    arguments = "--print-path", "--text", "the same the same", "--tokenizer", "words.json"
    own = data_of(Path(learn(*arguments).out.strip()))["tables"][-1]
    assert (own["name"], own["V"], own["random"]) == ("own", 4, True)
    assert own["ids"] == [1, 2, 1, 2]
    assert own["tokens"] == ["[UNK]", "the", "same", "numbers"]


def test_a_table_sets_the_rows(learn: Run) -> None:
    arguments = ["--print-path", "--table", "one.safetensors"]
    own = data_of(Path(learn(*arguments).out.strip()))["tables"][-1]
    assert (own["V"], own["D"], own["ids"], own["random"]) == (4, 5, [0, 1, 2], False)
    assert own["title"] == "wte.weight in one.safetensors"
    assert own["tokens"] is None
    arguments += ["--tokenizer", "words.json", "--text", "numbers"]
    own = data_of(Path(learn(*arguments).out.strip()))["tables"][-1]
    assert (own["labels"], own["ids"], own["tokens"]) == ([2, 3], [3], ["same", "numbers"])
    rows = torch.tensor([[5.0, 6, 7, 8, 9]]) + torch.tensor([[5.0], [10]])
    assert own["rows"] == rows.numpy().astype(">f4").tobytes().hex()


def test_times_of_compare_are_on_the_page(learn: Run, run_hotrow: Run, tmp_path: Path) -> None:
    compared = run_hotrow("compare", "--table", "one.safetensors", "--ids", "2,3", "--json")
    (tmp_path / "times.json").write_text(compared.out)
    [timing] = data_of(Path(learn("--print-path", "--times", "times.json").out.strip()))["timings"]
    [measured] = json.loads(compared.out)["comparisons"]
    assert (timing["V"], timing["D"], timing["N"]) == (4, 5, 2)
    assert timing["matmul_ms"] == measured["matmul"]["median_ms"] > 0
    assert timing["lookup_ms"] == measured["lookup"]["median_ms"] > 0


def test_times_of_bench_are_on_the_page(learn: Run) -> None:
    assert data_of(Path(learn("--print-path").out.strip()))["timings"] == []
    times.save_times([times.Timing(10, 4, 3, 2.5, 0.5)])
    [timing] = data_of(Path(learn("--print-path").out.strip()))["timings"]
    assert timing == {"V": 10, "D": 4, "N": 3, "matmul_ms": 2.5, "lookup_ms": 0.5}


def test_without_a_writable_cache_a_temporary_folder_is_used(learn: Run, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("not a folder")
    path = Path(learn("--print-path").out.strip())
    assert path.is_file()
    assert tmp_path not in path.parents
    path.unlink()
    path.parent.rmdir()


def test_a_link_in_the_cache_is_replaced_instead_of_its_target(learn: Run, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    cache_folder().mkdir(parents=True)
    for name in ("learn.html", "times.json"):
        (cache_folder() / name).symlink_to(outside)
    assert learn("--print-path").out == f"{cache_folder() / 'learn.html'}\n"
    times.save_times([times.Timing(10, 4, 3, 2.5, 0.5)])
    assert outside.read_text() == "precious"
    assert len(times.load_times()) == 1
    for name in ("learn.html", "times.json"):
        assert not (cache_folder() / name).is_symlink()


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX permissions")
@pytest.mark.parametrize(
    ("change", "why"), [("owner", "belongs to another user"), ("mode", "is writable by all users")]
)
def test_a_cache_that_another_user_controls_is_not_used(
    learn: Run, monkeypatch: pytest.MonkeyPatch, change: str, why: str
) -> None:
    cache_folder().mkdir(parents=True)
    if change == "mode":
        cache_folder().chmod(0o777)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: cache_folder().stat().st_uid + 1)
    path = Path(learn("--print-path").out.strip())
    with pytest.raises(HotrowError, match=f"{why}: set XDG_CACHE_HOME to a folder that only you"):
        times.save_times([times.Timing(10, 4, 3, 2.5, 0.5)])
    assert path.is_file()
    assert list(cache_folder().iterdir()) == []
    path.unlink()
    path.parent.rmdir()


def test_a_link_of_another_user_is_not_followed(
    learn: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "learn.html").write_text("my page")
    cache_folder().parent.mkdir()
    cache_folder().symlink_to(own)
    assert learn("--print-path").out == f"{own / 'learn.html'}\n"
    (own / "learn.html").write_text("my page")
    status = cache_folder().lstat()
    lstat = Path.lstat

    def lstat_of_other_user(path: Path) -> os.stat_result:
        if path != cache_folder():
            return lstat(path)
        return os.stat_result((*status[:4], status.st_uid + 1, *status[5:]))

    monkeypatch.setattr(Path, "lstat", lstat_of_other_user)
    path = Path(learn("--print-path").out.strip())
    assert path.parent != own
    assert (own / "learn.html").read_text() == "my page"
    path.unlink()
    path.parent.rmdir()


def test_a_relative_cache_folder_is_opened_by_its_absolute_path(
    learn: Run, monkeypatch: pytest.MonkeyPatch, opened: list[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "near")
    assert learn().code == 0
    assert opened == [(tmp_path / "near" / "hotrow" / "learn.html").as_uri()]


@pytest.mark.parametrize("named", [True, False])
def test_a_user_without_a_home_gets_the_page(
    learn: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: bool
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    if not named:
        monkeypatch.delenv("XDG_CACHE_HOME")
    path = Path(learn("--print-path").out.strip())
    assert path.is_file()
    assert (tmp_path in path.parents) == named
    path.unlink()


def test_ctrl_c_ends_without_a_traceback(learn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(url: str) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(webbrowser, "open", interrupted)
    found = learn()
    assert (found.code, found.out) == (130, "")
    assert "Traceback" not in found.err


TIMES = {
    "nan.json": ("NaN", "1"),
    "huge.json": ("1e400", "1"),
    "negative.json": ("-1", "1"),
    "none.json": ("1", "0"),
    "rows.json": ("1", "1", "1e400"),
    "wrong.json": ("1", "1", "-4"),
}


@pytest.mark.parametrize("text", ['{"comparisons": []}', '{"comparisons": {}}', "{}"])
def test_times_without_comparisons_are_an_error(learn: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "times.json").write_text(text)
    found = learn("--times", "times.json", "--save", "page.html")
    assert (found.code, found.out) == (2, "")
    assert found.err == (
        "Error: --times times.json is not the output of hotrow compare --json: it has no "
        "comparisons\n  try: hotrow compare --json > times.json\n"
    )
    assert not (tmp_path / "page.html").exists()


def test_times_of_other_operations_are_an_error(learn: Run, tmp_path: Path) -> None:
    (tmp_path / "times.json").write_text('{"comparisons": [{"operation": "gather"}]}')
    found = learn("--times", "times.json", "--save", "page.html")
    assert (found.code, "it compares other operations than" in found.err) == (2, True)


@pytest.mark.parametrize("name", [*TIMES, "deep.json"])
def test_invalid_times_get_a_message_and_exit_code_2(learn: Run, tmp_path: Path, name: str) -> None:
    if name == "deep.json":
        text = "[" * 100_000
    else:
        matmul, lookup, rows = (*TIMES[name], "4")[:3]
        text = (
            f'{{"comparisons": [{{"rows": {rows}, "columns": 5, "ids_compared": 2, '
            f'"matmul": {{"median_ms": {matmul}}}, "lookup": {{"median_ms": {lookup}}}}}]}}'
        )
    (tmp_path / name).write_text(text)
    found = learn("--times", name)
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith(f"Error: --times {name} is not the output of hotrow compare --json")
    assert "\n  try: hotrow compare --json > times.json" in found.err


UNUSABLE = [
    (["--lang", "fr"], "lang is 'fr', but it must be one of en, zh-CN", None),
    (["--text", "the"], "--text needs a tokenizer", "add --tokenizer tokenizer.json"),
    (["--tensor", "w"], "--tensor needs a table", "add --table model.safetensors"),
    (["--tokenizer", "words.json"], "--tokenizer needs text", "add --text or --table"),
    (["--text", "", "--tokenizer", "words.json"], "the text has no tokens", "pass a text"),
    (["--table", "two.safetensors"], "two.safetensors has 2 tables", None),
    (
        ["--table", "none.safetensors"],
        "the table: none.safetensors cannot be read",
        "check the path",
    ),
    (["--times", "none.json"], "the text: none.json cannot be read", "check the path"),
    (["--times", "words.json"], "--times words.json is not the output", "hotrow compare --json"),
    (["--times", "odd.json"], "--times odd.json is not the output", "hotrow compare --json"),
    (["--times", "one.safetensors"], "", None),
]


@pytest.mark.parametrize(("arguments", "problem", "fix"), UNUSABLE, ids=lambda each: str(each)[:40])
def test_invalid_arguments_get_a_message_and_exit_code_2(
    learn: Run, opened: list[str], arguments: list[str], problem: str, fix: str | None
) -> None:
    found = learn(*arguments)
    assert (found.code, found.out, opened) == (2, "", [])
    assert found.err.startswith(f"Error: {problem}")
    assert fix is None or f"\n  try: {fix}" in found.err


def test_help_shows_examples_and_every_option(learn: Run) -> None:
    out = learn("--help").out
    assert "\n  Examples:\n    hotrow learn\n    hotrow learn --lang zh-CN\n" in out
    for option in ("lang", "text", "tokenizer", "table", "tensor", "times", "save", "print-path"):
        assert re.search(rf"^  --{option} .*[A-Z]", out, re.MULTILINE), option
    assert "--no-open" in out
    assert max(map(len, out.splitlines())) <= 80
