"""What a worker is made of, put together once: journal, sinks, hand-over roots and, for each server, its station."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hsjournal.config import Manifest, RunPaths, Settings
from hsjournal.errors import NoRoomError
from hsjournal.events import Event
from hsjournal.journal.fence import Fence
from hsjournal.journal.group import JournalThread
from hsjournal.makeable import unusable
from hsjournal.mirror import Heartbeat, Mirror
from hsjournal.server.client import client_of
from hsjournal.sink.output import Output
from hsjournal.sink.policy import ReadBackPolicy
from hsjournal.worker.blame import Blame, Book
from hsjournal.worker.brake import Brake
from hsjournal.worker.canary import Canary
from hsjournal.worker.context import Context
from hsjournal.worker.handover import Handover
from hsjournal.worker.outage import Outage
from hsjournal.worker.parts import Part, Whole
from hsjournal.worker.prover import Keeper, Prover
from hsjournal.worker.slots import Slots
from hsjournal.worker.stations import Station, Stations
from hsjournal.worker.tally import Tally, totals
from hsjournal.worker.trouble import Pauses

RECENT = 50
"""Events that are looked through for what a row has done lately."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """What all parts share.

    Args:
        paths: of the run.
        manifest: of the run.
        settings: of this start.
        epoch: of this worker.
        mirror: where events lie.
        heartbeat: of this worker.
        pauses: of the run as a whole.
        record: keeps an event.
        spawn: starts a task whose failure ends the worker.
    """

    paths: RunPaths
    manifest: Manifest
    settings: Settings
    epoch: int
    mirror: Mirror
    heartbeat: Heartbeat
    pauses: Pauses
    record: Callable[[Event], None]
    spawn: Callable[[Coroutine[Any, Any, None]], None]

    async def stations(self, stack: AsyncExitStack) -> Stations:
        """Open everything; ``stack`` closes it.

        Raises:
            HsjournalError: what keeps the journal, a root or a client from being opened.
        """
        s, m = self.settings, self.manifest
        whole = Whole(self.pauses, s.pause_limit, self.record)
        roots = await self._roots(stack, whole)
        journal = JournalThread(
            self.paths.journal,
            self.epoch,
            pause_limit=s.pause_limit,
            retry_pause=s.retry_pause,
            on_trouble=self._journal_trouble,
        )
        await journal.start()
        stack.push_async_callback(journal.stop)
        pool = self._threads(stack, len(m.out_dirs))
        readers = {Path(out): self._threads(stack, 1) if len(m.out_dirs) > 1 else pool for out in m.out_dirs}
        share = max(1, min(2 * s.sink_threads, s.max_in_flight // len(m.out_dirs)))
        output = Output(m, self.paths.rejects, Fence(self.paths.journal, self.epoch), self.record, at_once=share)
        stack.callback(output.close)
        tally = Tally(*await journal.call(totals))
        book, slots, keeper = Book(), Slots(self.heartbeat), Keeper(self.paths.run_dir)
        found: list[Station] = []
        for endpoint, (handover, root_pauses) in zip(s.endpoints, roots, strict=True):
            pauses = whole.part(endpoint.url)
            whole.has(pauses, root_pauses)
            client = await stack.enter_async_context(client_of(endpoint.url, s))
            blame = Blame(
                book,
                journal,
                self.epoch,
                tally,
                most=s.most_failures_in_a_row,
                max_strikes=s.max_strikes,
                recent=lambda: [event for _, event in self.mirror.events(RECENT)],
                record=self.record,
            )
            under_way: dict[int, int] = {}
            prover = Prover(client, handover, m, s, keeper, journal, self.record, partial(sorted, under_way))
            outage = Outage(client, handover, m, s, pauses, blame, self.record, self.spawn, prover.prove)
            context = Context(
                manifest=m,
                settings=s,
                rejects=self.paths.rejects,
                journal=journal,
                client=client,
                handover=handover,
                output=output,
                read_back=ReadBackPolicy.parse(s.verify),
                pool=pool,
                readers=readers,
                slots=slots,
                pauses=self.pauses,
                brake=Brake(pauses, s.retry_pause),
                blame=blame,
                outage=outage,
                canary=Canary(s.canary_every, prover, outage, handover, self.record, self.spawn),
                tally=tally,
                record=self.record,
            )
            found.append(Station(context, under_way))
        return Stations(found)

    def _threads(self, stack: AsyncExitStack, folders: int) -> ThreadPoolExecutor:
        pool = ThreadPoolExecutor(2 * self.settings.sink_threads * folders, thread_name_prefix="sink")
        stack.callback(lambda: pool.shutdown(wait=False, cancel_futures=True))
        return pool

    async def _roots(self, stack: AsyncExitStack, whole: Whole) -> list[tuple[Handover, Part]]:
        """The hand-over root of each server, with its pauses; servers may share one."""
        s = self.settings
        made: dict[tuple[int, int], tuple[Handover, Part]] = {}
        found: list[tuple[Handover, Part]] = []

        def promised_elsewhere(me: Handover) -> int:
            others = [other for other, _ in made.values() if other is not me and other.device == me.device]
            return sum(other.room.promised for other in others)

        for endpoint in s.endpoints:
            pauses = whole.part(endpoint.handover_root)
            handover = Handover(
                Path(endpoint.handover_root), s.handover_budget, pauses, s.retry_pause, promised_elsewhere
            )
            try:
                identity = handover.make()  # two paths may lead to one folder
                if identity not in made:
                    await stack.enter_async_context(handover)
                    made[identity] = handover, pauses
            except OSError as error:
                raise unusable("the hand-over root", handover.path, "--handover-root", error) from error
            found.append(made[identity])
        return found

    def _journal_trouble(self, error: NoRoomError | None) -> None:
        if error is None:
            self.pauses.end("journal")
        else:
            self.pauses.begin("journal", error.message, error.trouble)
