"""What the screen remembers of the last minutes: throughput as a sparkline, and how sure the time to the end is."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

STEP_S = 10.0
MOST = 240
_LEVELS = "▁▂▃▄▅▆▇█"
_OPEN = ("pending", "sent", "dumped", "written")
_ROOM_S = 60.0
"""Seconds of a hand-over root's room that are remembered."""
_SURE_AFTER = 6
"""Steps from which on their spread says something."""


class History:
    """Verified tokens in steps of :data:`STEP_S` seconds, as the snapshots told them."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=MOST)
        self._rooms: dict[str, deque[tuple[float, float]]] = {}
        self._begun: float | None = None
        self._at_begin = 0

    def note(self, snapshot: Mapping[str, Any]) -> None:
        """Take a snapshot in; one that was seen already, or is of a later life, changes nothing wrongly."""
        at = float(snapshot.get("monotonic", 0.0))
        self._note_rooms(at, snapshot)
        tokens = int(snapshot["counts"]["verified"]["tokens"])
        if self._begun is None or tokens < self._at_begin or at < self._begun:
            self._begun, self._at_begin = at, tokens
            return
        passed = int((at - self._begun) // STEP_S)
        if passed >= 1:
            # What came in after a gap is spread over it: a worker that was stuck told nothing meanwhile.
            self._steps.extend([(tokens - self._at_begin) / (passed * STEP_S)] * min(passed, MOST))
            self._begun, self._at_begin = self._begun + passed * STEP_S, tokens

    def sparkline(self, width: int) -> str:
        """The last ``width`` steps, one character each; the highest of them is the full height."""
        steps = list(self._steps)[-max(0, width) :]
        most = max(steps, default=0.0)
        if most <= 0:
            return "▁" * len(steps)
        return "".join(_LEVELS[min(7, int(step / most * 7.999))] if step > 0 else "_" for step in steps)

    def _note_rooms(self, at: float, snapshot: Mapping[str, Any]) -> None:
        servers = snapshot.get("servers") or ()
        for handover in [snapshot.get("handover") or {}, *(server.get("handover") or {} for server in servers)]:
            if "available" in handover:
                seen = self._rooms.setdefault(str(handover.get("root")), deque())
                if seen and at < seen[-1][0]:  # of a later boot of the machine
                    seen.clear()
                if not seen or at > seen[-1][0]:
                    seen.append((at, float(handover["available"])))
                while at - seen[0][0] > _ROOM_S:
                    seen.popleft()

    def until_full(self, root: str) -> float | None:
        """Seconds until a hand-over root is full, at its speed of the last minute; None while it does not fill."""
        seen = self._rooms.get(root, deque())
        if len(seen) < 2 or seen[-1][0] - seen[0][0] < STEP_S:
            return None
        taken = (seen[0][1] - seen[-1][1]) / (seen[-1][0] - seen[0][0])
        return seen[-1][1] / taken if taken > 0 else None

    def spread(self, snapshot: Mapping[str, Any]) -> tuple[float, float] | None:
        """Seconds to the end, at the quicker and at the slower speed of the last steps; None while too little is known."""
        steps = list(self._steps)[-60:]
        if len(steps) < _SURE_AFTER:
            return None
        mean = statistics.fmean(steps)
        if mean <= 0:
            return None
        error = 2 * statistics.stdev(steps) / len(steps) ** 0.5
        left = sum(snapshot["counts"][state]["tokens"] for state in _OPEN)
        return left / (mean + error), left / max(mean - error, mean / 4)
