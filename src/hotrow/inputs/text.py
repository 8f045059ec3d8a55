"""Escape unprintable characters, cut text to a width, and format numbers for display."""

from __future__ import annotations

import os
import traceback
import unicodedata

_MESSAGE_COLUMNS = 400  # maximum width of a message from another library
_LIBRARY_PATHS = (  # substrings of paths to torch, Python's import system and hotrow
    f"-packages{os.sep}torch{os.sep}",
    "importlib",
    os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ""),
)
_MAX_MARKS = 4  # maximum number of combining marks on a letter; Vietnamese and Hindi need three


def escape_unprintable(text: str) -> str:
    r"""Replace every unprintable character (see `str.isprintable`) with its escape sequence.

    Unprintable characters include control characters, newlines, direction overrides, zero-width
    characters and lone surrogates. The result is safe to print in a terminal, but HTML and
    SVG need additional escaping.

    >>> print(escape_unprintable("\x1b[31mred\n"))
    \x1b[31mred\n
    >>> print(escape_unprintable("\u202eabc 词元"))
    \u202eabc 词元
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def display_width(text: str) -> int:
    """Return the number of columns that printable text takes in a monospace font.

    >>> display_width("row"), display_width("词元"), display_width("e" + chr(0x301))
    (3, 4, 1)
    """
    return sum(_char_width(char) for char in text)


def _char_width(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me"):  # combining marks
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def elide(text: str, columns: int) -> str:
    """Cut the text to at most `columns` columns (1 or more), with `…` at the cut.

    The text is also cut at a letter with more combining marks than any script uses. Such marks take
    no columns, but would cover the lines above.

    >>> elide("embedding", 9), elide("embeddings", 9), elide("嵌入矩阵", 6)
    ('embedding', 'embeddin…', '嵌入…')
    """
    end = used = marks = 0  # text[:end] leaves one column free for the ellipsis
    for index, char in enumerate(text):
        columns_taken = _char_width(char)
        used += columns_taken
        marks = 0 if columns_taken else marks + 1
        if used > columns or marks > _MAX_MARKS:
            return text[:end] + "…"
        if used < columns:
            end = index + 1
    return text


def format_number(x: float) -> str:
    """Format a number with four decimals, or in scientific notation if it is very small or large.

    >>> format_number(0.33740), format_number(-2.84), format_number(-0.0)
    ('0.3374', '-2.8400', '-0.0000')
    >>> [format_number(x) for x in (1.234e-5, -123456.0, float("nan"), float("-inf"))]
    ['1.23e-05', '-1.23e+05', 'nan', '-inf']
    """
    if x != 0 and (abs(x) < 1e-3 or abs(x) >= 1e5):
        return f"{x:.2e}"
    return f"{x:.4f}"


def format_count(number: int, noun: str) -> str:
    """Format a number and its noun, which is plural unless the number is 1.

    >>> format_count(1, "row"), format_count(1200, "row")
    ('1 row', '1,200 rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_size(count: float) -> str:
    """Format a number of bytes with three significant digits.

    >>> format_size(80), format_size(215_619_504)
    ('80 B', '216 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.3g} {unit}" if count < 999.5 else f"{count:,.0f} {unit}"


def format_milliseconds(value: float) -> str:
    """Format a time with three significant digits, or as a whole number if it is 100 ms or more.

    >>> format_milliseconds(0.0412), format_milliseconds(1234.5)
    ('0.0412 ms', '1,234 ms')
    """
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def message_of(error: BaseException) -> str:
    """Return the message of an exception, or "" if the exception's own code fails."""
    try:
        return str(error)
    except Exception:
        return ""


def one_line(error: BaseException) -> str:
    """Describe an exception in one line: its type, its message, and the last line of user code.

    >>> try:
    ...     {}["vocabulary"]
    ... except KeyError as error:
    ...     print(one_line(error).partition(" (")[0])
    KeyError: 'vocabulary'
    """
    message = elide(escape_unprintable(" ".join(message_of(error).split())), _MESSAGE_COLUMNS)
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [f for f in frames if not any(part in f.filename for part in _LIBRARY_PATHS)]
    if not user_frames:
        return text
    last = user_frames[-1]
    return f"{text} ({relative_path(last.filename)}, line {last.lineno})"


def relative_path(path: str) -> str:
    """Return the path relative to the current directory; leave a path outside it unchanged.

    >>> relative_path(os.path.join(os.getcwd(), "models.py"))
    'models.py'
    """
    here = os.path.join(os.getcwd(), "")
    return path.removeprefix(here)
