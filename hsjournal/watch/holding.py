"""The supervisor's lock, taken without touching its disk: a child opens and locks the file and hands it over."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from hsjournal.birth import lives, own_create_time
from hsjournal.errors import HsjournalError, JournalLockedError, NoJournalError, NoRoomError
from hsjournal.journal import hold
from hsjournal.watch.children import Patient, ask

NAME_S = 0.3
SCRIPT = Path(hold.__file__)
_HOLDER = "import sys; sys.stdout.write(open(sys.argv[1]).read())"


class Holding:
    """A lock on its way to us, then held until :meth:`release` or the end of this process.

    Args:
        path: the lock's file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._child: Patient | None = None
        self._channel: socket.socket | None = None

    @property
    def is_ours(self) -> bool:
        """Whether we hold it."""
        return self._fd >= 0

    def look(self) -> bool:
        """Ask for it, or see whether it has come; True once we hold it. One child at a time, however long it takes.

        Raises:
            JournalLockedError: when somebody else holds it, naming the process if it can be told.
            NoRoomError, NoJournalError: when the file can't be opened.
        """
        if self._channel is None:
            self._start()
        assert self._channel is not None
        assert self._child is not None
        try:
            said, fds, _, _ = socket.recv_fds(self._channel, 4096, 1)
        except BlockingIOError:
            return False
        self._channel.close()
        self._channel = None
        if fds:
            self._fd = fds[0]
            os.set_inheritable(self._fd, False)
            with contextlib.suppress(subprocess.TimeoutExpired):  # it has still our name to write, if the disk lets it
                self._child.process.wait(NAME_S)
            return True
        self.release()
        raise self._refusal(said)

    def release(self) -> None:
        """Give it back, or have no more to do with it."""
        if self._channel is not None:
            self._channel.close()
        if self._child is not None:
            self._child.close()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._channel, self._child = -1, None, None

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        owner = json.dumps({"pid": os.getpid(), "create_time": own_create_time(), "since": since})
        command = [sys.executable, "-I", "-S", str(SCRIPT), str(self._path), str(theirs.fileno()), owner]
        with theirs:
            self._child = Patient(command, pass_fd=theirs.fileno())

    def _refusal(self, said: bytes) -> HsjournalError:
        try:
            answer = json.loads(said)
        except ValueError:
            answer = {}
        place = self._path.parent
        if answer.get("held"):
            who = _holder(self._path)
            return JournalLockedError(
                f"{place} is in use: {who} holds {self._path.name}",
                remedy="Watch it with `hsjournal status`, or stop it first (Ctrl-C drains it, nothing is lost).",
            )
        why = answer.get("why") or "the child that was to lock it died"
        if answer.get("errno") == 2:
            return NoJournalError(f"{place} is gone", remedy="Name another run directory.")
        return NoRoomError(
            f"{self._path} can't be locked: {why}", remedy="Mend the disk or its permissions, then resume."
        )


def _holder(path: Path) -> str:
    """The process that holds a lock, by its own word."""
    with contextlib.suppress(HsjournalError, KeyError, TypeError, ValueError):
        owner = ask([sys.executable, "-I", "-S", "-c", _HOLDER, str(path)], 1.0)
        if lives(int(owner["pid"]), float(owner["create_time"])):
            return f"process {owner['pid']} since {owner['since']}"
    return "another process"
