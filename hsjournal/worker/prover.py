"""Before a server gets samples: the dear part of the preflight, and the run's probe prompt as it was at the start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hsjournal.config import Manifest, Settings
from hsjournal.dump.protocol import payload_bytes
from hsjournal.errors import ServerError
from hsjournal.events import Event
from hsjournal.journal.doubt import DOUBTED, GOOD, ranges, rows_since_good
from hsjournal.journal.group import JournalThread
from hsjournal.server.client import ServerClient
from hsjournal.server.preflight import PROBE_TIMEOUT, ProbeHeldError, ServerFacts, ask_agreement, probe
from hsjournal.server.preflight.agreement import worst
from hsjournal.server.preflight.baseline import Baseline, other_states
from hsjournal.server.preflight.states import Difference, States, read_states
from hsjournal.worker.handover import Handover

_MOST_NAMED = 300
"""Characters of a list of rows for people; the journal has it whole."""


class Keeper:
    """The run's baseline, made once, for all its servers.

    Args:
        folder: the run directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = asyncio.Lock()
        self._loaded = False
        self.baseline: Baseline | None = None

    async def load(self) -> Baseline | None:
        """What is kept; read once."""
        if not self._loaded:
            self.baseline = await asyncio.to_thread(Baseline.load, self._folder)
            self._loaded = True
        return self.baseline

    async def keep(self, baseline: Baseline) -> None:
        """Keep another one from now on."""
        self.baseline = baseline
        await asyncio.to_thread(baseline.save, self._folder)

    def alone(self) -> asyncio.Lock:
        """Held while a server is proven: the first one makes what the others are held against."""
        return self._lock


class Prover:
    """Proves one server.

    Args:
        client: of the server.
        handover: shared with it.
        manifest: of the run.
        settings: of this start.
        keeper: of the run.
        journal: keeps that all was well.
        record: keeps an event.
        under_way: rows that are at the server now.
    """

    def __init__(
        self,
        client: ServerClient,
        handover: Handover,
        manifest: Manifest,
        settings: Settings,
        keeper: Keeper,
        journal: JournalThread,
        record: Callable[[Event], object],
        under_way: Callable[[], list[int]],
    ) -> None:
        self._client, self._handover, self._manifest = client, handover, manifest
        self._every, self._keeper, self._journal = settings.canary_every, keeper, journal
        self._record, self.under_way = record, under_way
        self._timeout = min(PROBE_TIMEOUT, settings.sample_timeout)
        self._proved = False
        self._doubted: set[str] = set()

    @property
    def url(self) -> str:
        """Of the server."""
        return self._client.url

    async def prove(self, facts: ServerFacts) -> None:
        """What is asked after the cheap part passed; everything the first time in this worker's life.

        A life of the server that has passed already, or began during the run, is only held against the baseline.

        Raises:
            ServerError: when states depend on their company, or are not those of the run's start.
            ProbeError, UnreachableError, TimedOutError: what may pass.
        """
        found: dict[str, Any] = {"url": self._client.url, **facts.to_json()}
        if self._every or facts.meta.engine != "embedded":
            async with self._keeper.alone():
                found["agreement"] = await self._prove(facts)
        self._proved = True
        self._record(Event("preflight", None, found))

    async def _prove(self, facts: ServerFacts) -> dict[str, Any]:
        baseline = await self._keeper.load()
        if baseline is not None and (self._proved or facts.boot_id in baseline.proven):
            return await self._hold(baseline, facts.boot_id)
        room = self._handover.room.available()
        sent_at = time.time()
        agreement = await ask_agreement(
            self._client, self._handover.path, self._manifest.run_id, facts, room, timeout=self._timeout
        )
        if agreement is None:
            return {"note": f"not asked: {self._handover.place()} has no room for a probe"}
        if baseline is None or baseline.ids != agreement.ids:  # a shorter prompt, where room is scarce
            if baseline is not None:
                await self._hold(baseline, facts.boot_id)
            baseline = baseline or Baseline.of(agreement, facts.boot_id)
        else:
            found, words = baseline.compare(agreement.states)
            if words:
                raise await self.doubt(facts.boot_id, found, words)
        await self._keeper.keep(baseline.with_proven(facts.boot_id))
        await self.all_well(sent_at, [], ())
        return agreement.to_json()

    async def _hold(self, baseline: Baseline, boot_id: str) -> dict[str, Any]:
        if self._handover.room.available() < self.nbytes:
            return {"note": f"not asked: {self._handover.place()} has no room for the probe prompt"}
        sent_at, under_way = time.time(), self.under_way()
        try:
            found, words = await self.ask(baseline)
        except ProbeHeldError as error:
            return {"note": f"not asked: {error.message}"}
        if words:
            raise await self.doubt(boot_id, found, words)
        await self.all_well(sent_at, under_way, found)
        return worst(found)

    async def doubt(self, boot_id: str, found: Sequence[Difference], words: list[str]) -> ServerError:
        """The server's states are not those of the start: keep which rows are in doubt; what to tell."""
        url = self.url
        since = await self._journal.call(lambda journal: rows_since_good(journal, url, boot_id))
        rows = sorted({*since, *self.under_way()})
        named = ranges(rows)
        told = {"url": url, "why": words, "count": len(rows), **(worst(found) if found else {})}
        if boot_id not in self._doubted:  # else it is asked again after it was set aside
            self._doubted.add(boot_id)
            if rows:
                await self._journal.apply(events=(Event(DOUBTED, None, told | {"rows": named}),))
            self._record(Event("canary_failed", None, told | {"rows": named[:_MOST_NAMED]}))
        return other_states(url, words, len(rows), named[:_MOST_NAMED])

    @property
    def nbytes(self) -> int:
        """Bytes of the probe prompt's dump; 0 without a baseline."""
        m, baseline = self._manifest, self._keeper.baseline
        tokens = len(baseline.ids) if baseline else 0
        return payload_bytes(tokens, m.hidden_size, m.dtype, len(m.capture_layers))

    async def ask(self, baseline: Baseline) -> tuple[tuple[Difference, ...], list[str]]:
        """Send the probe prompt; how far its states are from the start's, and in words what is too far.

        Raises:
            ServerError, ProbeError, UnreachableError, TimedOutError: as a probe.
        """
        kept: list[States] = []
        run_id = self._manifest.run_id
        await probe(
            self._client,
            self._handover.path,
            run_id,
            baseline.ids,
            timeout=self._timeout,
            look=lambda dump: kept.append(read_states(dump)),
        )
        return await asyncio.to_thread(baseline.compare, kept[0])

    async def all_well(self, sent_at: float, under_way: list[int], found: tuple[Difference, ...]) -> None:
        """Keep it: what was taken before is beyond doubt."""
        detail: dict[str, Any] = {"url": self._client.url, "sent_at": sent_at, "under_way": under_way}
        if found:
            detail |= worst(found)
        await self._journal.apply(events=(Event(GOOD, None, detail),))

    @property
    def baseline(self) -> Baseline | None:
        """What the server is held against."""
        return self._keeper.baseline
