"""The `Vocabulary`, which assigns rows to keys and grows the layers that store the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from hotrow.errors import HotrowError
from hotrow.ids import check_count
from hotrow.vocabulary.key_file import read_keys, write_keys
from hotrow.vocabulary.keys import IntegerKeys, KeyMap, Rows, TextKeys, as_integers, as_text
from hotrow.vocabulary.layers import find_layers
from hotrow.vocabulary.resizing import Init, resize, take
from hotrow.vocabulary.states import check_owner, unwrap

UNKNOWN = "error", "row", "hash"
EVICTION = "idle", "count"


class Vocabulary:
    """Rows for keys, which are strings or int64 numbers, such as item names or user numbers.

    `admit` returns the ids of a batch of keys for training. It assigns rows to new keys, so the
    layers grow. `look_up` returns the ids for evaluation, and changes nothing. `evict` drops the
    rows of keys that are no longer used. Keys get rows in the order in which they are admitted.

    Training with a growing vocabulary gives the same result as dense training with all rows from
    the start, if the optimizer doesn't change rows that no batch has touched yet. This is true
    for all optimizers without weight decay, except ASGD.

    Args:
        layer: an embedding layer with the rows for unknown keys, followed by a row for each known
            key; or a list of layers with the same rows, such as an item's vector and its bias. See
            `hotrow.vocabulary.resize`.
        optimizer: the optimizer that trains the layers, or None if there is none yet. You
            can set the attribute `optimizer` later.
        keys: the distinct keys that already have a row in the layer, in the order of their rows.
        key_type: `str` or `int`.
        unknown: what to do with a key that has no row. "error" raises an error. "row" uses row 0,
            and "hash" uses one of the first `unknown_rows` rows, depending on the key's hash.
        unknown_rows: the number of rows at the start of the layer for unknown keys. Defaults to 0
            for "error", and to 1 for "row".
        admit_after: `admit` assigns a row to a key after it has seen the key this many times.
        init: the values of new rows; see `resize`.

    Attributes:
        layers: the layers that grow together.
        optimizer: see the argument.

    Raises:
        HotrowError: before anything changes, if an argument is invalid, a key is repeated, the
            layer has the wrong number of rows, or a key has no row and `unknown` is "error".

    Cost: with a million keys, a batch of 16,384 int64 keys takes 0.8 ms if a few keys are frequent,
    and 2 ms if all are equally frequent. With string keys, these times are 4 ms and 12 ms.
    Of that, Python takes 1 ms to hash the keys. Each row takes 16 bytes for its counts, in addition
    to the key itself.

    >>> import torch, hotrow
    >>> layer = hotrow.convert(torch.nn.Embedding(1, 4), min_entries=0)
    >>> optimizer = hotrow.optim.AdamW(layer.parameters())
    >>> words = hotrow.vocabulary.Vocabulary(layer, optimizer, unknown="row")
    >>> words.admit(["the", "cat", "the"])
    tensor([1, 2, 1])
    >>> words.look_up(["cat", "dog"])
    tensor([2, 0])
    >>> layer
    Embedding(3, 4)
    """

    def __init__(
        self,
        layer: nn.Module | Sequence[nn.Module],
        optimizer: Any = None,
        keys: Sequence[str] | Sequence[int] = (),
        *,
        key_type: type[str] | type[int] = str,
        unknown: Literal["error", "row", "hash"] = "error",
        unknown_rows: int | None = None,
        admit_after: int = 1,
        init: Init | None = None,
    ) -> None:
        self.layers = [layer] if isinstance(layer, nn.Module) else list(layer)
        self.optimizer, self._init = optimizer, init
        self.unknown, self.admit_after = unknown, check_count("admit_after", admit_after)
        first_row = _check_policy(unknown, unknown_rows, admit_after)
        if key_type not in (str, int):
            raise HotrowError(f"key_type is {key_type!r}, but it must be str or int")
        self.key_type = key_type
        values = self._as_keys(keys)
        repeated = [key for key, count in Counter(_to_list(values)).items() if count > 1]
        if repeated:
            raise HotrowError(f"keys contains {repeated[0]!r} twice", fix="list each key once")
        for each in self.layers:
            found = find_layers(each).row_count
            if found != first_row + len(values):
                raise HotrowError(
                    f"the layer has {found} rows, but the vocabulary needs "
                    f"{first_row + len(values)}: {first_row} for unknown keys and {len(values)} "
                    "for keys",
                    fix="create a layer with that many rows, or call hotrow.vocabulary.resize",
                )
        self._keys: KeyMap = (TextKeys if key_type is str else IntegerKeys)(first_row, values)
        # For each row, how often `admit` has seen it, and the number of the last batch that
        # contained it.
        self._seen = np.zeros((2, len(self)), np.int64)
        self._batch_count = 0
        self._pending: Counter[Any] = Counter()

    def __len__(self) -> int:
        """The number of rows, including the rows for unknown keys."""
        return self._keys.first_row + len(self._keys)

    def __contains__(self, key: str | int) -> bool:
        return bool(self._keys.find(self._as_keys([key]))[0] >= 0)

    @property
    def unknown_rows(self) -> int:
        """The number of rows for unknown keys."""
        return self._keys.first_row

    def keys(self) -> list[Any]:
        """Return all keys with a row; the first key has row `unknown_rows`."""
        return self._keys.to_list()

    @property
    def counts(self) -> Tensor:
        """How often `admit` has seen each row, (V,) int64."""
        return torch.from_numpy(self._seen[0, : len(self)].copy())

    @property
    def idle_batches(self) -> Tensor:
        """The number of batches that `admit` has seen since it last saw each row, (V,) int64."""
        return torch.from_numpy(self._batch_count - self._seen[1, : len(self)])

    def look_up(self, keys: Any) -> Tensor:
        """Return the ids of keys, without changing the vocabulary.

        Args:
            keys: a list, an array or an int64 tensor of any shape.

        Returns:
            int64 ids, with the shape of `keys`.

        Raises:
            HotrowError: a key has the wrong type, or has no row and `unknown` is "error".
        """
        values = self._as_keys(keys)
        rows = self._keys.find(values)
        self._fill_unknown(values, rows)
        return _like(rows, keys)

    def admit(self, keys: Any) -> Tensor:
        """Return the ids of keys, after assigning rows to new keys.

        The layers grow when a key has been seen `admit_after` times. Call this method before the
        forward pass.

        Args:
            keys: a list, an array or an int64 tensor of any shape.

        Returns:
            int64 ids, with the shape of `keys`.

        Raises:
            HotrowError: a key has the wrong type, or the layers can't grow; see `resize`.
        """
        values = self._as_keys(keys)
        rows = self._keys.find(values)
        is_unknown = rows < 0
        if is_unknown.any():
            positions = np.flatnonzero(is_unknown)
            unknown = self._keys.pick(values, positions)
            if new := self._choose_new(unknown):
                self._grow(len(self) + len(new))
                self._keys.append(self._as_keys(new))
                rows[positions] = self._keys.find(unknown)
            self._fill_unknown(values, rows)
        self._batch_count += 1
        np.add.at(self._seen[0], rows, 1)
        self._seen[1, rows] = self._batch_count
        return _like(rows, keys)

    def evict(self, rows: int, by: Literal["idle", "count"] = "idle") -> Tensor:
        """Drop keys and their rows until the given number of rows is left.

        The rows for unknown keys, padding rows and frozen rows are never dropped. Remaining rows
        keep their order, values and optimizer state.

        Args:
            rows: the number of rows to keep, including the rows for unknown keys.
            by: "idle" drops the rows that `admit` has not seen for the longest time, and "count"
                drops the rows that it has seen least often. Among tied rows, the
                oldest are dropped first.

        Returns:
            (V,) int64: the new id of each old id, or -1 if its row was dropped.

        Raises:
            HotrowError: before anything changes, if an argument is invalid, or more than `rows`
                rows must stay.
        """
        if by not in EVICTION:
            raise HotrowError(f"by is {by!r}, but it must be 'idle' or 'count'")
        drop_count = len(self) - check_count("rows", rows)
        order = self._eviction_order(by)
        if drop_count > len(order):
            raise HotrowError(
                f"rows is {rows}, but {len(self) - len(order)} rows must stay: the rows for "
                "unknown keys, padding rows and frozen rows",
                fix="keep more rows, or call hotrow.vocabulary.unfreeze",
            )
        if drop_count <= 0:
            return torch.arange(len(self))
        is_kept = np.ones(len(self), np.bool_)
        is_kept[order[:drop_count]] = False
        kept = np.flatnonzero(is_kept)
        self._check_layers()
        for layer in self.layers:
            remap = take(layer, torch.from_numpy(kept), self.optimizer)
        self._keys.select(kept[kept >= self.unknown_rows] - self.unknown_rows)
        self._seen = self._seen[:, kept]
        return remap

    def next_evicted(self, count: int, by: Literal["idle", "count"] = "idle") -> list[Any]:
        """Return the keys that `evict` would drop first, without dropping them."""
        keys, order = self.keys(), self._eviction_order(by)[:count]
        return [keys[row] for row in (order - self.unknown_rows).tolist()]

    def _eviction_order(self, by: str) -> Rows:
        """Return the rows that may be evicted, in the order in which they would be dropped."""
        may_go = np.arange(len(self)) >= self.unknown_rows
        for layer in self.layers:
            layers = find_layers(layer)
            may_go[torch.cat([layers.padding_rows(), layers.frozen_rows().cpu()]).numpy()] = False
        candidates = np.flatnonzero(may_go)
        seen = self._seen[EVICTION[::-1].index(by), candidates]
        return candidates[np.argsort(seen, kind="stable")]

    def save(self, path: str | Path) -> None:
        """Write the keys, their counts and the options to a safetensors file.

        If writing fails, an existing file remains unchanged. Save the model and the optimizer with
        `state_dict()` as usual.

        Raises:
            HotrowError: the file can't be written.
        """
        arrays = {
            "keys": self._as_keys(self.keys()),
            "pending_keys": self._as_keys(list(self._pending)),
            "pending_counts": np.array(list(self._pending.values()), np.int64),
            "seen": self._seen[:, : len(self)],
        }
        options = {
            "unknown": self.unknown,
            "unknown_rows": self.unknown_rows,
            "admit_after": self.admit_after,
            "batch_count": self._batch_count,
        }
        write_keys(path, arrays, options)

    @classmethod
    def load(
        cls,
        path: str | Path,
        layer: nn.Module | Sequence[nn.Module],
        optimizer: Any = None,
        *,
        init: Init | None = None,
    ) -> Self:
        """Read a vocabulary from a file that `save` wrote, and resize the layers to match it.

        After this call, load the model's and the optimizer's `state_dict()`.

        Args:
            path: the file.
            layer: see the class.
            optimizer: see the class.
            init: the values of new rows; see `resize`.

        Raises:
            HotrowError: before anything changes, if the file can't be read, was not written by
                `save`, or is damaged.
        """
        key_type, arrays, options = read_keys(path)
        keys = arrays["keys"]
        self = cls.__new__(cls)
        self.layers = [layer] if isinstance(layer, nn.Module) else list(layer)
        self.optimizer, self._init, self.key_type = optimizer, init, key_type
        self.unknown, self.admit_after = options["unknown"], options["admit_after"]
        _check_policy(self.unknown, options["unknown_rows"], self.admit_after)
        self._keys = (TextKeys if key_type is str else IntegerKeys)(options["unknown_rows"], keys)
        self._seen, self._batch_count = arrays["seen"].copy(), options["batch_count"]
        pending = zip(
            _to_list(arrays["pending_keys"]), arrays["pending_counts"].tolist(), strict=True
        )
        self._pending = Counter(dict(pending))
        self._resize_layers(len(self))
        return self

    def _as_keys(self, keys: Any) -> Any:
        """Return a batch of keys as a flat list of strings, or as a flat int64 array."""
        if isinstance(keys, Tensor):
            keys = keys.cpu().numpy()
        if isinstance(keys, np.ndarray):
            keys = keys.reshape(-1)
        return as_text(keys) if self.key_type is str else as_integers(keys)

    def _choose_new(self, unknown: Any) -> list[Any]:
        """Count unknown keys, and return those that get a row, in order of first appearance."""
        if self.admit_after == 1:
            return list(dict.fromkeys(_to_list(unknown)))
        if not self.admit_after:
            return []
        self._pending.update(_to_list(unknown))
        batch = dict.fromkeys(_to_list(unknown))
        new = [key for key in batch if self._pending[key] >= self.admit_after]
        for key in new:
            del self._pending[key]
        return new

    def _grow(self, rows: int) -> None:
        self._resize_layers(rows)
        if rows > self._seen.shape[1]:  # double the memory, so that growing in small steps is fast
            spare = np.zeros((2, rows), np.int64)
            self._seen = np.concatenate([self._seen, spare], axis=1)

    def _check_layers(self) -> None:
        """Raise an error if one of the layers can't change, before any of them has changed."""
        for layer in self.layers:
            weight = find_layers(layer).weight
            check_owner(unwrap(self.optimizer), weight)

    def _resize_layers(self, rows: int) -> None:
        self._check_layers()
        for layer in self.layers:
            if find_layers(layer).row_count != rows:
                resize(layer, rows, self.optimizer, init=self._init)

    def _fill_unknown(self, keys: Any, rows: Rows) -> None:
        """Replace each -1 in `rows` according to the policy for unknown keys."""
        positions = np.flatnonzero(rows < 0)
        if not len(positions):
            return
        if self.unknown == "error":
            position = int(positions[0])
            raise HotrowError(
                f"keys[{position}] is {_to_list(keys)[position]!r}, which has no row",
                fix="call admit, or create the vocabulary with unknown='row' or 'hash'",
            )
        rows[positions] = 0
        if self.unknown == "hash":
            hashes = self._keys.hash(self._keys.pick(keys, positions))
            rows[positions] = hashes % self.unknown_rows


