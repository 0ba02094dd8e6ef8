"""How much may still be asked of the server before the hand-over root, or its machine's memory, is full.

A sample's whole size is reserved before it is sent. The room left is the least of three: the budget, what the
file system has free, and, in tmpfs, what memory the machine and the container have left (tmpfs pages count
against the container's limit, and the kernel kills the server when they reach it).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hsjournal.filesystems import file_system_type

_IN_MEMORY = ("tmpfs", "ramfs")
_FULL = 1 << 20
"""Bytes free below which not even the report of a failed capture is sure to find room."""
_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number of this size."""


class Room:
    """Reservations by key against the room of one hand-over root; safe to use from several threads.

    Args:
        root: the hand-over root.
        budget_bytes: what this run may have in flight at most.
        margin_bytes: what is left free on the file system, and of the memory, for others.
        proc: where ``/proc`` is mounted.
        cgroups: where the cgroup file system is mounted.
        promised_elsewhere: bytes that others of this process still await on the same file system.
    """

    def __init__(
        self,
        root: Path,
        budget_bytes: int,
        margin_bytes: int = 64 << 20,
        *,
        proc: Path = Path("/proc"),
        cgroups: Path = Path("/sys/fs/cgroup"),
        promised_elsewhere: Callable[[], int] = lambda: 0,
    ) -> None:
        self._root = root
        self._promised_elsewhere = promised_elsewhere
        self._budget = budget_bytes
        self._margin = margin_bytes
        self._proc = proc
        self._cgroups = cgroups
        self._in_memory = file_system_type(root) in _IN_MEMORY
        self._reserved: dict[str, int] = {}
        self._landed: set[str] = set()
        self._lock = threading.Lock()
        self._full_at = float("-inf")

    def was_full(self, within: float) -> bool:
        """Whether the file system is full, or was seen full in the last ``within`` seconds: a dump may be missing for that."""
        with contextlib.suppress(OSError):  # it is gone, which is another matter
            self._free()
        return time.monotonic() - self._full_at < within

    def _free(self) -> int:
        """Bytes that the file system has free.

        Raises:
            OSError: when the root is gone.
        """
        found = os.statvfs(self._root)
        free = found.f_bavail * found.f_frsize
        if free < _FULL:
            self._full_at = time.monotonic()
        return free

    @property
    def reserved(self) -> int:
        """Bytes reserved now."""
        with self._lock:
            return sum(self._reserved.values())

    @property
    def promised(self) -> int:
        """Bytes reserved that have not landed: the file system does not count them yet."""
        with self._lock:
            return sum(nbytes for key, nbytes in self._reserved.items() if key not in self._landed)

    def capacity(self) -> int:
        """The largest sample that could ever be sent: what there would be with nothing in flight.

        Raises:
            OSError: when the root is gone.
        """
        found = os.statvfs(self._root)
        return max(0, min(self._budget, found.f_blocks * found.f_frsize - self._margin))

    def available(self) -> int:
        """Bytes that may still be reserved; 0 when there is no room.

        Raises:
            OSError: when the root is gone.
        """
        elsewhere = self._promised_elsewhere()
        with self._lock:
            return self._available(elsewhere)

    def reserve(self, key: str, nbytes: int, *, force: bool = False) -> bool:
        """Reserve ``nbytes`` for ``key`` if they fit; ``force`` enters what is already on its way, fit or not.

        A key that holds a reservation keeps it, and the answer is True.

        Raises:
            OSError: when the root is gone.
        """
        elsewhere = self._promised_elsewhere()
        with self._lock:
            if key not in self._reserved:
                if not force and nbytes > self._available(elsewhere):
                    return False
                self._reserved[key] = nbytes
            return True

    def landed(self, key: str) -> None:
        """The dump of ``key`` is complete: from now on the file system itself counts its bytes as used."""
        with self._lock:
            if key in self._reserved:
                self._landed.add(key)

    def release(self, key: str) -> None:
        """Give the reservation of ``key`` back; without one, nothing happens."""
        with self._lock:
            self._reserved.pop(key, None)
            self._landed.discard(key)

    def _available(self, elsewhere: int) -> int:
        total = sum(self._reserved.values())
        promised = elsewhere + total - sum(self._reserved[key] for key in self._landed)
        rooms = [self._free() - self._margin - promised]
        if self._in_memory:
            rooms += [room - self._margin - promised for room in memory_rooms(self._proc, self._cgroups)]
        return max(0, min(self._budget - total, *rooms))


def memory_rooms(proc: Path, cgroups: Path) -> list[int]:
    """Bytes of memory left: of the machine, and of each limited cgroup (v2 or v1) that this process is in.

    Page cache that the kernel would drop first (inactive file pages) counts as room.
    """
    rooms: list[int] = []
    meminfo = _table(proc / "meminfo")
    if "MemAvailable:" in meminfo:
        rooms.append(meminfo["MemAvailable:"] * 1024)
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            rooms += _walk(cgroups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = cgroups / "memory"
            rooms += _walk(base, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return rooms


def _walk(base: Path, path: str, limit_file: str, usage_file: str, reclaimable: str) -> list[int]:
    """The room of the group at ``path`` and of each group above it: every level's limit binds."""
    rooms = []
    folder = base / path.strip("/")
    if not folder.is_dir():
        folder = base  # in a cgroup namespace the path may be one that is only known outside
    while True:
        limit, usage = _text(folder / limit_file).strip(), _text(folder / usage_file).strip()
        if limit.isdigit() and usage.isdigit() and int(limit) < _UNLIMITED:
            rooms.append(int(limit) - int(usage) + _table(folder / "memory.stat").get(reclaimable, 0))
        if folder == base:
            return rooms
        folder = folder.parent


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _table(path: Path) -> dict[str, int]:
    """A file of lines ``name number …``."""
    table = {}
    for line in _text(path).splitlines():
        fields = line.split()
        if len(fields) >= 2 and fields[1].isdigit():
            table[fields[0]] = int(fields[1])
    return table
