"""Attack targets: functions that pass untrusted data to hotrow.

A target reads bytes as if they were a user's file. It returns if hotrow reads them correctly, and
raises `HotrowError` if hotrow rejects them. Anything else is a bug: another exception, a result
that differs from that of independent code, or a write outside the folder.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import hotrow
from hotrow import HotrowError, disk
from hotrow.cli import learn
from hotrow.inputs import files, loader
from hotrow.inputs.tokenizer import open_tokenizer
from hotrow.lesson import times
from hotrow.vocabulary import Vocabulary
from tests.attacks.state_dicts import load_state
from tests.disk.folders import change_record, make_folder

Target = Callable[[bytes], object]
TARGETS: dict[str, Target] = {}
REST = b"\x80\x02}X\x04\0\0\0stepK\x04s."  # the pickle program of {"step": 4}
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def target(function: Target) -> Target:
    """Add a function to `TARGETS`."""
    TARGETS[function.__name__] = function
    return function


@cache
def workplace() -> Path:
    """Return a folder for the files; its parent folder must never change."""
    outside = Path(tempfile.mkdtemp(prefix="hotrow-attack-"))
    (outside / "untouched").write_text("untouched")
    (outside / "inside").mkdir()
    os.environ["XDG_CACHE_HOME"] = str(outside / "inside")
    return outside / "inside"


def write(name: str, data: bytes) -> Path:
    """Write a file for a target to read."""
    path = workplace() / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def attack(name: str, data: bytes) -> bool:
    """Let a target read the data, and return whether hotrow accepts the data."""
    outside = workplace().parent
    try:
        TARGETS[name](data)
        return True
    except HotrowError:
        return False
    finally:
        assert sorted(os.listdir(outside)) == ["inside", "untouched"]
        assert (outside / "untouched").read_text() == "untouched"


# --- Tables and inputs ---------------------------------------------------------------------------


@target
def table(data: bytes) -> None:
    """Read a table from a safetensors file, and compare it with the file's bytes."""
    name, values = files.read_table(write("table.safetensors", data))
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])[name]
    assert list(values.shape) == entry["shape"]
    begin, end = (8 + length + offset for offset in entry["data_offsets"])
    if entry["dtype"] in DTYPES:
        expected = np.frombuffer(data[begin:end], DTYPES[entry["dtype"]]).reshape(values.shape)
        assert values.numpy().tobytes() == expected.tobytes()


@target
def inputs(data: bytes) -> None:
    """Read a model's inputs from a safetensors file."""
    read_all(loader.load_inputs(str(write("inputs.safetensors", data))))


@target
def checkpoint_file(data: bytes) -> None:
    """Read a model's inputs from a .pt file."""
    read_all(loader.load_inputs(str(write("inputs.pt", data))))


@target
def checkpoint(data: bytes) -> None:
    """Read a model's inputs from a .pt file with this pickle program."""
    checkpoint_file(checkpoint_with(data))


