"""Every way back of a row: whose fault was it, does it cost a strike, and what becomes of its dump or file."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from hsjournal.dump.protocol import FailureReason
from hsjournal.dump.reap import remove_dump, set_aside
from hsjournal.errors import DumpRejectedError, Reject, ServerError
from hsjournal.events import Event
from hsjournal.mirror import Phase
from hsjournal.server.client import BrokenError, HeldError, RefusedError, TimedOutError, UnreachableError
from hsjournal.server.preflight import no_access
from hsjournal.sink.sample import Written
from hsjournal.sink.verify import Damage, DamageError
from hsjournal.states import Actor, State
from hsjournal.worker import leavings
from hsjournal.worker.arrival import CaptureFailedError, LostError
from hsjournal.worker.brake import FAILURES, FULL
from hsjournal.worker.context import Outcome
from hsjournal.worker.row import Row

_MISCONFIGURED = {Reject.WRONG_LAYERS, Reject.WRONG_DTYPE, Reject.WRONG_HIDDEN, Reject.WRONG_NORM}
_THE_DISKS = {Damage.MISSING, Damage.UNREADABLE}
_BUSY = (429, 502, 503)
_TIMED_OUT = (408, 504)


async def run(row: Row, written: Written | None = None) -> Outcome:
    """Run a row as far as it goes, and back if it must.

    Raises:
        ServerError: the server serves something else than the run was made for.
        NoRoomError: a pause lasted longer than the limit.
        FencedError: a newer worker owns the run.
    """
    row.c.tally.flights[row.claim.row] = row.flight
    try:
        await row.advance(written)
    except DumpRejectedError as error:
        return await _rejected(row, error)
    except CaptureFailedError as error:
        return await _not_captured(row, error)
    except HeldError as error:
        row.c.blame.held.back(row.claim.row, error.detail)
        await _back(row, error.detail)
        return Outcome.HELD
    except RefusedError as error:
        return await _refused(row, error)
    except TimedOutError as error:
        await row.abort()
        return await _judged(row, error.message)
    except BrokenError as error:
        return await _broken(row, error)
    except UnreachableError as error:
        row.c.outage.report(error.message)
        return await _back(row, "the server could not be reached")
    except LostError as error:
        return await _excused(row, error.message)
    except DamageError as error:
        return await _damaged(row, error)
    finally:
        row.c.tally.flights.pop(row.claim.row, None)
    return Outcome.DONE


async def _rejected(row: Row, error: DumpRejectedError) -> Outcome:
    if error.reason in _MISCONFIGURED:
        await _back(row, str(error))
        row.c.outage.refuse(
            ServerError(
                f"the server at {row.c.client.url} captures something else than this run was made for: {error.detail}",
                remedy="Start it with the settings of the run (see `manifest.toml`), then resume.",
            )
        )
        return await _dropped(row)
    if error.reason in (Reject.VANISHED, Reject.STALE_BOOT):
        outage = f"the server was started anew: {error.detail}" if error.reason is Reject.STALE_BOOT else None
        outcome = await _excused(row, str(error), outage=outage)
        await row.drop(lambda: remove_dump(row.c.handover.fd, str(row.rid)))
        return outcome
    event = Event("dump_rejected", row.claim.row, {"rid": str(row.rid), "why": str(error)})
    outcome = await _judged(row, str(error), event)
    await row.drop(lambda: set_aside(row.c.handover.fd, str(row.rid), row.c.rejects, why=str(error)))
    return outcome


async def _not_captured(row: Row, error: CaptureFailedError) -> Outcome:
    event = Event("capture_failed", row.claim.row, {"rid": str(row.rid), "why": error.message})
    if error.reason in (FailureReason.PREFIX_HIT, FailureReason.UNSUPPORTED):
        await _back(row, error.message, event=event)
        hint = "Start the server with --disable-radix-cache." if error.reason is FailureReason.PREFIX_HIT else None
        row.c.outage.refuse(
            ServerError(f"the server at {row.c.client.url} can't capture: {error.message}", remedy=hint)
        )
        return await _dropped(row)
    if error.reason is FailureReason.NO_ROOM:
        outcome = await _no_room(row, error.message, event)
    elif error.reason is FailureReason.ABORTED:
        outcome = await _excused(row, error.message, event)
    else:
        outcome = await _judged(row, error.message, event)
    await row.drop(lambda: remove_dump(row.c.handover.fd, str(row.rid)))
    return outcome


async def _refused(row: Row, error: RefusedError) -> Outcome:
    end = no_access(row.c.client.url, error)
    if end is not None:
        await _back(row, error.message)
        row.c.outage.refuse(end)
        return Outcome.AGAIN
    if error.status in _BUSY:
        return await _excused(row, error.message, outage=error.message)
    if error.status < 500 and error.status not in _TIMED_OUT:
        return await _failed(row, error.message)
    return await _judged(row, error.message)


async def _broken(row: Row, error: BrokenError) -> Outcome:
    """The server may have died of this row, or of one beside it: it is a suspect, and runs alone next."""
    waiting = (Phase.SENDING, Phase.WAITING)
    there = [f for f in row.c.tally.flights.values() if f.server == row.c.client.url and f.phase in waiting]
    others = [f for f in there if f.row != row.claim.row]
    casualty = row.c.blame.broke(row.claim.row, row.attempt, row.claim.num_tokens, len(others))
    row.c.outage.report(error.message)
    event = Event("suspect", row.claim.row, {"rid": str(row.rid), "why": error.message, "beside": len(others)})
    outcome = await _back(row, error.message, event=event, suspect=1)
    casualty.settled.set()
    return outcome


async def _damaged(row: Row, error: DamageError) -> Outcome:
    """The file just written reads back wrong: it goes aside, and is written again from the dump if that is there.

    A file that is gone, or that the disk refuses to read, says nothing against the row.
    """
    path = row.file_path or row.c.output.path_of(row.sample)
    await row.drop(lambda: row.c.output.set_aside(path))
    event = Event("file_damaged", row.claim.row, {"path": path, "why": str(error)})
    strike = error.kind not in _THE_DISKS or not row.c.blame.excuse(row.claim.row)
    strikes = row.claim.strikes + strike
    if strikes >= row.c.settings.max_strikes or not row.c.handover.holds(row.rid):
        return await _back(row, str(error), strike=strike, event=event)
    await row.commit(State.DUMPED, actor=Actor.RECONCILE, event=event, strikes=strikes, reason=str(error))
    if strike:
        row.struck()
    else:
        await asyncio.sleep(row.c.settings.retry_pause)
    return await run(row)


async def _dropped(row: Row) -> Outcome:
    """The row goes to another server; what this one made of it is of no use."""
    await row.drop(lambda: remove_dump(row.c.handover.fd, str(row.rid)))
    return Outcome.AGAIN


async def _excused(row: Row, reason: str, event: Event | None = None, outage: str | None = None) -> Outcome:
    """Nobody's fault, as it seems, but not for ever; ``outage`` is why the server is to be asked before more is sent."""
    if row.c.blame.excuse(row.claim.row):
        if outage is not None:
            row.c.outage.report(outage)
        return await _back(row, reason, event=event)
    return await _judged(row, reason, event)


