"""One request's dump, put together from the chunks of its prefill while writer threads store them.

The scheduler's thread says what arrived (:class:`Assemblies`); writer threads write. Neither waits for the other here.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable

from hsjournal.capture.sglang_rows import RowSlice
from hsjournal.capture.writer import CaptureError, DumpWriter, DuplicateDumpError, OpenDump
from hsjournal.dump.protocol import FailureReason, RequestId

log = logging.getLogger(__name__)

IDS = -1
"""The tensor index of the token ids."""
ID_BYTES = 8
_ENDED_KEPT = 65_536
_STALE_S = 900.0


class Assembly:
    """The dump of one request.

    Args:
        writer: where it goes.
        rid: its request id.
        settle: called once, from any thread, when all its rows are written or it failed: queue :meth:`settle` for a
            writer thread.
    """

    def __init__(self, writer: DumpWriter, rid: RequestId, settle: Callable[[Assembly], None]) -> None:
        self.rid = rid
        self.received = 0  # the scheduler's thread only, as `chunks` and `touched`
        self.chunks: list[int] = []
        self.touched = time.monotonic()
        self.generation = 0
        self._writer = writer
        self._settle = settle
        self._ids = array("q")  # grows with what arrives: the promised number is anybody's
        self._state = threading.Lock()
        self._writing = threading.Lock()  # one write at a time, so that an older prefill's rows never land last
        self._pending = 0
        self._complete = False
        self._failure: tuple[FailureReason, str] | None = None
        self._settling = False
        self._dump: OpenDump | None = None

    def expect_write(self) -> int:
        """Announce a piece that a writer thread will bring to :meth:`write`; the generation that it belongs to."""
        with self._state:
            self._pending += 1
            return self.generation

    def advance(self, item: RowSlice) -> bool:
        """The chunk was taken; True when it was the last one."""
        self.received += item.length
        self.chunks.append(item.prefix)
        self.touched = time.monotonic()
        if self.received < self.rid.tokens:
            return False
        with self._state:
            self._complete = True
        self._maybe_settle()
        return True

    def restart(self) -> None:
        """The request was retracted and is prefilled from its first token again: nothing written so far counts."""
        self.received = 0
        self.chunks = []
        with self._state:
            self.generation += 1

    def fail(self, reason: FailureReason, detail: str) -> None:
        """Publish ``error`` instead; the first reason is kept."""
        with self._state:
            if self._failure is None:
                self._failure = (reason, detail)
        self._maybe_settle()

    def write(self, generation: int, tensor_index: int, row_offset: int, data: memoryview) -> None:
        """Store one announced piece (a writer thread)."""
        try:
            with self._writing:
                if self._failure is None and generation == self.generation:
                    self._store(tensor_index, row_offset, data)
        except CaptureError as error:
            self.fail(error.reason, error.detail)
        except DuplicateDumpError as error:
            self.fail(FailureReason.INTERNAL, str(error))
        finally:
            with self._state:
                self._pending -= 1
            self._maybe_settle()

    def settle(self) -> None:
        """Publish what became of it (a writer thread)."""
        if self._failure is None:
            assert self._dump is not None
            try:
                self._dump.commit(self._ids, self.chunks)
            except CaptureError as error:
                self._failure = (error.reason, error.detail)
        if self._failure is not None:
            reason, detail = self._failure
            log.warning("hsjournal: %s was not captured (%s): %s", self.rid, reason.value, detail)
            if self._dump is not None:
                self._dump.fail(reason, detail)
            else:
                self._writer.publish_failure(self.rid, reason, detail)

    def _store(self, tensor_index: int, row_offset: int, data: memoryview) -> None:
        if tensor_index == IDS:
            ids = array("q", bytes(data))
            self._ids.extend(array("q", bytes(ID_BYTES * max(0, row_offset + len(ids) - len(self._ids)))))
            self._ids[row_offset : row_offset + len(ids)] = ids
            return
        if self._dump is None:
            self._dump = self._writer.begin(self.rid)
        self._dump.write_rows(tensor_index, row_offset, data)

    def _maybe_settle(self) -> None:
        with self._state:
            if self._settling or self._pending or not (self._complete or self._failure):
                return
            self._settling = True
        self._settle(self)


class Assemblies:
    """The requests whose prefill is under way (the scheduler's thread only)."""

    def __init__(self, writer: DumpWriter, settle: Callable[[Assembly], None]) -> None:
        self._writer = writer
        self._settle = settle
        self._open: dict[RequestId, Assembly] = {}
        self._ended: OrderedDict[RequestId, None] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._open or self._ended)

    def admit(self, item: RowSlice) -> Assembly | None:
        """Whose dump the slice's rows belong to; None when they are not wanted (the reason is published by then)."""
        rid = item.rid
        if rid in self._ended:
            return None  # its own decoding, or a retracted request that was captured before
        assembly = self._open.get(rid)
        if assembly is None:
            self._drop_stale()
            assembly = self._open[rid] = Assembly(self._writer, rid, self._settle)
            if item.prefix:
                detail = f"{item.prefix} of {rid.tokens} tokens came from the prefix cache; start SGLang with --disable-radix-cache"
                self.fail(rid, FailureReason.PREFIX_HIT, detail)
                return None
        elif item.prefix == 0:
            assembly.restart()
        elif item.prefix != assembly.received:
            detail = f"a chunk starts at token {item.prefix}, where {assembly.received} rows had arrived"
            self.fail(rid, FailureReason.INTERNAL, detail)
            return None
        if assembly.received + item.length > rid.tokens:
            detail = f"{assembly.received + item.length} tokens were run, {rid.tokens} were promised"
            self.fail(rid, FailureReason.MISMATCH, detail)
            return None
        return assembly

    def took(self, item: RowSlice) -> None:
        """The slice's rows are on their way."""
        assembly = self._open.get(item.rid)
        if assembly is not None and assembly.advance(item):
            self._end(item.rid)

    def fail(self, rid: RequestId, reason: FailureReason, detail: str) -> None:
        """Give up the dump of ``rid``, if one is under way."""
        assembly = self._open.get(rid)
        if assembly is not None:
            self._end(rid)
            assembly.fail(reason, detail)

    def refuse(self, rid: RequestId, reason: FailureReason, detail: str) -> None:
        """Publish, once, that ``rid`` can't be captured."""
        if rid not in self._ended:
            self._open.setdefault(rid, Assembly(self._writer, rid, self._settle))
            self.fail(rid, reason, detail)

    def finished(self, rid: RequestId, *, aborted: bool) -> None:
        """The server is done with the request: a later one may use its id again."""
        if (assembly := self._open.get(rid)) is not None:
            reason = FailureReason.ABORTED if aborted else FailureReason.MISMATCH
            self.fail(rid, reason, f"the request ended after {assembly.received} of {rid.tokens} tokens")
        self._ended.pop(rid, None)

    def aborted(self, prefix: str, *, everything: bool) -> None:
        """The server was told to abort every request whose id starts with ``prefix``."""
        for rid in [r for r in self._open if everything or str(r).startswith(prefix)]:
            self.fail(rid, FailureReason.ABORTED, f"aborted after {self._open[rid].received} of {rid.tokens} tokens")

    def _end(self, rid: RequestId) -> None:
        del self._open[rid]
        self._ended[rid] = None
        while len(self._ended) > _ENDED_KEPT:
            self._ended.popitem(last=False)

    def _drop_stale(self) -> None:
        limit = time.monotonic() - _STALE_S
        for rid in [r for r, a in self._open.items() if a.touched < limit]:
            self.fail(rid, FailureReason.INTERNAL, f"no further chunk came within {_STALE_S:.0f} s")
