"""Check ids on the device, and raise the error later, without waiting for the device.

If a lookup contains an out-of-range id, its kernel writes the lookup's number and the id's position
to `bad_id`. All later kernels then leave every row unchanged, so the table and the optimizer state
stay as they were. The kernel also sets `has_bad_id`, in memory that Python can read while the
device is running. Python raises the error when it next uses a table on this device.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from hotrow.kernels.triton.batch import DeviceIds

NO_BAD_ID = 2**63 - 1
POSITION_BITS = 40  # a lookup has fewer ids than 2**40
NUMBERS = 2 ** (63 - POSITION_BITS) - 1  # after this many lookups, their numbers start again from 0
_LookUp = tuple[int, torch.Size, int, weakref.ref[Tensor] | None]
KEPT_LOOK_UPS = 256  # the number of recent lookups for which the error can name the id


class IdCheck:
    """The range check of all lookups on one device.

    Attributes:
        bad_id: (1,) int64 on the device: `number << 40 | position` of the first bad id, or
            NO_BAD_ID.
        has_bad_id: (1,) int32 in pinned memory: 1 if there is a bad id.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bad_id = torch.full((1,), NO_BAD_ID, dtype=torch.int64, device=device)
        self.has_bad_id = torch.zeros(
            1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda"
        )
        self._has_bad_id = self.has_bad_id.numpy()
        self._count = 0
        self._look_ups: deque[_LookUp] = deque(maxlen=KEPT_LOOK_UPS)

    def start(self, batch: DeviceIds, row_count: int) -> int:
        """Return the number of a new lookup in a table with `row_count` rows."""
        self._count = (self._count + 1) % NUMBERS
        self._look_ups.append((self._count, batch.shape, row_count, batch.original))
        return self._count

    def take_error(self, wait: bool = False) -> BadId | None:
        """Return the first bad id and clear it, or return None if there is none so far.

        Without `wait`, this function waits for the device only if there is a bad id. It then waits
        for all streams: their steps must see the bad id before it is cleared.
        """
        if not wait and not self._has_bad_id[0]:
            return None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if not self._has_bad_id[0]:
            return None
        number, position = divmod(int(self.bad_id), 1 << POSITION_BITS)
        self.bad_id.fill_(NO_BAD_ID)
        self._has_bad_id[0] = 0
        for kept, shape, row_count, ids in self._look_ups:
            if kept == number:
                return BadId(position, shape, row_count, None if ids is None else ids())
        return BadId(position, None, None, None)


class BadId(NamedTuple):
    """An out-of-range id.

    Attributes:
        position: the position in the flattened batch.
        shape: the shape of the batch, or None if too many lookups have run since.
        row_count: the number of rows of the table, or None.
        ids: the caller's batch, or None if it no longer exists.
    """

    position: int
    shape: torch.Size | None
    row_count: int | None
    ids: Tensor | None


_checks: dict[torch.device, IdCheck] = {}


def id_check(device: torch.device) -> IdCheck:
    """Return the range check of the lookups on a device."""
    check = _checks.get(device)
    if check is None:
        check = _checks[device] = IdCheck(device)
    return check
