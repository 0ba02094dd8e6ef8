"""What the supervisor called, held against what a drill did: false words, missed ones, wrong ones, and kills without cause."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hsjournal.events import Event


@dataclass(slots=True)
class Stalls:
    """The book of one run.

    Args:
        allowed: from when to when one stall may be called, and the worker ended for it (seconds since 1970).
        missed: stalls that were not called in time.
        wrong: stalls that were called something else than they were, or without their place.
        called: how long it took, for those that were.
    """

    allowed: list[tuple[float, float]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    called: list[float] = field(default_factory=list)

    def false(self, at: Iterable[float]) -> list[float]:
        """Those of ``at`` that nothing explains; a window explains one."""
        free, unexplained = list(self.allowed), []
        for t in sorted(at):
            window = next((w for w in free if _is_in(t, w)), None)
            if window is None:
                unexplained.append(t)
            else:
                free.remove(window)
        return unexplained

    def uncalled_for(self, at: Iterable[float]) -> list[float]:
        """Those of ``at``, when the supervisor ended a worker, in no window: however many steps one ending takes."""
        return [t for t in at if not any(_is_in(t, window) for window in self.allowed)]

    def judge(self, what: str, event: Event, wanted: Iterable[str], named: str) -> None:
        """Hold a stall against what it was, and what its sentence must name."""
        verdict, sentence = str(event.detail["verdict"]), str(event.detail["sentence"])
        if verdict not in wanted:
            self.wrong.append(f"{what} is called {verdict}: {sentence}")
        elif named not in sentence:
            self.wrong.append(f"{what} does not name {named}: {sentence}")


def _is_in(t: float, window: tuple[float, float]) -> bool:
    return window[0] - 0.1 <= t <= window[1] + 0.1
