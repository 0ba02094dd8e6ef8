"""From states in memory to a published dump and an answer, on writer threads beside the next forward pass."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from hsjournal.capture.embedded.lifetime import SIGNAL_POLL_S
from hsjournal.capture.embedded.requests import AbortedError, EngineError
from hsjournal.capture.writer import CaptureError, DumpWriter, DuplicateDumpError
from hsjournal.dump.protocol import FailureReason, RequestId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hsjournal.capture.embedded.model import States
    from hsjournal.capture.embedded.requests import Request

log = logging.getLogger(__name__)

_BATCHES_AHEAD = 3
"""Batches whose states may wait for the writers before the next forward pass waits too: bounds the memory."""


class Publisher:
    """Publishes dumps and answers requests.

    Args:
        writer: of the dumps.
        threads: how many dumps are written at a time.
        answered: called with each request before its answer is set.
    """

    def __init__(self, writer: DumpWriter, threads: int, answered: Callable[[Request], None]) -> None:
        self.writer = writer
        self._answered = answered
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dump-writer")
        self._ahead = threading.Semaphore(_BATCHES_AHEAD)

    def deliver(self, batch: Sequence[Request], states: States) -> None:
        """Publish and answer a batch; returns at once unless the writers are far behind."""
        while not self._ahead.acquire(timeout=SIGNAL_POLL_S):
            pass
        left = len(batch)
        lock = threading.Lock()

        def one_done(_future: object) -> None:
            nonlocal left
            with lock:
                left -= 1
                if left == 0:
                    self._ahead.release()

        start = 0
        for request, token in zip(batch, states.next_tokens, strict=True):
            end = start + len(request.input_ids)
            rows = [tensor[start:end] for tensor in states.tensors]
            self._pool.submit(self._publish, request, rows, token).add_done_callback(one_done)
            start = end

    def refuse(self, request: Request, reason: FailureReason, detail: str) -> None:
        """Publish ``error`` for a request that has no states, and answer it."""
        self._pool.submit(self._refuse, request, reason, detail)

    def _publish(self, request: Request, rows: Sequence[torch.Tensor], token: int | None) -> None:
        outcome: int | Exception | None
        try:
            if request.own is not None:
                problem = self._capture(request, request.own, rows)
            else:
                problem = AbortedError() if request.aborted else None
            outcome = token if problem is None else problem
        except Exception as error:  # a surprise must cost one request, not the writer thread
            log.exception("the capture of %s failed", request.rid)
            outcome = EngineError(f"The capture of {request.rid} failed: {error}")
        self._answer(request, outcome)

    def _capture(self, request: Request, rid: RequestId, rows: Sequence[torch.Tensor]) -> Exception | None:
        """Publish the dump; what the client has to be told if that is not enough."""
        try:
            dump = self.writer.begin(rid)
        except DuplicateDumpError as error:
            log.warning("%s; the first dump is kept", error)
            return None
        except CaptureError as error:
            return self._told(error, rid, published=self.writer.publish_failure(rid, error.reason, error.detail))
        try:
            for index, tensor in enumerate(rows):
                dump.write_rows(index, 0, _octets(tensor))
            if request.aborted:
                dump.fail(FailureReason.ABORTED, "the request was aborted after its prefill")
                return AbortedError()
            dump.commit(request.input_ids)
        except CaptureError as error:
            return self._told(error, rid, published=dump.fail(error.reason, error.detail))
        finally:
            dump.discard()
        return None

    def _told(self, error: CaptureError, rid: RequestId, *, published: bool) -> Exception | None:
        log.warning("the capture of %s failed: %s", rid, error)
        if published:
            return None
        # Without a dump or an error file to find, the answer must tell.
        return EngineError(f"The capture of {rid} failed ({error}), and the hand-over root takes no error file either")

    def _refuse(self, request: Request, reason: FailureReason, detail: str) -> None:
        try:
            if request.own is not None:
                self.writer.publish_failure(request.own, reason, detail)
        except Exception:
            log.exception("the failure of %s can't be published", request.rid)
        if reason is FailureReason.ABORTED:
            self._answer(request, AbortedError())
        else:
            self._answer(request, EngineError(detail))

    def _answer(self, request: Request, outcome: int | Exception | None) -> None:
        self._answered(request)
        if isinstance(outcome, Exception):
            request.answer.set_exception(outcome)
        else:
            request.answer.set_result(outcome)


def _octets(rows: torch.Tensor) -> memoryview:
    """The tensor's own memory."""
    return memoryview(rows.contiguous().view(torch.uint8).numpy().data).cast("B")
