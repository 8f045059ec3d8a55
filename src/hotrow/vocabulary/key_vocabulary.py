"""The `Vocabulary`, which assigns rows to keys and grows the layers that store the rows."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from hotrow.errors import HotrowError
from hotrow.ids import check_count
from hotrow.kernels.tracing import never_trace
from hotrow.locks import ForkSafeLock
from hotrow.optim.interrupts import PostponedSignals
from hotrow.table.row_change import RowChange
from hotrow.vocabulary.changing import (
    Init,
    agree_on_keys,
    change_rows,
    failing_on_all_ranks,
    spans_processes,
)
from hotrow.vocabulary.counts import Order
from hotrow.vocabulary.key_file import read_keys, write_keys
from hotrow.vocabulary.key_rows import KeyRows, to_list
from hotrow.vocabulary.key_state import Contents, from_state, to_state
from hotrow.vocabulary.keys import KeyMap, Rows, as_integers, as_text
from hotrow.vocabulary.layers import find_layers, is_on_disk
from hotrow.vocabulary.states import check_owner, unwrap
from hotrow.vocabulary.unknown_keys import check_policy

EVICTION = "idle", "count"


class Vocabulary:
    """Rows for keys, which are strings or int64 numbers, such as item names or user numbers.

    `admit` returns the ids of a batch of keys for training. It assigns rows to new keys, so the
    layers grow. `look_up` returns the ids for evaluation, and changes nothing. `evict` drops the
    rows of keys that are no longer used. Keys get rows in the order in which they are admitted.

    Training with a growing vocabulary gives the same result as dense training with all rows from
    the start, if the optimizer doesn't change rows that no batch has touched yet. This is true
    for all optimizers without weight decay, except ASGD, and Rprop with a changing `lr`.

    The saves of two tables on disk are not one transaction. After a crash between them, the tables
    may have rows for different keys; see "What hotrow promises about your data".

    If a layer is sharded or replicated, every rank must have the same keys in the same order, so
    sort the keys of a set. Create the vocabulary, and call `admit`, `evict` and `load`, on every
    rank. If the keys differ, these calls raise an error on every rank; `admit` compares the keys
    when it adds rows.

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
        admit_after: `admit` assigns a row to a key after it has seen the key this many times. With
            0, no new key gets a row.
        init: the values of new rows; see `resize`.

    Attributes:
        layers: the layers that grow together.
        optimizer: see the argument.

    Raises:
        HotrowError: before anything changes, if an argument is invalid, a key is repeated, the
            layer has the wrong number of rows, a key has no row and `unknown` is "error", or the
            ranks of a distributed table have different keys.

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

    # A SHA-256 object that has hashed all keys, or None if no change has needed the hash yet.
    _key_hash: Any = None
    # The process that has started to change the layers, and whether it drops rows.
    _unfinished_change: tuple[int, bool] | None = None
    _change_lock: ForkSafeLock
    _save_lock: ForkSafeLock

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Create the locks of a new, copied or unpickled vocabulary."""
        self = super().__new__(cls)
        # Not the lock of `ExclusiveAccess`, because other threads may compute rows for `init`.
        self._change_lock = ForkSafeLock()
        self._save_lock = ForkSafeLock()
        return self

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
        self.unknown = str(unknown)  # it may be a string of NumPy
        self.admit_after, self.key_type = admit_after, key_type
        with self._failing_on_all_ranks():
            self._set_keys(keys, unknown_rows)
        for each in self.layers:
            weight = find_layers(each).weight
            if spans_processes(weight):
                agree_on_keys(weight, _describe_keys(self._extend_hash(self._rows.keys)))

    def _set_keys(self, keys: Any, unknown_rows: int | None) -> None:
        self.admit_after = check_count("admit_after", self.admit_after)
        first_row = check_policy(self.unknown, unknown_rows, self.admit_after)
        if self.key_type not in (str, int):
            raise HotrowError(f"key_type is {self.key_type!r}, but it must be str or int")
        values = self._as_keys(keys)
        repeated = [key for key, count in Counter(to_list(values)).items() if count > 1]
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
        self._key_rows = KeyRows(first_row, values)

    @property
    def _rows(self) -> KeyRows:
        """The keys and their rows.

        Raises:
            HotrowError: this process was forked while another thread was dropping rows, so the keys
                may have other rows than in the layers.
        """
        change = self._unfinished_change
        if change is not None and change[0] != os.getpid() and change[1]:
            raise _fork_error()
        return self._key_rows

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Let other threads change the vocabulary only before or after the `with` block.

        Raises:
            HotrowError: this thread is already changing the vocabulary, or this process was forked
                while another thread was changing it.
        """
        if self._change_lock.is_held_here:
            raise HotrowError(
                "the vocabulary is already changing, so init can't change it too",
                fix="call admit and evict outside of init",
            )
        with PostponedSignals(), self._change_lock.lock:
            if self._unfinished_change is not None:
                raise _fork_error()
            try:
                yield
            finally:
                self._unfinished_change = None

    @contextmanager
    def _failing_on_all_ranks(self) -> Iterator[None]:
        """Raise an error of the `with` block on all ranks that have the layers."""
        try:
            yield
        except Exception:
            weights = [find_layers(each).weight for each in self.layers]
            with failing_on_all_ranks(list(filter(spans_processes, weights))):
                raise

    def __len__(self) -> int:
        """The number of rows, including the rows for unknown keys."""
        return len(self._rows)

    @never_trace
    def __contains__(self, key: str | int) -> bool:
        return bool(self._rows.find(self._as_keys([key]))[0] >= 0)

    @property
    def unknown_rows(self) -> int:
        """The number of rows for unknown keys."""
        return self._rows.keys.first_row

    @never_trace
    def keys(self) -> list[Any]:
        """Return all keys with a row; the first key has row `unknown_rows`."""
        return self._rows.to_list()

    @property
    @never_trace
    def counts(self) -> Tensor:
        """How often `admit` has seen each row, (V,) int64."""
        return torch.from_numpy(self._rows.seen())

    @property
    @never_trace
    def idle_batches(self) -> Tensor:
        """The number of batches that `admit` has seen since it last saw each row, (V,) int64."""
        return torch.from_numpy(self._rows.idle_batches())

    @never_trace
    def look_up(self, keys: Any) -> Tensor:
        """Return the ids of keys, without changing the vocabulary.

        Other threads may call this method during `admit` and `evict`.

        Args:
            keys: a list, an array or an int64 tensor of any shape.

        Returns:
            int64 ids, with the shape of `keys`.

        Raises:
            HotrowError: a key has the wrong type, or has no row and `unknown` is "error".
        """
        values = self._as_keys(keys)
        rows = self._rows.find(values)
        self._fill_unknown(values, rows)
        return _like(rows, keys)

    @never_trace
    def admit(self, keys: Any) -> Tensor:
        """Return the ids of keys, after assigning rows to new keys.

        The layers grow when a key has been seen `admit_after` times. Call this method before the
        forward pass.

        Args:
            keys: a list, an array or an int64 tensor of any shape.

        Returns:
            int64 ids, with the shape of `keys`.

        Raises:
            HotrowError: a key has the wrong type, other code has changed the number of rows, the
                ranks of a distributed table have different keys, or the layers can't grow; see
                `resize`.
        """
        with self._failing_on_all_ranks():
            values = self._as_keys(keys)
        with self._changing():
            rows = self._rows.find(values)
            positions = np.flatnonzero(rows < 0)
            if len(positions):
                self._admit_unknown(values, rows, positions)
            else:
                self._rows.count(rows)
        return _like(rows, keys)

    @never_trace
    def evict(self, rows: int, by: Order = "idle") -> Tensor:
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
            HotrowError: before anything changes, if an argument is invalid, more than `rows` rows
                must stay, or other code has changed the number of rows.
        """
        with self._changing():
            old_count = len(self)
            with self._failing_on_all_ranks():
                kept = self._kept_rows(rows, by)
            sources = torch.from_numpy(kept)
            if len(kept) < old_count:
                keys = self._rows.keys.selected(kept[self.unknown_rows :] - self.unknown_rows)
                counts = self._rows.counts.selected(kept)
                with self._change_layers(len(kept), keys, sources=sources):
                    pass
                self._rows.replace(keys, counts)
        old_ids = torch.arange(old_count, device="cpu")
        return RowChange(old_count, len(kept), sources).new_ids(old_ids)

    def _kept_rows(self, rows: int, by: Order) -> Rows:
        """Check the arguments of `evict`, and return the old ids of the remaining rows."""
        rows = check_count("rows", rows)
        self._check_row_counts()
        order = self._eviction_order(by)
        if len(self) - rows > len(order):
            raise HotrowError(
                f"rows is {rows}, but {len(self) - len(order)} rows must stay: the rows for "
                "unknown keys, padding rows and frozen rows",
                fix="keep more rows, or call hotrow.vocabulary.unfreeze",
            )
        is_kept = np.ones(len(self), np.bool_)
        is_kept[order[: max(0, len(self) - rows)]] = False
        return np.flatnonzero(is_kept)

    def next_evicted(self, count: int, by: Order = "idle") -> list[Any]:
        """Return the keys that `evict` would drop first, without dropping them."""
        keys, order = self.keys(), self._eviction_order(by)[: check_count("count", count)]
        return [keys[row] for row in (order - self.unknown_rows).tolist()]

    def _eviction_order(self, by: Order) -> Rows:
        """Return the rows that may be evicted, in the order in which they would be dropped."""
        if by not in EVICTION:
            raise HotrowError(f"by is {by!r}, but it must be 'idle' or 'count'")
        may_go = np.arange(len(self)) >= self.unknown_rows
        for layer in self.layers:
            layers = find_layers(layer)
            may_go[torch.cat([layers.padding_rows(), layers.frozen_rows().cpu()]).numpy()] = False
        candidates = np.flatnonzero(may_go)
        return self._rows.sort(candidates, by)

    def save(self, path: str | Path) -> None:
        """Write the keys, their counts and the options to a safetensors file.

        If writing fails, an existing file remains unchanged. If several threads call this method,
        they write one after the other. Save the model and the optimizer with `state_dict()` as
        usual.

        Raises:
            HotrowError: the file can't be written.
        """
        with PostponedSignals(), self._save_lock.lock:
            write_keys(path, *self._contents())

    @never_trace
    def state_dict(self) -> dict[str, Any]:
        """Return the keys, their counts and the options, as `load` reads them.

        To save a vocabulary together with a table on disk, pass this dict to
        `hotrow.disk.Store.save`. If the vocabulary has several tables on disk, pass it to each
        save. Call both in the thread that calls `admit` and `evict`: otherwise, the keys and the
        rows may be from before and after a change.

        Returns:
            A dict of int64 tensors, lists of strings, strings and integers. Later changes of the
            vocabulary don't change the dict.
        """
        return to_state(*self._contents())

    def _contents(self) -> Contents:
        arrays, batch_count = self._rows.to_arrays()
        options = {
            "unknown": self.unknown,
            "unknown_rows": self.unknown_rows,
            "admit_after": self.admit_after,
            "batch_count": batch_count,
        }
        return arrays, options

    @classmethod
    def load(
        cls,
        source: str | Path | Mapping[str, Any],
        layer: nn.Module | Sequence[nn.Module],
        optimizer: Any = None,
        *,
        init: Init | None = None,
    ) -> Self:
        """Load a vocabulary that `save` or `state_dict` saved, and resize the layers to match it.

        After this call, load the model's and the optimizer's `state_dict()`. `load` doesn't resize
        a table on disk, because it already has its rows.

        Args:
            source: the path of the file, or the dict.
            layer: see the class.
            optimizer: see the class.
            init: the values of new rows; see `resize`.

        Raises:
            HotrowError: before anything changes, if the file can't be read, was not written by
                `save`, or is damaged; if the dict is not the result of `state_dict`; if a table on
                disk has another number of rows; or if the layers can't change; see `resize`.
        """
        self = cls.__new__(cls)
        self.layers = [layer] if isinstance(layer, nn.Module) else list(layer)
        self.optimizer, self._init = optimizer, init
        with self._failing_on_all_ranks():
            self._set_contents(
                from_state(source) if isinstance(source, Mapping) else read_keys(source)
            )
        with self._changing(), self._change_layers(len(self), self._rows.keys):
            pass
        return self

    def _set_contents(self, contents: Contents) -> None:
        arrays, options = contents
        self.key_type = str if isinstance(arrays["keys"], list) else int
        self.unknown, self.admit_after = options["unknown"], options["admit_after"]
        check_policy(self.unknown, options["unknown_rows"], self.admit_after)
        self._key_rows = KeyRows.from_arrays(
            arrays, options["unknown_rows"], options["batch_count"]
        )
        self._check_tables_on_disk()

    def _as_keys(self, keys: Any) -> Any:
        """Return a batch of keys as a flat list of strings, or as a flat int64 array."""
        if isinstance(keys, Tensor):
            keys = keys.cpu().numpy()
        if isinstance(keys, np.ndarray):
            keys = keys.reshape(-1)
        return as_text(keys) if self.key_type is str else as_integers(keys)

    def _admit_unknown(self, values: Any, rows: Rows, positions: Rows) -> None:
        """Count a batch, and add rows for the keys that have been seen often enough.

        Arguments:
            values: the keys of the batch.
            rows: the row of each key. The missing rows are written.
            positions: the positions of the keys without a row.
        """
        unknown = self._rows.keys.pick(values, positions)
        new, pending = list(dict.fromkeys(to_list(unknown))), {}  # in order of first appearance
        if not self.admit_after:
            new = []
        elif self.admit_after > 1:
            pending = self._rows.count_pending(unknown)
            new = [key for key in new if pending[key] >= self.admit_after]
        counts = self._rows.counts
        if new:
            with self._failing_on_all_ranks():
                self._check_row_counts()
                counts = counts.grown(len(self) + len(new))
                keys = self._as_keys(new)
        try:
            with self._change_layers(len(counts), self._rows.keys, keys) if new else nullcontext():
                if new:
                    self._rows.append(keys)
                rows[positions] = self._rows.keys.find(unknown)
                self._fill_unknown(values, rows)
        except BaseException:  # the change may have failed on another rank
            self._rows.undo_append()
            raise
        self._rows.complete(new, counts, pending, rows)

    @contextmanager
    def _change_layers(
        self, row_count: int, keys: KeyMap, new: Any = (), sources: Tensor | None = None
    ) -> Iterator[None]:
        """Change the rows of all layers when the `with` block ends; see `change_rows`.

        If the layers are distributed, all ranks must have the same keys, in the same order.

        Arguments:
            row_count: the number of rows after the change.
            keys: the keys after the change, except the new keys.
            new: the new keys.
            sources: see `RowChange`.
        """
        model = nn.ModuleList(self.layers)
        key_hash, description, changes = None, "", []
        with self._failing_on_all_ranks():
            optimizer = unwrap(self.optimizer)
            found = [find_layers(layer, model) for layer in self.layers]
            for each in found:
                check_owner(optimizer, each.weight)
            if any(spans_processes(each.weight) for each in found):
                key_hash = self._extend_hash(keys, new)
                description = _describe_keys(key_hash)
        for each in {id(each.weight): each for each in found}.values():
            if sources is not None or each.row_count != row_count:
                changes.append((each, RowChange(each.row_count, row_count, sources)))
            else:
                agree_on_keys(each.weight, description)
        with change_rows(changes, optimizer, self._init, description):
            self._unfinished_change = os.getpid(), sources is not None
            yield
        self._key_hash = key_hash

    def _extend_hash(self, keys: KeyMap, new: Any = ()) -> Any:
        """Return a SHA-256 object that has hashed all keys, followed by new keys."""
        if keys is self._rows.keys and self._key_hash is not None:
            result = self._key_hash.copy()
        else:
            result = hashlib.sha256(keys.to_bytes(self._as_keys(keys.to_list())))
        result.update(keys.to_bytes(self._as_keys(new)))
        return result

    def __getstate__(self) -> dict[str, Any]:
        # Locks and `hashlib` objects can't be copied or pickled.
        left_out = "_change_lock", "_save_lock", "_key_hash"
        return {k: v for k, v in self.__dict__.items() if k not in left_out}

    def _check_row_counts(self) -> None:
        """Raise an error if other code has added or dropped rows."""
        for layer in self.layers:
            row_count = find_layers(layer).row_count
            if row_count != len(self):
                raise HotrowError(
                    f"the layer has {row_count} rows, but the vocabulary has {len(self)}",
                    fix="change the rows of the layer only with the vocabulary",
                )

    def _check_tables_on_disk(self) -> None:
        """Raise an error if the rows of a table on disk can't be those of the loaded keys."""
        for layer in self.layers:
            found = find_layers(layer)
            if is_on_disk(found.weight) and found.row_count != len(self):
                raise HotrowError(
                    f"the table on disk has {found.row_count} rows, but the vocabulary has "
                    f"{len(self)}",
                    fix="load the keys that were saved together with the table; for a new table, "
                    "call hotrow.vocabulary.resize first",
                )

    def _fill_unknown(self, keys: Any, rows: Rows) -> None:
        """Replace each -1 in `rows` according to the policy for unknown keys."""
        positions = np.flatnonzero(rows < 0)
        if not len(positions):
            return
        if self.unknown == "error":
            position = int(positions[0])
            raise HotrowError(
                f"keys[{position}] is {to_list(keys)[position]!r}, which has no row",
                fix="call admit, or create the vocabulary with unknown='row' or 'hash'",
            )
        rows[positions] = 0
        if self.unknown == "hash":
            hashes = self._rows.keys.hash(self._rows.keys.pick(keys, positions))
            rows[positions] = hashes % self.unknown_rows


def _fork_error() -> HotrowError:
    return HotrowError(
        "this process was forked while another thread was changing the vocabulary, so its layers "
        "and keys may not match",
        fix="call admit and evict in the thread that forks, or load a saved vocabulary in the new "
        "process",
    )


def _describe_keys(key_hash: Any) -> str:
    return f" for keys with hash {key_hash.hexdigest()[:16]}"


def _like(rows: Rows, keys: Any) -> Tensor:
    """Return the ids with the shape and the device of the keys."""
    ids = torch.from_numpy(rows)
    if isinstance(keys, Tensor | np.ndarray):
        ids = ids.reshape(keys.shape)
    return ids.to(keys.device) if isinstance(keys, Tensor) else ids
