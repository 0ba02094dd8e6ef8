"""The supervisor's eyes: gathers one look from /proc and the mirror, and asks the judge what it means."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hsjournal.mirror import SNAPSHOT, Beat, Mirror, Phase, read_heartbeat
from hsjournal.watch.figures import STALE_SNAPSHOT_S
from hsjournal.watch.health import EVERY_S, Health
from hsjournal.watch.places import Places, output_of
from hsjournal.watch.proc import look_at
from hsjournal.watch.verdict import AT_SERVER, Finding, Judge, Look, Row

BUSY = 0.2
"""A server of our own that takes this share of a core between two looks is computing."""
_NOWHERE = Places()


class Watcher:
    """Looks at one worker.

    Args:
        judge: keeps the marks over the lives of workers.
        mirror: of the run.
        pid: of the worker.
        epoch: of the worker.
        health: whether the servers answer.
        places: where the run keeps its things.
        server_pid: tells the number of an engine of our own that computes on the CPU; None when there is none.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        judge: Judge,
        mirror: Mirror,
        pid: int,
        epoch: int,
        health: Health,
        places: Places = _NOWHERE,
        server_pid: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._judge, self._mirror, self._pid, self._epoch = judge, mirror, pid, epoch
        self._server_pid, self._clock = server_pid, clock
        self._server_work: tuple[int, float, float] | None = None
        seen = look_at(pid)
        self._create_time = seen.create_time if seen is not None else None
        self._health, self._places = health, places
        judge.new_life(clock())

    def judge(self, killed_at: float | None = None) -> Finding:
        """One look, and what it means."""
        now = self._clock()
        snapshot = self._mirror.read(SNAPSHOT) or {}
        if snapshot.get("epoch") != self._epoch:
            snapshot = {}
        beat = read_heartbeat(self._mirror.folder)
        if beat is not None and beat.epoch != self._epoch:
            beat = None
        rows, states = rows_in_flight(snapshot, beat)
        counts = snapshot.get("counts", {})
        fresh = now - float(snapshot.get("monotonic", 0.0)) < STALE_SNAPSHOT_S
        pauses = dict(snapshot.get("pauses", {})) if fresh else {}
        server, asked = self._health.of((row.server for row in rows if row.phase in AT_SERVER), now)
        finding = self._judge.judge(
            Look(
                at=now,
                process=look_at(self._pid, self._create_time),
                states=states,
                rows=rows,
                done=sum(counts[s]["rows"] for s in ("verified", "failed", "skipped") if s in counts)
                + int(snapshot.get("deferred", 0)),
                pauses=pauses,
                troubles=snapshot.get("troubles", {}),
                server=server,
                asked=asked,
                killed_at=killed_at,
                phase=beat.phase if beat is not None else None,
                server_busy=self._is_server_busy(now),
                pace=float(snapshot.get("pace", 0.0)),
                longest_lately=int(snapshot.get("longest_lately", 0)),
                sends=int(snapshot.get("sends", 0)),
                places=self._places_now(snapshot),
            )
        )
        stall_timeout = self._judge.limits.stall_timeout
        if finding.silent_s > stall_timeout / 2 or pauses:
            self._health.refresh(now, min(EVERY_S, stall_timeout / 4))
        return finding

    def _places_now(self, snapshot: dict[str, Any]) -> Places:
        """With several output folders, those that it is about."""
        return replace(self._places, out_dir=output_of(self._places.out_dir, snapshot.get("volumes") or ()))

    def _is_server_busy(self, now: float) -> bool:
        pid = self._server_pid()
        seen = look_at(pid) if pid is not None else None
        before, self._server_work = self._server_work, None
        if seen is None:
            return False
        self._server_work = (seen.pid, now, seen.cpu_s)
        if before is None or before[0] != seen.pid:
            return False
        return seen.cpu_s - before[2] >= BUSY * (now - before[1])


def rows_in_flight(snapshot: dict[str, Any], beat: Beat | None) -> tuple[tuple[Row, ...], dict[int, str]]:
    """Rows in flight and their states: as the main loop told, and as each thread of the sink has told since."""
    told = float(snapshot.get("monotonic", 0.0))
    rows = {
        f["row"]: Row(
            f["row"],
            f["attempt"],
            f["tokens"],
            Phase[f["phase"].upper()],
            f.get("nbytes", 0),
            told - f.get("age_s", 0.0),
            str(f.get("server", "")),
        )
        for f in snapshot.get("in_flight", [])
    }
    states = {f["row"]: f.get("state", "sent") for f in snapshot.get("in_flight", [])}
    for slot in beat.slots if beat is not None else ():
        known = rows.get(slot.row)
        tokens, server = (known.tokens, known.server) if known else (0, "")
        rows[slot.row] = Row(slot.row, slot.attempt, tokens, slot.phase, slot.nbytes, slot.since, server)
    return tuple(rows.values()), states
