"""Text made fit to show: tokens from anywhere, and numbers as the lesson writes them."""

from __future__ import annotations

import os
import traceback
import unicodedata

_SAID = 400  # columns of another library's message
_NOT_OWN = (  # files of torch, of Python's imports, and of hotrow
    f"-packages{os.sep}torch{os.sep}",
    "importlib",
    os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ""),
)
_MARKS = 4  # combining marks on one letter; Vietnamese and Hindi need three, a prank five hundred


def printable(text: str) -> str:
    r"""The text with every character that could act, hide or break written as its escape.

    That is every character that is not `str.isprintable()`: controls, newlines, direction
    overrides, zero-width characters, lone surrogates. The result is safe in a terminal and,
    escaped as usual there, in HTML and SVG.

    >>> print(printable("\x1b[31mred\n"))
    \x1b[31mred\n
    >>> print(printable("\u202eabc 词元"))
    \u202eabc 词元
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def width(text: str) -> int:
    """Columns that printable text takes in a monospace font.

    >>> width("row"), width("词元"), width("e" + chr(0x301))
    (3, 4, 1)
    """
    return sum(_columns(char) for char in text)


def _columns(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me"):  # marks that sit on the letter before
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def elide(text: str, columns: int) -> str:
    """The text, cut to at most `columns` (one or more) columns; a final `…` says that it was.

    A letter under more combining marks than any script uses is cut as well: they take no
    columns, but they would climb over the lines above.

    >>> elide("embedding", 9), elide("embeddings", 9), elide("嵌入矩阵", 6)
    ('embedding', 'embeddin…', '嵌入…')
    """
    end = used = marks = 0  # text[:end] leaves a column for the ellipsis
    for place, char in enumerate(text):
        step = _columns(char)
        used += step
        marks = 0 if step else marks + 1
        if used > columns or marks > _MARKS:
            return text[:end] + "…"
        if used < columns:
            end = place + 1
    return text


def number(x: float) -> str:
    """Four decimals; scientific for what four decimals would flatten or stretch.

    >>> number(0.33740), number(-2.84), number(-0.0)
    ('0.3374', '-2.8400', '-0.0000')
    >>> number(1.234e-5), number(-123456.0), number(float("nan")), number(float("-inf"))
    ('1.23e-05', '-1.23e+05', 'nan', '-inf')
    """
    if x != 0 and (abs(x) < 1e-3 or abs(x) >= 1e5):
        return f"{x:.2e}"
    return f"{x:.4f}"


def size(count: float) -> str:
    """A number of bytes, to three digits.

    >>> size(80), size(215_619_504)
    ('80 B', '216 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.3g} {unit}" if count < 999.5 else f"{count:,.0f} {unit}"


def milliseconds(value: float) -> str:
    """A time, to three digits.

    >>> milliseconds(0.0412), milliseconds(1234.5)
    ('0.0412 ms', '1,234 ms')
    """
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def told(error: BaseException) -> str:
    """An exception in a line: its type, what it says, and the line of its reader's own code.

    >>> try:
    ...     {}["vocabulary"]
    ... except KeyError as error:
    ...     print(told(error).partition(" (")[0])
    KeyError: 'vocabulary'
    """
    said = elide(printable(" ".join(str(error).split())), _SAID)
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in _NOT_OWN)]
    return f"{text} ({relative(own[-1].filename)}, line {own[-1].lineno})" if own else text


def relative(path: str) -> str:
    """A path as seen from the current directory, if it is in it.

    >>> relative(os.path.join(os.getcwd(), "models.py"))
    'models.py'
    """
    here = os.path.join(os.getcwd(), "")
    return path.removeprefix(here)
