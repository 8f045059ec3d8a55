"""Change the rows in all files of a table before the table and its optimizer use the files."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hotrow.disk.folder import Folder, fix_for, reason_for
from hotrow.disk.mapped_tensor import Files
from hotrow.disk.record import TABLE
from hotrow.errors import HotrowError
from hotrow.table.autograd import storage_use_count
from hotrow.table.row_change import RowChange

_BLOCK_VALUES = 1 << 22  # the number of values that `take` copies at once


class ResizedFiles:
    """The files of a table after a change in its rows.

    The old files remain valid until the new tensors are used, so an error changes nothing.

    Arguments:
        folder: the folder of the files.
        files: the files before the change.
        change: which rows are kept, and how many are added.
        complete: a function that takes over the new files.

    Raises:
        HotrowError: the disk has too little space for the new rows, or there is too little memory.
    """

    def __init__(
        self,
        folder: Folder,
        files: Files,
        change: RowChange,
        complete: Callable[[Files, RowChange], None],
    ) -> None:
        self._folder, self._old, self._change, self._complete = folder, files, change, complete
        try:
            self._check_space()
            if change.sources is None:
                self._new = {name: file.resized(change.new_count) for name, file in files.items()}
            else:
                self._new = {name: file.emptied(change.new_count) for name, file in files.items()}
        except (OSError, MemoryError) as error:
            raise HotrowError(
                f"the files of {folder.path} could not be mapped with {change.new_count:,} rows "
                f"({reason_for(error)})",
                fix=f"{fix_for(error)}; nothing has changed",
            ) from None

    def _check_space(self) -> None:
        """Raise an error if the disk has too little space to save the new rows.

        The new rows of the table are also written to the journal. The optimizer state of new rows
        is zero and takes no space, except in a tmpfs.
        """
        is_tmpfs = self._folder.is_tmpfs()
        layouts = [file.layout for name, file in self._old.items() if is_tmpfs or name == TABLE]
        layouts.append(self._old[TABLE].layout)  # the journal
        count = self._change.new_count - self._change.old_count
        needed, free = sum(count * each.row_bytes for each in layouts), self._folder.free_bytes()
        if needed > free:
            raise HotrowError(
                f"{count:,} more rows need {needed:,} bytes of disk space, but {self._folder.path} "
                f"has {free:,}",
                fix="free disk space, or move the folder to a larger disk",
            )

    def apply(self, tensor: Tensor, added: float | Tensor, expected_uses: int) -> Tensor:
        """Apply the change in rows to a tensor from the old files, and return the result.

        A tensor that is not in the files is changed in memory.

        Arguments:
            tensor: (V, ...).
            added: one value for all added rows, or a tensor that contains the added rows.
            expected_uses: the number of tensors that may use the memory.

        Raises:
            HotrowError: another tensor uses the memory.
        """
        name = self._find(tensor)
        if name is None:
            return self._change.apply(tensor, added)
        if storage_use_count(tensor) > expected_uses:
            raise HotrowError(
                f"another tensor, such as the result of weight.data or state_dict(), shares the "
                f"memory of {self._old[name].file.path}, so the rows cannot change",
                fix="delete that tensor, or keep a copy (.clone()) instead",
            )
        result = self._new[name].tensor()
        if self._change.sources is not None:
            _take(self._change.sources, tensor, result, added)
        elif self._change.added_count and (isinstance(added, Tensor) or added):
            result[self._change.old_count :] = added  # added rows are zeros already
        return result

    def _find(self, tensor: Tensor) -> str | None:
        """Return the name of the file that contains this tensor, or None."""
        address = tensor.data_ptr()
        return next(
            (name for name, file in self._old.items() if file.tensor().data_ptr() == address), None
        )

    def complete(self) -> None:
        """Use the new files from now on."""
        self._complete(self._new, self._change)


def _take(sources: Tensor, rows: Tensor, result: Tensor, added: float | Tensor) -> None:
    """Copy rows in blocks: `result[i]` is `rows[sources[i]]`, or an added row for source -1."""
    block_rows = max(1, _BLOCK_VALUES // rows[0].numel())
    for block, chunk in zip(
        *(torch.split(each, block_rows) for each in (result, sources)), strict=True
    ):
        kept, new = (chunk >= 0).nonzero()[:, 0], (chunk < 0).nonzero()[:, 0]
        block[kept] = rows[chunk[kept]]
        if isinstance(added, Tensor):
            block[new], added = added[: len(new)], added[len(new) :]
        else:
            block[new] = added
