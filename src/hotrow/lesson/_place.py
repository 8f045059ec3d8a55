"""Where the page is put: the user's cache folder, for the package may be read-only."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from hotrow.errors import HotrowError
from hotrow.files import write_text


def place(text: str, name: str) -> Path:
    """Write the page and return its path: in the cache folder or, failing that, a temporary one.

    The name stays the same, so that pages do not pile up.
    """
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / name, text)
        return folder / name
    except (HotrowError, OSError):
        beside = Path(tempfile.mkdtemp(prefix="hotrow-")) / name
        write_text(beside, text)
        return beside


def cache_folder() -> Path:
    """The folder of hotrow among the user's caches, as each system has them."""
    home = Path.home()
    if sys.platform == "darwin":
        base = home / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "hotrow"
