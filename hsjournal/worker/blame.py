"""Whose fault was it? Strikes are for rows that fail where the server works; everything else is remembered here.

A row whose request the server may have died of becomes a suspect: it runs alone next, and only a death with the row
alone in flight counts a strike. A row is let off a bounded number of times, so that none goes round for ever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hsjournal.events import Event
from hsjournal.journal.group import JournalThread
from hsjournal.journal.store import Journal, Move
from hsjournal.states import Actor, State, Transition
from hsjournal.worker.held import Held
from hsjournal.worker.tally import Tally

MOST_EXCUSES = 5
SERVER_DIED = "server_died"
"""The supervisor's event about a server of our own; its detail ``crash`` is False when somebody outside killed it."""
_NOTICED_WITHIN = 30.0
"""Seconds from the death of a server until its requests are seen to break, at most."""
_ALONE = "the connection to the server broke with this sample alone in flight"


@dataclass(slots=True)
class Casualty:
    """A request that was under way when its connection broke.

    Args:
        row: its row.
        attempt: of the row.
        tokens: of the row.
        companions: how many other requests were at the server just then.
        at: seconds since 1970.
        settled: set once the row is back to pending in the journal, as a suspect.
    """

    row: int
    attempt: int
    tokens: int
    companions: int
    at: float = field(default_factory=time.time)
    settled: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Book:
    """What is remembered of rows wherever they were sent.

    Args:
        suspects: rows that run alone next.
        unsettled: suspects whose case is not decided yet; they are not sent until it is.
        excuses: how often each row was let off.
        held: rows that a v1 gateway holds back.
    """

    suspects: set[int] = field(default_factory=set)
    unsettled: set[int] = field(default_factory=set)
    excuses: dict[int, int] = field(default_factory=dict)
    held: Held = field(default_factory=Held)


class Blame:
    """What is held against rows at one server, beside the strikes in the journal.

    Args:
        book: shared by all servers.
        journal: where verdicts go.
        epoch: of this worker.
        tally: follows the changes of state.
        most: failures in a row, of different rows, after which the server is suspected rather than the rows.
        max_strikes: strikes that end a row.
        recent: the latest events of the run, the supervisor's among them.
        record: keeps an event.
    """

    def __init__(
        self,
        book: Book,
        journal: JournalThread,
        epoch: int,
        tally: Tally,
        *,
        most: int,
        max_strikes: int,
        recent: Callable[[], Iterable[Event]],
        record: Callable[[Event], object],
    ) -> None:
        self._book, self._journal, self._epoch, self._tally = book, journal, epoch, tally
        self._most, self._max_strikes = most, max_strikes
        self._recent, self._record = recent, record
        self._streak: set[int] = set()
        self._casualties: list[Casualty] = []
        self._judged_at = 0.0

    @property
    def suspects(self) -> set[int]:
        """Rows that run alone next."""
        return self._book.suspects

    @property
    def held(self) -> Held:
        """Rows that a v1 gateway holds back."""
        return self._book.held

    def failed(self, row: int) -> int:
        """A row failed; how many different ones have by now, with no success between."""
        self._streak.add(row)
        return len(self._streak)

    @property
    def is_streak(self) -> bool:
        """Whether so many different rows have failed in a row that it is hardly their fault."""
        return len(self._streak) >= self._most

    def dumped(self) -> None:
        """A dump was taken: the server works."""
        self._streak.clear()

    def ended(self, row: int) -> None:
        """A row is verified or failed: nothing more to remember."""
        self._book.excuses.pop(row, None)
        self.suspects.discard(row)

    def excuse(self, row: int) -> bool:
        """Let a row off without a strike; False when that was done too often."""
        excuses = self._book.excuses
        count = excuses[row] = excuses.get(row, 0) + 1
        return count <= MOST_EXCUSES

    def broke(self, row: int, attempt: int, tokens: int, companions: int) -> Casualty:
        """A connection broke under a request; the caller commits the row as a suspect and sets ``settled``."""
        casualty = Casualty(row, attempt, tokens, companions)
        self._casualties.append(casualty)
        self.suspects.add(row)
        self._book.unsettled.add(row)
        return casualty

    def is_unsettled(self, row: int) -> bool:
        """Whether the row may not be sent yet: its part in a broken connection is still to be decided."""
        return row in self._book.unsettled

    async def settle(self) -> None:
        """The server is back, or another one works on: decide about those that were under way when the connection broke.

        Raises:
            FencedError: when a newer worker owns the run.
        """
        while self._casualties:  # one more may break while these are settled, and nobody would come back for it
            casualties, self._casualties = self._casualties, []
            for casualty in casualties:
                await casualty.settled.wait()
            if self._was_killed(min(c.at for c in casualties)):
                await self._clear(casualties)
            elif len(casualties) == 1 and not casualties[0].companions:
                await self._strike(casualties[0])
            self._book.unsettled.difference_update(c.row for c in casualties)
            self._judged_at = time.time()

    def _was_killed(self, since: float) -> bool:
        """Whether the supervisor saw that somebody outside killed the server, which is no row's doing."""
        after = max(since - _NOTICED_WITHIN, self._judged_at)
        deaths = [e for e in self._recent() if e.kind == SERVER_DIED and e.at >= after]
        return bool(deaths) and all(e.detail.get("crash") is False for e in deaths)

    async def _clear(self, casualties: list[Casualty]) -> None:
        for c in casualties:
            event = Event("suspect_cleared", c.row, {"why": "the server was killed from outside"})
            await self._touch(c, event, suspect=0)
            self.suspects.discard(c.row)

    async def _strike(self, c: Casualty) -> None:
        (row,) = await self._journal.call(lambda journal: journal.rows_of([c.row]))
        strikes = row["strikes"] + 1
        event = Event("server_death_strike", c.row, {"strikes": strikes, "why": _ALONE})
        if strikes < self._max_strikes:
            await self._touch(c, event, strikes=strikes, reason=_ALONE)
            return
        move = Transition(State.PENDING, State.FAILED, Actor.WORKER, "strikes used up")
        values = {"strikes": strikes, "reason": _ALONE, "suspect": 0}
        await self._journal.apply(Move(c.row, c.attempt, move, values, event))
        self._tally.moved(c.row, State.PENDING, State.FAILED, c.tokens)
        self._record(Event("sample_failed", c.row, {"why": _ALONE}))
        self.ended(c.row)

    async def _touch(self, c: Casualty, event: Event, **values: int | str) -> None:
        def work(journal: Journal) -> None:
            journal.touch(c.row, State.PENDING, self._epoch, event, **values)

        await self._journal.call(work)
