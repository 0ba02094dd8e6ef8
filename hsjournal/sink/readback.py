"""Reading a file back from the storage it lies on, past the page cache where that is possible, and saying how."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import TYPE_CHECKING, Self

from hsjournal.dump.reader import FILE_FLAGS
from hsjournal.filesystems import file_system_type, is_network
from hsjournal.sink.blocks import BLOCK_BYTES, PAGE, fresh_block

if TYPE_CHECKING:
    from pathlib import Path

_IN_MEMORY = ("tmpfs", "ramfs")


class Method(StrEnum):
    """How bytes were read back; kept in the journal. On a network a client's or server's cache may have answered."""

    DIRECT = "direct"  # O_DIRECT
    DROPPED = "dropped"  # the file's pages were dropped from the page cache, then it was read
    MEMORY = "memory"  # tmpfs or ramfs: there is no storage behind it
    DIRECT_NETWORK = "direct-network"
    DROPPED_NETWORK = "dropped-network"


class ReadBack:
    """One open file; a context manager.

    Args:
        folder: descriptor of the folder that the file lies directly in.
        name: of the file.
        place: the folder's path, for its file system's type.

    Raises (from everything):
        OSError: as the storage answers; ELOOP for a link, EINVAL for what is no regular file.
    """

    def __init__(self, folder: int, name: str, place: Path) -> None:
        kind = file_system_type(place)
        self._network = is_network(kind)
        self._memory = kind in _IN_MEMORY
        self._direct = False
        self._read: memoryview | None = None
        self._fd = os.open(name, FILE_FLAGS, dir_fd=folder)
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", name)
            self.size = found.st_size
            if not self._memory:
                self._leave_the_cache()
        except BaseException:
            os.close(self._fd)
            raise

    def _leave_the_cache(self) -> None:
        """Read past the page cache from now on, or at least drop what it holds of this file."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            with mmap.mmap(-1, PAGE) as page:
                os.preadv(self._fd, [page], 0)  # some file systems refuse only now
            self._direct = True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def method(self) -> Method:
        """How this file is read."""
        if self._memory:
            return Method.MEMORY
        if self._direct:
            return Method.DIRECT_NETWORK if self._network else Method.DIRECT
        return Method.DROPPED_NETWORK if self._network else Method.DROPPED

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Some bytes; fewer where the file ends."""
        nbytes = max(0, min(nbytes, self.size - offset))
        if nbytes == 0:
            return b""
        if self.size <= BLOCK_BYTES:
            return bytes(self._whole()[offset : offset + nbytes])
        start = offset - offset % PAGE
        length = -(-(offset + nbytes - start) // PAGE) * PAGE
        with mmap.mmap(-1, length) as buffer:
            got = self._fill(buffer, start, length)
            return buffer[offset - start : min(offset - start + nbytes, got)]

    def blocks(self) -> Generator[tuple[int, memoryview]]:
        """The whole file, front to back, as offset and bytes; the next block is read while one is being used."""
        if self.size <= BLOCK_BYTES:
            if whole := self._whole():
                yield 0, whole
            return
        buffers = [fresh_block() for _ in range(2)]
        with ThreadPoolExecutor(1, thread_name_prefix="read-back") as reader:
            offset, turn = 0, 0
            pending = reader.submit(self._fill, buffers[0], 0, BLOCK_BYTES)
            while offset < self.size:
                got = pending.result()
                if got == 0:
                    return  # cut while it is being read: the digest will tell
                following = offset + got
                buffer, turn = buffers[turn], 1 - turn
                pending = reader.submit(self._fill, buffers[turn], following, BLOCK_BYTES)
                with memoryview(buffer) as memory, memory[:got] as view:
                    yield offset, view
                offset = following

    def _whole(self) -> memoryview:
        """All of a small file, read once: its parts lie closer together than two reads are worth."""
        if self._read is None:
            length = -(-self.size // PAGE) * PAGE
            buffer = memoryview(mmap.mmap(-1, max(length, PAGE)))
            self._read = buffer[: min(self.size, self._fill(buffer, 0, length))]
        return self._read

    def _fill(self, buffer: mmap.mmap | memoryview, offset: int, nbytes: int) -> int:
        """Read until the buffer is full or the file ends."""
        done = 0
        with memoryview(buffer) as memory:
            while done < nbytes and offset + done < self.size:
                if self._direct and (offset + done) % PAGE:
                    break  # only the end of a file is uneven: it was cut while it is being read
                with memory[done:nbytes] as rest:
                    got = os.preadv(self._fd, [rest], offset + done)
                if got == 0:
                    break
                done += got
        return done
