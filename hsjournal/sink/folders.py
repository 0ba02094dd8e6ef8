"""The output folder and the folders below it: opened without following links, made durably, tidied by name."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from typing import TYPE_CHECKING

from hsjournal.dump.protocol import RequestId
from hsjournal.dump.reader import DIRECTORY_FLAGS, FILE_FLAGS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NO_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""What link(2) answers where a file system has no hard links."""
_NO_LOCK = (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_LOCK_WAIT_S = 10.0
_TEMPORARY = re.compile(r"\.hsjournal-(?P<rid>.+)-[0-9a-f]{8}\.tmp")


def temporary_name(rid: RequestId) -> str:
    """A fresh hidden name that no trainer's glob matches."""
    return f".hsjournal-{rid}-{secrets.token_hex(4)}.tmp"


def open_folders(out_dir: Path, path: str, *, create: bool = False) -> list[int]:
    """Descriptors of the output folder and of each folder below it on the way to ``path``; no links are followed.

    Raises:
        FileNotFoundError: when the output folder, or (without ``create``) one below it, is missing.
        OSError: as the storage answers.
    """
    folders = [os.open(out_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    try:
        for part in path.split("/")[:-1]:
            if create:
                _make(part, folders[-1])
            folders.append(os.open(part, DIRECTORY_FLAGS, dir_fd=folders[-1]))
    except BaseException:
        for folder in folders:
            os.close(folder)
        raise
    return folders


def _make(name: str, parent: int) -> None:
    """Make a folder, durably, if it is missing."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o777, dir_fd=parent)
        os.fsync(parent)


@contextlib.contextmanager
def output_lock(out_fd: int, kind: int) -> Iterator[None]:
    """Hold the output folder's lock; where the file system has none (NFS on folders), go on without.

    Publishing a name takes it shared, taking a name away exclusively: whoever is stuck in the latter holds it, and
    nobody else can publish what it would hit when it wakes up.

    Args:
        out_fd: descriptor of the output folder.
        kind: ``fcntl.LOCK_SH`` or ``fcntl.LOCK_EX``.

    Raises:
        OSError: EBUSY when it can't be had within ten seconds.
    """
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(out_fd, kind | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                text = "another process is stuck setting a file aside in the output folder"
                raise OSError(errno.EBUSY, text) from None
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in _NO_LOCK:
                raise
            break
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(out_fd, fcntl.LOCK_UN)


def set_file_aside(folder: int, name: str, path: str, rejects_dir: Path) -> Path:
    """Move ``name`` from ``folder`` to a free name in ``rejects_dir``, on this or another file system; none is replaced."""
    rejects_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    number = 0
    while True:
        number += 1
        target = rejects_dir / f"{path.replace('/', '_')}.{number}"
        try:
            os.link(name, target, src_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            continue
        except OSError as error:
            if error.errno not in (errno.EXDEV, *NO_LINK):
                raise
            if not _copy(folder, name, target):
                continue
        os.unlink(name, dir_fd=folder)
        return target


def list_temporaries(out_dir: Path, run: str) -> list[str]:
    """Hidden temporaries of this run below the output folder, relative to it: left by writers that were killed."""
    found = []
    for folder, subfolders, files in os.walk(out_dir):
        subfolders.sort()
        for file in sorted(files):
            match = _TEMPORARY.fullmatch(file)
            rid = RequestId.parse(match["rid"]) if match else None
            if rid is not None and rid.run == run:
                found.append(os.path.relpath(os.path.join(folder, file), out_dir))
    return found


def remove_temporaries(out_dir: Path, run: str) -> int:
    """Remove this run's hidden temporaries; only when no writer of it lives. Returns how many there were."""
    names = list_temporaries(out_dir, run)
    for name in names:
        (out_dir / name).unlink(missing_ok=True)
    return len(names)


def make_output_folder(out_dir: Path) -> None:
    """Make the output folder, durably, with every missing folder above it."""
    missing = [p for p in (out_dir, *out_dir.parents) if not p.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fd = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _copy(folder: int, name: str, target: Path) -> bool:
    """Copy a file to another file system; False when the name is taken there. A link is copied as a link."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            os.symlink(os.readlink(name, dir_fd=folder), target)
            return True
        with os.fdopen(os.open(name, FILE_FLAGS, dir_fd=folder), "rb") as source, target.open("xb") as copy:
            try:
                while piece := source.read(1 << 20):
                    copy.write(piece)
                copy.flush()
                os.fsync(copy.fileno())
            except BaseException:
                target.unlink()
                raise
    except FileExistsError:
        return False
    return True
