"""Everything that can be seen of a run of ours, within a deadline; nothing is changed."""

from __future__ import annotations

import json
import time
import tomllib
from dataclasses import dataclass, field
from typing import Any

from hsjournal.config import MORE_OUT, RunPaths, Settings
from hsjournal.errors import NoJournalError
from hsjournal.mirror import SNAPSHOT, SUPERVISOR, Mirror, read_heartbeat
from hsjournal.ops.diagnose.asking import Asking
from hsjournal.ops.diagnose.looks import Looks, settings_of
from hsjournal.ops.diagnose.rows import named_rows
from hsjournal.watch.figures import STALE_SNAPSHOT_S
from hsjournal.watch.presence import Watched, watched
from hsjournal.watch.verdict import Look, Row
from hsjournal.watch.watcher import rows_in_flight

FIRST_S, MOST_S, ALL_S = 0.6, 1.3, 1.6
"""Seconds from this process's start: for the manifest, for everything else, for the rows of what was found."""
LEAST_S = 0.3
"""Whatever our own start took: a child needs so long to start, and one that did not says nothing of its disk."""
SPAN_S = 0.5
"""A worker that lives is looked at for so long at least."""
LOOK_EVERY_S = 0.1


@dataclass(slots=True)
class Examination:
    """One examination of one run directory.

    Args:
        paths: of the run.
        begin: monotonic seconds.
    """

    paths: RunPaths
    begin: float
    worker: Looks | None = None
    supervisor: Looks | None = None
    looks: list[Look] = field(default_factory=list)
    said: dict[str, Any] = field(default_factory=dict)
    snapshot: dict[str, Any] = field(default_factory=dict)
    settings: Settings | None = None
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)

    def examine(self) -> None:
        """Look at everything.

        Raises:
            NoJournalError: when there is neither a journal nor a mirror of one.
        """
        mirror = Mirror(self.paths.mirror)
        self._meet(mirror)
        self._ask()
        self._refuse_nothing(mirror)
        self._look(mirror)
        while self.worker is not None and self.worker.last is not None and self._span() < SPAN_S:
            time.sleep(LOOK_EVERY_S)
            self._look(mirror)

    def _span(self) -> float:
        return self.looks[-1].at - self.looks[0].at if self.looks else SPAN_S

    def _meet(self, mirror: Mirror) -> None:
        """Who is there, as the mirror says."""
        self.said = mirror.read(SUPERVISOR) or {}
        beat = read_heartbeat(self.paths.mirror)
        if beat is not None:
            self.worker = Looks(beat.pid, beat.create_time)
        if "pid" in self.said and "create_time" in self.said:
            self.supervisor = Looks(int(self.said["pid"]), float(self.said["create_time"]))
        self._look(mirror)

    def _ask(self) -> None:
        first, rest, run_dir = Asking(), Asking(), str(self.paths.run_dir)
        first.ask({"manifest": ("text", str(self.paths.manifest))})
        if self.worker is not None and self.worker.last is not None:
            # By a child: to read it takes a lock of the process's memory, which a thread that is stuck may hold.
            first.ask({"settings": ("text", f"/proc/{self.worker.pid}/cmdline")})
        if self.worker is None:
            first.ask({"worker_lock": ("text", str(self.paths.worker_lock))})
        if self.supervisor is None:
            first.ask({"supervisor_lock": ("text", str(self.paths.supervisor_lock))})
        rest.ask(
            {
                "journal": ("journal", str(self.paths.journal)),
                "log": ("tail", str(self.paths.logs / "worker.log")),
                "run_room": ("place", run_dir),
                "mirror_room": ("place", str(self.paths.shm)),
                "gpu": ("gpu", "0.6"),
            }
        )
        asked = self._ask_places(rest, {})
        self.answers |= first.answers(max(self.begin + FIRST_S, time.monotonic() + LEAST_S))
        self.manifest = manifest_of(self.answers["manifest"])
        self.settings = settings_of(self.answers.get("settings", {}).get("text", ""))
        self.worker = self.worker or holder_of(self.answers.get("worker_lock"))
        self.supervisor = self.supervisor or holder_of(self.answers.get("supervisor_lock"))
        self._look(Mirror(self.paths.mirror))
        self._ask_places(rest, asked)
        self.answers |= rest.answers(self.begin + MOST_S)
        rows = named_rows(self.answers.get("root", {}), self.run_id())
        known = self.answers["journal"].get("rows", {})
        unknown = [str(row) for row in rows if str(row) not in known][:500]
        if unknown and "error" not in self.answers["journal"]:
            more = Asking()
            more.ask({"more": ("journal", str(self.paths.journal), *unknown)})
            answer = more.answers(self.begin + ALL_S)["more"]
            if "rows" in answer:
                self.answers["journal"] = answer

    def _ask_places(self, asking: Asking, asked: dict[str, str]) -> dict[str, str]:
        """Ask about root, output and server as soon as it is known where they are."""
        found = {"root": self.root(), "server": self.server()} | self.out_rooms()
        words = {"root": "root", "server": "server"} | dict.fromkeys(self.out_rooms(), "place")
        fresh = {name: value for name, value in found.items() if value and name not in asked}
        asking.ask({n: (words[n], value, *(("0.6",) if n == "server" else ())) for n, value in fresh.items()})
        return asked | fresh

    def root(self) -> str:
        """The hand-over root: from memory if possible, else from the manifest."""
        told = (self.snapshot.get("handover") or {}).get("root") or (self.settings and self.settings.handover_root)
        return str(told or self.manifest.get("options", {}).get("handover_root") or "")

    def out_dir(self) -> str:
        """The output folder, likewise."""
        return str(self.said.get("out_dir") or self.manifest.get("out_dir") or "")

    def out_rooms(self) -> dict[str, str]:
        """Every output folder, the first one first, by the name under which it is asked for its room."""
        more = json.loads(self.manifest.get("options", {}).get(MORE_OUT, "[]"))
        told = [str(volume["path"]) for volume in self.snapshot.get("volumes") or ()]
        folders = dict.fromkeys(filter(None, [self.out_dir(), *told, *more]))
        return {f"out_room_{number}": folder for number, folder in enumerate(folders)}

    def server(self) -> str:
        """The server's address, likewise; empty when it was one of our own, which ended with its supervisor."""
        told = (self.settings.server_url if self.settings else "") or str(self.said.get("server", "")).split(" ")[0]
        return told if "://" in told else str(self.manifest.get("options", {}).get("server", ""))

    def run_id(self) -> str:
        """Of the journal, else of the manifest; empty when neither can be read."""
        return str(self.answers["journal"].get("run_id") or self.manifest.get("run_id") or "")

    def _look(self, mirror: Mirror) -> None:
        now = time.monotonic()
        if self.supervisor is not None:
            self.supervisor.look(now)
        self.snapshot = mirror.read(SNAPSHOT) or self.snapshot
        if self.worker is None:
            return
        process = self.worker.look(now)
        beat = read_heartbeat(self.paths.mirror)
        rows: tuple[Row, ...] = ()
        states: dict[int, str] = {}
        fresh: dict[str, Any] = {}
        if beat is not None and self.snapshot.get("epoch") in (None, beat.epoch):
            rows, states = rows_in_flight(self.snapshot, beat)
            if now - float(self.snapshot.get("monotonic", 0.0)) < STALE_SNAPSHOT_S:
                fresh = dict(self.snapshot.get("pauses", {}))
        self.looks.append(
            Look(
                now, process, states, rows, self._done(), fresh,
                troubles=self.snapshot.get("troubles", {}),
                phase=beat.phase if beat is not None else None,
                pace=float(self.snapshot.get("pace", 0.0)),
                longest_lately=int(self.snapshot.get("longest_lately", 0)),
                sends=int(self.snapshot.get("sends", 0)),
            )
        )  # fmt: skip

    def watched(self) -> Watched:
        """Who watches it, and how that one ended."""
        return watched(self.said, self.answers.get("journal", {}).get("supervisor"))

    def counts(self) -> dict[str, int]:
        """Rows by state: the journal's, else the worker's last word."""
        told = {state: c["rows"] for state, c in self.snapshot.get("counts", {}).items()}
        counts = self.answers["journal"].get("counts") or told
        return counts if any(counts.values()) else {}

    def _done(self) -> int:
        counts = self.snapshot.get("counts", {})
        ended: int = sum(counts[state]["rows"] for state in ("verified", "failed", "skipped") if state in counts)
        return ended + int(self.snapshot.get("deferred", 0))

    def _refuse_nothing(self, mirror: Mirror) -> None:
        """Without journal, manifest and mirror there is nothing to tell of."""
        if "error" not in self.answers["manifest"] or "error" not in self.answers["journal"]:
            return
        if self.said or self.snapshot or mirror.events(1):
            return
        why = "" if self.answers["manifest"].get("missing") else f" ({self.answers['manifest']['error']})"
        raise NoJournalError(
            f"there is no readable run in {self.paths.run_dir}{why}",
            remedy="Start one with `hsjournal run RUN_DIR --prompts FILE`; for a pipeline of another kind, "
            "`hsjournal diagnose --pid PID --log FILE --root DIR`.",
        )


def manifest_of(answer: dict[str, Any]) -> dict[str, Any]:
    """The frozen settings, as far as they can be read."""
    try:
        return tomllib.loads(answer.get("text", ""))
    except tomllib.TOMLDecodeError:
        return {}


def holder_of(answer: dict[str, Any] | None) -> Looks | None:
    """Who wrote a lock file last: for when shared memory was cleared away under a run that lives."""
    try:
        value = json.loads((answer or {}).get("text", ""))
        return Looks(int(value["pid"]), float(value["create_time"]))
    except (ValueError, TypeError, KeyError):
        return None
