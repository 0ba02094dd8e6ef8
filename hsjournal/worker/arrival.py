"""Waiting for a dump: it, the server's reply, the end of the server's life or the deadline, whichever comes first."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from hsjournal.dump import reader
from hsjournal.dump.protocol import FailureReason, RequestId
from hsjournal.errors import DumpRejectedError, HsjournalError, Reject
from hsjournal.server.client import BrokenError, RefusedError, Reply, TimedOutError, UnreachableError
from hsjournal.worker.context import Context
from hsjournal.worker.outage import Life

REPLY_GRACE = 5.0
"""Seconds that a reply may come after the dump."""


class LostError(HsjournalError):
    """The request was lost on the way, through nobody's fault: the row is sent again."""


class CaptureFailedError(HsjournalError):
    """The server published ``error`` instead of states."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason


class Arrival:
    """The dump of one request.

    Args:
        context: of the worker.
        rid: of the request.
        life: of the server that was asked; None when it is unknown.
    """

    def __init__(self, context: Context, rid: RequestId, life: Life | None) -> None:
        self._c, self._rid, self._life = context, rid, life

    async def wait(self, request: asyncio.Task[Reply] | None, timeout: float) -> None:
        """Until the dump is there and, if the server still answers soon, its reply agrees.

        Args:
            request: the request under way; None when an earlier worker sent it.
            timeout: seconds for the reply, or for the dump without one.

        Raises:
            CaptureFailedError: the server published an error.
            DumpRejectedError: the reply speaks of another number of tokens, or the root was deleted.
            RefusedError, TimedOutError, UnreachableError, LostError: why no dump will come.
        """
        seen = asyncio.create_task(self._c.handover.watch.wait(self._rid, time.monotonic() + timeout))
        ended = asyncio.create_task(self._life.ended.wait()) if self._life else None
        try:
            await self._first(seen, request, ended, timeout)
        except (RefusedError, TimedOutError, UnreachableError, LostError):
            if not self._c.handover.holds(self._rid):  # else it came just before, and is good for all that
                raise
        finally:
            seen.cancel()
            if ended is not None:
                ended.cancel()
        failure = await self._c.in_root(lambda: reader.read_failure(self._c.handover.fd, self._rid))
        if failure is not None:
            raise CaptureFailedError(failure.reason, failure.detail)
        if request is not None:
            await self._hear_out(request)

    async def _first(
        self,
        seen: asyncio.Task[None],
        request: asyncio.Task[Reply] | None,
        ended: asyncio.Task[Any] | None,
        timeout: float,
    ) -> None:
        others = {task for task in (request, ended) if task is not None}
        await asyncio.wait({seen, *others}, return_when=asyncio.FIRST_COMPLETED)
        if not seen.done() and request is not None and request.done():
            self._check(await request)
            timeout = self._c.settings.dump_timeout
            rest: set[asyncio.Task[Any]] = {seen, *(others - {request})}
            await asyncio.wait(rest, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if seen.done():
            try:
                await seen
            except TimeoutError:
                raise TimedOutError(f"neither an answer nor a dump within {timeout:g} s") from None
            except FileNotFoundError as error:
                raise DumpRejectedError(Reject.VANISHED, f"{self._c.handover.place()} was deleted") from error
        elif ended is not None and ended.done():
            if request is not None and not request.done():
                raise BrokenError("the server was started anew while it had the request")
            raise LostError("the server was started anew before the dump was there")
        else:
            raise TimedOutError(f"the server answered, but no dump appeared within {timeout:g} s")

    async def _hear_out(self, request: asyncio.Task[Reply]) -> None:
        """With the dump there, the reply can only add a doubt: one that is late, or an error, changes nothing."""
        grace = min(REPLY_GRACE, self._c.settings.dump_timeout)
        try:
            async with asyncio.timeout(grace):
                reply = await asyncio.shield(request)
        except (TimeoutError, UnreachableError, TimedOutError, RefusedError):
            return
        self._check(reply)

    def _check(self, reply: Reply) -> None:
        if reply.prompt_tokens not in (-1, self._rid.tokens):
            raise DumpRejectedError(
                Reject.WRONG_COUNT,
                f"the server says that it ran {reply.prompt_tokens:,} of the {self._rid.tokens:,} tokens sent: "
                "cut near its context limit?",
            )
        if reply.finish_reason == "abort":
            raise LostError("the server says that the request was aborted")
