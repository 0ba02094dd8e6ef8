"""What SQLite's errors mean for a run, as errors of ours: is it the disk, somebody else, or the file itself?"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hsjournal.errors import HsjournalError, JournalLockedError, NoJournalError, NoRoomError, SchemaError, Trouble

_DISK = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}
)
_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})
_FILE = frozenset({sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT})


def primary_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code; -1 for an error that the driver made up itself."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return -1 if code is None else code & 0xFF


def may_pass(error: sqlite3.Error) -> bool:
    """Whether the same statement may work later: the disk is full or failing, or somebody holds the database."""
    return primary_code(error) in _DISK | _BUSY


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file itself is damaged, or no database."""
    return primary_code(error) in _FILE


def trouble_of(error: sqlite3.Error) -> Trouble:
    """What ails the journal's disk, of an error that :func:`may_pass`."""
    code = primary_code(error)
    if code in _BUSY:
        return Trouble.BUSY
    return Trouble.FULL if code == sqlite3.SQLITE_FULL else Trouble.FAILING


def refusal(error: sqlite3.Error, journal: Path) -> HsjournalError:
    """The error to show instead of ``error``; a program's mistake (a bad statement) stays a plain one."""
    code = primary_code(error)
    if code in _DISK:
        return NoRoomError(
            f"the journal {journal} can't be used: {error}",
            remedy="Make room, mend the disk or the permissions of RUN_DIR, then resume; nothing is lost.",
            trouble=trouble_of(error),
        )
    if code in _BUSY:
        return JournalLockedError(
            f"the journal {journal} is locked by another program",
            remedy="End the program that has it open, then resume.",
        )
    if is_damage(error):
        return SchemaError(
            f"{journal} is damaged, or no journal of hsjournal: {error}",
            remedy="Restore it from a copy, or choose another run directory.",
        )
    return HsjournalError(
        f"the journal {journal} can't be used: {error}",
        remedy="Please report it with RUN_DIR/logs/worker.log; `hsjournal status` shows what is done, nothing is lost.",
    )


def refusal_of_a_look(answer: Mapping[str, Any], journal: Path) -> HsjournalError:
    """What to show for an error of :mod:`hsjournal.journal.peek`, whose statements are right for every journal of ours.

    Args:
        answer: ``error`` in SQLite's words, ``sqlite`` its code, ``missing`` whether no file is there.
        journal: that was looked at.
    """
    if answer.get("missing"):
        return NoJournalError(
            f"{journal} is missing", remedy="Restore it from a copy, or start again in a new run directory."
        )
    error = sqlite3.DatabaseError(str(answer["error"]))
    error.sqlite_errorcode = int(answer.get("sqlite") or -1)
    if primary_code(error) == sqlite3.SQLITE_ERROR:  # as of a missing table
        error.sqlite_errorcode = sqlite3.SQLITE_NOTADB
    return refusal(error, journal)
