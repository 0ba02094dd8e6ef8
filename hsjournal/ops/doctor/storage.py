"""One folder of the run on its storage: type, room, fsync and O_DIRECT speed. Run as a child, since a disk may be stuck.

``python -m hsjournal.ops.doctor.storage output|journal FOLDER NEED_BYTES`` prints one JSON object ``{"lines": […]}``.
It writes one file without a name into the folder (or, where there are none, a hidden one that it deletes again).
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hsjournal.filesystems import file_system_type, is_network
from hsjournal.ops.doctor.lines import Line, fail, ok, warn
from hsjournal.ui.words import size

PROBE = ".hsjournal-doctor"
SPEED_BYTES, PIECE = 64 << 20, 4 << 20
SLOW_FSYNC_S = 0.1
LEAST_INODES = 10_000


def examine(kind: str, folder: Path, need: int) -> Iterator[Line]:
    """Lines about ``folder``; its nearest existing parent speaks for one that is still to be made."""
    subject = f"{kind} {folder}"
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        yield fail(subject, f"{place} is not a folder", "Name another.")
        return
    system = file_system_type(place)
    if kind == "journal" and is_network(system):
        yield fail(
            subject, f"lies on {system}, a network file system: SQLite's locks can't be trusted there",
            "Put RUN_DIR on a local disk; only --out may lie on the network.",
        )  # fmt: skip
    elif is_network(system):
        yield warn(
            subject, f"lies on {system}: a cache may answer the read-back",
            "Nothing to do; the journal says so for each file (method).",
        )  # fmt: skip
    else:
        yield ok(subject, f"on {system}")
    yield from _room(subject, place, need)
    if not os.access(place, os.W_OK | os.X_OK):
        yield fail(subject, f"{place} can't be written by this user", "Change its owner or mode, or name another.")
        return
    try:
        yield from _speed(subject, place)
    except OSError as error:
        yield fail(subject, f"can't be written: {error.strerror}", "Make room or mend the disk.")


def _room(subject: str, place: Path, need: int) -> Iterator[Line]:
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    if need and free < need:
        yield fail(
            subject, f"{size(free)} free, the rows still to come need {size(need)}", "Make room, or name another --out."
        )
    else:
        yield ok(subject, f"{size(free)} free" + (f" of {size(need)} needed" if need else ""))
    if found.f_files and found.f_favail < LEAST_INODES:
        yield warn(subject, f"only {found.f_favail:,} files can still be made", "Delete files, or name another folder.")


def _speed(subject: str, place: Path) -> Iterator[Line]:
    fd = _scratch(place)
    try:
        times = []
        for number in range(5):
            begun = time.perf_counter()
            os.pwrite(fd, os.urandom(4096), 4096 * number)
            os.fsync(fd)
            times.append(time.perf_counter() - begun)
        sync = statistics.median(times)
        words = f"fsync {sync * 1000:.1f} ms"
        if sync > SLOW_FSYNC_S:
            yield warn(
                subject, f"{words}: each group of commits waits so long", "A disk with a write cache, or a local one."
            )
        else:
            yield ok(subject, words)
        free = os.statvfs(place)
        if free.f_bavail * free.f_frsize > 4 * SPEED_BYTES:
            yield _direct(subject, fd)
    finally:
        os.close(fd)


def _scratch(place: Path) -> int:
    """A file that is gone when its descriptor is closed, however this process ends where the file system can do that."""
    try:
        return os.open(place, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError:
        path = place / f"{PROBE}.{os.getpid()}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        path.unlink()
        return fd


def _direct(subject: str, scratch: int) -> Line:
    try:
        fd = os.open(f"/proc/self/fd/{scratch}", os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return warn(
            subject, "no O_DIRECT here: files go through the page cache", "Nothing to do; it costs CPU and memory."
        )
    try:
        with mmap.mmap(-1, PIECE) as piece:
            piece.write(os.urandom(1 << 20) * (PIECE >> 20))
            begun = time.perf_counter()
            for offset in range(0, SPEED_BYTES, PIECE):
                os.pwrite(fd, piece, offset)
            os.fdatasync(fd)
            seconds = time.perf_counter() - begun
    except OSError as error:
        return warn(
            subject, f"O_DIRECT writes fail: {error.strerror}", "Nothing to do; files go through the page cache."
        )
    finally:
        os.close(fd)
    return ok(subject, f"O_DIRECT {size(SPEED_BYTES / seconds)}/s (one writer, {size(SPEED_BYTES)})")


if __name__ == "__main__":
    _kind, _folder, _need = sys.argv[1:4]
    sys.stdout.write(json.dumps({"lines": [line.to_json() for line in examine(_kind, Path(_folder), int(_need))]}))
