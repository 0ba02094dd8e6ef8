"""The mirror: what a run says about itself in tmpfs, where no stuck disk can hide it.

    heartbeat        a memory-mapped record of the worker: who it is, and for each of its slots (main loop, sink
                     threads) the row, phase, bytes and monotonic time, written before each step that can block
    snapshot.json    the worker's last view of the whole run: counts, rates, rows in flight
    supervisor.json  the supervisor's: who it is, its verdict, the worker's lives
    events.jsonl     recent events, each under its own key, entered into the journal when it can be written

Standard library only: ``status`` and the supervisor live from here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from hsjournal.birth import own_create_time
from hsjournal.events import Event

HEARTBEAT, SNAPSHOT, SUPERVISOR, EVENTS = "heartbeat", "snapshot.json", "supervisor.json", "events.jsonl"
MAX_SLOTS = 64
MAX_EVENTS_BYTES = 4 << 20
STDERR, STDERR_BEFORE = "worker.err", "worker.err.before"
"""The standard error of the worker, and of the one before it until its successor has put it into its log."""
_EVENT_BYTES = 2048
MOST_WAITING = 1000
"""Events that wait for room, the latest of them."""
_MAGIC = b"HSJBEAT1"
_HEAD = struct.Struct(
    "<8s16sqdqqi"
)  # magic, machine boot id, pid, create time (s since its boot), epoch, beat (monotonic ns), phase
_SLOT = struct.Struct("<5q")  # row, attempt, phase, bytes, since (monotonic ns): whole words, so that none is torn
_HEAD_SIZE, _SLOT_SIZE = 128, 64
_SIZE = _HEAD_SIZE + MAX_SLOTS * _SLOT_SIZE


class Phase(IntEnum):
    """What a slot is doing; written before the step begins."""

    IDLE = 0
    STARTING = 1
    RECONCILING = 2
    PREFLIGHT = 3
    RUNNING = 4
    PAUSED = 5
    DRAINING = 6
    SENDING = 10
    WAITING = 11
    CHECKING = 12
    WRITING = 13
    SYNCING = 14
    PUBLISHING = 15
    COMMITTING = 16
    VERIFYING = 17
    DELETING = 18


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot of a heartbeat; ``since`` is seconds on the monotonic clock."""

    row: int
    attempt: int
    phase: Phase
    nbytes: int
    since: float


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat as read."""

    pid: int
    create_time: float
    epoch: int
    beat: float
    phase: Phase
    slots: tuple[Slot, ...]


def machine_boot_id() -> bytes:
    """16 bytes that change with every boot of the machine: monotonic times of another boot mean nothing."""
    return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


class Heartbeat:
    """The worker's side of the heartbeat; slot 0 is the main loop.

    Beating is a memory write: it never blocks, and needs no lock because each slot has one writer.
    """

    def __init__(self, mirror: Path, epoch: int) -> None:
        self._identity = (_MAGIC, machine_boot_id(), os.getpid(), own_create_time(), epoch)
        path = mirror / HEARTBEAT
        fresh = path.with_name(f".{HEARTBEAT}.{os.getpid()}")
        try:
            self._map = _mapped(fresh, bytes(_SIZE))
        except OSError:
            # tmpfs is full, of dumps perhaps that this worker is here to clear away: an older worker's record has
            # its room already; and without one it is better to work unseen than not at all.
            fresh.unlink(missing_ok=True)
            self._map = _mapped(path) if _size(path) == _SIZE else mmap.mmap(-1, _SIZE)
        self.phase(Phase.STARTING)
        for slot in range(MAX_SLOTS):
            self.slot(slot, -1, 0, Phase.IDLE)
        if fresh.exists():
            fresh.replace(path)

    def phase(self, phase: Phase) -> None:
        """The worker as a whole is now in ``phase``; also its sign of life."""
        self._phase = phase
        self.beat()

    def beat(self) -> None:
        """A sign of life of the main loop; not progress."""
        # One copy of the whole: pack_into would write byte by byte, and a reader could see half a number.
        self._map[: _HEAD.size] = _HEAD.pack(*self._identity, time.monotonic_ns(), self._phase)

    def slot(self, slot: int, row: int, attempt: int, phase: Phase, nbytes: int = 0) -> None:
        """Slot ``slot`` is about to do ``phase`` for ``row``."""
        begin = _HEAD_SIZE + slot * _SLOT_SIZE
        self._map[begin : begin + _SLOT.size] = _SLOT.pack(row, attempt, phase, nbytes, time.monotonic_ns())


def read_heartbeat(mirror: Path) -> Beat | None:
    """The last heartbeat, or None when there is none of this boot of the machine, or it isn't whole."""
    try:
        data = (mirror / HEARTBEAT).read_bytes()
    except OSError:
        return None
    if len(data) < _SIZE:
        return None
    magic, boot, pid, create_time, epoch, beat, phase = _HEAD.unpack_from(data, 0)
    if magic != _MAGIC or boot != machine_boot_id():
        return None
    try:
        slots = tuple(
            Slot(row, attempt, Phase(slot_phase), nbytes, since / 1e9)
            for row, attempt, slot_phase, nbytes, since in (
                _SLOT.unpack_from(data, _HEAD_SIZE + number * _SLOT_SIZE) for number in range(MAX_SLOTS)
            )
            if row >= 0
        )
        return Beat(pid, create_time, epoch, beat / 1e9, Phase(phase), slots)
    except ValueError:  # no phase of ours
        return None