def _check_policy(unknown: str, unknown_rows: int | None, admit_after: int) -> int:
    """Return the number of rows for unknown keys."""
    if unknown not in UNKNOWN:
        raise HotrowError(f"unknown is {unknown!r}, but it must be 'error', 'row' or 'hash'")
    if unknown == "error":
        if unknown_rows:
            raise HotrowError(
                f"unknown_rows is {unknown_rows}, but unknown='error' needs no rows",
                fix="omit unknown_rows, or pass unknown='hash'",
            )
        if admit_after != 1:
            raise HotrowError(
                f"admit_after is {admit_after}, but with unknown='error' every new key needs a row",
                fix="pass unknown='row' or 'hash'",
            )
        return 0
    count = 1 if unknown_rows is None and unknown == "row" else unknown_rows
    if (
        count is None
        or check_count("unknown_rows", count) < 1
        or (unknown, count > 1) == ("row", True)
    ):
        raise HotrowError(
            f"unknown_rows is {unknown_rows}, but unknown={unknown!r} needs "
            + ("one row" if unknown == "row" else "at least one row"),
            fix="pass the number of rows for unknown keys",
        )
    return count


def _to_list(keys: Any) -> list[Any]:
    return list(keys.tolist()) if isinstance(keys, np.ndarray) else list(keys)


def _like(rows: Rows, keys: Any) -> Tensor:
    """Return the ids with the shape and the device of the keys."""
    ids = torch.from_numpy(rows)
    if isinstance(keys, Tensor | np.ndarray):
        ids = ids.reshape(keys.shape)
    return ids.to(keys.device) if isinstance(keys, Tensor) else ids
