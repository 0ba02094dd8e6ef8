"""Bring a journal to this version's schema. Runs in a child process: alembic is slow to import.

All of it happens in one BEGIN IMMEDIATE, so a process killed in the middle leaves the old schema, and the next
start completes it. Before an existing journal is changed, a copy is made beside it by SQLite's backup API.
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from hsjournal.errors import HsjournalError, UsageError
from hsjournal.journal.pragmas import connect, refuse_network
from hsjournal.journal.refusals import refusal
from hsjournal.journal.schema import head, look, migrations_folder, newer, renew_triggers

__all__ = ["main", "migrate", "migrations_folder"]


def migrate(journal: Path) -> str:
    """Create or upgrade the journal; returns its revision.

    Raises:
        SchemaError: when the journal is of a newer hsjournal, or no journal of ours at all; it is not touched.
        NoRoomError: when the disk is full, failing or read-only.
    """
    refuse_network(journal)
    found = look(journal)
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    script = ScriptDirectory.from_config(config)
    if found is not None and found not in {revision.revision for revision in script.walk_revisions()}:
        raise newer(journal, found)
    engine = _engine(journal)
    try:
        if found not in (None, head()):
            _back_up(journal, found or "")
        with engine.connect() as connection, connection.begin():
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            driver = connection.connection.driver_connection
            assert isinstance(driver, sqlite3.Connection)
            renew_triggers(driver)
    except DBAPIError as error:
        if isinstance(error.orig, sqlite3.Error):
            raise refusal(error.orig, journal) from error
        raise
    except sqlite3.Error as error:
        raise refusal(error, journal) from error
    finally:
        engine.dispose()
    return head()


def _engine(journal: Path) -> Engine:
    engine = create_engine(f"sqlite:///{journal}", creator=lambda: connect(journal, create=True), poolclass=NullPool)

    @event.listens_for(engine, "begin")
    def _begin_immediate(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _back_up(journal: Path, revision: str) -> None:
    """Copy the journal, what lies in its WAL included; a copy under its final name is whole."""
    half, whole = Path(f"{journal}.{revision}.half"), Path(f"{journal}.{revision}.bak")
    half.unlink(missing_ok=True)
    with (
        closing(sqlite3.connect(f"{journal.absolute().as_uri()}?mode=ro", uri=True)) as source,
        closing(sqlite3.connect(half)) as target,
    ):
        source.backup(target)
    half.replace(whole)


def main(arguments: list[str]) -> int:
    """``python -m hsjournal.journal.migrate RUN_DIR``: migrate RUN_DIR/journal.db, print the revision."""
    try:
        if len(arguments) != 1:
            raise UsageError("usage: python -m hsjournal.journal.migrate RUN_DIR")
        sys.stdout.write(migrate(Path(arguments[0]) / "journal.db") + "\n")
    except HsjournalError as error:
        sys.stderr.write(f"hsjournal: {error}\n")
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
