"""Several output folders, each on a disk of its own: which one takes the next file, and which is left alone for a while.

Each volume is judged by its own room and speed, and has no more than its share of what is under way: one that hangs can't
take all of it before anybody knows. One that is full or fails, or in which a write makes no progress, is set aside while
the others go on. A file under way on a stuck volume stays there: it could still appear under its final name
when the storage comes back, and a sample has one file (DESIGN, G6).
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hsjournal.events import Event
from hsjournal.filesystems import is_trouble

STUCK_AFTER = 20.0
"""Seconds without progress of a write, after which its volume gets no further file."""
ASIDE_FOR = 30.0
"""Seconds for which a volume that answered with an error is left alone."""
LOOK_EVERY = 5.0
MARGIN = 64 << 20
"""Bytes that are left free on a volume as long as another has room."""
_UNKNOWN = 1 << 62
_THE_MACHINES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def is_its_own(error: OSError) -> bool:
    """Whether it is something that this volume answers and another would not."""
    return is_trouble(error) and error.errno not in _THE_MACHINES


@dataclass(slots=True, eq=False)
class Job:
    """One file being written, or read back (then of no bytes): its size, when it last made progress, and whether its name may be there already."""

    nbytes: int
    moved: float = field(default_factory=time.monotonic)
    publishing: bool = False

    def progress(self, tell: Callable[[str, int], None]) -> Callable[[str, int], None]:
        """``tell``, with an eye on it."""

        def told(phase: str, nbytes: int) -> None:
            self.moved = time.monotonic()
            self.publishing |= phase == "publishing"
            tell(phase, nbytes)

        return told


class Volume:
    """One output folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.speed = 1e9  # bytes per second, until one file says more
        self.free = _UNKNOWN
        self.jobs: set[Job] = set()
        self.aside_until = 0.0
        self._looked = float("-inf")
        self._looking: float | None = None

    def is_stuck(self, now: float) -> bool:
        """Whether a system call on it has not come back for long."""
        looking = self._looking
        calls = [job.moved for job in self.jobs] + ([looking] if looking is not None else [])
        return any(now - moved > STUCK_AFTER for moved in calls)

    def look(self) -> None:
        """Ask for its free room; if that hangs, no other thread follows."""
        if self._looking is None:
            self._looking = time.monotonic()
            try:
                room = os.statvfs(self.folder)
                self.free = room.f_bavail * room.f_frsize
            except OSError:
                self.aside_until = time.monotonic() + ASIDE_FOR
            self._looked = time.monotonic()
            self._looking = None

    def is_due(self, now: float) -> bool:
        """Whether its free room should be asked for again."""
        return self._looking is None and now - self._looked > LOOK_EVERY

    def lasts(self, nbytes: int) -> float:
        """Seconds until a file of ``nbytes`` would be written, behind those under way."""
        return (nbytes + sum(job.nbytes for job in self.jobs)) / self.speed


class _Wait:
    """Instead of a volume: all have their share."""


