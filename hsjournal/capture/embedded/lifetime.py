"""When the engine's process ends: by a signal, or with the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from typing import TYPE_CHECKING

from hsjournal.errors import ExitCode

if TYPE_CHECKING:
    from types import FrameType

_PR_SET_PDEATHSIG = 1
_PARENT_DIED = signal.SIGUSR2
_INSIST_S = 2.0
SIGNAL_POLL_S = 0.2
"""The main thread sleeps no longer than this at a time: a signal that comes just before a sleep does not end it."""
_ENDING = {signal.SIGTERM: ExitCode.TERMINATED, signal.SIGINT: ExitCode.INTERRUPTED}


class Stopping(BaseException):
    """Raised on the main thread when the process has to end; carries the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Lifetime:
    """Ends the process by raising :class:`Stopping` on the main thread.

    Args:
        parent_fd: the read end of a pipe whose other end the parent holds: its end is ours. None for no such tie.
    """

    def __init__(self, parent_fd: int | None) -> None:
        self._parent = os.getppid()
        self._code: int | None = None
        self._ended = False
        self._orphaned = False
        for number in (*_ENDING, _PARENT_DIED, signal.SIGALRM):
            signal.signal(number, self._stop)
        if parent_fd is not None:
            # The kernel sends this also when only the THREAD that started us ends, so the handler looks twice.
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(_PARENT_DIED), 0, 0, 0)
            threading.Thread(target=self._watch, args=(parent_fd,), name="parent-watch", daemon=True).start()

    def end(self) -> None:
        """From now on nothing interrupts the way out."""
        self._ended = True
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        if self._ended or (number == _PARENT_DIED and os.getppid() == self._parent and not self._orphaned):
            return
        if self._code is None:
            self._code = _ENDING.get(signal.Signals(number), ExitCode.DONE)
            # An exception raised inside a destructor is lost: ask again until it is heard.
            signal.setitimer(signal.ITIMER_REAL, _INSIST_S, _INSIST_S)
        elif number != signal.SIGALRM:
            return
        raise Stopping(self._code)

    def _watch(self, parent_fd: int) -> None:
        while os.read(parent_fd, 4096):
            pass
        self._orphaned = True
        signal.pthread_kill(threading.main_thread().ident or 0, _PARENT_DIED)
