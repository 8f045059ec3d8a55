"""Mutate the bytes of a file: its JSON, its length fields, or arbitrary bytes."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2, 0.5, -0.0, 1e-320, 1e308, 255, 2**31, 2**53, 2**63, 2**64, 10**30),
    *(None, True, False, "", "x", "../x", "/etc/passwd", "\0", "\ud800", "\u202e", "9" * 5000),
    *([], {}, [[]], [0] * 100, {"": 0}, "F32", "I64", "BF16", "F8_E4M3", "BPE", "Adam", "SGD"),
    *("(a+)+$", "\\p{L}", "a" * 1000, float("nan"), float("inf")),
)
TOKENS = (
    *(b"\0", b"\xff", b"\x80", b'"', b"{", b"}", b"[", b"]", b",", b":", b"-", b".", b"\n", b"\r"),
    *(b"NaN", b"Infinity", b"null", b"true", b"1e999", b"9" * 20, b"\xef\xbb\xbf", b"\\ud800"),
    *(struct.pack("<Q", number) for number in (0, 1, 8, 1 << 31, 1 << 62, (1 << 64) - 1)),
    *(b"\x85R", b"\x86R", b"\x87R", b"tR", b"h\0", b"q\0", b"K\x07", b"J\xff\xff\xff\x7f"),
)


def mutate(data: bytes, chance: random.Random, most: int = 1 << 16) -> bytes:
    """Return the data with a few random changes."""
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        change = chance.choice([_change_json, _change_json, _change_bytes])
        data = change(data, chance)
    return data[:most]


def _change_json(data: bytes, chance: random.Random) -> bytes:
    """Change a value in a JSON document. Its length may come first, as in safetensors files."""
    for begin in (0, 8):
        end = len(data) if not begin else 8 + int.from_bytes(data[:8], "little")
        try:
            document = json.loads(data[begin:end])
            if isinstance(document, dict | list):
                break
        except (ValueError, RecursionError):
            continue
    else:
        return _change_bytes(data, chance)
    _change_value(document, chance)
    text = json.dumps(document).encode()
    if begin:
        return struct.pack("<Q", len(text)) + text + data[end:]
    return text


def _change_value(document: Any, chance: random.Random) -> None:
    owner: Any = [document]
    key: Any = 0
    while True:
        each = owner[key]
        if not isinstance(each, dict | list) or not each or (chance.random() < 0.1):
            break
        owner, key = each, chance.choice(list(each) if isinstance(each, dict) else range(len(each)))
    kind = chance.randrange(6)
    if kind == 0 and key in owner:
        del owner[key]
    elif kind == 1 and isinstance(owner, dict):
        owner[str(chance.choice(VALUES))] = owner[key]
    elif kind == 2 and isinstance(owner, list):
        owner.insert(chance.randrange(len(owner) + 1), each)
    elif kind == 3 and type(each) in (int, float):
        owner[key] = each + chance.choice([-1, 1, 0.5, 100])
    elif kind == 4:
        owner[key] = [each] * chance.choice([1, 2, 50])
    else:
        owner[key] = chance.choice(VALUES)


def _change_bytes(data: bytes, chance: random.Random) -> bytes:
    begin = chance.randrange(len(data) + 1)
    end = min(len(data), begin + chance.choice([0, 1, 1, 2, 4, 8, 100]))
    kind = chance.randrange(4)
    if kind == 0:
        middle = bytes(chance.randrange(256) for _ in range(end - begin))
    elif kind == 1:
        middle = chance.choice(TOKENS)
    elif kind == 2:
        middle = data[begin:end] * chance.choice([0, 2, 3, 50])
    else:
        other = chance.randrange(len(data) + 1)
        middle = data[other : other + chance.choice([1, 8, 60])]
    return data[:begin] + middle + data[end:]
