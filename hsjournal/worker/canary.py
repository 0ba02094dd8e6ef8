"""The canary: the run's probe prompt, sent again every so many samples, whose states must be as at the start.

Digests tell that a dump belongs to its prompt, never that its rows are right: a server whose cache leaks, or whose
weights were changed under it, answers with rows that look well. When the canary's rows are wrong, and wrong again, the
server gets no further sample, and the rows since the last good one are named: they stay as they are until somebody
decides (``hsjournal retry RUN_DIR --doubted``).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

from hsjournal.errors import ServerError
from hsjournal.events import Event
from hsjournal.server.client import TimedOutError, UnreachableError
from hsjournal.server.preflight import ProbeError, ProbeHeldError
from hsjournal.server.preflight.agreement import worst
from hsjournal.server.preflight.baseline import Baseline
from hsjournal.server.preflight.states import Difference
from hsjournal.worker.handover import Handover
from hsjournal.worker.outage import Outage
from hsjournal.worker.prover import Prover

_MAY_PASS = (UnreachableError, TimedOutError, ProbeError)
_KEY = "canary"
_TICK = 0.05


class Canary:
    """Watches one server.

    Args:
        every: samples from one canary to the next; 0 for none.
        prover: knows the baseline, and what is at the server.
        outage: of the server.
        handover: where room is reserved.
        record: keeps an event.
        spawn: starts a task; what it raises ends the worker.
    """

    def __init__(
        self,
        every: int,
        prover: Prover,
        outage: Outage,
        handover: Handover,
        record: Callable[[Event], object],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._every, self._prover, self._outage, self._handover = every, prover, outage, handover
        self._record, self._spawn = record, spawn
        self._count = 0
        self._flying = asyncio.Lock()
        self.has_failed = False
        """Whether it came back wrong, twice, in this worker's life: rows are in doubt."""
        self.holds = False
        """Whether no further sample may start: it waits for the room that others leave, or came back wrong once."""

    def took(self) -> None:
        """A sample's dump was taken from the server."""
        self._count += 1
        if (
            self._every
            and self._count >= self._every
            and self._prover.baseline is not None
            and not self._flying.locked()
        ):
            self._spawn(self._fly(self._prover.baseline))

    async def last(self) -> None:
        """All rows are done: once more, for those since the last one. A server that is gone by now can't be asked.

        Raises:
            ServerError: when the states are wrong.
        """
        while self._flying.locked() and self._outage.is_up:  # noqa: ASYNC110 - either may end it
            await asyncio.sleep(_TICK)
        if self._every and self._count and self._prover.baseline is not None and self._outage.is_up:
            with contextlib.suppress(*_MAY_PASS):
                if (error := await self._judge(self._prover.baseline)) is not None:
                    raise error

    async def _fly(self, baseline: Baseline) -> None:
        async with self._flying:
            if self._count < self._every:
                return  # the one before it has seen to these too
            try:
                if await self._make_room() and (wrong := await self._judge(baseline)) is not None:
                    self._outage.refuse(wrong)
                    self.holds = False  # the server is set aside instead
            except ProbeHeldError as error:  # the server is no worse for it, and other lengths go on
                self._record(Event("canary_held", None, {"url": self._prover.url, "why": error.message}))
                self._count = 0
            except _MAY_PASS as error:  # again with the next sample, once the server is back
                self._outage.report(f"the canary did not come back: {error.message}")
            except ServerError as error:
                self._outage.refuse(error)
            finally:
                self._handover.room.release(_KEY)

    async def _make_room(self) -> bool:
        """Wait for room, while no further sample may start; False when there can never be enough."""
        self.holds = True
        try:
            while True:
                with contextlib.suppress(OSError):  # the root is gone just now
                    if self._prover.nbytes > self._handover.room.capacity():
                        self._record(
                            Event("canary_too_big", None, {"url": self._prover.url, "bytes": self._prover.nbytes})
                        )
                        self._count = 0
                        return False
                    if self._outage.is_up and self._handover.room.reserve(_KEY, self._prover.nbytes):
                        return True
                await asyncio.sleep(_TICK)
        finally:
            self.holds = False

    async def _judge(self, baseline: Baseline) -> ServerError | None:
        """Send it, and again if it comes back wrong; what to tell when it was wrong twice: then no sample may start."""
        async with self._outage.asking:
            count, sent_at, under_way = self._count, time.time(), self._prover.under_way()
            found, words = await self._prover.ask(baseline)
            if not words:
                self._count -= count
                await self._prover.all_well(sent_at, under_way, found)
                return None
            self._record(Event("canary_odd", None, self._told(found, words)))
            error = None
            self.holds = True  # or rows would be sent that nobody names
            try:
                again, words = await self._prover.ask(baseline)
                if words:
                    self.has_failed = True
                    error = await self._prover.doubt(self._outage.boot_id or "", again, words)
            finally:
                self.holds = error is not None
            return error

    def _told(self, found: tuple[Difference, ...], words: list[str]) -> dict[str, Any]:
        return {"url": self._prover.url, "why": words, **(worst(found) if found else {})}