class Volumes:
    """The output folders of a run, the first one its home; safe to use from several threads.

    Args:
        folders: absolute.
        tell: keeps an event.
        at_once: files that each may have under way; None for any number.
    """

    def __init__(self, folders: Sequence[Path], tell: Callable[[Event], object], at_once: int | None = None) -> None:
        self.all = tuple(Volume(folder) for folder in folders)
        self._tell = tell
        self._at_once = _UNKNOWN if at_once is None else at_once
        self._lock = threading.Condition()
        self._bound: dict[str, Volume] = {}

    @property
    def first(self) -> Volume:
        """The one that paths in the journal are relative to."""
        return self.all[0]

    def told(self) -> list[dict[str, object]]:
        """How each is, JSON-able: bytes free (None while nobody has looked), and what is the matter with it, if something is."""
        now = time.monotonic()
        return [
            {
                "path": str(volume.folder),
                "free": volume.free if volume.free < _UNKNOWN else None,
                "problem": "stuck" if volume.is_stuck(now) else "set aside" if volume.aside_until > now else None,
            }
            for volume in self.all
        ]

    def name(self, volume: Volume, path: str) -> str:
        """What the journal calls a file: relative to the first folder, absolute on any other."""
        return path if volume is self.first else str(volume.folder / path)

    def find(self, name: str) -> tuple[Volume, str]:
        """The volume of a file that the journal calls ``name``, and its path there.

        Raises:
            FileNotFoundError: when it lies in none of the folders.
        """
        if not name.startswith("/"):
            return self.first, name
        for volume in self.all[1:]:
            if name.startswith(f"{volume.folder}/"):
                return volume, name.removeprefix(f"{volume.folder}/")
        raise FileNotFoundError(errno.ENOENT, "the file lies in no output folder of this run", name)

    def home_of(self, path: str) -> Volume | None:
        """Where something lies under this path, or may: no other volume may get a file of that sample."""
        return self._bound.get(path) or next(self.holding(path), None)

    def holding(self, path: str) -> Iterator[Volume]:
        """The volumes on which something lies under this path."""
        return (volume for volume in self.all if os.path.lexists(volume.folder / path))

    def pick(self, nbytes: int, tried: Sequence[Volume], home: Volume | None) -> tuple[Volume, Job] | None:
        """The volume that will have written ``nbytes`` first, or ``home`` if there is one; the job counts from now on.

        One without room or in trouble is taken only if there is no other, and none that was tried. While all that could
        take the file have their share, it waits.
        """
        while True:
            now = time.monotonic()
            for volume in self.all:
                if volume.is_due(now) and not volume.is_stuck(now):
                    volume.look()
            with self._lock:
                picked = self._pick(now, nbytes, tried, home)
                if not isinstance(picked, _Wait):
                    return picked
                self._lock.wait(LOOK_EVERY)

    def _pick(
        self, now: float, nbytes: int, tried: Sequence[Volume], home: Volume | None
    ) -> tuple[Volume, Job] | _Wait | None:
        left = [v for v in self.all if v not in tried]
        good = [v for v in left if not v.is_stuck(now) and v.aside_until <= now and v.free >= nbytes + MARGIN]
        if home is not None:
            chosen = home
        elif good:
            free = [v for v in good if len(v.jobs) < self._at_once]
            if not free:
                return _Wait()
            chosen = min(free, key=lambda v: v.lasts(nbytes))
        elif tried:
            return None
        else:
            chosen = max(left, key=lambda v: (not v.is_stuck(now), v.aside_until <= now, v.free))
        job = Job(nbytes)
        chosen.jobs.add(job)
        return chosen, job

    @contextlib.contextmanager
    def reading(self, volume: Volume) -> Iterator[Job]:
        """While a file is read back there: where that hangs, no further file goes."""
        job = Job(0)
        with self._lock:
            volume.jobs.add(job)
        try:
            yield job
        finally:
            with self._lock:
                volume.jobs.discard(job)
                self._lock.notify_all()

    @contextlib.contextmanager
    def writing(self, volume: Volume, job: Job) -> Iterator[None]:
        """While the file of ``job`` is being written there."""
        nbytes, began = job.nbytes, time.monotonic()
        with self._lock:
            beside = sum(job.nbytes > 0 for job in volume.jobs)
        try:
            yield
        finally:
            with self._lock:
                volume.jobs.discard(job)
                self._lock.notify_all()
        seconds = max(time.monotonic() - began, 1e-3)
        with self._lock:
            volume.speed += 0.2 * (beside * nbytes / seconds - volume.speed)
        volume.look()

    def is_bound(self, path: str) -> bool:
        """See :meth:`bind`."""
        return path in self._bound

    def bind(self, path: str, volume: Volume) -> None:
        """A file may have got its name there though the storage answered with an error."""
        self._bound[path] = volume

    def unbind(self, path: str) -> None:
        """It is written."""
        self._bound.pop(path, None)

    def set_aside(self, volume: Volume, error: OSError) -> None:
        """Leave a volume alone for a while."""
        fresh = volume.aside_until <= time.monotonic()
        volume.aside_until = time.monotonic() + ASIDE_FOR
        if fresh:
            detail = {"folder": str(volume.folder), "why": error.strerror or str(error)}
            self._tell(Event("volume_set_aside", None, detail))
