"""Events get from the mirror into the journal while the run lives: tmpfs outlives no reboot, and keeps a few MiB of them."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

from hsjournal.events import Event
from hsjournal.journal.group import JournalThread
from hsjournal.journal.store import Journal
from hsjournal.mirror import EVENTS, Mirror
from hsjournal.worker.trouble import Pauses

EVERY_S = 10.0
MOST_AT_ONCE = 200
"""Events of one transaction: rows that wait for their commit wait no longer for it than for each other."""


class Chronicle:
    """Enters what worker and supervisor have recorded; each event has its key, so that none is entered twice.

    It is read on another thread, and handed to the journal one part after the other: while that hangs, one part waits.

    Args:
        mirror: of the run.
        journal: of the worker.
        pauses: of the run: a journal in trouble is left alone.
        every: seconds between two looks.
    """

    def __init__(self, mirror: Mirror, journal: JournalThread, pauses: Pauses, every: float = EVERY_S) -> None:
        self._mirror, self._journal, self._pauses, self._every = mirror, journal, pauses, every
        self._entered: set[str] = set()
        self._seen: tuple[int, int] | None = None

    async def keep(self) -> None:
        """For the worker's life.

        Raises:
            HsjournalError: as :meth:`JournalThread.call`.
        """
        while True:
            await asyncio.sleep(self._every)
            if "journal" not in self._pauses.sentences:
                await self.enter()

    async def enter(self) -> None:
        """Enter what has come since; raises as :meth:`keep`."""
        seen = self._stamp()
        if seen == self._seen:
            return
        events = await asyncio.to_thread(self._mirror.events)
        self._entered &= {key for key, _ in events}  # what the mirror has dropped comes no more
        fresh = [(key, event) for key, event in events if key not in self._entered]
        for first in range(0, len(fresh), MOST_AT_ONCE):
            part = fresh[first : first + MOST_AT_ONCE]
            await self._journal.call(partial(_enter, part))
            self._entered |= {key for key, _ in part}
        self._seen = seen

    def _stamp(self) -> tuple[int, int] | None:
        """What changes with every event: the file, and its size."""
        with contextlib.suppress(OSError):
            status = (self._mirror.folder / EVENTS).stat()
            return status.st_ino, status.st_size
        return None


def _enter(events: list[tuple[str, Event]], journal: Journal) -> None:
    journal.add_events(events)
