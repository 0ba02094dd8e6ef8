"""Waiting for dumps: inotify on the hand-over root, and a scan twice a second in case it is blind.

inotify is blind on some mounts, when its queue overflows, and where the user's limit of instances is reached.
Nothing is remembered but what somebody waits for, so a busy root costs no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import stat
import struct
from typing import TYPE_CHECKING, Self

from hsjournal.dump.reader import open_root

if TYPE_CHECKING:
    from pathlib import Path

    from hsjournal.dump.protocol import RequestId

_IN_CREATE, _IN_MOVED_TO, _IN_DELETE_SELF, _IN_MOVE_SELF = 0x100, 0x80, 0x400, 0x800
_IN_UNMOUNT, _IN_Q_OVERFLOW, _IN_IGNORED, _IN_ONLYDIR = 0x2000, 0x4000, 0x8000, 0x1000000
_LOST = _IN_DELETE_SELF | _IN_MOVE_SELF | _IN_UNMOUNT | _IN_IGNORED
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows
_READ_BYTES = 64 << 10


class DumpWatch:
    """Tells when ``ROOT/<rid>`` is there; an asynchronous context manager, for one event loop.

    Args:
        root: the hand-over root.
        scan_s: seconds between two looks that don't depend on inotify.

    Raises (on entering):
        OSError: when the root is missing or no directory.
    """

    def __init__(self, root: Path, scan_s: float = 0.5) -> None:
        self._root = root
        self._scan_s = scan_s
        self._root_fd = -1
        self._notify_fd = -1
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._scanner: asyncio.Task[None] | None = None
        self.gone = asyncio.Event()
        """Set when the root was deleted, moved away or unmounted; a new watch is needed then."""

    @property
    def uses_inotify(self) -> bool:
        """Whether inotify works here; otherwise a dump is seen by the next scan."""
        return self._notify_fd >= 0

    async def __aenter__(self) -> Self:
        self._root_fd = open_root(self._root)
        try:
            self._notify_fd = _watch(self._root_fd)
            if self.uses_inotify:
                asyncio.get_running_loop().add_reader(self._notify_fd, self._read)
        except BaseException:
            os.close(self._root_fd)
            raise
        self._look()  # what came before the watch was set, it can't tell
        self._scanner = asyncio.create_task(self._scan(), name="dump-watch-scan")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._scanner is not None:
            self._scanner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._scanner
        self._stop_notify()
        os.close(self._root_fd)
        for futures in self._waiting.values():
            for future in futures:
                future.cancel()

    async def wait(self, rid: RequestId | str, deadline: float) -> None:
        """Return when ``ROOT/<rid>`` is a directory: a dump or a failure was published.

        Args:
            rid: the request id.
            deadline: on the clock of ``time.monotonic()``, which is the event loop's.

        Raises:
            TimeoutError: at the deadline.
            FileNotFoundError: when the root itself went away.
        """
        name = str(rid)
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, set()).add(future)
        try:
            self._check(name)
            if self.gone.is_set():
                raise self._gone_error()
            async with asyncio.timeout_at(deadline):
                await future
        finally:
            futures = self._waiting[name]
            futures.discard(future)
            if not futures:
                del self._waiting[name]

    def _gone_error(self) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, "the hand-over root was deleted or moved away", str(self._root))

    async def _scan(self) -> None:
        while not self.gone.is_set():
            await asyncio.sleep(self._scan_s)
            self._look()

    def _look(self) -> None:
        """One look at everything that is waited for, and at the root itself."""
        for name in list(self._waiting):
            self._check(name)
        try:
            ours, there = os.fstat(self._root_fd), os.stat(self._root)
            present = ours.st_nlink > 0 and (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)
        except (FileNotFoundError, NotADirectoryError):
            present = False
        if not present:
            self._lose()

    def _check(self, name: str, *, announced: bool = False) -> None:
        try:
            found = os.stat(name, dir_fd=self._root_fd, follow_symlinks=False)
            there = stat.S_ISDIR(found.st_mode)
        except FileNotFoundError:
            there = announced  # it was, and is gone again: who opens it will see that
        if there:
            for future in self._waiting.get(name, ()):
                if not future.done():
                    future.set_result(None)

    def _lose(self) -> None:
        self.gone.set()
        self._stop_notify()
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(self._gone_error())

    def _stop_notify(self) -> None:
        if self._notify_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._notify_fd)
            os.close(self._notify_fd)
            self._notify_fd = -1

    def _read(self) -> None:
        """Take what inotify has to say; the loop calls again while there is more."""
        try:
            data = os.read(self._notify_fd, _READ_BYTES)
        except BlockingIOError:
            return
        offset = 0
        while offset < len(data):
            _, mask, _, length = _EVENT.unpack_from(data, offset)
            offset += _EVENT.size
            name = os.fsdecode(data[offset : offset + length].rstrip(b"\0"))
            offset += length
            if mask & (_LOST | _IN_Q_OVERFLOW):
                self._look()
                if mask & _LOST:
                    self._lose()
                    return
            elif name in self._waiting:
                self._check(name, announced=True)


def _watch(root_fd: int) -> int:
    """An inotify descriptor that watches the directory behind ``root_fd``, or -1 where there is no inotify."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "inotify_init1"):
        return -1
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        return -1
    mask = _IN_CREATE | _IN_MOVED_TO | _IN_DELETE_SELF | _IN_MOVE_SELF | _IN_ONLYDIR
    if libc.inotify_add_watch(fd, f"/proc/self/fd/{root_fd}".encode(), ctypes.c_uint32(mask)) < 0:
        os.close(fd)
        return -1
    return fd
