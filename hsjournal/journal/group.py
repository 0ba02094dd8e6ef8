"""Group commit: the worker's tasks hand their changes to one thread, which commits what has gathered together.

A full or failing journal disk pauses here: nothing is claimed that was not committed, and the same batch is tried
again until there is room or the pause limit has passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hsjournal.errors import HsjournalError, NoRoomError
from hsjournal.events import Event
from hsjournal.journal.place import JournalGoneError, Place
from hsjournal.journal.refusals import is_damage, may_pass, refusal, trouble_of
from hsjournal.journal.store import Journal, Move
from hsjournal.lifeline import name_thread
from hsjournal.states import State

T = TypeVar("T")
GUARD_EVERY = 2.0
MOST_PER_COMMIT = 256
"""Changes that share a commit; each may hold several moves."""


class JournalThread:
    """An open journal on a thread of its own.

    Args:
        path: the database.
        epoch: every change is made only while this is the run's epoch.
        pause_limit: seconds that a full or failing disk may last.
        retry_pause: seconds between two tries.
        on_trouble: called, on the thread, with the error when the disk fails and with None when it works again.
    """

    def __init__(
        self,
        path: Path,
        epoch: int,
        *,
        pause_limit: float,
        retry_pause: float,
        on_trouble: Callable[[NoRoomError | None], None] = lambda _error: None,
    ) -> None:
        self._path, self._epoch = path, epoch
        self._pause_limit, self._retry_pause, self._on_trouble = pause_limit, retry_pause, on_trouble
        self._work: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._place: Place | None = None
        self._gone: JournalGoneError | None = None

    @property
    def epoch(self) -> int:
        """Of this worker."""
        return self._epoch

    async def start(self) -> None:
        """Open the journal.

        Raises:
            NoJournalError, SchemaError, NoRoomError, JournalLockedError: as :class:`Journal`.
        """
        self._loop = asyncio.get_running_loop()
        opened = _Job(self._loop, function=lambda _journal: None)
        self._work.put(opened)
        self._thread.start()
        await opened.done

    async def guard(self) -> None:
        """For the worker's life: see to it that the journal is not deleted or replaced while nothing is committed.

        Raises:
            JournalGoneError: when it was.
        """
        while True:
            await asyncio.sleep(GUARD_EVERY)
            await self.call(lambda _journal: None)

    async def stop(self) -> None:
        """Commit what is queued and close the journal. What is handed in later is refused."""
        self._closed = True
        self._work.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    async def apply(self, *moves: Move, events: Sequence[Event] = ()) -> None:
        """Make the changes; returns once they are committed.

        Raises:
            FencedError: when a newer worker owns the run; nothing was changed.
            NoRoomError: when the disk stayed full or failing past the pause limit; nothing was changed.
            SchemaError: when SQLite finds the journal damaged.
        """
        await self._hand_in(moves=moves, events=events)

    async def take(self, row: int, state: State) -> None:
        """Say that this worker works on a row that an earlier one left in flight; raises as :meth:`apply`."""
        await self.call(lambda journal: journal.take(row, state, self._epoch))

    async def call(self, function: Callable[[Journal], T]) -> T:
        """Run ``function`` on the journal's thread and return what it returns.

        It is run again from its beginning when the disk fails, so it must bear that.
        """
        result: T = await self._hand_in(function=function)
        return result

    async def _hand_in(self, **what: Any) -> Any:
        if self._closed or self._loop is None or not self._thread.is_alive():
            raise HsjournalError(f"the journal {self._path} is closed")
        job = _Job(self._loop, **what)
        self._work.put(job)
        return await job.done

    def _run(self) -> None:
        name_thread("journal")
        try:
            journal = Journal(self._path)
        except BaseException as error:  # noqa: BLE001 - handed to the starter
            self._refuse_all(error)
            return
        try:
            with journal:
                self._place = Place(self._path)
                self._serve(journal)
        finally:
            self._refuse_all(HsjournalError(f"the journal {self._path} is closed"))

    def _serve(self, journal: Journal) -> None:
        pending: _Job | None = None
        while True:
            first, pending = (pending or self._work.get()), None
            if first is None:
                return
            if first.function is not None:
                self._do(journal, [first], lambda job=first: job.function(journal))  # type: ignore[misc]
                continue
            batch, ending = [first], False
            while len(batch) < MOST_PER_COMMIT and not self._work.empty():
                following = self._work.get()
                if following is None:
                    ending = True
                    break
                if following.function is not None:
                    pending = following
                    break
                batch.append(following)
            self._commit(journal, batch)
            if ending:
                return

    def _commit(self, journal: Journal, batch: list[_Job]) -> None:
        batch = [job for job in batch if not job.done.cancelled()]
        moves = [move for job in batch for move in job.moves]
        events = [event for job in batch for event in job.events]
        self._do(journal, batch, lambda: journal.apply(moves, self._epoch, events))

    def _do(self, journal: Journal, jobs: list[_Job], step: Callable[[], Any]) -> None:
        if not jobs:
            return
        try:
            self._look(journal)
            result = self._insist(step)
            self._look(journal)
        except BaseException as error:  # noqa: BLE001 - handed to the tasks that wait
            self._tell(jobs, None, error)
        else:
            self._tell(jobs, result, None)

    def _look(self, journal: Journal) -> None:
        """Go on only if the journal's name still leads to the open file; else save what is in it, once."""
        problem = self._place.problem() if self._place is not None else None
        if self._place is None or problem is None:
            return
        if self._gone is None:
            self._gone = self._place.gone(problem, journal.rescued_by(self._place))
        raise self._gone

    def _tell(self, jobs: list[_Job], result: Any, error: BaseException | None) -> None:
        """Wake all that wait with one message to the loop: a message each would cost more than the commit."""

        def settle() -> None:
            for job in jobs:
                if job.done.done():  # its task was cancelled meanwhile; what was committed stays
                    continue
                if error is None:
                    job.done.set_result(result)
                else:
                    job.done.set_exception(error)

        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(settle)

    def _refuse_all(self, error: BaseException) -> None:
        while not self._work.empty():
            job = self._work.get()
            if job is not None:
                self._tell([job], None, error)

    def _insist(self, step: Callable[[], T]) -> T:
        since: float | None = None
        while True:
            try:
                result = step()
            except sqlite3.DatabaseError as error:
                if is_damage(error):
                    raise refusal(error, self._path) from error
                if not may_pass(error):
                    raise
                trouble = NoRoomError(
                    f"the journal can't be written: {error} ({self._path})",
                    remedy="Make room or mend the disk, then resume; nothing is lost.",
                    trouble=trouble_of(error),
                )
                now = time.monotonic()
                since = now if since is None else since
                self._on_trouble(trouble)
                if now - since > self._pause_limit:
                    raise trouble from error
                time.sleep(self._retry_pause)
            else:
                if since is not None:
                    self._on_trouble(None)
                return result


class _Job:
    """Something handed in: a change, or a function to call."""

    __slots__ = ("done", "events", "function", "moves")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        moves: Sequence[Move] = (),
        events: Sequence[Event] = (),
        function: Callable[[Journal], Any] | None = None,
    ) -> None:
        self.moves, self.events, self.function = moves, events, function
        self.done: asyncio.Future[Any] = loop.create_future()
