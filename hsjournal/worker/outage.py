"""Is the server there, is it still the same one, and was it its fault?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from hsjournal.config import Manifest, Settings
from hsjournal.errors import HsjournalError, ServerError
from hsjournal.events import Event
from hsjournal.server.client import ServerClient, TimedOutError, UnreachableError
from hsjournal.server.preflight import (
    PROBE_TIMEOUT,
    NoDumpError,
    ProbeError,
    ServerFacts,
    check_facts,
    of_free_length,
    preflight,
    probe,
)
from hsjournal.worker.blame import Blame
from hsjournal.worker.brake import no_room
from hsjournal.worker.handover import Handover
from hsjournal.worker.parts import Part

PAUSE = "server"
PROBE_TOKENS = 8
MAX_BACK_OFF = 30.0
FRESH = 1.0
"""Seconds for which a dump that was taken, or a probe, proves that the server works."""
_MAY_PASS = (UnreachableError, TimedOutError, ProbeError)


@dataclass(frozen=True, slots=True, eq=False)
class Life:
    """One life of the server: what was asked of it can't come from the next."""

    boot_id: str
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Outage:
    """Knows whether requests may be sent, and proves a returned server before the next one is.

    Args:
        client: of the server.
        handover: shared with it.
        manifest: what it must serve.
        settings: of this start.
        pauses: of this server: shows that it is away.
        blame: told when it is back, before the next request is sent.
        record: keeps an event.
        spawn: starts the task that waits for the server's return; what it raises must end the worker.
        prove: what more is asked of a server that passed the cheap part; raises as the preflight.
    """

    def __init__(
        self,
        client: ServerClient,
        handover: Handover,
        manifest: Manifest,
        settings: Settings,
        pauses: Part,
        blame: Blame,
        record: Callable[[Event], object],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        prove: Callable[[ServerFacts], Awaitable[None]],
    ) -> None:
        self._prove = prove
        self._client, self._handover, self._blame = client, handover, blame
        self._manifest, self._settings, self._pauses = manifest, settings, pauses
        self._record, self._spawn = record, spawn
        self._probe_timeout = min(PROBE_TIMEOUT, settings.sample_timeout)
        self._up = asyncio.Event()
        self._recovering = False
        self._complaints = 0
        self._fresh = min(FRESH, settings.retry_pause)
        self._last_good = -FRESH
        self.asking = asyncio.Lock()
        """Held while a probe is under way: never two at a time."""
        self.life: Life | None = None

    @property
    def boot_id(self) -> str | None:
        """Of the server's life that passed the last preflight."""
        return self.life.boot_id if self.life else None

    @property
    def is_up(self) -> bool:
        """Whether requests may be sent."""
        return self._up.is_set()

    @property
    def others_work(self) -> bool:
        """Whether the run can go on without this server."""
        return self._pauses.others_work

    @property
    def problem(self) -> str | None:
        """Why no request may be sent; None when it may."""
        return self._pauses.sentences.get(PAUSE) if not self.is_up else None

    async def connect(self) -> None:
        """The first preflight; an unreachable server is waited for in the background.

        Raises:
            ServerError: when the server is another one than the run was made for, or shares no folder with us.
        """
        try:
            await self._preflight()
        except NoDumpError:
            raise
        except _MAY_PASS as error:
            self.report(error.message)
        else:
            self._up.set()

    def worked(self) -> None:
        """A dump was accepted: the server works."""
        self._last_good = time.monotonic()

    def report(self, sentence: str) -> None:
        """The server failed for everybody: hold all requests until a preflight passes."""
        self._up.clear()
        self._complaints += 1
        self._pauses.begin(PAUSE, sentence)
        if not self._recovering:
            self._recovering = True
            self._spawn(self._recover())

    def refuse(self, error: ServerError) -> None:
        """The server is set up wrongly: of several it is set aside, and asked again from time to time.

        Raises:
            ServerError: when it is the only one.
        """
        if not self._pauses.is_plural:
            raise error
        self.report(str(error))

    async def is_sane(self) -> bool:
        """Whether a failure just now is the row's: a dump was taken at about the same time, or a probe comes through.

        Raises:
            ServerError: when the probe shows that the server is set up wrongly.
        """
        asked = time.monotonic()
        async with self.asking:
            if not self.is_up:
                return False
            if self._last_good > asked - self._fresh:  # also by the probe that this call waited for
                return True
            try:
                await self._probe()
            except _MAY_PASS as error:
                self.report(f"the server does not do a probe either: {error.message}")
                return False
        self.worked()
        return True

    async def _probe(self) -> None:
        client, root, run_id = self._client, self._handover.path, self._manifest.run_id
        await of_free_length(PROBE_TOKENS, lambda n: probe(client, root, run_id, [1] * n, timeout=self._probe_timeout))

    async def _preflight(self) -> None:
        async with self.asking:
            facts: ServerFacts = await preflight(
                self._client, self._handover.path, self._manifest.run_id, timeout=self._probe_timeout
            )
            check_facts(facts, self._manifest)
            await self._prove(facts)
        last, self.life = self.life, self._life_of(facts)
        if last is not None and last is not self.life:
            self._record(Event("server_rebooted", None, {"from": last.boot_id, "to": facts.boot_id}))
            last.ended.set()
        self.worked()

    def _life_of(self, facts: ServerFacts) -> Life:
        same = self.life is not None and self.life.boot_id == facts.boot_id
        return self.life if same and self.life is not None else Life(facts.boot_id)

    async def _recover(self) -> None:
        pause = self._settings.retry_pause / 4  # a mere hiccup is over by now
        while True:
            await asyncio.sleep(pause)
            self._pauses.check(PAUSE, self._given_up)
            if self._pauses.others_work:
                await self._blame.settle()  # those rows need not wait for this server
            if self._handover.is_gone:
                continue  # nothing could arrive
            complaints = self._complaints
            try:
                await self._preflight()
            except ServerError as error:
                if not isinstance(error, _MAY_PASS) and not self._pauses.is_plural:
                    raise
                self._pauses.begin(PAUSE, error.message)
                pause = min(pause * 1.5, MAX_BACK_OFF)
            else:
                await self._blame.settle()
                if self._complaints != complaints:
                    continue  # it failed for somebody since it was asked
                self._recovering = False
                self._up.set()
                self._pauses.end(PAUSE)
                return

    def _given_up(self, words: str) -> HsjournalError:
        if self._handover.room.was_full(within=FRESH):  # it is full now
            return no_room(f"{words}; {self._handover.place()} is full")
        return ServerError(
            f"no usable server for {self._settings.pause_limit:.0f} s: {words}",
            remedy="Mend the server, then `hsjournal resume`; nothing is lost.",
        )
