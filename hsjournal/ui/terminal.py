"""A terminal that is drawn to by a thread of its own: one that takes no bytes costs frames, and never the time of whoever runs."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO, cast

from rich.console import Console, RenderableType
from rich.live import Live

PATIENCE_S = 1.0
"""Seconds that the last frame may take when the terminal is closed; one that is held by Ctrl-S takes for ever."""


class Terminal:
    """Draws the newest frame and forgets those that came while an older one was written.

    Args:
        per_second: frames at most.
        console: for tests; else standard output.
    """

    def __init__(self, per_second: float, console: Console | None = None) -> None:
        self._console = console or Console(file=cast("TextIO", _Unbuffered(sys.stdout)))
        # No redirection: what is printed beside the screen would be written by whoever prints, and block there.
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._every = 1 / per_second
        self._last = 0.0
        self._waiting: RenderableType | None = None
        self._busy = self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, now."""
        return self._console.size

    def draw(self, frame: Callable[[], RenderableType]) -> None:
        """Draw what ``frame`` gives, unless one was drawn just now or is still being written."""
        now = time.monotonic()
        if now - self._last < self._every or self._busy:
            return
        self._last = now
        drawn = frame()
        with self._changed:
            self._waiting, self._busy = drawn, True
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="screen", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Leave the last frame and give the terminal back, if it takes that within :data:`PATIENCE_S`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it was closed: nothing is drawn any more
            self._live.start()
            while (frame := self._next()) is not None:
                self._live.update(frame, refresh=True)
                self._busy = False
            self._live.stop()

    def _next(self) -> RenderableType | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._closed)
            frame, self._waiting = self._waiting, None
            return frame


class _Unbuffered(io.TextIOBase):
    """Writes past the buffer of ``out``: one that a blocked thread holds could not be flushed at the process's end either."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of ``out``."""
        return self._out.encoding or "utf-8"

    def fileno(self) -> int:
        """That of ``out``."""
        return self._out.fileno()

    def isatty(self) -> bool:
        """Whether ``out`` is a terminal."""
        return self._out.isatty()

    def write(self, text: str) -> int:
        """All of it, however long that takes."""
        data = text.encode(self.encoding, errors="replace")
        while data:
            try:
                data = data[os.write(self.fileno(), data) :]
            except BlockingIOError:  # somebody who shares the terminal has set it to non-blocking
                select.select([], [self.fileno()], [], 1.0)
        return len(text)
