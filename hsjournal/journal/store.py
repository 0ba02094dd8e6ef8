"""Writes of the journal. Every write is one short transaction; no file or HTTP work happens inside one."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Sequence
from sqlite3 import IntegrityError
from typing import Any

from hsjournal.errors import FencedError
from hsjournal.events import Event
from hsjournal.journal import queries
from hsjournal.journal.intake import Intake
from hsjournal.journal.rows import Claim, Count, Move, NewRow
from hsjournal.states import State

__all__ = ["Claim", "Count", "IntegrityError", "Journal", "Move", "NewRow"]


class Journal(Intake):
    """An open journal; see :class:`hsjournal.journal.base.OpenJournal` for what opening it may raise."""

    # the hot path

    def apply(self, moves: Sequence[Move], epoch: int, events: Sequence[Event] = ()) -> None:
        """Make all changes in one transaction, or none.

        Raises:
            FencedError: when a row is not as expected or ``epoch`` is no longer the run's; nothing was changed.
        """
        now = time.time()
        with self._writing() as connection:
            for move in moves:
                statement = queries.change(move.transition, tuple(sorted(move.values)))
                parameters = {"at_row": move.row, "at_attempt": move.attempt, "at_epoch": epoch, "changed_at": now}
                if connection.execute(statement, parameters | move.values).rowcount != 1:
                    raise self._fenced(move, epoch)
                if move.event is not None:
                    self._add_event(move.event, epoch)
            for event in events:
                self._add_event(event, epoch)

    # epochs, suspects, events

    def raise_epoch(self, events: Iterable[Event] = ()) -> int:
        """Fence all earlier workers: from here on their changes are refused. Returns the new epoch."""
        with self._writing() as connection:
            epoch = int(connection.execute(queries.RAISE_EPOCH).fetchall()[0][0])
            for event in events:
                self._add_event(event, epoch)
        return epoch

    def touch(self, row: int, state: State, epoch: int, event: Event | None = None, **values: Any) -> None:
        """Set counters or flags of a row without moving it.

        Raises:
            FencedError: as for :meth:`apply`.
        """
        with self._writing() as connection:
            parameters = {"at_row": row, "at_epoch": epoch, "changed_at": time.time()}
            self._one(
                connection.execute(queries.touch(state, tuple(sorted(values))), parameters | values), row, state, epoch
            )
            if event is not None:
                self._add_event(event, epoch)

    def take(self, row: int, state: State, epoch: int) -> None:
        """Say that the worker of ``epoch`` works on a row that an earlier one left in flight: its crash is blamed on it.

        Raises:
            FencedError: as for :meth:`apply`.
        """
        with self._writing() as connection:
            done = connection.execute(queries.take(state), {"at_row": row, "at_epoch": epoch})
            self._one(done, row, state, epoch)

    def release(self, rows: Sequence[int]) -> list[int]:
        """Mark verified rows as consumed: their files may be freed. Returns those that were not marked before.

        No epoch is asked for: it takes nothing from a worker, which is done with a verified row, and may be done
        beside a live run.
        """
        now = time.time()
        with self._writing() as connection:
            return [row for row in rows if connection.execute(queries.RELEASE, {"row": row, "now": now}).fetchall()]

    def add_events(self, events: Iterable[tuple[str, Event]]) -> None:
        """Enter events that were first kept elsewhere, each under its key, once."""
        with self._writing():
            for key, event in events:
                self._add_event(event, event.epoch, key)

    def require(self, epoch: int) -> None:
        """Go on only if ``epoch`` is the run's: for what changes the hand-over root or the output, and no row.

        Raises:
            FencedError: when it is not.
        """
        current = self.epoch
        if current != epoch:
            raise FencedError(f"epoch {epoch} is over (now {current}): a newer worker owns the run")

    def finish(self, epoch: int | None = None) -> None:
        """Every row is verified, failed or skipped; ``epoch`` of the worker that says so.

        Raises:
            FencedError: when ``epoch`` is no longer the run's.
        """
        with self._writing() as connection:
            statement = "UPDATE run SET finished_at = :now WHERE id = 1 AND epoch = coalesce(:epoch, epoch)"
            if connection.execute(statement, {"now": time.time(), "epoch": epoch}).rowcount != 1:
                raise FencedError(f"epoch {epoch} is over: something newer owns the run")

    def reopen(self, epoch: int) -> None:
        """There is work again in a run that was finished.

        Raises:
            FencedError: when ``epoch`` is no longer the run's.
        """
        with self._writing() as connection:
            statement = "UPDATE run SET finished_at = NULL WHERE id = 1 AND epoch = :epoch"
            if connection.execute(statement, {"epoch": epoch}).rowcount != 1:
                raise FencedError(f"epoch {epoch} is over: something newer owns the run")

    # inside

    def _one(self, done: sqlite3.Cursor, row: int, state: State, epoch: int) -> None:
        if done.rowcount != 1:
            raise FencedError(f"row {row} is no longer {state}, or epoch {epoch} is over (now {self.epoch})")

    def _fenced(self, move: Move, epoch: int) -> FencedError:
        try:
            self.require(epoch)
        except FencedError as error:
            return error
        found = self.rows_of([move.row])
        now = f"({found[0]['state']}, attempt {found[0]['attempt']})" if found else "absent"
        return FencedError(
            f"row {move.row} is {now}, not ({move.transition.source}, attempt {move.attempt}): something else changed it"
        )
