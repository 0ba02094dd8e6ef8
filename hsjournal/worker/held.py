"""Rows that a v1 gateway does not send on, for their dumps could not be told from another's: nobody's strike.

They are tried ever more seldom while others go on. When nothing but them is left, the run pauses, and ends past the
pause limit: where the server does not tell its load, only its restart lets them go.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from hsjournal.errors import HsjournalError, ServerError
from hsjournal.worker.trouble import Pauses

PAUSE = "held"
LONGEST_S = 30.0


class Held:
    """Which rows are held, since when, and why."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[float, str]] = {}

    def back(self, row: int, why: str) -> None:
        """The gateway did not send it."""
        since, _ = self._rows.get(row, (time.monotonic(), ""))
        self._rows[row] = since, why

    def sent(self, row: int, pauses: Pauses) -> None:
        """It got through, whatever became of it then: something moves again."""
        if self._rows.pop(row, None) is not None:
            pauses.end(PAUSE)

    def pause(self, row: int, first: float) -> float:
        """Seconds until a row that came back is tried again, ``first`` at least."""
        since, _ = self._rows.get(row, (time.monotonic(), ""))
        return min(max(first, (time.monotonic() - since) / 2), max(first, LONGEST_S))

    def check(self, waiting: Iterable[int], pauses: Pauses) -> None:
        """Pause while all that are ``waiting`` are held; called when nothing else is to be done.

        Raises:
            ServerError: when that has lasted longer than the pause limit.
        """
        rows = list(waiting)
        if rows and all(row in self._rows for row in rows):
            some = f"{len(rows):,} rows wait, " if len(rows) > 1 else ""
            pauses.begin(PAUSE, f"{some}row {rows[0]}: {self._rows[rows[0]][1]}")
            pauses.check(PAUSE, _given_up)


def _given_up(words: str) -> HsjournalError:
    return ServerError(
        f"paused for too long: {words}",
        remedy="Start the v1 server anew, then `hsjournal resume`; nothing is lost.",
    )
