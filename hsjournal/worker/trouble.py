"""Pauses: why nothing moves right now, since when, and when to stop waiting.

A full disk, a lost server or a missing folder is nobody's strike: the rows wait, and by themselves go on again.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from hsjournal.errors import HsjournalError, NoRoomError, Trouble
from hsjournal.events import Event
from hsjournal.filesystems import is_trouble

T = TypeVar("T")

_WORDS = {
    errno.ENOSPC: "is full",
    errno.EDQUOT: "is over its quota (df may still show room)",
    errno.EIO: "answers with I/O errors",
    errno.EROFS: "has become read-only",
    errno.ENOENT: "is gone",
}


@dataclass(slots=True)
class _Pause:
    sentence: str
    since: float
    trouble: Trouble | None


class Pauses:
    """The reasons to wait that hold right now, by name (``output``, ``journal``, ``server``, ``handover``)."""

    def __init__(self, limit: float, record: Callable[[Event], object]) -> None:
        self._limit, self._record = limit, record
        self._held: dict[str, _Pause] = {}

    @property
    def sentences(self) -> dict[str, str]:
        """What to tell the user, by name."""
        return {name: pause.sentence for name, pause in self._held.items()}

    @property
    def troubles(self) -> dict[str, Trouble]:
        """What ails the storage, of those pauses that a storage is the reason of."""
        return {name: pause.trouble for name, pause in self._held.items() if pause.trouble is not None}

    def begin(self, name: str, sentence: str, trouble: Trouble | None = None) -> None:
        """Something doesn't work (again, or still); ``trouble`` where it is a storage."""
        pause = self._held.get(name)
        if pause is None:
            self._held[name] = _Pause(sentence, time.monotonic(), trouble)
            self._record(Event("paused", None, {"what": name, "why": sentence}))
        else:
            pause.sentence, pause.trouble = sentence, trouble

    def end(self, name: str) -> None:
        """It works again."""
        pause = self._held.pop(name, None)
        if pause is not None:
            self._record(Event("resumed", None, {"what": name, "after_s": round(time.monotonic() - pause.since, 1)}))

    def check(self, name: str, error: Callable[[str], HsjournalError] | None = None) -> None:
        """Raise when the pause ``name`` has lasted longer than the limit.

        Raises:
            NoRoomError: or what ``error`` makes of the sentence.
        """
        pause = self._held.get(name)
        if pause is not None and time.monotonic() - pause.since > self._limit:
            if error is not None:
                raise error(pause.sentence)
            raise NoRoomError(
                f"paused for more than {self._limit:.0f} s: {pause.sentence}",
                remedy="Make room or mend the disk, then `hsjournal resume`; nothing is lost.",
            )

    async def insist(self, name: str, place: str, step: Callable[[], Awaitable[T]], retry_pause: float) -> T:
        """Do ``step`` again and again while the storage ``place`` answers with an error of its own.

        Raises:
            NoRoomError: past the pause limit.
            OSError: one that says nothing about the storage.
        """
        while True:
            try:
                result = await step()
            except OSError as error:
                if not is_trouble(error):
                    raise
                words = _WORDS.get(error.errno or 0, f"does not work: {error.strerror}")
                self.begin(name, f"{place} {words}", Trouble.of(error.errno))
                self.check(name)
                await asyncio.sleep(retry_pause)
            else:
                self.end(name)
                return result


def start_in(group: asyncio.TaskGroup, work: Coroutine[Any, Any, None], name: str | None = None) -> asyncio.Task[None]:
    """A new task of ``group``.

    Raises:
        CancelledError: when the group is ending because another of its tasks has failed.
    """
    try:
        return group.create_task(work, name=name)
    except RuntimeError:
        work.close()
        raise asyncio.CancelledError from None
