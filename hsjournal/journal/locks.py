"""The two locks of a run directory: flock on files of their own, which are never unlinked.

A pid file lies after a crash; an flock ends with its last open descriptor, whatever happened. A worker that is
stuck in the kernel keeps its lock, and the next supervisor must see it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from hsjournal.birth import lives, own_create_time
from hsjournal.errors import JournalLockedError

_TRIES, _TRY_AGAIN = 25, 0.02  # half a second: a looker may be put to sleep while it holds it


class Lock:
    """An flock held until :meth:`release` or the end of the process. Not inherited by exec."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock and write who holds it into the file.

        Raises:
            JournalLockedError: when somebody else holds it, naming the process if it can be told.
        """
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(fd)
        except BlockingIOError:
            os.close(fd)
            holder = read_holder(self.path)
            named = holder is not None and lives(holder["pid"], holder["create_time"])
            who = f"process {holder['pid']} since {holder['since']}" if holder and named else "another process"
            raise JournalLockedError(
                f"{self.path.parent} is in use: {who} holds {self.path.name}",
                remedy="Watch it with `hsjournal status`, or stop it first (Ctrl-C drains it, nothing is lost).",
            ) from None
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        body = json.dumps({"pid": os.getpid(), "create_time": own_create_time(), "since": since})
        self._fd = fd
        with contextlib.suppress(OSError):  # on a full disk the lock holds all the same, only its holder has no name
            os.ftruncate(fd, os.pwrite(fd, body.encode(), 0))

    def release(self) -> None:
        """Give the lock back; the file stays."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _lock(fd: int) -> None:
    """Lock it, passing over the moment that :func:`is_held` of somebody else takes."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_TRY_AGAIN)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def read_holder(path: Path) -> dict[str, Any] | None:
    """Who wrote the lock file last: ``pid``, ``create_time``, ``since``; it may be gone."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and {"pid", "create_time", "since"} <= set(value) else None


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock; takes it for a moment and leaves the file as it is."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
