"""How far a command is: a bar on a terminal, a plain line every ten seconds elsewhere; both on standard error."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Any, Self

from hsjournal.ui.words import duration, size

EVERY = 10.0


class ProgressLine:
    """Shows done and total of rows and bytes; a context manager that gives the terminal back.

    Args:
        word: what is being done, as ``verify``.
        quiet: show nothing.
    """

    def __init__(self, word: str, *, quiet: bool = False) -> None:
        self._word, self._quiet = word, quiet
        self._bar: Any = None
        self._task: Any = None
        self._began = self._last = time.monotonic()

    def __enter__(self) -> Self:
        terminal = sys.stderr.isatty() and "CI" not in os.environ and os.environ.get("TERM") != "dumb"
        if terminal and not self._quiet:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
            console = Console(stderr=True)
            self._bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
            self._task = self._bar.add_task(self._word, total=None)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, rows: int, total_rows: int, nbytes: int, total_bytes: int, more: str = "") -> None:
        """Draw, if it is time."""
        spent = time.monotonic() - self._began
        rate = nbytes / spent if spent > 0 else 0.0
        text = f"{self._word}: {rows:,}/{total_rows:,} files, {size(nbytes)} of {size(total_bytes)}, {size(rate)}/s"
        left = f", {duration((total_bytes - nbytes) / rate)} left" if rate > 0 and self._bar is None else ""
        self._draw(text + (f", {more}" if more else "") + left, nbytes, total_bytes)

    def count(self, step: str, done: int, total: int) -> None:
        """Draw a step that has so many parts, if it is time."""
        self._draw(f"{self._word}: {step} {done:,}/{total:,}", done, total)

    def _draw(self, text: str, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=max(1, total), description=text)
        elif not self._quiet and time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
