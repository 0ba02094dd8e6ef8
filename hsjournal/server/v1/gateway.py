"""The gateway: requests by protocol v2 in, requests of distinct token counts out, dumps of v1 in, dumps of v2 out."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from hsjournal.dump.protocol import CaptureFailure, FailureReason, RequestId, token_ids_sha256
from hsjournal.errors import DumpRejectedError
from hsjournal.server.v1 import dumps, handing_on, state_file
from hsjournal.server.v1.dumps import Found
from hsjournal.server.v1.root import Root
from hsjournal.server.v1.taking import Awaited, decide

log = logging.getLogger("hsjournal.v1")
POLL_S = 0.01
IDLE_POLL_S = 0.25
REST = 20
"""Times as long as a look at the root took, before the next: hundreds of directories that nobody fetches cost little."""
LONGEST_POLL_S = 1.0
ADMIT_TIMEOUT_S = 20.0
DUMP_TIMEOUT_S = 60.0
"""Seconds that a dump may come after its request was answered."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What stands behind the gateway.

    Args:
        root: where the server writes, and where we hand on.
        layers: that it captures; its dumps don't say.
        final_norm: ``post`` or ``pre``.
        state: file that outlives this process: which requests have no end yet.
        dump_timeout: seconds that a dump may come after its request was answered.
        admit_timeout: seconds that a sample waits for another of its length; then the client is told, and sends other
            rows meanwhile. Shorter than the client's own patience.
    """

    root: Path
    layers: tuple[int, ...]
    final_norm: str
    state: Path
    dump_timeout: float = DUMP_TIMEOUT_S
    admit_timeout: float = ADMIT_TIMEOUT_S


class HeldError(Exception):
    """A request that can't be told from another one yet, and was not sent; the message says which, for people."""


