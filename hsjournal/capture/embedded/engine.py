"""The engine: requests wait in one queue and run in batches on the main thread."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from hsjournal.capture.embedded.batching import next_batch
from hsjournal.capture.embedded.lifetime import SIGNAL_POLL_S
from hsjournal.capture.embedded.publish import Publisher
from hsjournal.capture.embedded.requests import BadRequestError
from hsjournal.dump.protocol import FailureReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hsjournal.capture.embedded.model import TargetModel
    from hsjournal.capture.embedded.requests import Request
    from hsjournal.capture.writer import DumpWriter

log = logging.getLogger(__name__)

_LINGER_S = 0.005
"""A burst of requests arrives one by one: the first waits this long for company."""


class Engine:
    """Serves requests until :meth:`run` is interrupted.

    Args:
        model: runs the prefills.
        writer: of the dumps.
        max_batch_tokens: of one forward pass; a longer prompt runs alone.
        writer_threads: how many dumps are written at a time.
        accepted: called with the rid of each accepted request of ours, in order.
    """

    def __init__(
        self,
        model: TargetModel,
        writer: DumpWriter,
        *,
        max_batch_tokens: int,
        writer_threads: int = 2,
        accepted: Callable[[str], None] = lambda _rid: None,
    ) -> None:
        self.model = model
        self.publisher = Publisher(writer, writer_threads, self._answered)
        self.running = False
        self._max_batch_tokens = max_batch_tokens
        self._accepted = accepted
        self._turn = threading.Condition()
        self._waiting: list[Request] = []
        self._in_flight: dict[str, Request] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; each one's ``answer`` is set later.

        Raises:
            BadRequestError: when one of the rids is in flight already; then none is queued.
        """
        with self._turn:
            for request in requests:
                if request.rid in self._in_flight:
                    raise BadRequestError(
                        f"Duplicate request ID detected: {request.rid} is in flight. Wait for its answer or abort it."
                    )
            for request in requests:
                self._in_flight[request.rid] = request
                if request.own is not None:
                    self._accepted(request.rid)
            self._waiting.extend(requests)
            self._turn.notify_all()

    def in_flight(self) -> list[str]:
        """Rids of ours that were accepted and not yet answered: their dumps may still come, no others will."""
        with self._turn:
            return [request.rid for request in self._in_flight.values() if request.own is not None]

    def abort(self, rid: str | None) -> None:
        """Abort the request ``rid``, or all of them for None; those of ours publish ``error: aborted``."""
        with self._turn:
            for request in self._in_flight.values():
                if rid is None or request.rid == rid:
                    request.aborted = True
            dropped = [request for request in self._waiting if request.aborted]
            self._waiting = [request for request in self._waiting if not request.aborted]
        for request in dropped:
            self.publisher.refuse(request, FailureReason.ABORTED, "the request was aborted before its prefill")

    def run(self) -> None:
        """Serve for ever: on the main thread, so that a signal can end it in the middle of a forward pass."""
        self.running = True
        try:
            while True:
                self._run_batch(self._next_batch())
        finally:
            self.running = False

    def _next_batch(self) -> list[Request]:
        limit = self._max_batch_tokens if self.model.packs else 1
        with self._turn:
            while not self._turn.wait_for(lambda: self._waiting, SIGNAL_POLL_S):
                pass
            deadline = time.monotonic() + _LINGER_S
            while sum(len(r.input_ids) for r in self._waiting) < limit and time.monotonic() < deadline:
                self._turn.wait(_LINGER_S)
            chosen = next_batch([len(request.input_ids) for request in self._waiting], limit)
            batch = [self._waiting[index] for index in chosen]
            self._waiting = [request for request in self._waiting if request not in batch]
            return batch

    def _run_batch(self, batch: Sequence[Request]) -> None:
        if not batch:
            return  # an abort emptied the queue
        try:
            states = self.model.prefill([r.input_ids for r in batch], [r.want_token for r in batch])
        except Exception as error:  # out of memory, above all; it must not end the engine
            if len(batch) == 1:
                log.exception("the forward pass of %s failed", batch[0].rid)
                reason = " ".join(str(error).split())[:500]
                self.publisher.refuse(batch[0], FailureReason.INTERNAL, f"The forward pass failed: {reason}")
                return
            log.warning("a forward pass of %d requests failed (%s); each runs alone now", len(batch), error)
        else:
            self.publisher.deliver(batch, states)
            return
        for request in batch:
            self._run_batch([request])

    def _answered(self, request: Request) -> None:
        with self._turn:
            self._in_flight.pop(request.rid, None)
