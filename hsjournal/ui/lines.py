"""Lines of text from a thread of their own: whoever redirects them to a disk that hangs must not stop who speaks."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections import deque
from typing import TextIO

PATIENCE_S = 0.2
"""Seconds that a line is waited for; it costs this once when the disk hangs, and then nothing until it works again."""
_MOST = 1000


class Lines:
    """Writes lines in their order; when nothing takes them, the last thousand are kept.

    Written past the buffer of ``out``: one that a blocked thread holds could not be flushed at the end either.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._waiting: deque[str] = deque(maxlen=_MOST)
        self._changed = threading.Condition()
        self._busy = self._hangs = self._closed = False
        self._broken: BrokenPipeError | None = None
        self._thread: threading.Thread | None = None

    def say(self, line: str) -> None:
        """Write a line, or leave it to the thread when that takes too long.

        Raises:
            BrokenPipeError: when nobody reads any more.
        """
        if self._broken is not None:
            raise self._broken
        with self._changed:
            self._waiting.append(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            self._wait(0.0 if self._hangs else PATIENCE_S)
        if self._broken is not None:
            raise self._broken

    def close(self) -> None:
        """Give what is still there a moment."""
        with self._changed:
            self._wait(PATIENCE_S)
            self._closed = True
            self._changed.notify_all()

    def _wait(self, seconds: float) -> None:
        done = self._changed.wait_for(lambda: not self._waiting and not self._busy, seconds)
        self._hangs = not done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                line, self._busy = self._waiting.popleft(), True
            try:
                self._write(f"{line}\n")
            except BrokenPipeError as error:
                self._broken = error
            except (OSError, ValueError):  # a full disk under a log is no reason to stop a run
                continue

    def _write(self, text: str) -> None:
        try:
            fd = self._out.fileno()
        except (OSError, io.UnsupportedOperation, AttributeError):
            self._out.write(text)
            self._out.flush()
            return
        with contextlib.suppress(ValueError):
            self._out.flush()  # what others have printed comes first
        data = text.encode(self._out.encoding or "utf-8", errors="replace")
        while data:
            data = data[os.write(fd, data) :]
