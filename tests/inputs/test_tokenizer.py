"""Test converting text to ids, and the limits on a tokenizer's memory and time."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from hotrow import HotrowError
from hotrow.inputs import tokenizer_process
from hotrow.inputs.tokenizer import open_tokenizer
from tests.support.exhaustive import exhaustive

VOCABULARY = {"[UNK]": 0, "the": 1, "same": 2, "numbers": 3}


def tokenizer_file(folder: Path, **changes: Any) -> Path:
    tokenizer = Tokenizer(WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.enable_truncation(max_length=3)
    tokenizer.enable_padding(length=10, pad_token="[UNK]")
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(tokenizer.to_str()) | changes))
    return path


@pytest.mark.parametrize(
    "text", ["the same numbers the same numbers", "the", ""], ids=["long", "short", "empty"]
)
def test_tokenizer_neither_truncates_nor_pads(tmp_path: Path, text: str) -> None:
    with open_tokenizer(tokenizer_file(tmp_path), 4, "the table") as tokenizer:
        tokens = tokenizer.encode(text)
    assert tokens.ids == [VOCABULARY[word] for word in text.split()]
    assert tokens.texts == tuple(text.split())


def test_token_of_an_id_outside_the_vocabulary_is_a_question_mark(tmp_path: Path) -> None:
    with open_tokenizer(tokenizer_file(tmp_path), 4, "the table") as tokenizer:
        texts = tokenizer.token_texts([3, 7, -1, 2**32, 2**64, -(2**70)])
    assert texts == ("numbers", "?", "?", "?", "?", "?")


def test_tokenizer_with_more_ids_than_table_rows_raises(tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path)
    with (
        pytest.raises(HotrowError, match=r"ids up to 3, but wte has 3 rows \(valid ids: 0\.\.2\)"),
        open_tokenizer(path, 3, "wte"),
    ):
        pass
    added = {"id": 4, "content": "<x>", "special": True, "normalized": False}
    added |= {"single_word": False, "lstrip": False, "rstrip": False}
    path = tokenizer_file(tmp_path, added_tokens=[added])
    with (
        pytest.raises(HotrowError, match="has ids up to 4, but wte has 4 rows"),
        open_tokenizer(path, 4, "wte"),
    ):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {"type": "Magic"}}', "\x80"])
def test_invalid_tokenizer_file_raises(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text, encoding="latin-1")
    with (
        pytest.raises(HotrowError, match=r"tokenizer.json cannot be read as a tokenizer \("),
        open_tokenizer(path, 4, "the table"),
    ):
        pass


def encode(path: Path, text: str) -> None:
    with open_tokenizer(path, None, "the table") as tokenizer:
        tokenizer.encode(text)


def split_by(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def test_panic_in_the_tokenizers_library_is_an_error_with_one_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tokenizer_file(tmp_path, pre_tokenizer=split_by("(a+)+$"))
    with pytest.raises(HotrowError, match=r"tokenizer.json cannot convert the text to ids \(Panic"):
        encode(path, "a" * 40 + "b")
    assert capfd.readouterr() == ("", "")


def test_tokenizer_without_its_unknown_token_is_an_error(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"the": 0}, "unk_token": "[UNK]"}
    path = tokenizer_file(tmp_path, model=model)
    with pytest.raises(HotrowError, match=r"tokenizer.json cannot convert .*Missing \[UNK\] token"):
        encode(path, "the other")


@exhaustive
def test_tokenizer_that_multiplies_the_text_runs_out_of_memory_alone(tmp_path: Path) -> None:
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    normalizer = {"type": "Sequence", "normalizers": [double] * 60}
    path = tokenizer_file(tmp_path, normalizer=normalizer)
    before = psutil.Process().memory_info().rss
    with pytest.raises(HotrowError, match="it needs more than 4 GB of memory"):
        encode(path, "a")
    assert psutil.Process().memory_info().rss - before < 100_000_000


def multiply(*factors: int) -> dict[str, Any]:
    """Return a normalizer that repeats each "a", once with each factor."""
    replace = [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "a " * factor}
        for factor in factors
    ]
    return {"type": "Sequence", "normalizers": replace}


def test_few_bytes_of_text_cannot_become_millions_of_tokens(tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path, normalizer=multiply(1000, 150))
    why = "the tokens take 1,500,020 bytes, but the limit for 13 bytes of input is 1,000,000 bytes"
    with pytest.raises(HotrowError, match=why):
        encode(path, "a")


def set_limit(monkeypatch: pytest.MonkeyPatch, folder: Path, old: str, new: str) -> None:
    """Make the tokenizer process run a copy of its script with another limit."""
    source, script = Path(tokenizer_process.__file__).read_text(), folder / "process.py"
    script.write_text(source.replace(f"{old}\n", f"{new}\n"))
    assert f"{new}\n" in script.read_text()
    monkeypatch.setattr(tokenizer_process, "__file__", str(script))


def test_size_of_the_tokens_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limit(monkeypatch, tmp_path, "REPLY_BYTES = 128_000_000", "REPLY_BYTES = 1_500_000")
    path = tokenizer_file(tmp_path)
    encode(path, "the " * 100_000)
    with pytest.raises(HotrowError, match="the limit for 1,200,012 bytes of input is 1,500,000"):
        encode(path, "the " * 300_000)


def test_tokens_of_repeated_bytes_are_within_the_limit(tmp_path: Path) -> None:
    """A token for each byte, with a name like <0xE4>, is more than real tokenizers need."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True}
    path = tokenizer_file(tmp_path, model=model, pre_tokenizer=None)
    with open_tokenizer(path, None, "it") as tokenizer:
        tokens = tokenizer.encode("词元" * 50_000)
    assert len(tokens.ids) == 300_000
    assert tokens.texts[:3] == ("<0xE8>", "<0xAF>", "<0x8D>")


