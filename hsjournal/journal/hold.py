"""Take a lock for somebody who must not touch its disk: run by path, standard library only.

``python -I -S hold.py LOCK_FILE SOCKET_FD OWNER`` opens and locks the file, hands the locked descriptor over the
socket, and writes OWNER (JSON, as :mod:`hsjournal.journal.locks` reads it) into the file. An flock belongs to the open
file, so it lasts until the receiver closes it. If the disk hangs, it is this process that hangs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import time

TRIES, TRY_AGAIN = 25, 0.02


def hold(path: str, to: socket.socket, owner: str) -> int:
    """Lock ``path`` and hand it over; 0, or 1 when somebody else has it or it can't be opened (said over the socket)."""
    try:
        fd = _open(path)
    except OSError as error:
        to.send(json.dumps({"errno": error.errno, "why": error.strerror}).encode())
        return 1
    for left in reversed(range(TRIES)):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if not left:
                to.send(json.dumps({"held": True}).encode())
                return 1
            time.sleep(TRY_AGAIN)
    socket.send_fds(to, [b"{}"], [fd])
    os.close(fd)
    # From here on the receiver holds it; the name is for people, and may come late or never.
    with contextlib.suppress(OSError):
        named = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        os.ftruncate(named, os.pwrite(named, owner.encode(), 0))
        os.close(named)
    return 0


def _open(path: str) -> int:
    """Read-only where it exists: that works on a frozen disk too."""
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[2])) as channel:
        sys.exit(hold(sys.argv[1], channel, sys.argv[3]))
