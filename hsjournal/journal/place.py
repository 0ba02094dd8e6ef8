"""Is the journal that lies under its name still the one that is open? SQLite does not notice when it isn't.

Somebody deletes or replaces ``journal.db`` under a live run: the worker's commits go on to succeed, into a file that no
name leads to any more, and are lost with the process. So its place is looked at around every commit, by stat alone (a
plain open and close would drop SQLite's locks), and what is still open is saved into a copy.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from hsjournal.errors import NoJournalError

RESCUED = ".rescued"


class JournalGoneError(NoJournalError):
    """The journal was deleted or replaced under the run; what was in it lies in a copy beside it, if that could be made."""


class Place:
    """Remembers which files lie under the journal's names; made when it has just been opened.

    Args:
        journal: the database.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        names = (journal, Path(f"{journal}-wal"))
        self._files = {name: identity for name in names if (identity := _identity(name)) is not None}

    def problem(self) -> str | None:
        """None while all is as it was, else what happened in words; an unreadable folder is no such thing."""
        for name, identity in self._files.items():
            try:
                found = _identity(name)
            except OSError:
                continue
            if found is None:
                return f"{name} was deleted under the run"
            if found != identity:
                return f"{name} was replaced under the run"
        return None

    def rescue(self, connection: sqlite3.Connection) -> Path | None:
        """Save what an open connection still sees into a file beside the journal; None when that can't be done."""
        target = Path(f"{self._journal}{RESCUED}")
        fresh = Path(f"{target}.{os.getpid()}")
        try:
            with contextlib.closing(sqlite3.connect(fresh)) as copy:
                connection.backup(copy)
            fd = os.open(fresh, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            fresh.replace(target)
        except (sqlite3.Error, OSError):
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            return None
        return target

    def gone(self, problem: str, copy: Path | None) -> JournalGoneError:
        """The error to end with."""
        if copy is None:
            return JournalGoneError(problem, remedy="Restore it from a copy, or start again in a new run directory.")
        remedy = (
            f"All of it is safe in {copy}: move {self._journal.name}* away (not the copy), rename the copy to "
            f"{self._journal.name}, then resume."
        )
        return JournalGoneError(problem, remedy=remedy)


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode; None when nothing lies there."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
