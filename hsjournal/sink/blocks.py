"""Writing a stream through a few aligned, rotating blocks: one is filled while others are being written.

O_DIRECT keeps the data out of the page cache. Where it is refused, each block is written, pushed to the storage
(``sync_file_range``) and dropped from the cache (``fadvise``), which bounds the dirty pages in the same way.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Self

import xxhash

from hsjournal import faults

BLOCK_BYTES = 2 << 20
"""One huge page: pinned for O_DIRECT at a stroke, where 4 KiB pages cost twice the processor time."""
PAGE = 4096
"""What O_DIRECT is aligned to; a storage that wants more refuses, and gets the other way."""
_BLOCKS = 4
_WRITERS = 2
_PUSH = 1 | 2 | 4  # SYNC_FILE_RANGE_WAIT_BEFORE | WRITE | WAIT_AFTER


def fresh_block() -> memoryview:
    """A block of zeros, in a huge page where the machine has one; what is mapped beside it is never touched."""
    whole = mmap.mmap(-1, 2 * BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        whole.madvise(mmap.MADV_HUGEPAGE)
    at = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    start = -at % BLOCK_BYTES  # older kernels do not align it by themselves
    return memoryview(whole)[start : start + BLOCK_BYTES]


class BlockPool:
    """Sets of blocks, kept for the next sample: fresh memory would cost a page fault per 4 KiB."""

    def __init__(self, keep: int = 4) -> None:
        self._free: list[list[memoryview]] = []
        self._keep = keep
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def blocks(self) -> Iterator[list[memoryview]]:
        """A set of blocks for one writer."""
        with self._lock:
            held = self._free.pop() if self._free else None
        if held is None:
            held = [fresh_block() for _ in range(_BLOCKS)]
        try:
            yield held
        finally:
            with self._lock:
                if len(self._free) < self._keep:
                    self._free.append(held)

    def close(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._free.clear()


class BlockWriter:
    """Writes a stream to a file from its start, and digests it on the way; a context manager that ends its threads.

    Either ask for :meth:`space`, fill a :meth:`view` and :meth:`advance`, or :meth:`append`; then :meth:`finish`.

    Args:
        fd: of an empty file.
        blocks: from a :class:`BlockPool`.
        direct: whether ``fd`` was opened with O_DIRECT.
        progress: called with the bytes written, before each step that can block.
        row: of the sample, for the fault point.

    Raises (from every method):
        OSError: what the storage answered; nothing more is written then.
    """

    def __init__(
        self,
        fd: int,
        blocks: list[memoryview],
        *,
        direct: bool,
        progress: Callable[[int], None],
        row: int | None = None,
    ) -> None:
        self._fd = fd
        self._direct = direct
        self._progress = progress
        self._row = row
        self._error: BaseException | None = None
        self._todo: queue.SimpleQueue[tuple[memoryview, int, int] | None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[tuple[memoryview, int]] = queue.SimpleQueue()
        self._outstanding = 0
        self._spare = list(blocks)
        self._block = self._spare.pop()
        self._memory = memoryview(self._block)
        self._position = 0
        self._start = 0
        self._done = 0
        self._hash = xxhash.xxh3_128()
        self._threads = [threading.Thread(target=self._work, name=f"block-writer-{i}") for i in range(_WRITERS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and self._error is None:
            self._error = error  # what is queued is not worth writing any more
        for _thread in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()
        self._memory.release()

    def space(self) -> int:
        """Bytes that the current block still takes, at least 1."""
        if self._position == BLOCK_BYTES:
            self._submit(BLOCK_BYTES)
        return BLOCK_BYTES - self._position

    def view(self, nbytes: int) -> memoryview:
        """The next ``nbytes`` of the current block, to be filled."""
        return self._memory[self._position : self._position + nbytes]

    def advance(self, nbytes: int) -> None:
        """Take the next ``nbytes`` of the current block as filled."""
        with self.view(nbytes) as filled:
            self._hash.update(filled)
        self._position += nbytes

    def append(self, data: bytes | memoryview) -> None:
        """Copy ``data`` in, over as many blocks as it takes."""
        offset = 0
        while offset < len(data):
            nbytes = min(self.space(), len(data) - offset)
            with self.view(nbytes) as view:
                view[:] = data[offset : offset + nbytes]
            self.advance(nbytes)
            offset += nbytes

    def finish(self) -> tuple[int, str]:
        """Write what is left, wait for all of it, and cut the file to its exact size.

        Returns:
            The size and the xxh3_128 of the stream.
        """
        total = self._start + self._position
        padded = -(-self._position // PAGE) * PAGE if self._direct else self._position
        with self.view(padded - self._position) as view:
            view[:] = bytes(len(view))
        if padded:
            self._submit(padded, last=True)
        while self._outstanding:
            self._reclaim()
        self._check()
        os.ftruncate(self._fd, total)
        return total, self._hash.hexdigest()

    def _submit(self, nbytes: int, *, last: bool = False) -> None:
        """Hand the current block to the writers and take another."""
        faults.point("sink.writing", self._row)
        self._todo.put((self._block, nbytes, self._start))
        self._outstanding += 1
        self._start += nbytes
        self._position = 0
        if last:
            return
        if not self._spare:
            self._reclaim()
        self._check()
        self._memory.release()
        self._block = self._spare.pop()
        self._memory = memoryview(self._block)

    def _reclaim(self) -> None:
        self._progress(self._done)
        block, nbytes = self._free.get()
        self._outstanding -= 1
        self._done += nbytes
        self._spare.append(block)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (job := self._todo.get()) is not None:
            block, nbytes, offset = job
            try:
                if self._error is None:
                    with memoryview(block) as memory:
                        self._write(memory[:nbytes], offset)
            except BaseException as error:  # noqa: BLE001  # handed to the thread that fills
                self._error = self._error or error
            finally:
                self._free.put((block, nbytes))

    def _write(self, data: memoryview, offset: int) -> None:
        begin, end = offset, offset + len(data)
        with data:
            while offset < end:
                try:
                    written = os.pwrite(self._fd, data[offset - begin :], offset)
                except OSError as error:
                    if error.errno != errno.EINVAL or not self._direct:
                        raise
                    self._use_the_cache()
                    continue
                if self._direct and offset + written < end:
                    written -= written % PAGE  # go on from an aligned place
                    if written == 0:
                        self._use_the_cache()
                offset += written
        if not self._direct:
            push(self._fd, begin, end - begin)

    def _use_the_cache(self) -> None:
        """O_DIRECT was taken at opening and refused at writing: go on without it."""
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self._direct = False


def push(fd: int, offset: int, nbytes: int) -> None:
    """Have a range that was written through the page cache on its way to the storage, and out of the cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "sync_file_range"):
        call = libc.sync_file_range
        if call(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), ctypes.c_uint(_PUSH)) < 0:
            code = ctypes.get_errno()
            if code in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
                raise OSError(code, os.strerror(code))
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
