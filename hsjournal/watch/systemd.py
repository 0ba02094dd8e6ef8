"""A word to systemd, where it started us (``Type=notify``): ready, how it stands, and signs of life that mean something.

A sign of life is sent only while rows pass their marks, or while the wait is one that is explained (a full disk, a
lost server, a new worker's back-off). ``WatchdogSec=`` then restarts a supervisor that hangs, and one whose run does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time

from hsjournal.watch.deeds import Deed, meaning
from hsjournal.watch.verdict import Verdict
from hsjournal.watch.view import View

VARIABLE = "NOTIFY_SOCKET"
EVERY = 1.0


class Systemd:
    """Tells systemd about a view; does nothing where systemd isn't listening. Never blocks."""

    def __init__(self, address: str | None = None) -> None:
        address = address if address is not None else os.environ.get(VARIABLE, "")
        self._socket: socket.socket | None = None
        self._last = 0.0
        self._ready = False
        if address[:1] in ("/", "@"):
            with contextlib.suppress(OSError):
                found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
                self._socket = found
                found.connect("\0" + address[1:] if address.startswith("@") else address)

    def tell(self, view: View) -> None:
        """How it stands, once a second at most."""
        if self._socket is None or time.monotonic() - self._last < EVERY:
            return
        self._last = time.monotonic()
        lines = [f"STATUS={view.stage}: {view.sentence}".replace("\n", " ")[:500]]
        if not self._ready and view.stage != "preparing":
            self._ready = True
            lines.append("READY=1")
        if not _is_helpless(view):
            lines.append("WATCHDOG=1")
            if view.stage == "preparing":  # a large model takes its time: systemd's start time-out must not end it
                lines.append(f"EXTEND_TIMEOUT_USEC={60_000_000}")
        with contextlib.suppress(OSError):
            self._socket.send("\n".join(lines).encode())

    def stopping(self) -> None:
        """The end has begun."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.send(b"STOPPING=1")
            self._socket.close()
            self._socket = None


def _is_helpless(view: View) -> bool:
    """Whether a stall lasts that we should have ended, or can do nothing about; a pause or a lost server is waited for."""
    verdict = view.verdict or {}
    return bool(verdict.get("overdue")) and meaning(Verdict(verdict["verdict"])).deed in (Deed.END_WORKER, Deed.LOOK_ON)
