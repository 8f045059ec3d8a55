"""Exceptions. Each message says what is wrong, where, and how to fix it."""

from __future__ import annotations


class HotrowError(ValueError):
    """Raised for invalid input, before hotrow changes anything.

    `HotrowError` is a subclass of `ValueError`. For an id that is out of range, hotrow raises
    `HotrowIndexError`. This subclass also derives from `IndexError`, the type that torch raises.

    Attributes:
        problem: what is wrong, including the argument, position, value and valid range.
        fix: the likely cause and how to fix it, or None.

    >>> error = HotrowError("ids is float32", fix="use ids.long()")
    >>> str(error), error.fix
    ('ids is float32: use ids.long()', 'use ids.long()')
    """

    def __init__(self, problem: str, *, fix: str | None = None) -> None:
        super().__init__(problem if fix is None else f"{problem}: {fix}")
        self.problem = problem
        self.fix = fix


def mark_on_all_ranks(error: Exception, value: bool = True) -> None:
    """Record whether every process in a group raises this error, or an error with its message."""
    vars(error)["on_all_ranks"] = value


def is_on_all_ranks(error: BaseException | None) -> bool:
    """Return whether `mark_on_all_ranks` was called for the error."""
    return getattr(error, "on_all_ranks", False)


class HotrowIndexError(HotrowError, IndexError):
    """Raised for an id that is out of range. Also an `IndexError`, the type that torch raises."""
