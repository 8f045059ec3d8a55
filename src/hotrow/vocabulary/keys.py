"""Maps from keys to rows: Python's dict for strings, and numba's hash map for integers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from hotrow.errors import HotrowError

Rows = NDArray[np.int64]


class KeyMap(Protocol):
    """The keys of a vocabulary; key number i has row `first_row + i`."""

    first_row: int

    def __len__(self) -> int: ...

    def find(self, keys: Any) -> Rows:
        """Return the row of each key, or -1 if it has none."""

    def append(self, keys: Any) -> None:
        """Assign the next rows to distinct new keys; after an error, nothing has changed."""

    def selected(self, positions: Rows) -> Self:
        """Return a new map with the keys at these positions, in this order."""

    def pick(self, keys: Any, positions: Rows) -> Any:
        """Return the keys at these positions in a batch."""

    def hash(self, keys: Any) -> Rows:
        """Return a non-negative number for each key, the same on every machine."""

    def to_bytes(self, keys: Any) -> bytes:
        """Return the keys as bytes, which differ between any two sequences of keys."""

    def to_list(self) -> list[Any]:
        """Return the keys in the order of their rows."""


class TextKeys:
    """Keys that are strings."""

    def __init__(self, first_row: int, keys: Sequence[str] = ()) -> None:
        self.first_row, self._keys = first_row, list(keys)
        self._rows = {key: first_row + i for i, key in enumerate(self._keys)}

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, keys: list[str]) -> Rows:
        """See `KeyMap`."""
        try:
            return np.fromiter(map(self._rows.__getitem__, keys), np.int64, len(keys))
        except KeyError:
            get = self._rows.get
            return np.fromiter((get(key, -1) for key in keys), np.int64, len(keys))

    def append(self, keys: list[str]) -> None:
        """See `KeyMap`."""
        count = len(self)
        start = self.first_row + count
        try:
            self._rows.update(zip(keys, range(start, start + len(keys)), strict=True))
            self._keys += keys
        except BaseException:
            for key in keys:
                self._rows.pop(key, None)
            del self._keys[count:]
            raise

    def selected(self, positions: Rows) -> Self:
        """See `KeyMap`."""
        return type(self)(self.first_row, [self._keys[i] for i in positions])

    def pick(self, keys: list[str], positions: Rows) -> list[str]:
        """See `KeyMap`."""
        return [keys[i] for i in positions]

    def hash(self, keys: list[str]) -> Rows:
        """See `KeyMap`."""
        return np.fromiter(map(zlib.crc32, map(_encode, keys)), np.int64, len(keys))

    def to_bytes(self, keys: list[str]) -> bytes:
        """See `KeyMap`."""
        return b"".join(len(code).to_bytes(8, "little") + code for code in map(_encode, keys))

    def to_list(self) -> list[str]:
        """See `KeyMap`."""
        return list(self._keys)


def _encode(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


class IntegerKeys:
    """Keys that are int64 numbers."""

    def __init__(self, first_row: int, keys: Rows | None = None) -> None:
        # imports numba, which takes a while
        from hotrow.kernels.cpu.keys import empty_map, find_rows, insert_keys

        self.first_row, self._keys = first_row, np.empty(0, np.int64)
        self._find, self._insert = find_rows, insert_keys
        self._empty_map: Any = empty_map
        self._count, self._rows = 0, self._empty_map()  # type: ignore[no-untyped-call]
        none = np.empty(0, np.int64)
        self.append(none if keys is None else keys)
        # Compile the kernel here: later calls hold a lock for which forks wait, and the files of
        # compiled kernels have another such lock.
        self.find(none)

    def __reduce__(self) -> tuple[Any, ...]:
        # numba's map cannot be pickled or copied.
        return type(self), (self.first_row, self._keys[: self._count])

    def __len__(self) -> int:
        return self._count

    def find(self, keys: Rows) -> Rows:
        """See `KeyMap`."""
        rows = np.empty(len(keys), np.int64)
        self._find(self._rows, keys, rows)
        return rows

    def append(self, keys: Rows) -> None:
        """See `KeyMap`."""
        count = self._count + len(keys)
        if count > len(self._keys):  # double the memory, so that many small additions are fast
            self._keys = np.concatenate([self._keys, np.empty(count, np.int64)])
        try:
            self._insert(self._rows, keys, self.first_row + self._count)
        except BaseException:
            self._rows = self._empty_map()
            self._insert(self._rows, self._keys[: self._count], self.first_row)
            raise
        self._keys[self._count : count] = keys
        self._count = count

    def selected(self, positions: Rows) -> Self:
        """See `KeyMap`."""
        return type(self)(self.first_row, self._keys[: self._count][positions])

    def pick(self, keys: Rows, positions: Rows) -> Rows:
        """See `KeyMap`."""
        return keys[positions]

    def hash(self, keys: Rows) -> Rows:
        """See `KeyMap`."""
        mixed = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # wraps around
        return (mixed >> np.uint64(33)).astype(np.int64)

    def to_bytes(self, keys: Rows) -> bytes:
        """See `KeyMap`."""
        return keys.astype("<i8").tobytes()

    def to_list(self) -> list[int]:
        """See `KeyMap`."""
        return list(self._keys[: self._count].tolist())


def as_text(keys: Any) -> list[str]:
    """Return a batch of string keys as a list."""
    if isinstance(keys, str):
        raise HotrowError("keys is a string, not a batch of strings", fix="pass a list: [key]")
    values = keys.tolist() if isinstance(keys, np.ndarray) else list(keys)
    if not set(map(type, values)) <= {str}:
        position = next(i for i, key in enumerate(values) if type(key) is not str)
        raise HotrowError(
            f"keys[{position}] is {values[position]!r}, but this vocabulary has string keys",
            fix="pass strings, or create a vocabulary with integer keys",
        )
    return values


def as_integers(keys: Any) -> Rows:
    """Return a batch of integer keys as int64."""
    try:
        values = np.asarray(keys)
    except ValueError as error:
        raise HotrowError(f"keys cannot be converted to an array ({error})") from None
    if values.ndim > 1:
        raise HotrowError(
            f"keys is a nested {type(keys).__name__}, whose shape the ids would not have",
            fix="pass an array or a tensor",
        )
    if not values.size:
        values = values.astype(np.int64)
    if values.dtype.kind != "i":
        raise HotrowError(
            f"keys is an array of {values.dtype}, but this vocabulary has int64 keys",
            fix="pass int64 numbers, or create a vocabulary with string keys",
        )
    # Without read-only or unaligned arrays, there is one version of each kernel.
    return np.require(values.reshape(-1), np.int64, ["C", "A", "W"])
