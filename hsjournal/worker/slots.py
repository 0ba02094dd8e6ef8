"""Which slot of the heartbeat a thread writes to: one each for the sink's threads, slot 0 for the main loop."""

from __future__ import annotations

import itertools
import threading

from hsjournal.lifeline import name_thread
from hsjournal.mirror import MAX_SLOTS, Heartbeat, Phase


class Slots:
    """Hands each thread its own slot at its first beat."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._local = threading.local()
        self._numbers = itertools.count(1)

    def beat(self, row: int, attempt: int, phase: Phase, nbytes: int) -> None:
        """This thread is about to do ``phase`` for ``row``; a memory write that never blocks."""
        number = getattr(self._local, "number", None)
        if number is None:
            number = self._local.number = 1 + (next(self._numbers) - 1) % (MAX_SLOTS - 1)
            name_thread(f"sink-{number}")
        self._heartbeat.slot(number, row, attempt, phase, nbytes)

    def idle(self) -> None:
        """This thread has nothing to do."""
        self.beat(-1, 0, Phase.IDLE, 0)
