"""An open journal: one connection, short reads, and writes that are whole or not at all."""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hsjournal import faults
from hsjournal.events import Event
from hsjournal.journal import queries
from hsjournal.journal.place import Place
from hsjournal.journal.pragmas import connect, refuse_network
from hsjournal.journal.reading import Reading
from hsjournal.journal.schema import require_head


class OpenJournal(Reading):
    """The connection and how it is used; one thread at a time.

    The driver runs in its autocommit mode, so that no read outlives its statement and pins the WAL.

    Args:
        path: the database; must exist and be migrated (:mod:`hsjournal.journal.migrate`).

    Raises:
        NoJournalError: when it does not exist.
        SchemaError: on a network file system, when it is of another version or no journal, or SQLite refuses a pragma.
        NoRoomError, JournalLockedError: when the disk or another program stands in the way.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_network(path)
        self._connection = connect(path)
        try:
            require_head(self._connection, path)
        except BaseException:
            self._connection.close()
            raise
        self._rows = self._connection.cursor()
        self._rows.row_factory = sqlite3.Row

    def rescued_by(self, place: Place) -> Path | None:
        """What :meth:`Place.rescue` makes of the open connection."""
        return place.rescue(self._connection)

    def close(self) -> None:
        """Close the journal; the last connection to close folds the WAL into the database."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: committed at the end, rolled back by any error, also by one of COMMIT itself."""
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
            faults.point("journal.committing")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # SQLite ends it by itself after some errors
                connection.execute("ROLLBACK")
            raise

    def _read(self, statement: str, **parameters: Any) -> list[sqlite3.Row]:
        return self._rows.execute(statement, parameters).fetchall()

    def _add_event(self, event: Event, epoch: int, key: str | None = None) -> None:
        self._connection.execute(
            queries.ADD_EVENT,
            {
                "id": None,
                "key": key or uuid.uuid4().hex,
                "at": event.at,
                "epoch": event.epoch or epoch,
                "kind": event.kind,
                "row": event.row,
                "detail": json.dumps(event.detail, default=str),
            },
        )
