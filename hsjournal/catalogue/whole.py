"""Files that are replaced as a whole: a reader finds the old one or the new one, never half of either."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

PREFIX, SUFFIX = ".hsjournal-beside-", ".tmp"


def _no_fence() -> None:
    """Used where nobody else can own the run."""


@contextlib.contextmanager
def replaced(path: Path, fence: Callable[[], None] = _no_fence) -> Iterator[BinaryIO]:
    """Write ``path`` anew: under a hidden name in its folder, durable, then in its place when the block ends well.

    Args:
        path: in a folder that is made if it is missing.
        fence: called before the name is touched; raises :class:`FencedError` when something newer owns the run.

    Raises:
        FencedError: from ``fence``.
        OSError: as the storage answers; the old file is untouched then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(path)
    fd, name = _hidden(path)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            yield file
            file.flush()
            os.fsync(file.fileno())
            fence()
            os.replace(name, path)  # still locked: nobody takes it for a dead writer's
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    sync_folder(path.parent)


def _hidden(path: Path) -> tuple[int, str]:
    """A fresh hidden file beside ``path``, locked for as long as its writer lives."""
    while True:
        fd, name = tempfile.mkstemp(prefix=f"{PREFIX}{path.name}-", suffix=SUFFIX, dir=path.parent)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(name).st_ino == os.fstat(fd).st_ino:
                return fd, name
        os.close(fd)  # it was taken for a dead writer's before it was locked


def _remove_stale(path: Path) -> None:
    """Remove what writers left that were killed: nobody holds its lock any more."""
    for stale in path.parent.glob(f"{PREFIX}{path.name}-*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError), stale.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            stale.unlink()


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
