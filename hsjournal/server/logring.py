"""A server's log, kept in tmpfs in a bounded number of pieces, and carried from there to the run's folder.

A server that writes its log to a disk stops with it when the disk hangs. So what it says goes through a pipe into the
run's folder in tmpfs, where a full tmpfs costs lines and never a wait; a throw-away child appends it to the file on the disk
(``python logring.py RING FILE``: this file runs alone). Standard library only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

PIECE_BYTES = 1 << 20
PIECES = 8
_PREFIX, _SUFFIX, _CARRIED = "server-", ".log", "carried"
_FILE_BYTES, _FILES = 16 << 20, 3
_MOST_HELD = 1 << 16


class LogRing:
    """The writer; one process at a time.

    Args:
        folder: in tmpfs; made if it is missing, private to this user.
        secrets: what must not be written: it is replaced by ``***``.
    """

    def __init__(self, folder: Path, secrets: Sequence[str] = ()) -> None:
        self._folder = folder
        self._secrets = [secret.encode() for secret in secrets if secret]
        self._held = b""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = pieces(folder)
        self._number = found[-1][0] if found else 1
        self._fd = -1
        self._size = 0
        self._lost = 0

    def write(self, data: bytes) -> None:
        """Append; what finds no room is lost, and counted in a line of its own later."""
        if not self._secrets:
            self._append(data)
            return
        # Whole lines, so that a secret is never cut in two; of a line without end, all but what may be a secret's start.
        lines, newline, self._held = (self._held + data).rpartition(b"\n")
        lines += newline
        if len(self._held) > _MOST_HELD:
            self._held = self._clean(self._held)
            cut = len(self._held) - max(map(len, self._secrets)) + 1
            lines, self._held = lines + self._held[:cut], self._held[cut:]
        self._append(self._clean(lines))

    def close(self) -> None:
        """Write what was held back."""
        self._append(self._clean(self._held))
        self._held = b""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _clean(self, data: bytes) -> bytes:
        for secret in self._secrets:
            data = data.replace(secret, b"***")
        return data

    def _append(self, data: bytes) -> None:
        if not data:
            return
        if self._lost:
            data = b"\n[hsjournal: %d bytes of this log found no room in tmpfs]\n" % self._lost + data
        try:
            self._open()
            written = os.write(self._fd, data)
        except OSError:
            self._lost += len(data)
            return
        self._lost = len(data) - written
        self._size += written

    def _open(self) -> None:
        if self._fd >= 0 and self._size < PIECE_BYTES:
            return
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._number += 1
            for number, path in pieces(self._folder):
                if number <= self._number - PIECES:
                    path.unlink(missing_ok=True)
        path = self._folder / f"{_PREFIX}{self._number:06d}{_SUFFIX}"
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size


def pieces(folder: Path) -> list[tuple[int, Path]]:
    """The pieces of a ring by number, oldest first."""
    found = []
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        number = path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        if number.isdigit():
            found.append((int(number), path))
    return sorted(found)


def newest(folder: Path) -> tuple[int, int]:
    """Number and size of the newest piece: unequal to an earlier answer when something was written since."""
    found = pieces(folder)
    try:
        return (found[-1][0], found[-1][1].stat().st_size) if found else (0, 0)
    except OSError:
        return 0, 0


def tail(folder: Path, nbytes: int = 16384) -> str:
    """The end of the log in the ring; empty when there is none."""
    text = b""
    for _, path in reversed(pieces(folder)):
        try:
            text = path.read_bytes() + text
        except OSError:
            break
        if len(text) >= nbytes:
            break
    return text[-nbytes:].decode(errors="replace")


def carry(folder: Path, file: Path) -> int:
    """Append to ``file`` what is new in the ring since the last time; the number of bytes.

    The place is written after the text, so that a death between the two doubles lines rather than losing them.
    """
    try:
        at, offset = (int(word) for word in (folder / _CARRIED).read_text().split())
    except (OSError, ValueError):
        at, offset = 0, 0
    file.parent.mkdir(parents=True, exist_ok=True)
    _turn_over(file)
    carried = 0
    with file.open("ab") as target:
        for number, path in pieces(folder):
            if number < at:
                continue
            if at and number > at + 1 and not carried:
                target.write(b"\n[hsjournal: pieces of this log were dropped before the disk took them]\n")
            with path.open("rb") as source:
                source.seek(offset if number == at else 0)
                data = source.read()
                at, offset = number, source.tell()
            target.write(data)
            carried += len(data)
    fresh = folder / f".{_CARRIED}.{os.getpid()}"
    fresh.write_text(f"{at} {offset}")
    fresh.replace(folder / _CARRIED)
    return carried


def _turn_over(file: Path) -> None:
    """Keep a few files of bounded size, as the worker's log does."""
    if not file.exists() or file.stat().st_size < _FILE_BYTES:
        return
    for number in range(_FILES, 0, -1):
        older = file if number == 1 else file.with_name(f"{file.name}.{number - 1}")
        if older.exists():
            older.replace(file.with_name(f"{file.name}.{number}"))


if __name__ == "__main__":
    carry(Path(sys.argv[1]), Path(sys.argv[2]))
