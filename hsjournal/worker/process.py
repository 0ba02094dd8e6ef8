"""The worker's life: lock, journal, preflight, reconcile, then rows until none is left or it is told to drain."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

from hsjournal.config import Manifest, RunPaths, Settings
from hsjournal.errors import ExitCode, HsjournalError, NoRoomError, end_code
from hsjournal.events import Event
from hsjournal.journal.fence import Fence
from hsjournal.journal.locks import Lock
from hsjournal.journal.store import Journal
from hsjournal.mirror import SNAPSHOT, Heartbeat, Mirror, Phase
from hsjournal.reconcile.apply import apply
from hsjournal.reconcile.plan import plan
from hsjournal.states import DEFERRED, INCOMPLETE, State
from hsjournal.worker import leavings
from hsjournal.worker.assembly import Assembly
from hsjournal.worker.beside import Beside
from hsjournal.worker.chronicle import Chronicle
from hsjournal.worker.handover import Handover
from hsjournal.worker.recover import in_flight_at, survey
from hsjournal.worker.schedule import Schedule
from hsjournal.worker.stations import Stations
from hsjournal.worker.sweep import sweep, sweep_always
from hsjournal.worker.tally import Tally, refuse_miscount, totals
from hsjournal.worker.trouble import Pauses, start_in

SNAPSHOT_EVERY = 0.5


class Worker:
    """One worker of one run directory.

    Args:
        paths: of the run.
        manifest: of the run.
        settings: of this start.
        epoch: given by the supervisor; every change is made only while it is the run's.
    """

    def __init__(self, paths: RunPaths, manifest: Manifest, settings: Settings, epoch: int) -> None:
        self._paths, self._manifest, self._settings, self._epoch = paths, manifest, settings, epoch
        self._mirror = Mirror(paths.mirror)
        self._draining = asyncio.Event()
        self._pauses = Pauses(settings.pause_limit, self._record)
        self._background: list[asyncio.Task[None]] = []

    async def run(self) -> ExitCode:
        """Work until every row is verified, failed or skipped, or until drained.

        Raises:
            HsjournalError: whose exit code says what happened; nothing is lost by it.
        """
        lock = Lock(self._paths.worker_lock)
        lock.acquire()
        self._mirror.create()
        self._heartbeat = Heartbeat(self._mirror.folder, self._epoch)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._drain)
        self._record(Event("worker_started", None, {"pid": os.getpid()}))
        try:
            async with AsyncExitStack() as stack:
                stations = await self._assembly().stations(stack)
                async with asyncio.TaskGroup() as group:
                    self._group = group
                    await self._work(stations)
                    for task in self._background:
                        task.cancel()
                return await self._finish(stations)
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            lock.release()

    def _assembly(self) -> Assembly:
        return Assembly(
            self._paths, self._manifest, self._settings, self._epoch, self._mirror, self._heartbeat, self._pauses,
            self._record, self._spawn,
        )  # fmt: skip

    async def _work(self, stations: Stations) -> None:
        schedule = Schedule(stations, self._group, self._draining)
        self._spawn(self._tick(stations, schedule))
        journal = next(iter(stations)).c.journal
        self._spawn(journal.guard())
        self._spawn(Chronicle(self._mirror, journal, self._pauses).keep())
        for handover in stations.handovers:
            self._spawn(handover.guard(partial(_ask_again, stations, handover)))
        self._heartbeat.phase(Phase.PREFLIGHT)
        async with asyncio.TaskGroup() as group:
            for station in stations:
                group.create_task(station.c.outage.connect())
        stations.refuse_doubles()
        self._heartbeat.phase(Phase.RECONCILING)
        await self._reconcile(stations)
        self._heartbeat.phase(Phase.RUNNING)
        self._spawn(sweep_always(stations, self._settings.retry_pause))
        beside = Beside(next(iter(stations)).c, self._paths, Fence(self._paths.journal, self._epoch))
        self._spawn(beside.write())
        await schedule.run()
        if not self._draining.is_set():
            for station in stations:
                await station.c.canary.last()
        await beside.write()

    async def _reconcile(self, stations: Stations) -> None:
        """Bring journal, roots and output together."""
        c = next(iter(stations)).c
        lives: dict[str, frozenset[str] | None] = {}
        for station in stations:
            in_flight = await in_flight_at(station.c.client)
            station.tells = in_flight is not None
            if station.c.outage.boot_id is not None:
                lives[station.c.outage.boot_id] = in_flight

        def work(journal: Journal) -> Tally:
            roots = [handover.fd for handover in stations.handovers]
            made = plan(survey(journal, roots, c.output, c.manifest, lives, c.settings.max_strikes))
            freed = apply(made, journal, self._epoch, roots, c.rejects, c.output.folder, self._record)
            if not made.is_empty or made.foreign:
                self._record(Event("reconciled_root", None, made.summary() | {"freed_bytes": freed}))
            return Tally(*totals(journal))

        async def reconcile() -> Tally:
            return await c.journal.call(work)

        places = ", ".join([*map(str, c.output.folders), *(handover.place() for handover in stations.handovers)])
        now = await self._pauses.insist("output", f"one of {places}", reconcile, self._settings.retry_pause)
        c.tally.counts, c.tally.deferred = now.counts, now.deferred
        await leavings.clear_all(c)

    async def _finish(self, stations: Stations) -> ExitCode:
        await sweep(stations)
        c = next(iter(stations)).c
        await leavings.clear_all(c)
        counts, deferred = await c.journal.call(totals)
        told = {state: tuple(value) for state, value in c.tally.counts.items()}
        self._snapshot(stations)
        if told != counts or tuple(c.tally.deferred) != deferred:
            raise HsjournalError(
                f"the counts do not add up: {told} told, {counts} in the journal", remedy="Please report this."
            )
        left = sum(counts[state][0] for state in INCOMPLETE) - deferred[0]
        if left:
            self._record(Event("drained", None, {"left": left}))
            return ExitCode.INTERRUPTED
        await c.journal.call(refuse_miscount)
        await c.journal.call(lambda j: j.finish(self._epoch))
        said = {state.value: count[0] for state, count in counts.items()} | {DEFERRED: deferred[0]}
        self._record(Event("finished", None, said))
        in_doubt = sum(station.c.canary.has_failed for station in stations)  # of several servers: the others went on
        return end_code(counts[State.VERIFIED][0] + deferred[0], counts[State.FAILED][0] + in_doubt)

    async def _tick(self, stations: Stations, schedule: Schedule) -> None:
        while True:
            self._heartbeat.beat()
            self._snapshot(stations)
            schedule.wake()
            await asyncio.sleep(SNAPSHOT_EVERY)

    def _snapshot(self, stations: Stations) -> None:
        c = next(iter(stations)).c
        servers = [station.told() for station in stations]
        mine = {
            "pid": os.getpid(),
            "epoch": self._epoch,
            "pauses": self._pauses.sentences,
            "troubles": self._pauses.troubles,
            "draining": self._draining.is_set(),
            "server_up": stations.any_up,
            "servers": servers,
            "volumes": c.output.told(),
            "handover": servers[0]["handover"] | {"budget": c.settings.handover_budget},
        }
        if not self._mirror.write(SNAPSHOT, c.tally.snapshot() | mine) and not self._mirror.folder.exists():
            with suppress(OSError):  # shared memory was cleaned up; the heartbeat is back with the next worker
                self._mirror.create()

    def _record(self, event: Event) -> None:
        """Keep an event in the mirror at once; the journal gets it when it can be written."""
        self._mirror.record(Event(event.kind, event.row, event.detail, event.at, event.epoch or self._epoch))

    def _drain(self) -> None:
        if self._draining.is_set():
            os._exit(ExitCode.INTERRUPTED)  # the second signal: now. Every committed step stays.
        self._draining.set()
        self._heartbeat.phase(Phase.DRAINING)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._background.append(start_in(self._group, work))


def _ask_again(stations: Stations, root: Handover) -> None:
    """A root that had gone is back: whether its servers still write into it is proved by a probe."""
    for station in stations:
        if station.c.handover is root:
            station.c.outage.report(f"{root.place()} is back: asking for a probe")


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error that tells most: ours before others."""
    flat: list[BaseException] = []

    def collect(group: BaseExceptionGroup[BaseException]) -> None:
        for error in group.exceptions:
            if isinstance(error, BaseExceptionGroup):
                collect(error)
            else:
                flat.append(error)

    collect(errors)
    ours = [e for e in flat if isinstance(e, HsjournalError)]
    return ([e for e in ours if not isinstance(e, NoRoomError)] or ours or flat)[0]
