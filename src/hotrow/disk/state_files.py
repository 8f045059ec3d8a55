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
from hotrow.disk.folder import Folder, fix_for, reason_for
from hotrow.disk.layout import Layout
from hotrow.disk.mapped_tensor import Files, MappedTensor, RowBlocks, filled_blocks, write_new
from hotrow.disk.record import STEPS, TABLE, Record
from hotrow.errors import HotrowError
from hotrow.table.autograd import storage_use_count


class StateFiles:
    """The mapped files of a table and of its optimizer state, by the name of the tensor.

    Attributes:
        used: the files of the table and of the complete optimizer state.
        new: the files of an optimizer state that is not complete yet.
        is_resuming: whether a saved training run is being restored, so that the optimizer gets its
            saved state.
        last_run: the `Run` of the last `RowLag` that was closed, or None.

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
        self.last_run: object = None
        self._folder, self._session = folder, session
        self._access, self._previous_save = access, previous_save

    def create_slot(self, name: str, initial: float) -> Tensor:
        """Create a (V, D) state tensor for the optimizer, filled with this initial value."""
        if self.is_resuming:
            return self.used[name].tensor()
        return self._create(name, initial).tensor()

    def store_slot(self, name: str, values: Tensor) -> Tensor:
        """Return a (V, D) state tensor for the optimizer, with these values.

        The result is the same tensor if other code has aliases of it. In that case, a save copies
        the values.
        """
        file = self.used[name] if name in self.used else self._create(name)
        stored = file.in_memory_of(values)
        self.new[name] = stored or file
        if stored is not None or storage_use_count(values) > 1:
            return values
        self.new[name] = file.with_values(values)
        return self.new[name].tensor()

    def row_steps(self) -> Tensor:
        """Return the (V,) int32 tensor with each row's last step: the saved steps, or zeros.

        The optimizer calls this method after it has created its state tensors.
        """
        if STEPS in self.used:
            steps = self.used[STEPS].tensor()
            if not self.is_resuming:
                steps.zero_()
        else:
            steps = self._create(STEPS).tensor()
        self.replace({**self.used, **self.new})
        return steps

    def discard(self, files: object, run: object) -> None:
        """Forget the newest optimizer state, which no save contains; see `RowLag.discard`."""
        assert isinstance(files, dict)
        self.replace(files)
        self.last_run = run

    def replace(self, files: Files) -> None:
        """Use other files from now on."""
        self.used, self.new = files, Files()

    def keep(self, names: Iterable[str]) -> None:
        """Keep only these files, which a save contains."""
        self.replace({name: self.used[name] for name in names})

    def _create(self, name: str, initial: float = 0.0) -> MappedTensor:
        """Create and map the files of a tensor, which `row_steps` adds to the used files."""
        table = self.used[TABLE].layout
        layout = Layout(name, table.shape, table.dtype)
        if name == STEPS:
            layout = Layout(name, table.shape[:1], torch.int32)
        with self._access.exclusive():
            if name in self.new:  # the optimizer has begun again after an error
                self.new = Files()
            try:
                file = self.new[name] = self._map_new(layout, initial)
            except BaseException:
                self.new = Files()
                raise
            return file

    def _map_new(self, layout: Layout, initial: float) -> MappedTensor:
        """Create the files of a tensor, and map them.

        Until the next save, they have as many rows as the files of the last save. If there is a
        tensor of the same name, of another optimizer, its files get new values at the next save.
        """
        try:
            rows = layout.shape[0]
            if layout.name in self.used:
                file = self.used[layout.name].emptied(rows)
                if initial:
                    file.tensor().fill_(initial)
                return file
            saved = layout.with_rows(self._previous_save().rows)
            values: RowBlocks = ()
            if initial:
                values = filled_blocks(saved.shape, saved.dtype, lambda block: block.fill_(initial))
            write_new(self._folder, saved, self._session, values)
            file = MappedTensor(self._folder, saved)
            if layout != saved:
                file = file.resized(rows)
                file.tensor()[saved.shape[0] :] = initial
            return file
        except (OSError, MemoryError) as error:
            raise HotrowError(
                f"{self._folder.path / layout.file_name} could not be created "
                f"({reason_for(error)})",
                fix=f"{fix_for(error)} and repeat the step; the folder contains the last save",
            ) from None
