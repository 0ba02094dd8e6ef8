"""The incident replayed: 37,312 rows, 18,421 of them verified, a real engine, and a disk that freezes while the worker writes.

Twice in one run: first only the output's disk freezes, then the run directory's as well. Nothing may be lost, doubled
or asked for again; somebody is told within the time-out; no second worker is started; and after each thaw the run goes
on by itself. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hsjournal.config import RunPaths
from hsjournal.events import Event
from hsjournal.journal.store import Journal, Move
from hsjournal.mirror import SUPERVISOR, Mirror
from hsjournal.sink.formats import layout_named
from hsjournal.states import Actor, State, Transition
from tests.helpers.drill.alone import Alone, thread_states
from tests.helpers.drill.asking import Asking, faults_of, wchans
from tests.helpers.drill.report import say
from tests.helpers.drill.stage import DrillEngine, Stage, ended, random_prompts, wait_for, words
from tests.helpers.drill.truth import Rid
from tests.helpers.mounts import Disk, ext4

ROWS, VERIFIED = 37_312, 18_421
STALL, POLL = 3.0, 0.5
SLACK = 4.0
"""Seconds that a busy machine may add to a detection."""
BUDGET = 8 << 20
IN_FLIGHT = 4
WORKER = "hsjournal.worker"


@dataclass(slots=True)
class Told:
    """What the drill found; everything that is a fault stands in ``faults``."""

    faults: list[str] = field(default_factory=list)
    line: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    begin: float = field(default_factory=time.monotonic)

    def at(self, words_: str) -> None:
        """One line of the time line."""
        self.line.append(f"{time.monotonic() - self.begin:7.2f} s  {words_}")
        say(words_)

    def must(self, holds: object, words_: str) -> None:
        """A thing that must be so."""
        if not holds:
            self.faults.append(words_)
            self.at(f"FAULT: {words_}")


class Incident:
    """One replay.

    Args:
        stage: with all prompts; run directory and output lie on disks of their own.
        engine: that serves it.
        told: what is found.
    """

    def __init__(self, stage: Stage, engine: DrillEngine, told: Told) -> None:
        self.stage, self.engine, self.told = stage, engine, told
        self.paths = RunPaths.of(stage.run_dir)
        self.asking = Asking(stage)
        self.supervisor: subprocess.Popen[bytes] | None = None

    @property
    def mirror(self) -> Mirror:
        """Of the run, in the stage's part of tmpfs."""
        (folder,) = self.stage.shm.glob("hsjournal-*/*/mirror")
        return Mirror(folder)

    def prepare(self) -> None:
        """A run as far as the one at the incident: entered by the real preparation, moved by real moves."""
        Alone(self.stage, self.engine.url).prepare()
        layout = layout_named("specforge")
        writes = Transition(State.PENDING, State.WRITTEN, Actor.ADOPT, "")
        verifies = Transition(State.WRITTEN, State.VERIFIED, Actor.ADOPT, "")
        with Journal(self.paths.journal) as journal:
            epoch = journal.raise_epoch()
            for first in range(0, VERIFIED, 2000):
                rows = range(first, min(first + 2000, VERIFIED))
                file = {"output_bytes": 4096, "output_xxh3": "0" * 32, "source_xxh3": "0" * 32}
                moves = [Move(r, 0, writes, file | {"output_path": layout.path_of(r, f"s{r}")}) for r in rows]
                moves += [Move(r, 0, verifies, {"verify_method": "direct"}) for r in rows]
                journal.apply(moves, epoch)
        self.told.at(f"a journal of {ROWS:,} rows, {VERIFIED:,} of them verified")

    def start(self) -> subprocess.Popen[bytes]:
        """Start the program."""
        self.supervisor = self.stage.hsjournal(
            "resume", self.stage.run_dir, "--plain", "--stall-timeout", str(STALL), "--poll-interval", str(POLL),
            "--retry-pause", "0.5", "--max-in-flight", str(IN_FLIGHT), "--handover-budget", str(BUDGET),
            "--canary-every", "0", "--notify-command", f"(cat; echo) >> {self.stage.base / 'told'}",
        )  # fmt: skip
        return self.supervisor

    def files(self) -> int:
        """Finished files."""
        return sum(1 for _ in self.stage.out_dir.glob("*/*.ckpt"))

    def workers(self) -> list[int]:
        """Every worker that lives, of whatever supervisor; one that was killed and is stuck shows no command line."""
        return [pid for pid, command in self.stage.processes().items() if f"-m {WORKER}" in command]

    def wait_event(self, kind: str, since: float, timeout: float = 60.0) -> Event:
        """The first event of a kind since then, from the mirror."""

        def look() -> Event | None:
            found = [e for _, e in self.mirror.events(200) if e.kind == kind and e.at >= since]
            return found[0] if found else None

        event: Event = wait_for(look, timeout, f"{kind}; {words(self.supervisor) if self.supervisor else ''}")
        return event

    def freeze(self, name: str, *disks: Disk) -> None:
        """Freeze the disks while the worker writes, look at what is said, kill the supervisor, thaw, and see it heal."""
        told, child = self.told, self.supervisor
        assert child is not None
        goal = self.files() + 5
        wait_for(lambda: child.poll() is not None or self.files() >= goal, 90, "files are written")
        assert child.poll() is None, words(child)
        (worker,) = self.workers()
        with contextlib.ExitStack() as stack:
            for disk in disks:
                stack.enter_context(disk.frozen())
            frozen, at = time.monotonic(), time.time()
            told.at(f"{name}: frozen, worker {worker} writes")
            self._ask(name, "before the stall", {"healthy", "slow", "storage_stalled", "unkillable"})
            stall = self.wait_event("stall", at)
            told.at(f"stall told: {stall.detail['sentence']}")
            self._check_stall(name, stall, frozen)
            last = self.wait_event("worker_unkillable", at)
            told.at(f"SIGKILL has no effect: {last.detail['threads']}")
            told.must("D" in thread_states(worker), f"{name}: the worker is said to be stuck, and is not")
            verdict = wait_for(self._unkillable, 20, f"{name}: the verdict is unkillable")
            self._check_named(name, verdict.get("sentence", ""), verdict.get("row"))
            self._check_meanwhile(name, worker)
            named = (wchans(worker), [f"row {stall.row}, "], [str(self.stage.out_dir), str(self.stage.run_dir)])
            self._ask(name, "after SIGKILL", {"unkillable"}, named)
            child.kill()
            child.wait()
            self._ask(name, "between two supervisors", {"unkillable", "storage_stalled"}, status={"supervisor_dead"})
            told.at("supervisor killed, another one started")
            again = self.start()
            closed = self.wait_event("gate_closed", time.time() - 0.5)
            told.at(f"the next one sees it: {closed.detail['why']}")
            told.must(closed.detail["verdict"] == "unkillable", f"{name}: the gate says {closed.detail['verdict']}")
            self._check_named(name, closed.detail["why"], stall.row)
            time.sleep(2.0)
            told.must("no second one is started" in words(again, 1 << 20), f"{name}: it is not said on the screen")
            self._check_meanwhile(name, worker)
            self._ask(name, "under the next supervisor", {"unkillable"}, named)
        thawed, before = time.monotonic(), self.files()
        told.at(f"{name}: thawed after {thawed - frozen:.1f} s")
        wait_for(lambda: not thread_states(worker), 30, "the stuck worker ends by itself")
        wait_for(lambda: again.poll() is not None or self.files() >= before + 8, 90, "the run goes on by itself")
        told.must(again.poll() is None, f"{name}: the run did not go on: {words(again)}")
        told.at(f"goes on by itself, {time.monotonic() - thawed:.1f} s after the thaw")
        told.facts[name] |= {"healed_s": round(time.monotonic() - thawed, 1)}

    def _ask(
        self,
        name: str,
        when: str,
        wanted: set[str],
        named: Sequence[Sequence[str]] = (),
        status: set[str] | None = None,
    ) -> None:
        """What people are told right now; ``status`` where that is another verdict than the one of ``diagnose``."""
        answers = self.asking.ask(f"{name}, {when}")
        for fault in faults_of(answers, {"status": status or wanted, "diagnose": wanted}, named):
            self.told.must(False, fault)
        self.told.at("; ".join(f"{a.command} answers {a.verdict} in {a.beyond_s} s" for a in answers))
        worst = self.asking.worst()
        self.told.facts["slowest_answer"] = {
            "command": worst.command,
            "when": worst.when,
            "beyond_start_s": worst.beyond_s,
        }

    def _unkillable(self) -> dict[str, Any] | None:
        """What the supervisor says, once it says so."""
        verdict = (self.mirror.read(SUPERVISOR) or {}).get("verdict") or {}
        return dict(verdict) if verdict.get("verdict") == "unkillable" else None

    def _check_named(self, name: str, sentence: str, row: int | None) -> None:
        """Whoever reads it in the morning must know which disk to mend, and what was being done to it."""
        places = [f"the storage of {place}" for place in (self.stage.out_dir, self.stage.run_dir)]
        self.told.must(any(place in sentence for place in places), f"{name}: no storage is named: {sentence}")
        self.told.must(row is not None and f"row {row}, " in sentence, f"{name}: row {row} is not named: {sentence}")

    def _check_stall(self, name: str, stall: Event, frozen: float) -> None:
        told, detail = self.told, stall.detail
        late = detail["silent_s"] - STALL
        told.must(detail["verdict"] == "storage_stalled", f"{name}: the verdict is {detail['verdict']}")
        told.must(late <= 2 * POLL + SLACK, f"{name}: told {late:.1f} s after the time-out")
        told.must(any(": D " in thread for thread in detail["threads"]), f"{name}: no thread in D: {detail['threads']}")
        told.must(stall.row is not None and stall.row >= VERIFIED, f"{name}: row {stall.row} is named")
        self._check_named(name, detail["sentence"], stall.row)
        told.facts[name] = {"detected_s": round(time.monotonic() - frozen, 1), "silent_s": detail["silent_s"]}
        told.facts[name] |= {"thread": detail["threads"][0] if detail["threads"] else "", "row": stall.row}

    def _check_meanwhile(self, name: str, worker: int) -> None:
        """No second worker, the server lives, shared memory stays within its budget, the supervisor beats."""
        told = self.told
        told.must("D" in thread_states(worker), f"{name}: the stuck worker is gone")
        told.must(set(self.workers()) <= {worker}, f"{name}: workers {self.workers()} beside {worker}")
        told.must(self.engine.is_up, f"{name}: the server does not answer")
        used = sum(path.stat().st_size for path in self.stage.root.rglob("*") if path.is_file())
        told.must(used <= BUDGET, f"{name}: {used:,} bytes in the hand-over root")
        beat = (self.mirror.read(SUPERVISOR) or {}).get("monotonic", 0.0)
        told.must(
            time.monotonic() - beat < 3.0, f"{name}: the supervisor's beat is {time.monotonic() - beat:.1f} s old"
        )

    def judge(self) -> None:
        """Drain, then hold the journal, the files and the server's own list of requests against each other."""
        told, child = self.told, self.supervisor
        assert child is not None
        child.send_signal(signal.SIGINT)
        told.must(ended(child) == 130, f"drained with {child.returncode}: {words(child)}")
        with Journal(self.paths.journal) as journal:
            counts = {str(state): count.rows for state, count in journal.counts().items() if count.rows}
            fresh = [r["row"] for r in journal.rows_in(State.VERIFIED) if r["row"] >= VERIFIED]
            struck = [r["row"] for r in journal.rows_of(range(VERIFIED, ROWS)) if r["strikes"]]
            kinds = Counter(event.kind for _, event in journal.events(most=100_000))
        sent = Counter(rid.row for text in self.stage.received() if (rid := Rid.of(text)) is not None)
        on_disk = Counter(int(p.stem.removeprefix("data_")) for p in self.stage.out_dir.rglob("*.ckpt"))
        lost = ROWS - counts.get("verified", 0) - counts.get("pending", 0)
        lost += len(set(fresh) - on_disk.keys())
        facts: dict[str, Any] = {
            "rows": ROWS,
            "verified_before": VERIFIED,
            "verified_since": len(fresh),
            "lost": lost,
            "duplicated": sum(n - 1 for n in on_disk.values()) + len(on_disk.keys() - set(fresh)),
            "resent_needlessly": sum(n - 1 for n in sent.values()),
            "struck": len(struck),
        }
        for name in ("lost", "duplicated", "resent_needlessly", "struck"):
            told.must(facts[name] == 0, f"{name}: {facts[name]} ({counts})")
        for kind in ("stall", "worker_ending", "worker_unkillable", "gate_closed", "recovered"):
            told.must(kinds[kind] >= 1, f"the journal holds no event {kind}: {dict(kinds)}")
        told.must(kinds["stall"] == 2, f"{kinds['stall']} stalls were told: two, whoever supervised")
        heard = Counter(json.loads(line)["event"] for line in (self.stage.base / "told").read_text().splitlines())
        told.must(heard["stall"] == 2, f"somebody was told: {dict(heard)}")
        told.must(heard["recovery"] == 2, f"somebody was told: {dict(heard)}")
        self.told.facts = facts | self.told.facts