def checkpoint_with(program: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a .pt file with this pickle program and two storages."""
    values = struct.pack("<4q", 0, 1, 2, 3)
    contents = {"data.pkl": program, "byteorder": b"little", "version": b"3\n"}
    contents |= {"data/0": values, "data/1": values}
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in contents.items():
            file.writestr(zipfile.ZipInfo(f"archive/{name}"), content, compression)
    return archive.getvalue()


def read_all(contents: Any) -> None:
    """Read all values of tensors, so that an index out of bounds ends the process."""
    if isinstance(contents, torch.Tensor):
        if contents.numel() < 1_000_000:
            str(contents.to_dense() if contents.layout != torch.strided else contents)
    elif isinstance(contents, dict):
        read_all([*contents.keys(), *contents.values()])
    elif isinstance(contents, list | tuple | set):
        for each in contents:
            read_all(each)


# --- Texts, ids, tokenizers and times ------------------------------------------------------------


@target
def ids(data: bytes) -> None:
    """Read ids from a text file, and compare them with the result of another parser."""
    text = files.read_text(write("ids.txt", data))
    found = files.parse_ids(text, "ids.txt")
    words = re.split(r"[,\s]+", data.decode("utf-8-sig"))
    assert found == [int(word) for word in words if word]


@target
def tokenizer(data: bytes) -> None:
    """Read a tokenizer, and convert a text to ids."""
    with open_tokenizer(write("tokenizer.json", data), 1000, "the table") as found:
        tokens = found.encode("the same numbers, aaaaaaaaaaaaaaaaaaaaaaaab 词元")
        assert len(tokens.ids) == len(tokens.texts)
        assert all(0 <= id < 1 << 32 for id in tokens.ids)
        assert len(found.token_texts(range(5))) == 5


@target
def saved_times(data: bytes) -> None:
    """Read the times that `hotrow bench` saved; the lesson ignores times that it can't read."""
    write("hotrow/times.json", data)
    found = times.load_times()
    assert all(0 < each.lookup_ms < float("inf") for each in found)
    json.dumps([each.__dict__ for each in found], allow_nan=False)
    if found:
        times.save_times(found)
        by_size = {(each.V, each.D, each.N): each for each in found}  # a size may occur twice
        assert times.load_times() == list(by_size.values())


@target
def compared_times(data: bytes) -> None:
    """Read the output of `hotrow compare --json`."""
    found = learn._read_timings(str(write("compared.json", data)))
    json.dumps([each.__dict__ for each in found], allow_nan=False)


# --- Folders of tables ---------------------------------------------------------------------------


@cache
def saved_folder() -> dict[str, bytes]:
    """Return the files of a folder with a saved table; the names of its saves are fixed."""
    names = (f"{number:032x}" for number in range(100))
    with (
        tempfile.TemporaryDirectory() as parent,
        mock.patch("hotrow.disk.creation.new_name", side_effect=names),
        mock.patch("hotrow.disk.store.new_name", side_effect=names),
    ):
        folder = make_folder(Path(parent, "table"))
        rest = checkpoint_with(REST)  # the bytes of torch.save depend on torch's version
        (folder / "rest.pt").write_bytes(rest)
        change_record(folder, rest=[len(rest), zlib.crc32(rest)])
        return {each.name: each.read_bytes() for each in folder.iterdir()}


def open_folder(name: str, data: bytes) -> None:
    """Open a folder with this file; then read, train and save the table."""
    folder = workplace() / "table"
    folder.mkdir(exist_ok=True)
    for each, content in (saved_folder() | {name: data}).items():
        (folder / each).write_bytes(content)
    try:
        with disk.open(folder) as store:
            optimizer = hotrow.optim.Adam(store.layer.parameters(), lr=0.05)
            store.layer.weight.sum()
            store.layer(torch.tensor([0, store.layer.num_embeddings - 1])).sum().backward()
            optimizer.step()
            expected = store.layer.weight.detach().clone()
            store.save({"step": 5})
        with disk.open(folder) as store:
            assert torch.equal(store.layer.weight.isnan(), expected.isnan())
            assert torch.equal(store.layer.weight.nan_to_num(), expected.nan_to_num())
            assert store.rest == {"step": 5}
        disk.verify(folder)
    finally:
        assert {each.name for each in folder.iterdir()} <= {*saved_folder(), name}
        for each in folder.iterdir():
            each.unlink()


@target
def record(data: bytes) -> None:
    """Open a folder with this `run.json`; if it is a JSON object, correct its checksum first."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        found.pop("checksum", None)
        checksum = zlib.crc32(json.dumps(found, sort_keys=True).encode())
        data = json.dumps(found | {"checksum": checksum}).encode()
    open_folder("run.json", data)


@target
def journal(data: bytes) -> None:
    """Open a folder with this journal and its correct hash."""
    open_folder("journal", data + hashlib.sha256(data).digest())


@target
def header(data: bytes) -> None:
    """Open a folder whose table starts with these bytes."""
    whole = saved_folder()["weight.safetensors"]
    open_folder("weight.safetensors", (data + whole[len(data) :])[: len(whole)])


@target
def beside_table(data: bytes) -> None:
    """Read a table from a folder that also contains this `run.json`."""
    write("beside/run.json", data)
    files.read_table(write("beside/weight.safetensors", saved_folder()["weight.safetensors"]))


# --- Vocabularies and state dicts ----------------------------------------------------------------


@target
def vocabulary(data: bytes) -> None:
    """Read a vocabulary, save it, and read it again."""
    layer = torch.nn.Embedding(3, 2)
    found = Vocabulary.load(write("keys.safetensors", data), layer)
    assert len(layer.weight) == len(found)
    path = workplace() / "again.safetensors"
    found.save(path)
    again = Vocabulary.load(path, torch.nn.Embedding(3, 2))
    assert again.keys() == found.keys()
    found.admit(found.keys()[:2])


TARGETS["state"] = load_state