def _mapped(path: Path, fill: bytes | None = None) -> mmap.mmap:
    if fill is not None:
        path.write_bytes(fill)  # all its pages are there from now on: no beat can meet a full tmpfs
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), _SIZE)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


class Mirror:
    """The folder itself; made 0700, refused when it is not ours.

    It tells, and no work depends on it: a full tmpfs costs a snapshot, and makes events wait, but stops nobody.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._waiting: deque[str] = deque(maxlen=MOST_WAITING)

    def create(self) -> None:
        """Make the folder and its parents, private to this user.

        Raises:
            PermissionError: when a parent in tmpfs is a link or belongs to somebody else.
        """
        for place in (self.folder.parent.parent, self.folder.parent, self.folder):
            place.mkdir(mode=0o700, exist_ok=True)
            status = place.lstat()
            if status.st_uid != os.getuid() or not place.is_dir() or place.is_symlink():
                raise PermissionError(f"{place} is not a folder of this user")

    def write(self, name: str, value: dict[str, Any]) -> bool:
        """Replace one JSON file, at once for every reader; False when there is no room, or no folder."""
        fresh = self.folder / f".{name}.{os.getpid()}.{threading.get_ident()}"
        try:
            fresh.write_text(json.dumps(value, default=str))
            fresh.replace(self.folder / name)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            return False
        return True

    def read(self, name: str) -> dict[str, Any] | None:
        """One JSON file, or None when it isn't there or isn't whole."""
        try:
            value = json.loads((self.folder / name).read_text())
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def record(self, event: Event) -> str:
        """Append an event; returns its key. The file is turned over once, at 4 MiB.

        An event that finds no room waits for the next one.
        """
        key = uuid.uuid4().hex
        with self._lock:
            self._waiting.append(f"{key} {event.to_json()}\n")
            with contextlib.suppress(OSError):
                self._append()
        return key

    def _append(self) -> None:
        path = self.folder / EVENTS
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                end = os.fstat(fd).st_size
                torn = end > 0 and os.pread(fd, 1, end - 1) != b"\n"  # by a full tmpfs, or a death
                while self._waiting:
                    line = ("\n" if torn else "") + self._waiting[0]
                    torn = os.write(fd, line.encode()) != len(line.encode())
                    if torn:
                        return
                    self._waiting.popleft()
                end = os.fstat(fd).st_size
            finally:
                os.close(fd)
            if end > MAX_EVENTS_BYTES:
                # Supervisor and worker both write, and one of them may be stopped just here: who gets no lock
                # leaves it to the next event; who gets it looks again, so that no fresh file replaces the old one.
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if path.stat().st_size > MAX_EVENTS_BYTES:
                        path.replace(path.with_suffix(".1.jsonl"))
        finally:
            os.close(folder)

    def events(self, last: int | None = None) -> list[tuple[str, Event]]:
        """The recent events with their keys, oldest first; ``last`` of them, read from the file's end, if given."""
        found: list[tuple[str, Event]] = []
        for path in ((self.folder / EVENTS).with_suffix(".1.jsonl"), self.folder / EVENTS):
            with contextlib.suppress(OSError), path.open("rb") as file:
                if last is not None:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - last * _EVENT_BYTES))
                found.extend(_parse_events(file.read()))
        return found if last is None else found[-last:]


def _parse_events(data: bytes) -> Iterator[tuple[str, Event]]:
    for line in data.decode(errors="replace").split("\n"):
        key, _, body = line.partition(" ")
        if body and len(key) == 32:  # a line that was cut by the seek is left out
            with contextlib.suppress(ValueError, TypeError):
                yield key, Event.from_json(body)
