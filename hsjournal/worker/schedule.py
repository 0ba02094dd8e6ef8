"""Which row runs next, and whether there is room for it: suspects alone, then what was recovered, then the rest."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections import deque
from typing import Any

from hsjournal.dump.protocol import RequestId, payload_bytes
from hsjournal.errors import NoRoomError
from hsjournal.journal.store import Claim, Journal
from hsjournal.states import DEFERRED, INCOMPLETE, State
from hsjournal.worker.ceiling import Ceiling
from hsjournal.worker.context import Outcome
from hsjournal.worker.recover import written_of
from hsjournal.worker.retreat import run
from hsjournal.worker.row import Row
from hsjournal.worker.stations import Station, Stations
from hsjournal.worker.trouble import start_in

CLAIM_BATCH = 64
WAKE_EVERY = 0.5
RETRY_AFTER = 1.0
_SLACK = 1 << 16
"""Bytes of a dump beside its tensors."""
_HOLDING = ("output", "journal")
"""Pauses during which nothing is sent: it could not be taken in."""


class Schedule:
    """Runs rows until none is left, or until drained.

    Args:
        stations: the servers.
        group: the rows' tasks; what one of them raises ends the worker.
        draining: set when no further row is to be started.
    """

    def __init__(self, stations: Stations, group: asyncio.TaskGroup, draining: asyncio.Event) -> None:
        self._stations, self._group, self._draining = stations, group, draining
        self._c = next(iter(stations)).c  # what is said of it here is the same for all servers
        self._tick = min(WAKE_EVERY, self._c.settings.retry_pause)
        self._retry_after = min(RETRY_AFTER, self._c.settings.retry_pause)
        self._tasks: set[asyncio.Task[None]] = set()
        self._cursor = -1
        self._exhausted = False
        self._ready: list[Claim] = []
        self._later: list[tuple[float, int]] = []
        self._alone: deque[int] = deque()
        self._queued: set[int] = set()
        self._inherited: set[int] = set()
        self._too_big: dict[int, int] = {}
        self._wake = asyncio.Event()
        self._ceiling = Ceiling(self._c, stations.under_way)

    def wake(self) -> None:
        """Something changed: look again."""
        self._wake.set()

    async def run(self) -> None:
        """Run every row to its end.

        Raises:
            NoRoomError: when the hand-over root stayed too small past the pause limit, or could never hold a sample.
        """
        c = self._c
        await self._suspects()
        await self._recovered()
        while not self._draining.is_set():
            if self._alone:
                await self._run_alone(self._alone.popleft())
            elif (claim := await self._next()) is not None:
                if self._fits(claim) and (station := await self._make_way(claim)) is not None:
                    self._start(claim, State.PENDING, station)
            elif self._tasks or self._later or self._alone:
                if not self._tasks:
                    c.blame.held.check((row for _, row in self._later), c.pauses)
                await self._sleep()
            else:
                self._refuse_big()
                return
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _suspects(self) -> None:
        """Rows that were in flight when a worker or the server died run alone, so that the next death names its row."""
        rows = [row["row"] for row in await self._c.journal.call(lambda j: j.suspects())]
        self._c.blame.suspects.update(rows)
        self._inherited.update(rows)
        self._alone.extend(rows)
        while self._alone and not self._draining.is_set():
            await self._run_alone(self._alone.popleft())

    async def _recovered(self) -> None:
        """Rows that are already past the sending."""
        rows = await self._c.journal.call(self._left_behind)
        self._inherited.update(row["row"] for row in rows)
        for row in rows:
            while len(self._tasks) >= self._c.settings.max_in_flight * len(self._stations):
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._draining.is_set():
                return
            claim = await self._claim(row["row"])
            self._start(claim, State(row["state"]), self._owner_of(claim, row), row)

    def _left_behind(self, journal: Journal) -> list[dict[str, Any]]:
        rows = journal.being_written()
        policy, run_id = self._c.read_back, self._c.manifest.run_id
        if policy.share > 0:  # else none of those that were put off is due
            written = (r for r in journal.rows_in(State.WRITTEN) if r["verify_method"] == DEFERRED)
            rows += [r for r in written if policy.reads(run_id, r["row"])]
        return rows + journal.rows_in(State.DUMPED) + journal.rows_in(State.SENT)

    async def _run_alone(self, number: int) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)
        row = await self._row(number)
        claim = await self._claim(number)
        if State(row["state"]) is State.PENDING:
            way = await self._make_way(claim) if self._fits(claim) else None
            if way is None:
                return
            station = way
            row = await self._row(number)  # the wait may have been for the verdict on this very row
        else:
            station = self._owner_of(claim, row)
        state = State(row["state"])
        if state not in INCOMPLETE or self._draining.is_set():
            station.c.handover.room.release(str(number))
            return
        await asyncio.wait({self._start(await self._claim(number), state, station, row)})

    def _owner_of(self, claim: Claim, row: dict[str, Any]) -> Station:
        rid = RequestId.sample(self._c.manifest.run_id, claim.row, claim.attempt, claim.num_tokens)
        return self._stations.owner_of(rid, row["boot_id"], row["server"])

    async def _row(self, number: int) -> dict[str, Any]:
        (row,) = await self._c.journal.call(lambda j: j.rows_of([number]))
        return row

    async def _next(self) -> Claim | None:
        # A trial row had better be one that has not failed yet: those that have may be at fault themselves.
        if self._stations.is_braked:
            return await self._fresh() or await self._due()
        return await self._due() or await self._fresh()

    async def _due(self) -> Claim | None:
        if not self._later or self._later[0][0] > time.monotonic():
            return None
        row = heapq.heappop(self._later)[1]
        self._queued.discard(row)
        if row in self._c.blame.suspects:  # it was held: alone again
            self._alone.append(row)
            return None
        return await self._claim(row)

    async def _fresh(self) -> Claim | None:
        if not self._ready and not self._exhausted:
            self._ready = await self._c.journal.call(lambda j: j.claimable(self._cursor, CLAIM_BATCH))
            self._exhausted = not self._ready
            if self._ready:
                self._cursor = self._ready[-1].row
        while self._ready:
            claim = self._ready.pop(0)
            if claim.row not in self._inherited:  # else it goes its way through the other queues
                return claim
        return None

    async def _claim(self, row: int) -> Claim:
        return await self._c.journal.call(lambda j: j.claim_of(row))

    def _fits(self, claim: Claim) -> bool:
        """Whether a hand-over root could ever hold the sample; the others go first where none could."""
        try:
            fits = self._bytes_of(claim) <= max(root.room.capacity() for root in self._stations.handovers)
        except OSError:  # a root is gone just now
            return True
        if not fits:
            self._too_big[claim.row] = self._bytes_of(claim)
        return fits

    def _refuse_big(self) -> None:
        if not self._too_big:
            return
        row, needed = max(self._too_big.items(), key=lambda item: item[1])
        root = max(self._stations.handovers, key=lambda root: root.room.capacity())
        raise NoRoomError(
            f"{len(self._too_big):,} samples are too big for {root.place()}, which can hold "
            f"{root.room.capacity():,} bytes: row {row} needs {needed:,}; all others are done",
            remedy="Give it more (--handover-budget, docker run --shm-size), or name a folder on a disk with "
            "--handover-root, then resume.",
        )

    async def _make_way(self, claim: Claim) -> Station | None:
        """Wait for a server with a free place in flight and room in its hand-over root. None when drained meanwhile."""
        c, needed = self._c, self._bytes_of(claim)
        while not self._draining.is_set():
            held = c.blame.is_unsettled(claim.row) or any(name in c.pauses.sentences for name in _HOLDING)
            if not held and not await self._ceiling.holds(claim.num_tokens):
                station = self._stations.choose(claim.row, needed)
                if station is not None:
                    c.pauses.end("handover")
                    return station
                self._check_room(needed)
            await self._sleep()
        return None

    def _check_room(self, needed: int) -> None:
        """Nothing is in flight, and still there is no room: somebody else's files, or memory, are in the way."""
        if self._tasks:
            return
        for root in (station.c.handover for station in self._stations if station.takes()):
            with contextlib.suppress(OSError):  # it is gone just now
                has = root.room.available()
                sentence = f"{root.place()} has room for {has:,} bytes, the next sample needs {needed:,}"
                self._c.pauses.begin("handover", sentence)
                self._c.pauses.check("handover")

    def _start(
        self, claim: Claim, state: State, station: Station, row: dict[str, Any] | None = None
    ) -> asyncio.Task[None]:
        c, key = station.c, str(claim.row)
        deferred = row is not None and state is State.WRITTEN and row["verify_method"] == DEFERRED
        if state is not State.PENDING and not deferred:  # it is there already, or on its way
            with contextlib.suppress(OSError):
                c.handover.room.reserve(key, self._bytes_of(claim), force=True)
        if state in (State.DUMPED, State.WRITTEN) and not deferred:
            c.handover.room.landed(key)
        written = written_of(row) if row is not None and state is State.WRITTEN else None
        if written is not None:
            c.tally.holds(claim.row, written.nbytes)
        lost = state is State.SENT and not station.tells
        way = Row(c, claim, state, trial=c.brake.is_pressed, inherited=lost, deferred=deferred)
        station.enter(claim.row, claim.num_tokens)

        async def work() -> None:
            try:
                if state is not State.PENDING:
                    await c.journal.take(claim.row, state)
                outcome = await run(way, written)
            finally:
                c.handover.room.release(key)
                station.leave(claim.row, done=way.state is State.VERIFIED or way.deferred)
                self.wake()
            held = outcome is Outcome.HELD
            if not held:
                c.blame.held.sent(claim.row, self._c.pauses)
            if held or outcome is Outcome.AGAIN:
                self._stations.sent_back(claim.row, station)
                self._again(claim.row, held=held)
            else:
                self._stations.ended(claim.row)

        task = start_in(self._group, work(), f"row-{claim.row}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _again(self, row: int, *, held: bool) -> None:
        if row in self._c.blame.suspects and not held:
            self._alone.append(row)
        elif row not in self._queued:
            self._queued.add(row)
            pause = self._c.blame.held.pause(row, self._retry_after)
            heapq.heappush(self._later, (time.monotonic() + pause, row))

    async def _sleep(self) -> None:
        self._wake.clear()
        due = self._later[0][0] - time.monotonic() if self._later else self._tick
        with contextlib.suppress(TimeoutError):
            # Not wait_for: up to Python 3.11 it swallows a cancellation that comes together with the event.
            async with asyncio.timeout(min(self._tick, max(due, 0.005))):
                await self._wake.wait()

    def _bytes_of(self, claim: Claim) -> int:
        m = self._c.manifest
        return payload_bytes(claim.num_tokens, m.hidden_size, m.dtype, len(m.capture_layers)) + _SLACK
