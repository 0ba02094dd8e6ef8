"""Which screen suits where the output goes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Protocol

from hsjournal.ui.hangup import Hangup
from hsjournal.ui.sturdy import Sturdy
from hsjournal.watch.view import View


class Screen(Protocol):
    """Draws views until it is closed."""

    def show(self, view: View) -> None:
        """Draw, if it is time."""

    def close(self) -> None:
        """Give the terminal back."""


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
    if not has_terminal(plain=plain, quiet=quiet):
        from hsjournal.ui.plain import PlainScreen

        screen: Screen = PlainScreen(quiet=quiet)
    else:
        from hsjournal.ui.live import LiveScreen

        screen = Sturdy(LiveScreen())
    return screen if logs is None else _Lasting(screen, Hangup(logs / "screen.log"), quiet=quiet)


class _Lasting:
    """A screen until nobody looks at it any more, then lines for the log."""

    def __init__(self, screen: Screen, hangup: Hangup, *, quiet: bool) -> None:
        self._screen, self._hangup, self._quiet = screen, hangup, quiet
        self._has_left = False
        hangup.begin()

    def show(self, view: View) -> None:
        if self._hangup.look():
            self._leave()
        try:
            self._screen.show(view)
        except BrokenPipeError:
            self._hangup.leave()

    def close(self) -> None:
        self._screen.close()
        self._hangup.end()

    def _leave(self) -> None:
        if not self._has_left:
            from hsjournal.ui.plain import PlainScreen

            self._has_left = True
            self._screen.close()
            self._screen = PlainScreen(quiet=self._quiet)
