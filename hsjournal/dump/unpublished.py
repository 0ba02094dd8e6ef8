"""Whose an unpublished folder is, ``.tmp-<rid>``: a living writer's, or nobody's.

A writer holds an flock on each folder that it fills, from just after making it until it has published it. The lock dies
with the process, so a folder that can be locked is left over from a life of the server that has ended, whatever its
boot id. Standard library only: this module is imported inside servers.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable

NEWBORN_S = 1.0
"""A folder younger than this may belong to a writer that has not locked it yet."""
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def outgrow_birth(root_fd: int, names: Iterable[str]) -> None:
    """Return when each folder's writer, if it lives, has had the time to lock it."""
    if any(_age(root_fd, name) < NEWBORN_S for name in names):
        time.sleep(NEWBORN_S)


def take_abandoned(root_fd: int, name: str, kind: int = fcntl.LOCK_EX) -> int | None:
    """A descriptor of the folder ``name`` that no writer holds, locked; None when one does, or when it is gone.

    Args:
        root_fd: the hand-over root.
        name: of the folder, which is older than :data:`NEWBORN_S`.
        kind: ``fcntl.LOCK_EX``, or ``fcntl.LOCK_SH`` to look only.

    Raises:
        OSError: other than for a folder that is gone.
    """
    try:
        folder = os.open(name, _FLAGS, dir_fd=root_fd)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(folder, kind | fcntl.LOCK_NB)
        # Its writer may have published it between the two calls: then the lock is one on a finished dump.
        named, locked = os.stat(name, dir_fd=root_fd, follow_symlinks=False), os.fstat(folder)
        if (named.st_dev, named.st_ino) == (locked.st_dev, locked.st_ino):
            return folder
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(folder)
        raise
    os.close(folder)
    return None


def _age(root_fd: int, name: str) -> float:
    try:
        return time.time() - os.stat(name, dir_fd=root_fd, follow_symlinks=False).st_mtime
    except OSError:
        return NEWBORN_S
