"""What the supervisor shows: one value, handed to whatever draws it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from hsjournal.events import Event
from hsjournal.watch.figures import aged

RECENT = 24
"""Events that a view holds: a tall terminal's worth."""


@dataclass(slots=True)
class View:
    """The state of a run as the supervisor knows it.

    Args:
        stage: ``preparing``, ``running``, ``draining``, ``waiting``, ``done``.
        sentence: what is going on, in words.
        snapshot: the worker's last, from the mirror.
        forecast: of a new run.
        progress: of ingestion.
        lives: workers started so far.
        worker: of the last one: alive, pid, epoch, phase, beat_age_s.
        server: address and how it is.
        verdict: the last one, with its sentence, row, threads and way out.
        gpus: utilisation of each, where it can be told.
        notes: what the user may want to keep, each said once.
        events: recent ones in words, oldest first.
    """

    stage: str = "preparing"
    sentence: str = ""
    run_dir: str = ""
    out_dir: str = ""
    snapshot: dict[str, Any] | None = None
    forecast: dict[str, Any] | None = None
    progress: dict[str, Any] | None = None
    lives: int = 0
    worker: dict[str, Any] = field(default_factory=dict)
    worker_pid: int | None = None
    server: str = ""
    verdict: dict[str, Any] | None = None
    gpus: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, Any] | None:
        """The snapshot as it is now; None before the first one."""
        return None if self.snapshot is None else aged(self.snapshot, time.monotonic())


def event_words(event: Event) -> str:
    """An event as one line, with its local time."""
    row = f"row {event.row} " if event.row is not None else ""
    detail = " ".join(f"{key}={value}" for key, value in event.detail.items() if not isinstance(value, dict | list))
    return f"{time.strftime('%H:%M:%S', time.localtime(event.at))} {event.kind} {row}{detail}"[:300]
