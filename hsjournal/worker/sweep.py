"""Dumps that nobody waits for: of older attempts that came after all, published twice, or of probes given up.

They are dropped while the worker runs, or shared memory would fill up with them until the next start.
"""

from __future__ import annotations

import asyncio

from hsjournal.dump import reader
from hsjournal.dump.reader import Entry
from hsjournal.dump.reap import remove_dump
from hsjournal.events import Event
from hsjournal.reconcile.plan import Why
from hsjournal.states import DEFERRED, State
from hsjournal.worker.context import Context
from hsjournal.worker.stations import Stations

EVERY = 10.0
_UNDER_WAY = (State.SENT, State.DUMPED, State.WRITTEN)


async def sweep_always(stations: Stations, pause: float) -> None:
    """Sweep now and then, for the worker's life."""
    while True:
        await asyncio.sleep(min(EVERY, 4 * pause))
        await sweep(stations)


async def sweep(stations: Stations) -> None:
    """Drop what nobody waits for, in every root. What a server has not published is its own."""
    for c in {station.c.handover: station.c for station in stations}.values():
        await _sweep_root(c, stations)


async def _sweep_root(c: Context, stations: Stations) -> None:
    # What an entry stands for is asked after it was seen: an attempt is committed before its dump can be there, and one
    # that is over never comes back.
    try:
        entries = await c.in_pool(lambda: reader.list_root(c.handover.fd, c.manifest.run_id))
    except OSError:
        return  # the root's own guard tells
    for entry in entries:
        if entry.kind not in ("foreign", "tmp") and not _is_awaited(c, stations, entry):
            why = await _why(c, entry)
            if why is not None:
                await _drop(c, entry, why)


def _is_awaited(c: Context, stations: Stations, entry: Entry) -> bool:
    if entry.rid is None or entry.rid.row is None:
        return stations.are_asked  # this may be the answer to a probe that is under way
    flight = c.tally.flights.get(entry.rid.row)
    return flight is not None and flight.attempt == entry.rid.attempt


async def _why(c: Context, entry: Entry) -> Why | None:
    rid = entry.rid
    if rid is None or rid.row is None:
        return Why.PROBE
    number = rid.row
    found = await c.journal.call(lambda journal: journal.rows_of([number]))
    if not found:
        return Why.SUPERSEDED
    if State(found[0]["state"]) in _UNDER_WAY and found[0]["attempt"] == rid.attempt:
        return Why.RELEASED if found[0]["verify_method"] == DEFERRED else None
    return Why.VERIFIED if State(found[0]["state"]) is State.VERIFIED else Why.SUPERSEDED


async def _drop(c: Context, entry: Entry, why: Why) -> None:
    row = entry.rid.row if entry.rid is not None else None
    try:
        freed = await c.in_pool(lambda: remove_dump(c.handover.fd, entry.name, c.manifest.run_id))
    except OSError:
        return  # told when it was tried first; the next start tries again
    if freed:  # else its row removed it just now
        c.record(Event("dump_removed", row, {"name": entry.name, "why": why}))
