"""The hand-over root against the largest sample: room in tmpfs and in the container, owner and mode, what lies in it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from hsjournal.dump.reader import list_root, open_root
from hsjournal.dump.room import Room, memory_rooms
from hsjournal.errors import DumpRejectedError
from hsjournal.filesystems import file_system_type
from hsjournal.ops.doctor.lines import Line, fail, ok, warn
from hsjournal.ui.words import size

SUBJECT = "hand-over"
IN_FLIGHT = 4
"""Samples that should fit at once, or the server waits for the disk."""


def examine(root: Path, budget: int, largest: int) -> Iterator[Line]:
    """Lines about ``root``; ``largest`` is the bytes of the largest sample, 0 when it isn't known."""
    subject = f"{SUBJECT} {root}"
    place = root
    while not place.exists() and place != place.parent:
        place = place.parent
    system = file_system_type(place)
    yield ok(subject, f"on {system}") if system in ("tmpfs", "ramfs") else warn(
        subject, f"on {system}, not in memory: the server's writer threads wait for that disk",
        "Well on a fast local NVMe; else name a folder under /dev/shm.",
    )  # fmt: skip
    yield from _owner(subject, root)
    yield _room(subject, place, budget, largest)
    if root.is_dir():
        yield from _content(subject, root)


def _owner(subject: str, root: Path) -> Iterator[Line]:
    try:
        found = root.lstat()
    except FileNotFoundError:
        yield ok(subject, "not there yet; it will be made, for this user only")
        return
    if not stat.S_ISDIR(found.st_mode):
        yield fail(subject, "is a link or a file", "Name a folder.")
    elif found.st_uid != os.getuid():
        yield warn(
            subject, f"belongs to user {found.st_uid}, not to you ({os.getuid()})",
            "Server and client under two users: start the server with HSJOURNAL_GROUP_MODE=1 and share a group.",
        )  # fmt: skip
    elif found.st_mode & stat.S_IWOTH:
        yield fail(subject, f"anybody may write into it (mode {found.st_mode & 0o7777:04o})", f"chmod 700 {root}")
    else:
        yield ok(subject, f"yours, mode {found.st_mode & 0o7777:04o}")


def _room(subject: str, place: Path, budget: int, largest: int) -> Line:
    room = Room(place, budget)
    free, capacity = room.available(), room.capacity()
    memory = min(memory_rooms(Path("/proc"), Path("/sys/fs/cgroup")), default=None)
    words = f"{size(free)} free now of {size(capacity)}"
    if memory is not None and file_system_type(place) in ("tmpfs", "ramfs"):
        words += f" (memory left to this container or machine: {size(memory)})"
    if not largest:
        return ok(subject, words)
    words += f"; the largest sample has {size(largest)}"
    if largest > capacity:
        return fail(
            subject, words, "Enlarge it (mount -o remount,size=…; docker --shm-size), raise --handover-budget, or cut with --max-tokens.",
        )  # fmt: skip
    if largest > free:
        return fail(subject, words, "Free memory: dumps of other runs, or a container limit that counts tmpfs.")
    if largest * IN_FLIGHT > free:
        return warn(subject, words, f"Fewer than {IN_FLIGHT} samples fit at once: give it more room for full speed.")
    return ok(subject, words)


def _content(subject: str, root: Path) -> Iterator[Line]:
    try:
        fd = open_root(root)
    except (OSError, DumpRejectedError) as error:
        yield fail(subject, f"can't be opened: {error}", "Check its owner and mode.")
        return
    try:
        entries = list_root(fd)
    finally:
        os.close(fd)
    kinds: dict[str, int] = {}
    for entry in entries:
        kinds[entry.kind] = kinds.get(entry.kind, 0) + 1
    if not entries:
        yield ok(subject, "empty")
        return
    words = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
    if set(kinds) <= {"foreign"}:
        yield warn(
            subject, f"holds only things that are not ours: {words}", "They take room; hsjournal leaves them alone."
        )
    else:
        yield ok(subject, f"holds {words}; a run takes up its own at its start")
