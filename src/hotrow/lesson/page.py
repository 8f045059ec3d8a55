"""Build the lesson as one HTML file with inline styles, scripts and data."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from hotrow import __version__
from hotrow.errors import HotrowError
from hotrow.figures.svg import COLOURS
from hotrow.lesson.excerpt import Excerpt, example_excerpts
from hotrow.lesson.times import Timing

LANGUAGES = ("en", "zh-CN")

SCRIPTS = (  # in order of execution
    "float32.js",
    "random.js",
    "elements.js",
    "words.js",
    "arithmetic.js",
    "steps.js",
    "cost.js",
    "tables.js",
    "fields.js",
    "address.js",
    "printing.js",
    "python.js",
    "controls.js",
    "drawing.js",
    "predict.js",
    "labels.js",
    "section-hero.js",
    "own-words.js",
    "section-row.js",
    "section-vector.js",
    "section-layer.js",
    "section-waste.js",
    "section-meaning.js",
    "section-lookup.js",
    "section-product.js",
    "section-linear.js",
    "section-gradient.js",
    "section-step.js",
    "section-mix.js",
    "section-position.js",
    "section-idea.js",
    "section-differ.js",
    "section-cost.js",
    "start.js",
)
# Markup characters, JavaScript's line separators, and surrogates, which UTF-8 can't encode.
_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
_DOCUMENTS = {
    "readme": ("README.md", "README.zh-CN.md"),
    "notebook": ("embedding-vs-linear.ipynb", "embedding-vs-linear.zh-CN.ipynb"),
}


def build_page(
    lang: str | None = None,
    excerpt: Excerpt | None = None,
    timings: Sequence[Timing] = (),
    *,
    local_links: bool = True,
) -> str:
    """Return the lesson as one HTML document that makes no network requests.

    Args:
        lang: the initial language, "en" or "zh-CN"; None for the browser's language.
        excerpt: the user's tokens and rows, which the page shows first.
        timings: times measured on this machine, for the cost section.
        local_links: whether the page may link to files on this machine. Pass False for a page that
            other people will open.

    Raises:
        HotrowError: `lang` is not a known language.
    """
    if lang is not None and lang not in LANGUAGES:
        raise HotrowError(f"lang is {lang!r}, but it must be one of {', '.join(LANGUAGES)}")
    tables = [*example_excerpts(), *([] if excerpt is None else [excerpt])]
    data = {
        "lang": lang,
        "version": __version__,
        "tables": [table.to_dict() for table in tables],
        "timings": [asdict(timing) for timing in timings],
        "documents": {
            what: [_link_document(name, local_links) for name in names]
            for what, names in _DOCUMENTS.items()
        },
        "words": {each: json.loads(_read_source(f"words/{each}.json")) for each in LANGUAGES},
    }
    style = _colour_variables() + _read_source("style.css")
    script = '"use strict";\n' + "".join(_read_source(f"script/{name}") for name in SCRIPTS)
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_csp_hash(script)}",
            f"style-src {_csp_hash(style)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    return Template(_read_source("skeleton.html")).substitute(
        lang=lang or "en", policy=policy, style=style, script=script, data=escape_json(data)
    )


def escape_json(data: Any) -> str:
    r"""Return JSON that can't end a script element or be parsed as markup.

    >>> escape_json({"token": "</script>"})
    '{"token":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _read_source(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _csp_hash(text: str) -> str:
    """Return the hash that allows this inline text in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _colour_variables() -> str:
    """Return the colors of the figures as CSS variables, for light and dark mode."""
    light, dark = (
        "".join(f"--{name}:{pair[place]};" for name, pair in COLOURS.items()) for place in (0, 1)
    )
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def _link_document(name: str, local_links: bool) -> dict[str, str | None]:
    """Return a document's name, and its address if hotrow runs from a source checkout."""
    root = Path(__file__).resolve().parents[3]
    found = next((each for each in (root / name, root / "lessons" / name) if each.is_file()), None)
    return {"name": name, "href": found.as_uri() if found and local_links else None}
