"""Refuse sparse files, which can take far more time and memory to read than space on the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from hotrow.errors import HotrowError

_MAX_SPARSE_BYTES = 1 << 28
_LARGEST_EXPANSION = 10


def check_not_sparse(descriptor: int, path: str | Path) -> None:
    """Raise `HotrowError` if a file is large and consists almost entirely of holes.

    Copies of a file, and file systems that compress, may turn zeros into holes. So this function
    accepts files of up to 256 MiB, and files with data in at least a tenth of their bytes.
    """
    size = os.fstat(descriptor).st_size
    if size <= _MAX_SPARSE_BYTES or not hasattr(os, "SEEK_DATA"):  # Windows has no SEEK_DATA
        return
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    least, data, end = size // _LARGEST_EXPANSION, 0, 0
    while end < size and data < least:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO: the rest of the file is a hole
                raise
            break
        data += end - begin
    os.lseek(descriptor, position, os.SEEK_SET)
    if data < least:
        raise HotrowError(
            f"{path} is a sparse file: only {data:,} of its {size:,} bytes are on the disk",
            fix="if you trust it, copy it with cp -r --sparse=never, and open the copy",
        )
