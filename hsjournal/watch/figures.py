"""A run's figures as they are now: the ages of the last snapshot go on, and a speed that nobody tells any more is none."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hsjournal.birth import lives
from hsjournal.mirror import SNAPSHOT, Mirror, read_heartbeat

STALE_SNAPSHOT_S = 15.0
"""A snapshot older than this says nothing about the present: the worker's main loop is stuck, or the worker is gone."""


def aged(snapshot: Mapping[str, Any], now: float) -> dict[str, Any]:
    """A snapshot as it is at ``now`` (monotonic seconds), with ``snapshot_age_s`` besides.

    Counts stay: the journal has moved with them. Of a stale one, ``rates`` and ``eta_s`` are None and ``pauses`` empty.
    """
    age = max(0.0, now - float(snapshot.get("monotonic", now)))
    found = dict(snapshot) | {"snapshot_age_s": age}
    if "progress_age_s" in snapshot:
        found["progress_age_s"] = snapshot["progress_age_s"] + age
    found["in_flight"] = [f | {"age_s": f.get("age_s", 0.0) + age} for f in snapshot.get("in_flight", ())]
    return found | {"rates": None, "eta_s": None, "pauses": {}} if age > STALE_SNAPSHOT_S else found


def read_figures(mirror: Mirror) -> dict[str, Any] | None:
    """The worker's last snapshot as it is now; None when there is none."""
    snapshot = mirror.read(SNAPSHOT)
    return None if snapshot is None else aged(snapshot, time.monotonic())


def read_worker(mirror: Path) -> dict[str, Any]:
    """Whether a worker lives, and when it gave its last sign of life; more than ``alive`` only where one ever did.

    JSON-able: ``alive``, ``pid``, ``epoch``, ``phase``, ``beat_age_s``.
    """
    beat = read_heartbeat(mirror)
    if beat is None:
        return {"alive": False}
    return {
        "alive": lives(beat.pid, beat.create_time),
        "pid": beat.pid,
        "epoch": beat.epoch,
        "phase": beat.phase.name.lower(),
        "beat_age_s": round(max(0.0, time.monotonic() - beat.beat), 2),
    }
