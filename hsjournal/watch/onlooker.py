"""What the supervisor shows, seen from another process: from shared memory alone, so it never opens the journal."""

from __future__ import annotations

from hsjournal.config import RunPaths
from hsjournal.mirror import SNAPSHOT, SUPERVISOR, Mirror
from hsjournal.watch.figures import read_worker
from hsjournal.watch.presence import Presence, verdict_on, watched
from hsjournal.watch.view import RECENT, View, event_words


class Onlooker:
    """Watches one run.

    Args:
        paths: of it.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._mirror = Mirror(paths.mirror)

    @property
    def is_going_on(self) -> bool:
        """Whether a supervisor of it lives."""
        return watched(self._mirror.read(SUPERVISOR)).is_alive

    def view(self) -> View | None:
        """The supervisor's view as it told it last; None when nothing of the run is in shared memory."""
        told = self._mirror.read(SUPERVISOR)
        snapshot = self._mirror.read(SNAPSHOT)
        if told is None and snapshot is None:
            return None
        told = told or {}
        who = watched(told)
        trouble = verdict_on(who, complete=False)  # a complete run has left nothing in shared memory
        stage, sentence = str(told.get("stage", "")), str(told.get("sentence", ""))
        if who.presence is not Presence.ALIVE and trouble is not None:
            stage, sentence = ("NOT WATCHED" if who.is_alive else "NOT RUNNING"), trouble["sentence"]
        return View(
            stage=stage,
            sentence=sentence,
            run_dir=str(self._paths.run_dir),
            out_dir=str(told.get("out_dir", "")),
            snapshot=snapshot,
            lives=int(told.get("lives", 0)),
            worker=read_worker(self._mirror.folder),
            worker_pid=told.get("worker_pid"),
            server=str(told.get("server", "")),
            verdict=trouble or told.get("verdict"),
            gpus=told.get("gpus") or [],
            events=[event_words(event) for _, event in self._mirror.events(RECENT)],
        )
