"""Write the lesson's files to the user's cache, because the package folder may be read-only."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from hotrow.errors import HotrowError
from hotrow.inputs.files import write_text


def write_page(text: str, name: str) -> Path:
    """Write the page to the cache folder, or to a temporary folder if that fails; return its path.

    A page in the cache folder replaces the previous page of the same name.
    """
    try:
        # A browser needs an absolute path, but a path from the environment may be relative.
        folder = cache_folder().resolve()
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / name, text)
        return folder / name
    except (HotrowError, OSError, RuntimeError):  # RuntimeError: the user has no home folder
        path = Path(tempfile.mkdtemp(prefix="hotrow-")).resolve() / name
        write_text(path, text)
        return path


def cache_folder() -> Path:
    """Return hotrow's folder in the cache folder that the operating system gives the user."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "hotrow"
