"""How often a worker may die: back-off between lives, and when to give up."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path

from hsjournal.errors import ExitCode

FENCED = 75
_FINAL = {
    ExitCode.DONE, ExitCode.FAILED_SAMPLES, ExitCode.USAGE, ExitCode.GAVE_UP, ExitCode.NO_ROOM, ExitCode.NO_JOURNAL,
    ExitCode.LOCKED, ExitCode.SCHEMA, ExitCode.SERVER,
}  # fmt: skip
_LONE_KILLS = 3
"""So many kills in a row without a newly verified row are taken for the doing of what is in flight."""


@dataclass(slots=True)
class Lives:
    """Restart intensity: resets on a newly verified row only, never on a good start.

    Args:
        most: deaths without a newly verified row after which the supervisor gives up.
        first_pause: seconds before the second life; doubles with each death up to ``longest_pause``.
    """

    most: int = 10
    first_pause: float = 0.5
    longest_pause: float = 60.0
    deaths: int = 0
    total: int = 0
    _verified: int = -1
    _lone: list[int] = field(default_factory=list)

    def progressed(self, verified: int) -> None:
        """Tell how many rows are verified now."""
        if verified > self._verified:
            if self._verified >= 0:
                self.deaths = 0
                self._lone.clear()
            self._verified = verified

    def died(self) -> float | None:
        """One death more: seconds to wait before the next life, None to give up."""
        self.deaths += 1
        self.total += 1
        if self.deaths > self.most:
            return None
        return float(min(self.first_pause * 2 ** (self.deaths - 1), self.longest_pause))

    def repeated_kill(self, in_flight: list[int]) -> bool:
        """After a kill from outside: whether the next one is to be taken for the doing of a row that is in flight.

        One row that is always alone gets a strike then; of several, each becomes a suspect and runs alone from there
        on, since else a sample that has the worker killed at once would never let its neighbours through.
        """
        lone = self.lone_kill(in_flight)
        return lone or (len(in_flight) > 1 and self.deaths >= _LONE_KILLS)

    def lone_kill(self, in_flight: list[int]) -> bool:
        """A kill from outside with ``in_flight`` rows under way: whether the same lone row died so too often."""
        if len(in_flight) != 1:
            self._lone.clear()
            return False
        if self._lone and self._lone[-1] != in_flight[0]:
            self._lone.clear()
        self._lone.append(in_flight[0])
        return len(self._lone) >= _LONE_KILLS


def is_final(returncode: int) -> bool:
    """Whether a worker that ended so by itself must not be started again; one that was asked to stop by somebody else may be."""
    return returncode == FENCED or returncode in _FINAL


def is_crash(returncode: int, oom_kills: int) -> bool:
    """Whether the worker died of itself: an exception, a fault, or the kernel's out-of-memory killer.

    A plain SIGKILL, TERM, INT or HUP comes from somebody outside, and is nobody's strike; a worker that takes a TERM
    finishes what is in flight and ends with 130.
    """
    if returncode == ExitCode.INTERRUPTED:
        return False
    if returncode >= 0:
        return not is_final(returncode)
    if -returncode == signal.SIGKILL:
        return oom_kills > 0
    return -returncode not in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def oom_kill_count() -> int:
    """How many processes the kernel has killed for want of memory since boot, on this machine."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0
