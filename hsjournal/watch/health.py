"""Do the servers answer? Each is asked on a thread of its own, one question at a time, and only when there is trouble."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence

EVERY_S = 5.0
"""Seconds between two questions, for nothing that makes the model work."""
KNOWN_S = 30.0
"""Seconds for which an answer says something about the present."""


class Health:
    """What the servers of a run answered lately.

    Args:
        urls: of all of them.
        ask: returns None when the server at an address answers, else why not; may block for a few seconds.
    """

    def __init__(self, urls: Sequence[str], ask: Callable[[str], str | None]) -> None:
        self._servers = {url: _Server(url, ask) for url in (given.rstrip("/") for given in urls)}

    def refresh(self, now: float, every: float = EVERY_S) -> None:
        """Ask those again that were asked longer ago than ``every`` seconds; ``now`` is monotonic."""
        for server in self._servers.values():
            server.refresh(now, every)

    def of(self, urls: Iterable[str], now: float) -> tuple[str | None, bool]:
        """Whether any of ``urls`` answers: None if so, or if that isn't known, else why none does; and whether it is known.

        Args:
            urls: those that rows wait for; none of them known means all of the run.
            now: monotonic seconds.
        """
        meant = [self._servers[url] for url in dict.fromkeys(u.rstrip("/") for u in urls) if url in self._servers]
        known = [server for server in meant or self._servers.values() if server.is_known(now)]
        if len(known) < len(meant or self._servers):
            return None, any(server.problem is None for server in known)
        if not known or any(server.problem is None for server in known):
            return None, bool(known)
        return "; ".join(f"{server.url}: {server.problem}" for server in known), True


class _Server:
    def __init__(self, url: str, ask: Callable[[str], str | None]) -> None:
        self.url, self._ask = url, ask
        self._asked_at = self._known_at = -math.inf
        self._thread: threading.Thread | None = None
        self.problem: str | None = None

    def is_known(self, now: float) -> bool:
        return now - self._known_at < KNOWN_S

    def refresh(self, now: float, every: float) -> None:
        if now - self._asked_at < every or (self._thread is not None and self._thread.is_alive()):
            return
        self._asked_at = now
        self._thread = threading.Thread(target=self._run, args=(now,), name="health", daemon=True)
        self._thread.start()

    def _run(self, now: float) -> None:
        self.problem = self._ask(self.url)
        self._known_at = now
