"""A child ends with its parent, however the parent ends; and its threads have names that others can read."""

from __future__ import annotations

import ctypes
import os
import signal
import threading

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def end_with_parent(parent_fd: int, how: int = signal.SIGKILL) -> None:
    """Die when the parent does: by the kernel's parent-death signal, and by the end of file of a pipe it holds.

    The signal alone is not enough: it is sent when the *thread* that started us ends, and it is lost if the parent
    died before this call. Everything a worker has committed stays, so the end may be sudden.

    Args:
        parent_fd: read end of a pipe whose write end only the parent holds; negative for none.
        how: the signal.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, how)
    if parent_fd < 0:
        return

    def watch() -> None:
        while os.read(parent_fd, 4096):
            pass
        os.kill(os.getpid(), how)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def name_thread(name: str) -> None:
    """Give the calling thread a name (15 bytes at most) that the kernel shows in /proc; Python keeps its own to itself."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