def test_time_of_a_tokenizer_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limit(monkeypatch, tmp_path, "CPU_SECONDS = 60", "CPU_SECONDS = 1")
    # WordPiece's time is cubic in the length of a word.
    model = {"type": "WordPiece", "vocab": {"x": 0, "##x": 1, "[UNK]": 2}, "unk_token": "[UNK]"}
    model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 10**6}
    path = tokenizer_file(tmp_path, model=model)
    with pytest.raises(HotrowError, match="cannot convert the text to ids: it takes more than"):
        encode(path, "x" * 100_000)


def test_process_ends_with_the_tokenizer(tmp_path: Path) -> None:
    children = set(psutil.Process().children())
    with open_tokenizer(tokenizer_file(tmp_path), 4, "the table") as tokenizer:
        (child,) = set(psutil.Process().children()) - children
        assert tokenizer.largest_id == 3
    assert not child.is_running()


@exhaustive
def test_file_in_the_current_folder_does_not_replace_a_library(tmp_path: Path) -> None:
    for name in ("tokenizers", "json", "struct", "resource"):
        (tmp_path / f"{name}.py").write_text("open('sprung', 'w')\nraise ImportError\n")
    tokenizer_file(tmp_path)
    code = (
        "import sys; from hotrow.inputs.tokenizer import open_tokenizer\n"
        "with open_tokenizer('tokenizer.json', 4, 'it') as found: print(found.encode('the').ids)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "[1]\n", done.stderr
    assert not (tmp_path / "sprung").exists()


def test_a_tokenizer_process_that_ended_is_an_error(tmp_path: Path) -> None:
    def kill_and_encode() -> None:
        with open_tokenizer(tokenizer_file(tmp_path), 4, "the table") as tokenizer:
            tokenizer._process.kill()
            tokenizer._process.wait()
            tokenizer.encode("the")

    with pytest.raises(HotrowError, match=r"tokenizer\.json cannot convert the text to ids"):
        kill_and_encode()
