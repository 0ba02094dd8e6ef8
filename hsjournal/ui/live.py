"""The live screen on a terminal."""

from __future__ import annotations

from rich.console import Console, Group

from hsjournal.ui.frame import frame
from hsjournal.ui.history import History
from hsjournal.ui.terminal import Terminal
from hsjournal.watch.view import View

PER_SECOND = 4


class LiveScreen:
    """Draws a view, at most four times a second; restores the terminal when closed."""

    def __init__(self, console: Console | None = None) -> None:
        self._terminal = Terminal(PER_SECOND, console)
        self._history = History()

    def show(self, view: View) -> None:
        """Draw, unless it was done just now."""
        if view.snapshot is not None:
            self._history.note(view.snapshot)
        self._terminal.draw(lambda: self._frame(view))

    def close(self) -> None:
        """Leave the last frame and give the terminal back."""
        self._terminal.close()

    def _frame(self, view: View) -> Group:
        width, height = self._terminal.size
        # One line is left for the cursor: a frame as high as the terminal would scroll at each drawing.
        return Group(*frame(view, self._history, width, max(3, height - 1)))