@dataclass(slots=True)
class _Request:
    awaited: Awaited
    row: int | None
    answered_at: float | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Desk:
    """Who may be sent, and whose each dump is. For one event loop.

    Args:
        setup: of the gateway.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.boot_id = uuid.uuid4().hex
        self._counts = state_file.load(setup.state)
        self._requests: dict[int, _Request] = {}
        self._given_up: dict[str, Awaited] = {}
        self._seen: dict[str, int] = {}
        self._moved = asyncio.Condition()
        self._root = Root(setup.root)
        self._cost_s = 0.0

    @property
    def in_flight(self) -> list[str]:
        """Request ids that somebody waits for."""
        return [request.awaited.rid for request in self._requests.values()]

    @property
    def is_draining(self) -> bool:
        """Whether nothing is sent until the server has nothing left to do."""
        return self._counts.is_draining

    @property
    def barred(self) -> list[int]:
        """Token counts of which a request was given up that the server may still answer."""
        return sorted(self._counts.barred)

    async def tells_load(self, value: bool) -> None:
        """Whether the server says how much it has to do; where it doesn't, a bar holds until it is started anew."""
        if value != self._counts.tells_load:
            self._counts.tells_load = value
            await self._tell()

    async def admit(self, rid: RequestId, input_ids: list[int]) -> None:
        """Wait until the request can be told from every other one, then count it as sent.

        Raises:
            HeldError: when that took too long, or will not be before the server is started anew.
            OSError: when the root can't be read.
        """
        count = rid.tokens
        try:
            async with asyncio.timeout(self.setup.admit_timeout if rid.row is not None else None), self._moved:
                before = await self._lying_there(count)
        except TimeoutError:
            raise HeldError(self._counts.why_held(count)) from None
        # From here on nothing waits: whoever cancels a request leaves no count behind that nobody frees.
        self._counts.send(count, str(rid))
        awaited = Awaited(str(rid), count, token_ids_sha256(input_ids), time.time(), before)
        self._requests[count] = _Request(awaited, rid.row)
        state_file.save(self.setup.state, self._counts)

    async def _lying_there(self, count: int) -> frozenset[tuple[str, int]]:
        """What lies in the root, as soon as a request of ``count`` tokens may be sent."""
        while True:
            await self._moved.wait_for(lambda: self._counts.may_send(count) or self._counts.waits_for_restart(count))
            if self._counts.waits_for_restart(count):
                raise HeldError(self._counts.why_held(count))
            before = frozenset((await asyncio.to_thread(dumps.names, self._root.fd)).items())
            if self._counts.may_send(count):  # nobody was sent meanwhile, but somebody may have been given up
                return before

    def answered(self, count: int, rid: str) -> None:
        """The server replied: the dump is there, or will be soon."""
        request = self._requests.get(count)
        if request is not None and request.awaited.rid == rid:
            request.answered_at = time.monotonic()

    async def refused(self, count: int, rid: str) -> None:
        """The server did not run it: nothing will come."""
        await self._end(count, rid)

    async def give_up(self, count: int, rid: str) -> None:
        """Nobody waits for it any more."""
        request = self._requests.get(count)
        if request is None or request.awaited.rid != rid:
            return
        del self._requests[count]
        self._given_up[rid] = request.awaited
        self._counts.give_up(count)
        state_file.save(self.setup.state, self._counts)
        log.warning("%s is given up: its token count is barred until the server has drained or is started anew", rid)
        await self._tell()

    async def drained(self) -> None:
        """Whatever was given up never comes."""
        if self._counts.barred:
            log.info("the server has nothing left to do: all token counts are free again")
        self._given_up.clear()
        self._counts.drained()
        state_file.save(self.setup.state, self._counts)
        await self._tell()

    async def rebooted(self) -> None:
        """The server was started anew: it has another boot id, and nobody waits for what the last one was asked.

        That comes never, most likely; but a process that only lost its port may write still. So the counts are barred
        until :meth:`drained`.
        """
        self.boot_id = uuid.uuid4().hex
        for count, request in list(self._requests.items()):
            await self.give_up(count, request.awaited.rid)

    async def run(self) -> None:
        """Look for dumps, for ever."""
        while True:
            try:
                await self.look()
            except OSError as error:  # the root is gone, or its disk is in trouble: the client sees that too
                log.warning("the root %s: %s", self.setup.root, error.strerror)
                self._root.close()
                await asyncio.sleep(IDLE_POLL_S)
            await asyncio.sleep(pause(self._cost_s, waits=bool(self._requests or self._given_up)))

    async def look(self) -> None:
        """Take in what has become complete since the last look."""
        fd, begin = self._root.fd, time.thread_time()
        there = dumps.names(fd)
        self._seen = {name: inode for name, inode in self._seen.items() if there.get(name) == inode}
        fresh = [name for name, inode in there.items() if name not in self._seen and dumps.is_complete(fd, name)]
        self._cost_s = time.thread_time() - begin
        if fresh:
            await self._take(fresh, there)
        for count, request in list(self._requests.items()):
            since = request.answered_at
            if since is not None and time.monotonic() - since > self.setup.dump_timeout:
                await self.give_up(count, request.awaited.rid)

    def is_writing(self) -> bool:
        """Whether a directory is there that its server has not finished."""
        with contextlib.suppress(OSError):
            fd = self._root.fd
            old = {name for request in self._given_up.values() for name, _ in request.before}
            return any(not dumps.is_complete(fd, name) for name in dumps.names(fd) if name not in old)
        return False

    async def _take(self, names: list[str], there: dict[str, int]) -> None:
        found: list[Found] = []
        for name in names:
            self._seen[name] = there[name]
            try:
                found.append(await asyncio.to_thread(dumps.look, self._root.fd, name))
            except DumpRejectedError as error:
                await self._unreadable(name, there[name], str(error))
        decision = decide(found, [r.awaited for r in self._requests.values()], self._given_up.values())
        for item, why in decision.foreign:
            log.warning("%s is left alone: %s", item.name, why)
            await self._unexpected(item, why)
        for awaited, why in decision.refused:
            await self._fail(awaited, FailureReason.MISMATCH, why)
        for awaited, item in decision.taken:
            await self._hand_on(awaited, item)

    async def _hand_on(self, awaited: Awaited, found: Found) -> None:
        fd, setup = self._root.fd, self.setup
        try:
            meta = handing_on.meta_of(
                found, awaited.rid, awaited.ids_sha256, setup.layers, setup.final_norm, self.boot_id
            )
            await asyncio.to_thread(handing_on.publish, fd, found, meta)
        except DumpRejectedError as error:
            await self._fail(awaited, FailureReason.MISMATCH, str(error))
            return
        except OSError as error:
            if error.errno == errno.EEXIST:
                log.warning("%s: %s", found.name, error)
            reason = FailureReason.NO_ROOM if error.errno in (errno.ENOSPC, errno.EDQUOT) else FailureReason.INTERNAL
            await self._fail(awaited, reason, f"{found.name} could not be handed on: {error.strerror or error}")
            return
        with contextlib.suppress(OSError):  # its rows are safe; what can't be removed lies there still
            await asyncio.to_thread(dumps.remove, fd, found)
        log.info("%s is %s's", found.name, awaited.rid)
        await self._end(awaited.count, awaited.rid)
        self._given_up.pop(awaited.rid, None)

    async def _unreadable(self, name: str, inode: int, why: str) -> None:
        """What has no readable length answers the one request that is at the server, if there is but one."""
        log.warning("%s is left alone: %s", name, why)
        if len(self._requests) == 1 and not self._given_up:
            (request,) = self._requests.values()
            if (name, inode) not in request.awaited.before:
                await self._fail(request.awaited, FailureReason.MISMATCH, f"{name}: {why}")

    async def _unexpected(self, item: Found, why: str) -> None:
        """A whole dump that is nobody's, while one request alone is at the server: its rows, but not their number."""
        if len(self._requests) == 1 and not self._given_up:
            (request,) = self._requests.values()
            if (item.name, item.inode) not in request.awaited.before and item.began >= request.awaited.sent_at:
                await self._fail(request.awaited, FailureReason.MISMATCH, why)

    async def _fail(self, awaited: Awaited, reason: FailureReason, detail: str) -> None:
        """Tell the client why there is no dump; the count stays barred, for another one may come."""
        failure = CaptureFailure(awaited.rid, reason, detail, self.boot_id)
        try:
            await asyncio.to_thread(handing_on.publish_failure, self._root.fd, failure)
        except OSError as error:
            log.warning("%s: %s", awaited.rid, error)
        await self.give_up(awaited.count, awaited.rid)

    async def _end(self, count: int, rid: str | None = None) -> None:
        request = self._requests.get(count)
        if request is None or (rid is not None and request.awaited.rid != rid):
            return  # a late dump of one that was given up: its count stays barred
        del self._requests[count]
        self._counts.answered(count)
        request.ended.set()
        state_file.save(self.setup.state, self._counts)
        await self._tell()

    async def _tell(self) -> None:
        async with self._moved:
            self._moved.notify_all()


def pause(cost_s: float, *, waits: bool) -> float:
    """Seconds to the next look at the root, when one takes ``cost_s`` of processor time and somebody ``waits`` or not."""
    return min(max(POLL_S if waits else IDLE_POLL_S, REST * cost_s), LONGEST_POLL_S)
