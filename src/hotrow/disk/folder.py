"""The folder of a table. Its contents are never trusted.

`Folder` opens the folder once and accesses its files only through the resulting descriptor. It
never follows a symbolic link, and opens only regular files without other hard links. So a folder's
contents can never make hotrow read or write a file outside the folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from hotrow.errors import HotrowError


class Folder:
    """An open folder.

    Raises:
        HotrowError: the folder does not exist or is a symbolic link, or the system is not Linux.
    """

    def __init__(self, path: Path) -> None:
        check_path(path)
        try:
            self._descriptor = os.open(path, os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise HotrowError(
                f"the folder {path} does not exist", fix="create it with hotrow.disk.create"
            ) from None
        except OSError:
            if path.is_symlink():
                raise HotrowError(
                    f"{path} is a symbolic link, which hotrow does not follow",
                    fix=f"open {os.path.realpath(path)!r}",
                ) from None
            if not path.is_dir():
                raise HotrowError(
                    f"{path} is not a folder", fix="pass the folder that hotrow.disk.create created"
                ) from None
            raise
        self.set_path(path)
        self._is_tmpfs: bool | None = None
        self._close = close_later(self, self._descriptor)
        self._lock = self._process = -1

    def set_path(self, path: Path) -> None:
        """Set the path of the folder, for example after it was renamed."""
        self.path, self._real_path = path, os.path.realpath(path)

    def lock(self) -> None:
        """Lock the folder. The lock is on the folder itself, so there is no lock file to delete.

        Raises:
            HotrowError: the folder is already open.
        """
        import fcntl  # does not exist on Windows

        descriptor = os.open(".", os.O_DIRECTORY, dir_fd=self._descriptor)
        self._close_lock = close_later(self, descriptor)
        self._lock, self._process = descriptor, os.getpid()
        _locked.add(self)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.forget_lock()
            raise HotrowError(
                f"{self.path} is already open, in this process or another process",
                fix="close it first, or use a copy of the folder",
            ) from None

    @property
    def is_locked(self) -> bool:
        """Whether this process has locked the folder, and is not a forked child of that process.

        A child forgets the lock, but signal handlers may run before. In another process namespace,
        it may have the same number as its parent.
        """
        return self._lock >= 0 and self._process == os.getpid()

    def forget_lock(self) -> None:
        """In a forked child, let only the parent keep the lock."""
        self._close_lock()
        self._lock = -1

    def close(self) -> None:
        """Unlock and close the folder. In a forked child, the parent keeps its lock."""
        import fcntl

        if self.is_locked:
            # A child that was just forked may still have the descriptor.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self.forget_lock()
        self._close()
        self._descriptor = -1

    def open(self, name: str, mode: str) -> IO[bytes]:
        """Open a regular file in binary mode.

        Raises:
            FileNotFoundError: the file is missing.
            HotrowError: the name belongs to a link, a folder, a pipe or a device.
        """
        return open(name, mode, opener=self._open)

    def _open(self, name: str, flags: int) -> int:
        if not flags & os.O_EXCL:  # merely opening a device or a pipe can have side effects
            self._check_regular(name, os.stat(name, dir_fd=self._descriptor, follow_symlinks=False))
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(name, flags, 0o666, dir_fd=self._descriptor)
        try:
            self._check_regular(name, os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check_regular(self, name: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
            raise damaged_file(self.path / name, f"it is {kind}")
        if status.st_nlink > 1:
            raise HotrowError(
                f"{self.path / name} has {status.st_nlink} hard links, so a save would also change "
                "the file under its other names",
                fix="copy the folder with cp -r, and open the copy",
            )

    def create(self, name: str, like: str | None = None) -> IO[bytes]:
        """Create a file for writing, after deleting any file or link with the same name.

        Arguments:
            name: the name.
            like: the name of another file, whose owner and permissions the new file gets if
                possible, or None.
        """
        self.remove(name)
        file = self.open(name, "xb")
        if like is not None:
            with contextlib.suppress(OSError):
                self._copy_permissions(like, file.fileno())
        return file

    def _copy_permissions(self, name: str, descriptor: int) -> None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        other = os.open(name, flags, dir_fd=self._descriptor)
        try:
            status = os.fstat(other)
            if not stat.S_ISREG(status.st_mode):
                return
            with contextlib.suppress(OSError):
                _copy_mode(other, descriptor)
            for user, group in ((-1, status.st_gid), (status.st_uid, -1)):
                with contextlib.suppress(OSError):
                    os.fchown(descriptor, user, group)  # last: only an owner may change the mode
        finally:
            os.close(other)

    def write(self, name: str, parts: Iterable[Any]) -> None:
        """Write a file beside the old one, flush it to disk, and rename it into place."""
        with self.create(f"{name}.new", like=name) as file:
            file.writelines(parts)
            flush(file)
        self.rename(f"{name}.new", name)

    def rename(self, name: str, new_name: str) -> None:
        """Rename a file, replacing any file that already has the new name."""
        os.replace(name, new_name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def check_replaceable(self, name: str) -> None:
        """Raise a PermissionError if the folder's sticky bit forbids to replace a file."""
        try:
            file = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return
        folder = os.fstat(self._descriptor)
        is_owner = os.geteuid() in (folder.st_uid, file.st_uid)
        if folder.st_mode & stat.S_ISVTX and not is_owner and not _may_replace_files_of(file):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), name)

    def is_replaced(self) -> bool:
        """Return whether another file or folder now has the path at which the folder was opened."""
        try:
            status = os.lstat(self._real_path)
        except OSError:
            return False  # the folder was moved
        return not os.path.samestat(status, os.fstat(self._descriptor))

    def is_same(self, name: str, descriptor: int) -> bool:
        """Return whether a name belongs to the file with this descriptor."""
        status = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        return os.path.samestat(status, os.fstat(descriptor))

    def remove(self, name: str) -> None:
        """Delete a file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    def flush(self) -> None:
        """Flush the directory entries to disk."""
        os.fsync(self._descriptor)

    def reserve(self, file: IO[bytes], size: int) -> None:
        """Reserve space for a file in a tmpfs.

        Other file systems don't need space to read the holes of a sparse file. A tmpfs does: if it
        is full, Linux kills a process that reads a hole through a mapping.

        Raises:
            OSError: the tmpfs has too little space.
        """
        if self.is_tmpfs():
            if size - os.fstat(file.fileno()).st_blocks * 512 > self.free_bytes():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # Linux starts a call again after each signal, so a long call might never end.
            for begin in range(0, size, _RESERVED_BYTES):
                os.posix_fallocate(file.fileno(), begin, min(_RESERVED_BYTES, size - begin))

    def free_bytes(self) -> int:
        """Return the free space of the file system, or `sys.maxsize` if it has no limit."""
        status = os.fstatvfs(self._descriptor)
        return status.f_bavail * status.f_frsize if status.f_blocks else sys.maxsize

    def is_tmpfs(self) -> bool:
        """Return whether the folder is in a tmpfs."""
        if self._is_tmpfs is None:
            status = ctypes.create_string_buffer(512)  # longer than `struct statfs`
            ctypes.CDLL(None).fstatfs(self._descriptor, status)
            self._is_tmpfs = int.from_bytes(status.raw[:4], sys.byteorder) == _TMPFS
        return self._is_tmpfs


def close_later(owner: object, descriptor: int) -> Callable[[], object]:
    """Close a descriptor once its owner is no longer used, or when the result is called.

    At the end of the program, leave this to the system, because other code may still save.
    """
    close = weakref.finalize(owner, os.close, descriptor)
    close.atexit = False
    return close


def _copy_mode(source: int, target: int) -> None:
    """Copy the mode and the access list of a file, given two descriptors."""
    access_list = _read_access_list(source)
    mode = os.fstat(source).st_mode & 0o666
    if access_list is None:
        with contextlib.suppress(OSError):
            os.removexattr(target, _ACCESS_LIST)  # the folder's default list
        os.fchmod(target, mode)
    else:
        # With a list, the mode of the group limits what it allows other users and groups.
        os.fchmod(target, mode & ~stat.S_IRWXG)
        os.setxattr(target, _ACCESS_LIST, access_list)


def _read_access_list(descriptor: int) -> bytes | None:
    try:
        return os.getxattr(descriptor, _ACCESS_LIST)
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return None
        raise


def _may_replace_files_of(file: os.stat_result) -> bool:
    """Return whether this process may replace files of other users in a folder with a sticky bit.

    This requires the capability CAP_FOWNER. In a user namespace, it also requires that the
    namespace contains the owner and the group of the file. Otherwise, Linux reports other numbers,
    often 65534.
    """
    try:
        status = Path("/proc/thread-self/status").read_text()
        are_known = [_is_known("uid", file.st_uid), _is_known("gid", file.st_gid)]
    except OSError:
        return os.geteuid() == 0
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    return all(are_known) and bool(capabilities >> _CAP_FOWNER & 1)


def _is_known(kind: str, number: int) -> bool:
    """Return whether this user namespace contains a user or a group."""
    ranges = Path(f"/proc/self/{kind}_map").read_text().split()
    unknown = int(Path(f"/proc/sys/kernel/overflow{kind}").read_text())
    return ranges[2:] == ["4294967295"] or number != unknown


_ACCESS_LIST = "system.posix_acl_access"
_CAP_FOWNER = 3  # from linux/capability.h
_RESERVED_BYTES = 1 << 22  # the space that one call reserves
_TMPFS = 0x01021994  # the first number in the result of `fstatfs`
_locked: weakref.WeakSet[Folder] = weakref.WeakSet()


def _forget_locks() -> None:
    # Otherwise, a child would keep the lock if its parent is killed.
    for folder in list(_locked):
        folder.forget_lock()


if hasattr(os, "register_at_fork"):  # does not exist on Windows
    os.register_at_fork(after_in_child=_forget_locks)


def check_path(path: Path) -> None:
    """Raise an error unless the system is Linux and accepts the path."""
    if sys.platform != "linux":
        raise HotrowError(
            f"{path} cannot be used for training on {sys.platform}, because only Linux reports "
            "which pages were written",
            fix="read its rows with hotrow.Embedding.from_file",
        )
    try:
        os.stat(path)
    except ValueError as error:  # the path contains a null character or a surrogate
        raise HotrowError(
            f"{str(path)!r} is not a path ({error})", fix="pass another path"
        ) from None
    except OSError:
        pass


def damaged_file(path: Path, why: str) -> HotrowError:
    """Return the error for a damaged file."""
    return HotrowError(f"{path} is damaged ({why})", fix="restore the folder from a backup")


def reason_for(error: OSError | MemoryError) -> str:
    """Return the cause of an error from the system; a MemoryError often has no message."""
    return str(error) or "there is too little memory"


def fix_for(error: OSError | MemoryError) -> str:
    """Return how the user can fix the cause of an error from the system."""
    code = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    return _FIXES.get(code or 0, "free disk space or check the permissions")


_FIXES = {
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space",
    errno.ENOMEM: "free memory",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "make the file system writable",
    errno.EFBIG: "allow longer files (ulimit -f), or use another file system",
    errno.ENAMETOOLONG: "use a shorter name",
}


def flush(file: IO[bytes]) -> None:
    """Flush a file to disk."""
    file.flush()
    os.fsync(file.fileno())
