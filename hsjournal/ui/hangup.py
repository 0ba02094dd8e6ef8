"""A terminal that is closed, or a pipe that nobody reads any more, must not end a run: what it would have shown goes to its log."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO, cast

from hsjournal.ui.lines import Lines


class Hangup:
    """From :meth:`begin` to :meth:`end`, SIGHUP is noted, not obeyed, and a file takes the terminal's place.

    A program that was started with SIGHUP ignored (``nohup``) goes on ignoring it.

    Args:
        log: takes the lines from then on; opened by a thread, since its disk may hang.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self.came = False
        self._before: Any = None
        self._terminals: list[int] = []

    def begin(self) -> None:
        """Take the signal."""
        self._terminals = [fd for fd in (0, 1, 2) if os.isatty(fd)]
        self._before = signal.getsignal(signal.SIGHUP)
        self._take()

    def _take(self) -> None:
        if self._before is not signal.SIG_IGN and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGHUP, lambda *_: self.leave())

    def end(self) -> None:
        """Give it back."""
        if not self.came:  # else the last words are still to be said
            signal.signal(signal.SIGHUP, self._before)

    def look(self) -> bool:
        """Whether the terminal is gone, be it that no signal told us: a job in the background gets none."""
        if not self.came:
            self._take()  # again: a library that was loaded since may have given it back to the kernel, as Ray's does
            if not all(map(os.isatty, self._terminals)):
                self.leave()
        return self.came

    def leave(self) -> None:
        """Have the log take what is printed from here on."""
        if self.came:
            return
        self.came = True
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_RDWR)
            for fd in self._terminals:  # a write that is under way ends with an error, or went there
                os.dup2(nowhere, fd)
            os.close(nowhere)
        spoken = cast("TextIO", _Spoken(Lines(cast("TextIO", _LateFile(self.log)))))
        sys.stdout = spoken
        if 2 in self._terminals:
            sys.stderr = spoken
        spoken.write(
            f"{time.strftime('%H:%M:%S')} nobody reads here any more; the run goes on, and `status --watch` shows it\n"
        )


class _LateFile(io.TextIOBase):
    """Appends; opened at the first write, by whoever writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def write(self, text: str) -> int:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
        return self._file.write(text)


class _Spoken(io.TextIOBase):
    """Printed words as whole lines."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._begun = ""

    def write(self, text: str) -> int:
        *whole, self._begun = (self._begun + text).split("\n")
        for line in whole:
            self._lines.say(line)
        return len(text)
