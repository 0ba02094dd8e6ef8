"""Which screen suits where the output goes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from hsjournal.ui.hangup import Hangup
from hsjournal.ui.sturdy import Sturdy
from hsjournal.watch.view import View

Shown_contra = TypeVar("Shown_contra", contravariant=True)


class Drawing(Protocol[Shown_contra]):
    """Draws what it is shown until it is closed."""

    def show(self, shown: Shown_contra, /) -> None:
        """Draw, if it is time."""

    def close(self) -> None:
        """Give the terminal back."""


Screen = Drawing[View]
"""A run's."""


def has_terminal(*, plain: bool, quiet: bool) -> bool:
    """Whether there is a terminal to draw on: not in CI, not on a dumb one, and not when lines or silence were asked for."""
    return not (plain or quiet or not sys.stdout.isatty() or "CI" in os.environ or os.environ.get("TERM") == "dumb")


def screen_for(*, plain: bool, quiet: bool, logs: Path | None = None) -> Screen:
    """The live screen on a terminal; plain lines where there is none, in CI, or on demand.

    Args:
        plain: lines are asked for.
        quiet: nothing is to be shown.
        logs: folder of a run that must outlive its terminal: ``screen.log`` takes the lines when that is closed.
    """

    def lines() -> Screen:
        from hsjournal.ui.plain import PlainScreen

        return PlainScreen(quiet=quiet)

    if not has_terminal(plain=plain, quiet=quiet):
        screen = lines()
    else:
        from hsjournal.ui.live import LiveScreen

        screen = Sturdy(LiveScreen())
    return screen if logs is None else Lasting(screen, logs / "screen.log", lines)


class Lasting(Drawing[Shown_contra]):
    """A screen until nobody looks at it any more, then lines for a log.

    Args:
        screen: the one to begin with.
        log: takes the lines.
        lines: makes the screen that writes them.
    """

    def __init__(self, screen: Drawing[Shown_contra], log: Path, lines: Callable[[], Drawing[Shown_contra]]) -> None:
        self._screen, self._hangup, self._lines = screen, Hangup(log), lines
        self._has_left = False
        self._hangup.begin()

    def show(self, shown: Shown_contra, /) -> None:
        """Draw, if it is time."""
        if self._hangup.look():
            self._leave()
        try:
            self._screen.show(shown)
        except BrokenPipeError:
            self._hangup.leave()

    def close(self) -> None:
        """Give the terminal back, if it is still there."""
        self._screen.close()
        self._hangup.end()

    def _leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._screen.close()
            self._screen = self._lines()
