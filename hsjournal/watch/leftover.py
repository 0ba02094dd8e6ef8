"""A worker of an earlier life that still holds its lock: is it only ending, or does the kernel not let it go?"""

from __future__ import annotations

from hsjournal.mirror import SNAPSHOT, Mirror, read_heartbeat
from hsjournal.watch.proc import Process
from hsjournal.watch.verdict import Row
from hsjournal.watch.watcher import rows_in_flight

LOOKS = 3
"""Looks in a row that must show the same thread stuck."""


class Leftover:
    """Looked at again and again; one look at a thread in D proves nothing, since everybody who ends passes through it.

    Args:
        kill_wait: seconds for which a thread must have been stuck at every look.
    """

    def __init__(self, kill_wait: float) -> None:
        self._kill_wait = kill_wait
        self._pid = -1
        self._stuck: frozenset[int] = frozenset()
        self._since, self._looks = 0.0, 0

    def is_unkillable(self, process: Process | None, now: float) -> bool:
        """Whether one of its threads has been stuck for so long; takes one more look, at ``now`` (monotonic seconds)."""
        stuck = frozenset(thread.tid for thread in process.stuck) if process is not None else frozenset[int]()
        pid = process.pid if process is not None else -1
        if pid == self._pid and self._stuck & stuck:
            self._stuck, self._looks = self._stuck & stuck, self._looks + 1
        else:
            self._pid, self._stuck, self._since, self._looks = pid, stuck, now, 1
        return bool(stuck) and self._looks >= LOOKS and now - self._since >= self._kill_wait

    @property
    def is_doubtful(self) -> bool:
        """Whether a thread is stuck, and a few more looks will tell."""
        return bool(self._stuck)


def rows_of(mirror: Mirror, process: Process) -> tuple[Row, ...]:
    """What a worker had in flight, by the record that it left; empty when a newer one has taken its place."""
    beat = read_heartbeat(mirror.folder)
    if beat is None or (beat.pid, beat.create_time) != (process.pid, process.create_time):
        return ()
    snapshot = mirror.read(SNAPSHOT) or {}
    return rows_in_flight(snapshot if snapshot.get("epoch") == beat.epoch else {}, beat)[0]
