"""Reads of the journal, by whoever writes it and by those who must not change a byte of it."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from hsjournal.errors import NoJournalError, SchemaError
from hsjournal.events import Event
from hsjournal.journal import queries
from hsjournal.journal.rows import Claim, Count, MaskedPrompt
from hsjournal.journal.schema import require_head
from hsjournal.states import State

__all__ = ["Claim", "Count", "JournalReader", "MaskedPrompt", "Reading"]

BATCH = 500
_TRIES = 5


class Reading:
    """Everything that can be asked of a journal; how a statement is run is the subclass's matter."""

    def _read(self, statement: str, **parameters: Any) -> list[Any]:
        raise NotImplementedError

    def claimable(self, after: int, most: int, *, suspects: bool = False) -> list[Claim]:
        """Pending rows above ``after``, ascending; only suspects if asked."""
        return self._claims(queries.NEXT_SUSPECT if suspects else queries.NEXT_PENDING, after, most)

    def claim_of(self, row: int) -> Claim:
        """One row's prompt and counters, whatever its state.

        Raises:
            LookupError: when there is no such row, or it was skipped and has no prompt.
        """
        found = self._claims(queries.ONE_ROW, row, 1)
        if not found:
            raise LookupError(f"row {row} has no prompt")
        return found[0]

    def counts(self) -> dict[State, Count]:
        """Rows, tokens and output bytes of every state, from the table that triggers keep."""
        found = {State(r[0]): Count(r[1], r[2], r[3]) for r in self._read(queries.COUNTS)}
        return {state: found.get(state, Count(0, 0, 0)) for state in State}

    def recount(self) -> dict[State, int]:
        """Rows of every state, counted one by one: a pass over the whole table."""
        found = {State(r[0]): int(r[1]) for r in self._read(queries.RECOUNT)}
        return {state: found.get(state, 0) for state in State}

    def rows_read(self) -> int | None:
        """Rows that ingestion read from the input, refused ones too; None where it left no word."""
        for (intake,) in self._read(queries.INTAKE):
            found = json.loads(intake) if intake else {}
            return int(found["rows"]) if "rows" in found else None
        return None

    def rows_in(self, state: State, after: int = -1, most: int = 1 << 30) -> list[dict[str, Any]]:
        """All columns of the rows in ``state``, ascending."""
        return [dict(r) for r in self._read(queries.rows_in(state), after=after, most=most)]

    def rows_of(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """All columns of those of the named rows that there are."""
        return [dict(r) for row in rows for r in self._read(queries.ROW_BY_NUMBER, row=row)]

    def row_of_id(self, sample_id: str) -> dict[str, Any] | None:
        """All columns of the row with this id, if there is one that was not refused."""
        return next((dict(r) for r in self._read(queries.ROW_BY_ID, sample_id=sample_id)), None)

    def released(self) -> tuple[int, int]:
        """Rows whose files were freed, and the bytes that they had."""
        ((rows, nbytes),) = self._read(queries.RELEASED)
        return int(rows), int(nbytes)

    def deferred(self) -> Count:
        """Written rows whose files are to be read back later."""
        ((rows, tokens, nbytes),) = self._read(queries.DEFERRED_TOTALS)
        return Count(int(rows), int(tokens), int(nbytes))

    def being_written(self) -> list[dict[str, Any]]:
        """All columns of the written rows whose files are to be read back now."""
        return [dict(r) for r in self._read(queries.UNDER_WAY)]

    def suspects(self) -> list[dict[str, Any]]:
        """All columns of the incomplete rows that were in flight when a worker crashed, ascending."""
        return [dict(r) for r in self._read(queries.SUSPECTS)]

    def all_rows(self) -> Iterator[dict[str, Any]]:
        """All columns of every row, ascending, in short reads."""
        after = -1
        while batch := self._read(queries.NEXT_ROWS, after=after, most=BATCH):
            yield from map(dict, batch)
            after = batch[-1]["row"]

    def all_prompts(self) -> Iterator[tuple[int, bytes]]:
        """Row and token ids (little-endian uint32) of every row that has a prompt, ascending, in short reads."""
        after = -1
        while batch := self._read(queries.NEXT_PROMPTS, after=after, most=BATCH):
            yield from map(tuple, batch)
            after = batch[-1]["row"]

    def all_masks(self) -> Iterator[tuple[int, bytes]]:
        """Row and loss mask (run lengths, little-endian uint32) of every row that has a prompt, ascending, in short reads."""
        after = -1
        while batch := self._read(queries.NEXT_MASKS, after=after, most=BATCH):
            yield from map(tuple, batch)
            after = batch[-1]["row"]

    def prompts_of_length(self, tokens: int, near: int, most: int) -> list[MaskedPrompt]:
        """Other rows' prompts of just so many tokens, those nearest to row ``near`` first."""
        rows = self._read(queries.PROMPTS_OF_LENGTH, tokens=tokens, row=near, most=most)
        return [MaskedPrompt(r[0], r[1], r[2], r[3], r[4]) for r in rows]

    def masked_prompts(self) -> Iterator[MaskedPrompt]:
        """Token ids and loss mask of every row, ascending, in short reads; both empty for a row that was refused."""
        after = -1
        while batch := self._read(queries.NEXT_MASKED_PROMPTS, after=after, most=BATCH):
            yield from (MaskedPrompt(r[0], r[1], r[2], r[3] or b"", r[4] or b"") for r in batch)
            after = batch[-1]["row"]

    @property
    def epoch(self) -> int:
        """The run's current epoch."""
        return int(self._read(queries.EPOCH)[0][0])

    @property
    def run_id(self) -> str:
        """The run's id."""
        return str(self._read("SELECT run_id FROM run WHERE id = 1")[0][0])

    @property
    def is_ingested(self) -> bool:
        """Whether all prompts are in."""
        rows = self._read("SELECT ingested_at FROM run WHERE id = 1")
        return bool(rows) and rows[0][0] is not None

    def events(self, after: int = 0, most: int = 1000) -> list[tuple[int, Event]]:
        """Events by ascending number."""
        rows = self._read(queries.EVENTS, after=after, most=most)
        return [(r[0], Event(kind=r[3], row=r[4], detail=json.loads(r[5]), at=r[1], epoch=r[2])) for r in rows]

    def _claims(self, statement: str, after: int, most: int) -> list[Claim]:
        rows = self._read(statement, after=after, most=most)
        return [Claim(r[0], r[1], r[2], r[3], r[4], array("I", r[5]), array("I", r[6])) for r in rows]


class JournalReader(Reading):
    """A journal that is only looked at, beside a live run or after it: not a byte of it or of its WAL is changed.

    Each statement has a connection of its own, so that no read pins the WAL.

    Args:
        path: the database.

    Raises:
        NoJournalError: when it does not exist.
        SchemaError: from every read, when it is no readable journal, or one of another version that lacks what is asked for.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise NoJournalError(
                f"there is no journal at {path}", remedy="Start a run with `hsjournal run RUN_DIR --prompts FILE`."
            )
        self.path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held open."""

    def _read(self, statement: str, **parameters: Any) -> list[Any]:
        for attempt in range(_TRIES):
            try:
                return self._once(statement, parameters)
            except sqlite3.Error as error:  # a run may have begun or ended between the look at its WAL and the opening
                if attempt == _TRIES - 1:
                    self._refuse_other_schema()
                    raise SchemaError(
                        f"{self.path} can't be read as a journal: {error}", remedy="Restore it from a copy."
                    ) from None
                time.sleep(0.05 * 2**attempt)
        raise AssertionError

    def _refuse_other_schema(self) -> None:
        """A column that an older journal has not is no damage; what an older one can answer, it may."""
        with contextlib.suppress(sqlite3.Error), contextlib.closing(self._connect()) as connection:
            require_head(connection, self.path)

    def _once(self, statement: str, parameters: dict[str, Any]) -> list[Any]:
        with contextlib.closing(self._connect()) as connection:
            connection.row_factory = sqlite3.Row
            return connection.execute(statement, parameters).fetchall()

    def _connect(self) -> sqlite3.Connection:
        # Without a WAL there is no writer, and "immutable" keeps SQLite from making an empty one.
        how = "mode=ro" if os.path.exists(f"{self.path}-wal") else "mode=ro&immutable=1"
        uri = f"file:{quote(str(self.path))}?{how}"
        return sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None)
