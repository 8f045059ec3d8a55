"""Write the lesson's files to the user's cache, because the package folder may be read-only."""

from __future__ import annotations

import os
import stat
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
        return write_cached(text, name)
    except (HotrowError, OSError, RuntimeError):  # RuntimeError: the user has no home folder
        path = Path(tempfile.mkdtemp(prefix="hotrow-")).resolve() / name
        write_text(path, text)
        return path


def write_cached(text: str, name: str) -> Path:
    """Write a file to the cache folder, replacing any file or link of this name; return its path.

    Raises:
        HotrowError: the file can't be written, or another user controls the folder.
        OSError: the folder can't be created.
        RuntimeError: the user has no home folder.
    """
    # A browser needs an absolute path, but a path from the environment may be relative.
    folder = cache_folder().absolute()
    for path in (folder, *folder.parents):
        _check_link(path)
    folder = folder.resolve()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(folder)
    path = folder / name
    if path.is_symlink():  # `write_text` would replace the file that the link points to
        path.unlink()
    write_text(path, text)
    return path


def _check_private(folder: Path) -> None:
    """Raise an error if another user could choose which files a write changes."""
    if not hasattr(os, "geteuid"):  # Windows
        return
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise _foreign_folder(folder, "belongs to another user")
    if status.st_mode & stat.S_IWOTH:
        raise _foreign_folder(folder, "is writable by all users")


def _check_link(path: Path) -> None:
    """Raise an error if the path is a link that another user has created."""
    if path.is_symlink() and hasattr(os, "geteuid"):
        owner = path.lstat().st_uid
        if owner not in (os.geteuid(), 0):
            raise _foreign_folder(path, "is a link of another user")


def _foreign_folder(folder: Path, why: str) -> HotrowError:
    return HotrowError(
        f"the cache folder {folder} {why}",
        fix="set XDG_CACHE_HOME to a folder that only you can write to",
    )


def cache_folder() -> Path:
    """Return hotrow's folder in the cache folder that the operating system gives the user."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "hotrow"
