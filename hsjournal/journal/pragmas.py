"""How every connection to the journal is opened: pragmas set, and read back.

WAL with ``synchronous=FULL`` keeps each commit through a power loss. Writes begin with BEGIN IMMEDIATE: a
deferred transaction that upgrades from read to write fails at once and ignores the busy timeout.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from hsjournal.errors import NoJournalError, SchemaError
from hsjournal.filesystems import file_system_type, is_network
from hsjournal.journal.refusals import refusal

BUSY_TIMEOUT_MS = 30_000
PRAGMAS: tuple[tuple[str, str, object], ...] = (
    ("busy_timeout", str(BUSY_TIMEOUT_MS), BUSY_TIMEOUT_MS),
    ("journal_mode", "WAL", "wal"),
    ("synchronous", "FULL", 2),
    ("foreign_keys", "ON", 1),
)


def refuse_network(journal: Path) -> None:
    """Refuse a journal on a network file system: WAL needs memory shared by all its readers and writers.

    Raises:
        SchemaError: naming the type.
    """
    kind = file_system_type(journal)
    if is_network(kind):
        raise SchemaError(
            f"the journal would lie on a network file system ({kind}): {journal.parent}",
            remedy="Put RUN_DIR on a local disk; only the output folder (--out) may lie on a network.",
        )


def connect(journal: Path, *, create: bool = False) -> sqlite3.Connection:
    """Open the journal in the driver's autocommit mode, pragmas set and read back.

    Raises:
        NoJournalError: when there is none, unless it may be created.
        SchemaError: when it is no database, or the file system silently refuses a pragma.
        NoRoomError, JournalLockedError: when the disk or another program stands in the way.
    """
    if not create and not journal.exists():
        raise NoJournalError(
            f"there is no journal at {journal}", remedy="Start a run with `hsjournal run RUN_DIR --prompts FILE`."
        )
    connection = None
    try:
        uri = f"{journal.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        for name, value, expected in PRAGMAS:
            connection.execute(f"PRAGMA {name}={value}")
            (got,) = connection.execute(f"PRAGMA {name}").fetchone()
            if got != expected:
                raise SchemaError(
                    f"SQLite did not take {name}={value} for {journal} (it answers {got!r})",
                    remedy="Put RUN_DIR on a local disk with a file system that supports SQLite's WAL.",
                )
    except (sqlite3.Error, SchemaError) as error:
        if connection is not None:
            connection.close()
        raise refusal(error, journal) if isinstance(error, sqlite3.Error) else error from None
    return connection