async def _judged(row: Row, reason: str, event: Event | None = None) -> Outcome:
    """A failure that may be the row's or the server's: the row gets a strike only if the server proves to work."""
    if row.c.handover.room.was_full(within=time.monotonic() - row.asked_at):  # not even the report found room, perhaps
        return await _no_room(row, reason, event)
    try:
        sane = await row.c.outage.is_sane()
    except ServerError as error:
        await _back(row, reason, event=event)
        row.c.outage.refuse(error)
        return Outcome.AGAIN
    return await (_failed(row, reason, event) if sane else _back(row, reason, event=event))


async def _no_room(row: Row, reason: str, event: Event | None = None) -> Outcome:
    """Nobody's fault: rows go one at a time until one finds room."""
    row.c.brake.press(FULL, f"the server finds no room in {row.c.handover.place()} ({reason})")
    return await _back(row, reason, event=event)


async def _failed(row: Row, reason: str, event: Event | None = None) -> Outcome:
    """The row's failure, unless too many others failed just before it: then each is tried alone, slowly."""
    blame = row.c.blame
    count = blame.failed(row.claim.row)
    strike = (row.trial and not row.c.outage.others_work) or not blame.is_streak
    if blame.is_streak:
        sentence = (
            f"{count} samples in a row failed, though the server does a probe; the last, row {row.claim.row}: {reason}"
        )
        row.c.brake.press(FAILURES, sentence)
        row.c.outage.report(f"asking the server again, since {sentence}")
    return await _back(row, reason, strike=strike, event=event)


async def _back(row: Row, reason: str, *, strike: bool = False, event: Event | None = None, **values: Any) -> Outcome:
    if row.state is State.PENDING:
        return Outcome.AGAIN
    strikes = row.claim.strikes + strike
    event = event or Event("sent_back", row.claim.row, {"rid": str(row.rid), "why": reason, "strike": strike})
    if strikes >= row.c.settings.max_strikes:
        await row.commit(State.FAILED, event=event, strikes=strikes, reason=reason, suspect=0)
        row.c.blame.ended(row.claim.row)
        row.c.record(Event("sample_failed", row.claim.row, {"why": reason}))
        await leavings.clear(row.c, row.claim.row, row.claim.sample_id)
        return Outcome.FAILED
    await row.commit(State.PENDING, actor=Actor.RECONCILE, event=event, strikes=strikes, reason=reason, **values)
    return Outcome.AGAIN
