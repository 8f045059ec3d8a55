"""The files of a table's optimizer state, which the optimizer creates.

The optimizer creates one state tensor after the other, and then the last step of each row. Only
then does the store use the new files. So if there is no space for one of them, the optimizer's
step can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from hotrow.disk.access import FileAccess
from hotrow.disk.folder import Folder, fix_for
from hotrow.disk.layout import Layout
from hotrow.disk.mapped_tensor import Files, MappedTensor, RowBlocks, filled_blocks, write_new
from hotrow.disk.record import STEPS, TABLE, Record
from hotrow.errors import HotrowError


class StateFiles:
    """The mapped files of a table and of its optimizer state, by the name of the tensor.

    Attributes:
        used: the files of the table and of the complete optimizer state.
        new: the files of an optimizer state that is not complete yet.
        is_resuming: whether a saved training run is being restored, so that the optimizer gets its
            saved state.

    Arguments:
        folder: the folder of the files.
        session: the name that the new files contain until the next save.
        used: see the attribute.
        access: allows only one operation on the files at a time.
        previous_save: checks that the folder may be written, and returns the record of the last
            save.
    """

    def __init__(
        self,
        folder: Folder,
        session: str,
        used: Files,
        access: FileAccess,
        previous_save: Callable[[], Record],
    ) -> None:
        self.used, self.new = used, Files()
        self.is_resuming = False
        self._earlier = used
        self._folder, self._session = folder, session
        self._access, self._previous_save = access, previous_save

    def create_slot(self, name: str, initial: float, replace: bool) -> Tensor:
        """Create a (V, D) state tensor for the optimizer, filled with this initial value.

        With `replace`, the tensor may replace that of an earlier optimizer of another class.
        """
        if self.is_resuming:
            return self.used[name].tensor()
        if name in self.used and not replace:
            self.new = Files()
            raise HotrowError(
                f"{self._folder.path} already has the state {name!r} of another optimizer",
                fix="use one optimizer; to switch optimizers, save and reopen the folder first",
            )
        table = self.used[TABLE].layout
        return self._create(Layout(name, table.shape, table.dtype), initial)

    def store_slot(self, name: str, values: Tensor) -> Tensor:
        """Return a (V, D) state tensor for the optimizer, with these values."""
        table = self.used[TABLE].layout
        if name not in self.used:
            return self._create(Layout(name, table.shape, table.dtype)).copy_(values)
        file = self.used[name]
        if file.is_tensor(values):
            return values  # another tensor with its own storage would hide aliases of this one
        return file.tensor().copy_(values.clone())  # the values may be in the same memory

    def row_steps(self) -> Tensor:
        """Return the (V,) int32 tensor with each row's last step: the saved steps, or zeros.

        The optimizer calls this method after it has created its state tensors.
        """
        if STEPS in self.used:
            steps = self.used[STEPS].tensor()
            if not self.is_resuming:
                steps.zero_()
        else:
            shape = self.used[TABLE].layout.shape[:1]
            steps = self._create(Layout(STEPS, shape, torch.int32))
        self._earlier = self.used
        self.used, self.new = {**self.used, **self.new}, Files()
        return steps

    def discard(self) -> None:
        """Forget the newest optimizer state, which no save contains; see `RowLag.discard`."""
        self.used = self._earlier

    def keep(self, names: Iterable[str]) -> None:
        """Keep only these files, which a save contains."""
        self.used = {name: self.used[name] for name in names}
        self.new = Files()  # left by a step that failed

    def _create(self, layout: Layout, initial: float = 0.0) -> Tensor:
        """Create and map the files of a tensor, which `row_steps` adds to the used files."""
        with self._access.exclusive():
            if layout.name in self.new:  # the optimizer has begun again after an error
                self.new = Files()
            try:
                file = self.new[layout.name] = self._map_new(layout, initial)
            except BaseException:
                self.new = Files()
                raise
            return file.tensor()

    def _map_new(self, layout: Layout, initial: float) -> MappedTensor:
        """Create the files of a tensor, and map them.

        Until the next save, they have as many rows as the files of the last save. If there is a
        tensor of the same name, of another optimizer, its files are mapped once more.
        """
        previous = self._previous_save()
        saved = layout.with_rows(previous.rows)
        values: RowBlocks = ()
        if initial:
            values = filled_blocks(saved.shape, saved.dtype, lambda block: block.fill_(initial))
        exists = layout.name in previous.tensors or layout.name in self.used
        try:
            if not exists:
                write_new(self._folder, saved, self._session, values)
            file = MappedTensor(self._folder, saved)
        except OSError as error:
            raise HotrowError(
                f"{self._folder.path / layout.file_name} could not be created ({error})",
                fix=f"{fix_for(error)} and repeat the step; the folder contains the last save",
            ) from None
        if exists:
            file.tensor().fill_(initial)
        if layout != saved:
            file = file.resized(layout.shape[0])
            file.tensor()[saved.shape[0] :] = initial
        return file
