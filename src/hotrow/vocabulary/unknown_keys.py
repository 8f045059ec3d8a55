"""What a vocabulary does with keys that have no row."""

from __future__ import annotations

from hotrow.errors import HotrowError
from hotrow.ids import check_count

UNKNOWN = "error", "row", "hash"
COUNT_LIMIT = 2**62  # counts must be smaller, so that they have room to grow


def check_policy(unknown: str, unknown_rows: int | None, admit_after: int) -> int:
    """Return the number of rows for unknown keys."""
    if unknown not in UNKNOWN:
        raise HotrowError(f"unknown is {unknown!r:.60}, but it must be 'error', 'row' or 'hash'")
    if admit_after >= COUNT_LIMIT:
        raise HotrowError(
            f"admit_after is {admit_after}, but it must be less than 2**62",
            fix="to give no new key a row, pass 0",
        )
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
    if unknown_rows is None:
        count = 1 if unknown == "row" else 0
    else:
        count = check_count("unknown_rows", unknown_rows)
    if count < 1 or (unknown == "row" and count > 1):
        raise HotrowError(
            f"unknown_rows is {unknown_rows}, but unknown={unknown!r} needs "
            + ("one row" if unknown == "row" else "at least one row"),
            fix="pass the number of rows for unknown keys",
        )
    return count
