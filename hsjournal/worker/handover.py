"""The worker's hold on the hand-over root: descriptor, watch and room; found again when somebody deletes the folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from hsjournal.dump.protocol import RequestId
from hsjournal.dump.reader import open_root
from hsjournal.dump.room import Room
from hsjournal.dump.watch import DumpWatch
from hsjournal.worker.trouble import Pauses

PAUSE = "root"


class Handover:
    """The hand-over root, made if it is missing; an asynchronous context manager.

    Args:
        path: of the root.
        budget: bytes that this run may have in flight.
        pauses: of this root: shows that it is gone, and ends the worker past the pause limit.
        retry_pause: seconds between two looks for it.
        promised_elsewhere: bytes on the same file system that other roots of this run still await.

    Raises (on entering):
        OSError: when it can't be made or opened.
    """

    def __init__(
        self,
        path: Path,
        budget: int,
        pauses: Pauses,
        retry_pause: float,
        promised_elsewhere: Callable[[Handover], int] = lambda _me: 0,
    ) -> None:
        self.path = path
        self.fd = -1
        self._pauses, self._retry_pause = pauses, retry_pause
        self._budget = budget
        self._promised_elsewhere = promised_elsewhere
        self._lost: list[int] = []

    async def __aenter__(self) -> Self:
        self.make()
        self.room = Room(self.path, self._budget, promised_elsewhere=lambda: self._promised_elsewhere(self))
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.watch.__aexit__(kind, error, trace)
        for fd in (*self._lost, self.fd):
            os.close(fd)

    @property
    def is_gone(self) -> bool:
        """Whether the root was deleted or moved away, and is not back yet."""
        return self.watch.gone.is_set()

    def make(self) -> tuple[int, int]:
        """Make the folder if it is missing; its device and inode.

        Raises:
            OSError: when it can't be made.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.path.stat()
        return found.st_dev, found.st_ino

    @property
    def device(self) -> int:
        """Of its file system."""
        return os.fstat(self.fd).st_dev

    def place(self) -> str:
        """What to call it to people."""
        return f"the hand-over root {self.path}"

    def holds(self, rid: RequestId) -> bool:
        """Whether something lies there under this name."""
        try:
            os.stat(str(rid), dir_fd=self.fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    async def guard(self, returned: Callable[[], None]) -> None:
        """For the worker's life: when the root goes away, wait for it or make it again, then call ``returned``.

        Raises:
            NoRoomError: when it stayed away past the pause limit.
        """
        while True:
            await self.watch.gone.wait()
            self._pauses.begin(PAUSE, f"{self.place()} was deleted or moved away")
            while not await self._find():
                self._pauses.check(PAUSE)
                await asyncio.sleep(self._retry_pause)
            self._pauses.end(PAUSE)
            returned()

    async def _find(self) -> bool:
        try:
            self._make()
            old = self.watch
            await self._open()
            await old.__aexit__(None, None, None)
        except OSError as error:
            self._pauses.begin(PAUSE, f"{self.place()} was deleted and can't be made again: {error.strerror}")
            return False
        return True

    def _make(self) -> None:
        """Make it as it was: a server that runs as another user must still be able to write to it."""
        if self.path.exists():
            return
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._mode != stat.S_IMODE(self.path.stat().st_mode):
            with contextlib.suppress(PermissionError):
                os.chown(self.path, -1, self._group)
            self.path.chmod(self._mode)

    async def _open(self) -> None:
        fd = open_root(self.path)
        try:
            watch = await DumpWatch(self.path).__aenter__()
        except BaseException:
            os.close(fd)
            raise
        if self.fd >= 0:
            self._lost.append(self.fd)  # threads may still use it: closed only at the end
        found = os.fstat(fd)
        self.fd, self.watch = fd, watch
        self._mode, self._group = stat.S_IMODE(found.st_mode), found.st_gid
