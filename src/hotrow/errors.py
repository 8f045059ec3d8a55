"""The exceptions: each names what is wrong, where, and what to do about it."""

from __future__ import annotations


class HotrowError(ValueError):
    """Input that hotrow cannot use; nothing was changed.

    `problem` names the argument, the position, the value and the valid range;
    `fix`, where there is one, the likely cause and the remedy. It is a
    `ValueError`; an id out of range is an `IndexError` as well, as in torch.

    >>> str(HotrowError("ids is float32", fix="use ids.long()"))
    'ids is float32: use ids.long()'
    """

    on_all_ranks = False  # whether all processes of a group raise it

    def __init__(self, problem: str, *, fix: str | None = None) -> None:
        super().__init__(problem if fix is None else f"{problem}: {fix}")
        self.problem = problem
        self.fix = fix


class HotrowIndexError(HotrowError, IndexError):
    """An id outside the table: what `except IndexError` catches around torch's own look-up."""
