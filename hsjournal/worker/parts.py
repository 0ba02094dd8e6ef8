"""Pauses of one server, or of one hand-over root, among several: the run itself pauses only when no server is left.

With one server both are the same, and a part's pause is the run's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hsjournal.errors import HsjournalError, Trouble
from hsjournal.events import Event
from hsjournal.worker.trouble import Pauses


class Whole:
    """Follows which servers work; begins the run's pauses when none does, and ends them when one does again.

    Args:
        pauses: of the run.
        limit: seconds that a pause may last.
        record: keeps an event.
    """

    def __init__(self, pauses: Pauses, limit: float, record: Callable[[Event], object]) -> None:
        self._pauses, self._limit, self._record = pauses, limit, record
        self._servers: list[tuple[Part, Part]] = []
        self._held: set[str] = set()
        self.since: float | None = None
        """When the last server that worked stopped working; None while one works."""

    def part(self, label: str) -> Part:
        """The pauses of one server or root, by its address or path."""
        return Part(label, self._limit, self._record, self)

    def has(self, server: Part, root: Part) -> None:
        """A server of the run, and the root that it shares with us."""
        self._servers.append((server, root))

    @property
    def is_plural(self) -> bool:
        """Whether there are several servers."""
        return len(self._servers) > 1

    def others_work(self, server: Part) -> bool:
        """Whether a server besides this one works."""
        return any(not (part.sentences or root.sentences) for part, root in self._servers if part is not server)

    def changed(self) -> None:
        """A part's pause began, ended, or has another reason."""
        if any(not (server.sentences or root.sentences) for server, root in self._servers):
            self.since = None
            names: dict[str, list[str]] = {}
        else:
            self.since = time.monotonic() if self.since is None else self.since
            names = {}
            for part in dict.fromkeys(part for pair in self._servers for part in pair):
                for name, sentence in part.sentences.items():
                    names.setdefault(name, []).append(sentence)
        for name, sentences in names.items():
            self._pauses.begin(name, "; ".join(sentences))
        for name in self._held - names.keys():
            self._pauses.end(name)
        self._held = set(names)


class Part(Pauses):
    """As :class:`~hsjournal.worker.trouble.Pauses`; lasts too long only when no other server works for as long."""

    def __init__(self, label: str, limit: float, record: Callable[[Event], object], whole: Whole) -> None:
        super().__init__(limit, self._told)
        self._label, self._whole, self._keep = label, whole, record

    @property
    def others_work(self) -> bool:
        """Whether a server besides this one works."""
        return self._whole.others_work(self)

    @property
    def is_plural(self) -> bool:
        """Whether this is one of several servers."""
        return self._whole.is_plural

    def begin(self, name: str, sentence: str, trouble: Trouble | None = None) -> None:
        """As a run's pause; the run pauses too when no other server works."""
        super().begin(name, sentence, trouble)
        self._whole.changed()

    def end(self, name: str) -> None:
        """The inverse of :meth:`begin`."""
        super().end(name)
        self._whole.changed()

    def check(self, name: str, error: Callable[[str], HsjournalError] | None = None) -> None:
        """Raise when the pause, and that no server works, have both lasted longer than the limit.

        Raises:
            NoRoomError: or what ``error`` makes of the sentence.
        """
        since = self._whole.since
        if since is not None and time.monotonic() - since > self._limit:
            super().check(name, error)

    def _told(self, event: Event) -> Any:
        """With one server, the run's own pause says it all."""
        if self.is_plural:
            kind = {"paused": "server_set_aside", "resumed": "server_back"}[event.kind]
            self._keep(Event(kind, event.row, {"where": self._label} | dict(event.detail)))
