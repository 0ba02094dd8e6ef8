"""Giving a finished file its final name: never replacing another one, and durable when it returns.

A file is written without a name (O_TMPFILE) or under a hidden one in its own folder, then linked to its final
name. A link fails when the name exists; a rename would replace, even hours later, when a frozen disk comes back
and lets a killed writer's last system call finish. The only step that takes a name away, setting another file
aside, is therefore done under an exclusive lock of the output folder: whoever is stuck in it holds the lock, and
nobody else can publish what it would hit.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from typing import TYPE_CHECKING, Self

import xxhash

from hsjournal import faults
from hsjournal.dump.reader import FILE_FLAGS
from hsjournal.sink.folders import NO_LINK, open_folders, output_lock, set_file_aside, temporary_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hsjournal.dump.protocol import RequestId

_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_RENAME_NOREPLACE = 1


class Publication:
    """A file on its way to ``out_dir/path``; a context manager that leaves nothing behind unless published.

    Args:
        out_dir: the output folder; it must exist (one that went away is not made again, since it may be a mount).
        path: relative to it, from a layout.
        rid: names the hidden temporary, where one is needed.
        rejects_dir: where a different file under the final name is set aside to; outside the output.
        fence: called before the final name is touched; raises :class:`FencedError` when a newer worker owns the run.
        durable: folders, relative to ``out_dir``, whose own names this process has made durable; added to.

    Attributes:
        fd: to be written.
        direct: whether it bypasses the page cache.

    Raises:
        OSError: as the storage answers.
    """

    def __init__(
        self, out_dir: Path, path: str, rid: RequestId, rejects_dir: Path, fence: Callable[[], None],
        durable: set[str] | None = None,
    ) -> None:  # fmt: skip
        self._out_dir = out_dir
        self._path = path
        self._rid = rid
        self._rejects_dir = rejects_dir
        self._fence = fence
        self._folder, _, self._name = path.rpartition("/")
        self._durable: set[str] = set() if durable is None else durable
        self._folders: list[int] = []
        self._temporary: str | None = None
        self.fd = -1
        self.direct = False

    def __enter__(self) -> Self:
        try:
            self._folders = open_folders(self._out_dir, self._path, create=True)
            self._open()
            faults.point("sink.opened", self._rid.row)
        except BaseException:
            self._durable.discard(self._folder)
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.fd >= 0:
                os.close(self.fd)
            if self._temporary is not None:
                with contextlib.suppress(OSError):  # a stale one is found by its name later
                    os.unlink(self._temporary, dir_fd=self._folders[-1])
        finally:
            for folder in self._folders:
                os.close(folder)

    def publish(self, nbytes: int, digest: str) -> tuple[bool, str | None]:
        """Link the file, whose data must be durable, to its final name, and make that durable.

        Args:
            nbytes: its size.
            digest: its xxh3_128.

        Returns:
            Whether the very same bytes lay there already, and where a different file was set aside to.

        Raises:
            FencedError: from ``fence``; nothing was changed.
            OSError: as the storage answers; EBUSY when a stuck process holds the output folder.
        """
        faults.point("sink.synced", self._rid.row)
        self._fence()
        faults.point("sink.linking", self._rid.row)
        adopted, displaced = False, None
        while not self._link():
            existing = self._existing(nbytes, digest)
            if existing is None:
                adopted = True
                break
            displaced = self._set_aside(existing) or displaced
        faults.point("sink.linked", self._rid.row)
        if self._temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary, dir_fd=self._folders[-1])
            self._temporary = None
        os.fsync(self._folders[-1])  # the name
        if self._folder not in self._durable:  # a writer that was killed may have made it and told nobody
            for folder in reversed(self._folders[:-1]):
                os.fsync(folder)
            self._durable.add(self._folder)
        faults.point("sink.published", self._rid.row)
        return adopted, displaced

    def _open(self) -> None:
        folder = self._folders[-1]
        flags = os.O_RDWR | os.O_CLOEXEC
        if os.path.exists("/proc/self/fd"):
            for direct in (os.O_DIRECT, 0):
                try:
                    self.fd = os.open(".", flags | os.O_TMPFILE | direct, 0o666, dir_fd=folder)
                except OSError as error:
                    if error.errno not in _NO_TMPFILE:
                        raise
                else:
                    self.direct = bool(direct)
                    return
        name = temporary_name(self._rid)
        self.fd = os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=folder)
        self._temporary = name
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) | os.O_DIRECT)
            self.direct = True

    def _link(self) -> bool:
        """Link to the final name; False when it exists."""
        folder = self._folders[-1]
        with output_lock(self._folders[0], fcntl.LOCK_SH):
            try:
                if self._temporary is None:
                    os.link(f"/proc/self/fd/{self.fd}", self._name, dst_dir_fd=folder, follow_symlinks=True)
                else:
                    os.link(self._temporary, self._name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in NO_LINK or self._temporary is None:
                    raise
                return _rename_noreplace(folder, self._temporary, self._name)
        return True

    def _existing(self, nbytes: int, digest: str) -> os.stat_result | None:
        """None when the file under the final name holds the same bytes (made durable), else what it is."""
        folder = self._folders[-1]
        found = os.stat(self._name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            raise FileExistsError(errno.EEXIST, "a folder stands where a file is due", str(self._out_dir / self._path))
        if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
            return found
        fd = os.open(self._name, FILE_FLAGS, dir_fd=folder)
        try:
            if _digest(fd) != digest:
                return os.fstat(fd)
            os.fsync(fd)
        finally:
            os.close(fd)
        return None

    def _set_aside(self, judged: os.stat_result) -> str | None:
        """Move a different file away, if it is still the one that was judged."""
        folder = self._folders[-1]
        with output_lock(self._folders[0], fcntl.LOCK_EX):
            self._fence()  # again: the lock may have come hours later
            try:
                found = os.stat(self._name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                return None
            if (found.st_dev, found.st_ino) != (judged.st_dev, judged.st_ino):
                return None
            target = set_file_aside(folder, self._name, self._path, self._rejects_dir)
            os.fsync(folder)
        return str(target)


def _digest(fd: int) -> str:
    digest = xxhash.xxh3_128()
    while piece := os.read(fd, 1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def _rename_noreplace(folder: int, old: str, new: str) -> bool:
    """For file systems without links (FAT, some of FUSE): the one rename that never replaces; False when ``new`` exists."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(folder, os.fsencode(old), folder, os.fsencode(new), ctypes.c_uint(_RENAME_NOREPLACE)) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EEXIST:
        return False
    raise OSError(code, f"{os.strerror(code)}: this file system can publish a file neither by link nor by rename", new)
