"""The way of one row forward: request, dump, file, read-back, deletion. What goes wrong is for ``retreat``.

Each step is committed before the next begins, so whatever dies, the journal names the last one that is done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from hsjournal import faults
from hsjournal.dump import reader
from hsjournal.dump.protocol import FailureReason, RequestId
from hsjournal.dump.reap import remove_dump
from hsjournal.errors import DumpRejectedError, HsjournalError
from hsjournal.events import Event
from hsjournal.journal.store import Claim, Move
from hsjournal.mirror import Phase
from hsjournal.reconcile.gather import expectation
from hsjournal.server.client import Reply, TimedOutError
from hsjournal.sink.sample import OutputSample, Written
from hsjournal.states import DEFERRED, Actor, State, Transition
from hsjournal.worker.arrival import Arrival, CaptureFailedError, LostError
from hsjournal.worker.context import Context
from hsjournal.worker.outage import Life
from hsjournal.worker.recover import make_sample
from hsjournal.worker.tally import Flight

log = logging.getLogger(__name__)
T = TypeVar("T")
ABORT_GRACE = 5.0
"""Seconds that a dump may come after an abort."""
_PHASES = {
    "opening": Phase.WRITING, "writing": Phase.WRITING, "syncing": Phase.SYNCING,
    "publishing": Phase.PUBLISHING, "reading": Phase.VERIFYING,
}  # fmt: skip


class Row:
    """One row under way: where it stands, and the steps that move it forward.

    Args:
        context: of the worker.
        claim: the row.
        state: of the row.
        trial: whether it is tried alone because something is wrong (:class:`~hsjournal.worker.brake.Brake`).
        inherited: whether a request of an earlier worker is waited for that the server may never have got.
        deferred: whether an earlier worker put the read-back of its file off.
    """

    def __init__(
        self, context: Context, claim: Claim, state: State, *, trial: bool = False, inherited: bool = False,
        deferred: bool = False,
    ) -> None:  # fmt: skip
        self.c = context
        self.claim = claim
        self.state = state
        self.trial = trial
        self.attempt = claim.attempt
        self.flight = Flight(claim.row, claim.sample_id, claim.attempt, claim.num_tokens, server=context.client.url)
        self.flight.state = state
        self.life: Life | None = context.outage.life
        self.file_bytes = 0
        self.file_path: str | None = None
        self.deferred = deferred
        """Whether the row is written and to be read back later: all that is done for now."""
        self.asked_at = time.monotonic()
        """When the current attempt began."""
        self._inherited = inherited

    @property
    def rid(self) -> RequestId:
        """The request id of the current attempt."""
        return RequestId.sample(self.c.manifest.run_id, self.claim.row, self.attempt, self.claim.num_tokens)

    @property
    def sample(self) -> OutputSample:
        """What the row's file must hold."""
        claim = self.claim
        return make_sample(self.c.manifest, claim.row, claim.sample_id, self.rid, claim.input_ids, claim.loss_mask)

    async def advance(self, written: Written | None = None) -> None:
        """Move the row from where it stands to verified, or to written if it is not to be read back now.

        ``written`` is the file of a row that is already written.

        Raises:
            DumpRejectedError, CaptureFailedError, RefusedError, TimedOutError, UnreachableError, LostError, DamageError:
                what went wrong; the row's state says how far it got.
            NoRoomError: a pause lasted longer than the limit.
            FencedError: a newer worker owns the run.
        """
        if self.state is State.PENDING:
            await self._send()
        elif self.state is State.SENT:
            await self._inherit()
        inherited = written is not None
        if written is None:
            written = await self._write()
        self.file_bytes, self.file_path = written.nbytes, written.path
        if self._reads_back:
            await self._verify(written)
        else:
            await self._put_off(inherited=inherited)

    @property
    def _reads_back(self) -> bool:
        return self.c.read_back.reads(self.c.manifest.run_id, self.claim.row)

    async def commit(
        self,
        target: State,
        *,
        actor: Actor = Actor.WORKER,
        at_attempt: int | None = None,
        event: Event | None = None,
        **values: Any,
    ) -> None:
        """Move the row in the journal, then in the tally."""
        attempt = self.attempt if at_attempt is None else at_attempt
        move = Move(self.claim.row, attempt, Transition(self.state, target, actor, ""), values, event)
        before, since = self.flight.phase, self.flight.since
        self.flight.enter(Phase.COMMITTING)
        await self.c.journal.apply(move)
        why = f" ({event.kind})" if event else ""
        log.debug("row %d, attempt %d: %s to %s%s", self.claim.row, self.attempt, self.state, target, why)
        self.flight.phase, self.flight.since = before, since
        if self.deferred:
            self.deferred = False
            self.c.tally.put_off(self.claim.row, self.claim.num_tokens, self.file_bytes, sign=-1)
        self.c.tally.moved(self.claim.row, self.state, target, self.claim.num_tokens, self.file_bytes)
        self.state = self.flight.state = target

    def struck(self) -> None:
        """One strike more, after it was committed."""
        self.claim = replace(self.claim, strikes=self.claim.strikes + 1)

    async def drop(self, step: Callable[[], object]) -> None:
        """Clean up; a failure never fails a sample: the next reconcile tries again."""
        try:
            await self.c.in_pool(step)
        except OSError as error:
            self.c.record(Event("cleanup_failed", self.claim.row, {"rid": str(self.rid), "why": str(error)}))

    async def _send(self) -> None:
        faults.point("worker.claiming", self.claim.row)
        self.flight.enter(Phase.SENDING)
        self.attempt += 1
        self.asked_at = time.monotonic()
        self.flight.attempt = self.attempt
        if self.c.handover.holds(self.rid):  # from before the send: not the answer to it, whatever it says
            stale = Event("stale_dump", self.claim.row, {"rid": str(self.rid)})
            self.c.record(stale)
            await self.drop(lambda: remove_dump(self.c.handover.fd, str(self.rid)))
        self.life = self.c.outage.life
        values: dict[str, Any] = {
            "attempt": self.attempt,
            "sent_at": time.time(),
            "server": self.c.client.url,
            "boot_id": self.c.outage.boot_id,
            "reason": None,
        }
        await self.commit(State.SENT, at_attempt=self.attempt - 1, **values)
        faults.point("worker.sent_committed", self.claim.row)
        request = asyncio.create_task(self.c.client.generate(str(self.rid), self.claim.input_ids))
        request.add_done_callback(_looked_at)
        faults.point("worker.requested", self.claim.row)
        try:
            await self._arrival().wait(request, self.c.settings.sample_timeout)
        except DumpRejectedError:
            if not request.done():  # the row goes back though its request still runs
                await self.abort()
            raise
        finally:
            if not request.done():
                request.cancel()

    async def _inherit(self) -> None:
        """Wait for the dump of a request that an earlier worker sent; where the server can't tell of it, not for long."""
        if not self._inherited:
            await self._arrival().wait(None, self.c.settings.sample_timeout)
            return
        await self.abort()
        try:
            await self._arrival().wait(None, min(ABORT_GRACE, self.c.settings.dump_timeout))
        except TimedOutError:
            raise LostError("an earlier worker's request, aborted; no dump came of it") from None
        except CaptureFailedError as error:
            if error.reason is FailureReason.ABORTED:
                raise LostError("an earlier worker's request, aborted") from None
            raise

    async def abort(self) -> None:
        """Tell the server that the request is no longer wanted; it may be too late for that."""
        try:
            await self.c.client.abort(str(self.rid))
        except HsjournalError as error:
            self.c.record(Event("abort_failed", self.claim.row, {"rid": str(self.rid), "why": str(error)}))

    async def _write(self) -> Written:
        self.flight.enter(Phase.CHECKING)
        faults.point("worker.dump_seen", self.claim.row)
        is_new = self.state is State.SENT
        # A row that is dumped already was checked; its dump may be of a life of the server that is long over.
        boot_id = self.life.boot_id if self.life and is_new else None
        expect = expectation(self.c.manifest, self.rid, self.claim.input_ids, boot_id)
        dump = await self.c.in_root(lambda: reader.open_dump(self.c.handover.fd, self.rid, expect))
        with dump:
            self.c.handover.room.landed(str(self.claim.row))
            if is_new:
                await self.commit(State.DUMPED, boot_id=dump.meta.boot_id)
                faults.point("worker.dumped_committed", self.claim.row)
            sample = self.sample
            first = is_new and self.attempt == 1
            written = await self._insist(
                lambda: self.c.output.write(dump, sample, self._progress, is_first=first), "output"
            )
        self.file_bytes, self.file_path = written.nbytes, written.path
        later: dict[str, Any] = {} if self._reads_back else {"verify_method": DEFERRED, "suspect": 0}
        await self.commit(
            State.WRITTEN,
            **later,
            output_path=written.path,
            output_bytes=written.nbytes,
            output_xxh3=written.output_xxh3,
            source_xxh3=written.source_xxh3,
        )
        if is_new:
            self._proves_server()
        if written.displaced is not None:
            self.c.record(Event("file_displaced", self.claim.row, {"path": written.path, "to": written.displaced}))
        faults.point("worker.written_committed", self.claim.row)
        return written

    async def _verify(self, written: Written) -> None:
        sample = self.sample
        # With several folders, one that can't be read holds its own rows, and no others.
        folder, folders = self.c.output.folder_of(written.path), self.c.output.folders
        pause = "output" if len(folders) == 1 else f"output {folder}"
        readers = self.c.readers[folder]
        method = await self._insist(lambda: self.c.output.verify(sample, written, self._progress), pause, readers)
        await self.commit(State.VERIFIED, verify_method=str(method), verified_at=time.time(), suspect=0)
        self.c.blame.ended(self.claim.row)
        faults.point("worker.verified_committed", self.claim.row)
        await self._release()

    async def _put_off(self, *, inherited: bool) -> None:
        """Leave the read-back to a later ``hsjournal verify``; the journal says so, and the dump goes now."""
        number = self.claim.row
        if inherited:  # written by a worker that was to read it back
            epoch = self.c.journal.epoch
            values = {"verify_method": DEFERRED, "suspect": 0}
            await self.c.journal.call(lambda j: j.touch(number, State.WRITTEN, epoch, None, **values))
        self.deferred = True
        self.c.tally.put_off(number, self.claim.num_tokens, self.file_bytes)
        self.c.blame.ended(number)
        await self._release()

    async def _release(self) -> None:
        self.flight.enter(Phase.DELETING)
        await self.drop(lambda: remove_dump(self.c.handover.fd, str(self.rid)))

    def _arrival(self) -> Arrival:
        self.flight.enter(Phase.WAITING)
        return Arrival(self.c, self.rid, self.life)

    def _proves_server(self) -> None:
        """Its rows were all there, and finite."""
        self.c.outage.worked()
        self.c.blame.dumped()
        self.c.brake.release()
        self.c.canary.took()

    async def _insist(self, step: Callable[[], T], pause: str, pool: ThreadPoolExecutor | None = None) -> T:
        named = pause.removeprefix("output ") if pause != "output" else ", ".join(self.c.manifest.out_dirs)
        place = f"the output folder {named}"
        pace = self.c.settings.retry_pause
        return await self.c.pauses.insist(pause, place, lambda: self.c.in_pool(step, pool), pace)

    def _progress(self, step: str, nbytes: int) -> None:
        phase = _PHASES[step]
        if phase is not self.flight.phase:
            self.flight.enter(phase)
        self.flight.nbytes = nbytes
        self.c.slots.beat(self.claim.row, self.attempt, phase, nbytes)


def _looked_at(request: asyncio.Task[Reply]) -> None:
    """A request that failed when nobody waited for it any more is no news."""
    if not request.cancelled():
        request.exception()
