"""A live screen that may fail: what it can't draw is said in plain lines from then on."""

from __future__ import annotations

import contextlib

from hsjournal.ui.live import LiveScreen
from hsjournal.ui.plain import PlainScreen
from hsjournal.watch.view import View


class Sturdy:
    """Draws with a live screen until that fails, then with lines.

    Args:
        live: tried first.
        plain: takes over; else a new one on standard output.
    """

    def __init__(self, live: LiveScreen, plain: PlainScreen | None = None) -> None:
        self._screen: LiveScreen | PlainScreen = live
        self._plain = plain

    def show(self, view: View) -> None:
        """Draw, if it is time.

        Raises:
            Exception: what the live screen failed of, once; and whatever the plain one raises.
        """
        try:
            self._screen.show(view)
        except Exception:
            self._fall_back()
            raise

    def close(self) -> None:
        """Give the terminal back."""
        self._screen.close()

    def _fall_back(self) -> None:
        if isinstance(self._screen, LiveScreen):
            with contextlib.suppress(Exception):
                self._screen.close()
            self._screen = self._plain or PlainScreen()
