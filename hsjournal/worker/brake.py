"""One row at a time: while something is wrong that only a row that comes through can disprove."""

from __future__ import annotations

import time
from collections.abc import Callable

from hsjournal.errors import HsjournalError, NoRoomError, ServerError
from hsjournal.worker.trouble import Pauses

LONGEST = 30.0
FULL = "no_room"
FAILURES = "failures"


class Brake:
    """Pressed when the server finds no room, or when rows fail one after another; a dump that is taken lets go.

    While it is pressed, a row is tried alone, after a pause that grows from one trial to the next.

    Args:
        pauses: shows what holds, and ends the worker past the pause limit.
        first: seconds before the first trial.
    """

    def __init__(self, pauses: Pauses, first: float) -> None:
        self._pauses, self._first = pauses, first
        self._pressed: set[str] = set()
        self._pause = 0.0
        self._until = 0.0

    @property
    def is_pressed(self) -> bool:
        """Whether rows go one at a time."""
        return bool(self._pressed)

    @property
    def sentences(self) -> tuple[str, ...]:
        """What is wrong, in words."""
        return tuple(self._pauses.sentences.get(name, name) for name in sorted(self._pressed))

    def press(self, name: str, sentence: str) -> None:
        """Something is wrong, again or still. Rows that fail together lengthen the pause once."""
        now = time.monotonic()
        if name not in self._pressed or now >= self._until:
            self._pause = min(max(self._first, 2 * self._pause), LONGEST)
            self._until = now + self._pause
        self._pressed.add(name)
        self._pauses.begin(name, sentence)

    def release(self) -> None:
        """A dump was taken: all is well."""
        for name in self._pressed:
            self._pauses.end(name)
        self._pressed.clear()
        self._pause = 0.0

    def allows(self, under_way: int) -> bool:
        """Whether a row may start beside ``under_way`` others.

        Raises:
            NoRoomError, ServerError: when it has been pressed for longer than the pause limit.
        """
        if not self._pressed:
            return True
        for name in self._pressed:
            self._pauses.check(name, _ENDS[name])
        return under_way == 0 and time.monotonic() >= self._until


def no_room(sentence: str) -> HsjournalError:
    """How a run ends whose hand-over root has been full for too long."""
    return NoRoomError(
        f"paused for too long: {sentence}",
        remedy="Make room in the hand-over root, or name another one (--handover-root), then resume; nothing is lost.",
    )


def _failures(sentence: str) -> HsjournalError:
    return ServerError(
        f"paused for too long: {sentence}", remedy="See the server's log, mend it, then resume; nothing is lost."
    )


_ENDS: dict[str, Callable[[str], HsjournalError]] = {FULL: no_room, FAILURES: _failures}