@contextlib.contextmanager
def scene(model: Path, base: Path | None = None) -> Iterator[tuple[Incident, Disk, Disk]]:
    """Two disks, all the prompts, an engine; everything is gone after the block."""
    with tempfile.TemporaryDirectory(prefix="hsj-incident-", dir=base) as folder:
        place = Path(folder)
        with ext4(place / "a", 256) as run_disk, ext4(place / "b", 1024) as out_disk:
            prompts = random_prompts(ROWS, random.Random(22_391), 3, 12)
            with Stage.make(model, prompts, place) as stage:
                (run_disk.mount / "run").mkdir()
                stage.run_dir.symlink_to(run_disk.mount / "run")
                (out_disk.mount / "out").mkdir()
                stage.out_dir.symlink_to(out_disk.mount / "out")
                engine = DrillEngine(stage, 0.1)
                engine.start()
                engine.wait()
                incident = Incident(stage, engine, Told())
                yield incident, run_disk, out_disk


def incident_drill(model: Path, base: Path | None = None) -> Told:
    """Replay it; what was found."""
    with scene(model, base) as (incident, run_disk, out_disk):
        incident.prepare()
        incident.start()
        incident.freeze("output", out_disk)
        incident.freeze("whole", run_disk, out_disk)
        incident.judge()
        return incident.told
