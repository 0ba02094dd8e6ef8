"""Which schema a journal has and which one this version wants; told without alembic, whose import is slow."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import cache
from pathlib import Path

from hsjournal import states
from hsjournal.errors import NoJournalError, SchemaError
from hsjournal.journal.refusals import refusal

_HEADER = 100
"""Bytes of an SQLite file's header."""


def migrations_folder() -> Path:
    """The packaged migrations if this is an installed wheel, else those beside the package."""
    package = Path(__file__).resolve().parent.parent
    packaged = package / "migrations"
    return packaged if packaged.is_dir() else package.parent / "migrations"


@cache
def head() -> str:
    """The newest revision: migrations are named by it, in ascending order.

    Raises:
        SchemaError: when there are none.
    """
    names = sorted(path.name for path in (migrations_folder() / "versions").glob("[0-9]*_*.py"))
    if not names:
        raise SchemaError(f"no migrations in {migrations_folder()}", remedy="Install hsjournal again.")
    return names[-1].partition("_")[0]


def revision_of(connection: sqlite3.Connection) -> str | None:
    """The revision of an open journal; None for an empty database.

    Raises:
        SchemaError: when it is a database of something else.
    """
    tables = {str(r[0]) for r in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if {"alembic_version", "run", "sample", "state_count"} <= tables:
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        if row is not None:
            return str(row[0])
    if tables - {"alembic_version"}:
        raise SchemaError(
            f"an SQLite database of something else lies there (tables: {', '.join(sorted(tables)[:5])})",
            remedy="Choose another run directory.",
        )
    return None


def look(journal: Path) -> str | None:
    """The revision of the journal at ``journal``, None when it is missing or empty; nothing is changed.

    Raises:
        SchemaError: when it is no journal of ours.
        NoRoomError: when the disk answers with an error.
    """
    size = journal.stat().st_size if journal.exists() else 0
    if size == 0:
        return None
    if size < _HEADER:  # SQLite takes it for an empty database and would write over it
        raise SchemaError(f"{journal} is no journal ({size} bytes)", remedy="Choose another run directory.")
    try:
        with closing(sqlite3.connect(f"{journal.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            return revision_of(connection)
    except sqlite3.Error as error:
        raise refusal(error, journal) from None
    except SchemaError as error:
        raise SchemaError(f"{journal}: {error.message}", remedy=error.remedy) from None


def require_head(connection: sqlite3.Connection, journal: Path) -> None:
    """Refuse a journal of another schema than this version's.

    Raises:
        NoJournalError: when the database is empty.
        SchemaError: when the schema is newer or older, or the database is of something else.
    """
    found = revision_of(connection)
    if found is None:
        raise NoJournalError(
            f"{journal} is empty, though there should be a journal",
            remedy="Restore it from a copy, or start again in a new run directory.",
        )
    if found != head():
        raise newer(journal, found) if found > head() else older(journal, found)


def newer(journal: Path, found: str) -> SchemaError:
    """The journal was made by a later hsjournal."""
    return SchemaError(
        f"{journal} has schema {found}, newer than this hsjournal knows (up to {head()})",
        remedy="Use the version of hsjournal that made it, or a newer one.",
    )


def older(journal: Path, found: str) -> SchemaError:
    """The journal was made by an earlier hsjournal and was not migrated yet."""
    return SchemaError(
        f"{journal} has schema {found}, older than this hsjournal's {head()}",
        remedy="`hsjournal resume` brings it up to date (a copy is kept beside it).",
    )


def renew_triggers(connection: sqlite3.Connection) -> bool:
    """Make the triggers those of this version's :mod:`hsjournal.states`, inside the caller's transaction if there is one.

    Returns:
        Whether anything had to be changed.
    """
    found = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall())
    wanted = states.trigger_sql()
    if found == wanted:
        return False
    for name in found:
        connection.execute(f'DROP TRIGGER "{name}"')
    for statement in wanted.values():
        connection.execute(statement)
    return True


def bring_up_to_date(journal: Path) -> None:
    """Migrate an existing journal if it is older, and renew its triggers; costs two reads when there is nothing to do.

    Raises:
        NoJournalError: when there is none.
        SchemaError: when it is newer, or not ours.
    """
    found = look(journal)
    if found is None:
        raise NoJournalError(
            f"there is no journal at {journal}", remedy="Start a run with `hsjournal run RUN_DIR --prompts FILE`."
        )
    if found == head():
        with closing(sqlite3.connect(f"{journal.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            triggers = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall())
        if triggers == states.trigger_sql():
            return
    from hsjournal.journal.migrate import migrate

    migrate(journal)
