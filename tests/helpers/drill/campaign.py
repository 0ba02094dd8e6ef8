"""N kills at random moments and at every named point, against worker, supervisor, server or all, then a last resume."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

from hsjournal.faults import POINTS
from tests.helpers.drill.report import Report, say
from tests.helpers.drill.stage import (
    DrillEngine,
    Stage,
    child_of,
    kill_and_wait,
    state_of,
    wait_for,
    words,
)
from tests.helpers.drill.truth import Truth

ENGINE, WORKER, PREPARE, GATE = (
    "hsjournal.capture.embedded",
    "hsjournal.worker",
    "hsjournal.prepare",
    "hsjournal.journal.gate",
)
SERVER_POINTS = tuple(p for p in POINTS if p.startswith("capture."))
PREPARE_POINTS = ("migrate.step", "ingest.batch", "prepare.finishing")
PACE = 0.05
OPTIONS = (
    "--retry-pause", "0.3", "--pause-limit", "180", "--sample-timeout", "60", "--connect-timeout", "5", "--plain",
)  # fmt: skip
FINAL_TIMEOUT = 300.0


class Campaign:
    """One run directory under fire.

    Args:
        stage: fresh; its prompts are the rows.
        draw: the seed's random numbers.
        kills: how many.
        points: which named points must fire, each once.
        embedded: whether the engine is the supervisor's child, else the run is attached to one of the drill's.
        report: kills and findings are added to it.
    """

    def __init__(
        self, stage: Stage, draw: random.Random, kills: int, points: list[str], *, embedded: bool, report: Report
    ) -> None:
        self.stage, self.draw, self.report = stage, draw, report
        self.truth = Truth(stage)
        self.findings = report.findings
        self._left, self.wanted = kills, list(points)
        self._armed: dict[str, Path] = {}
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._early = 0
        self._done = False
        self._engine = None if embedded else DrillEngine(stage, PACE)

    def run(self) -> int:
        """Fire until all kills are done or all rows are, resume a last time, judge; how many kills are left."""
        self.truth.seed_foreign()
        if self._engine is not None:
            self._await_engine()
        while self._left > 0 and not self._done:
            self._one_supervisor()
        self._disarm()
        self._finish()
        self.truth.judge(self.findings)
        self.report.struck += len(self.truth.struck())
        self._end_engine()
        self.truth.check_left_over(self.findings)
        self.report.rows += len(self.stage.prompts)
        return self._left

    # one life of a supervisor

    def _one_supervisor(self) -> None:
        supervisor = self._supervisor = self._start()
        until = self.draw.choice((2, 3, 5, 8)) if self._engine is not None else 3
        for _ in range(until):
            if self._left <= 0 or not self._fire(supervisor):
                break
        if supervisor.poll() is None and self._left > 0:
            self._strike("supervisor", supervisor)
        elif supervisor.poll() is None:
            self._stop(supervisor)
        elif supervisor.returncode >= 0:
            self._ended(supervisor)
        self._take_fired()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._engine is not None:  # a resume without a server is refused at once; that is another test's matter
            self._await_engine()
        known = (self.stage.run_dir / "manifest.toml").exists()
        if known:
            self.truth.seed_links()
        self.truth.look()
        flight, threads = self.draw.choice((1, 2, 4, 8, 16, 32)), self.draw.choice((1, 2, 3))
        arguments = ["resume" if known and self.draw.random() < 0.7 else "run", str(self.stage.run_dir), *OPTIONS]
        arguments += ["--max-in-flight", str(flight), "--sink-threads", str(threads)]
        if not known:
            arguments += [
                "--prompts",
                str(self.stage.prompts_file),
                "--model",
                str(self.stage.model),
                "--out",
                str(self.stage.out_dir),
            ]
            arguments += [
                "--handover-root",
                str(self.stage.root),
                *(("--server", self._engine.url) if self._engine else ("--dtype", "float32")),
            ]
        wanted = (
            [p for p in self.wanted if (p in PREPARE_POINTS) == (not known)]
            if self._engine is not None or known
            else list(self.wanted)
        )
        if self._engine is not None:
            wanted = [p for p in wanted if p not in SERVER_POINTS]
        wanted.sort(key=lambda p: p != "migrate.step")  # a journal is made only once
        faults = self._arm(wanted[: 1 if not known else 3], passages=2 if known else 1)
        if self._engine is None:
            faults = f"capture.publishing=delay:{PACE}; {faults}"
        return self.stage.hsjournal(*arguments, HSJOURNAL_FAULTS=faults)

    def _fire(self, supervisor: subprocess.Popen[bytes]) -> bool:
        """One kill, unless an armed point comes first; False when the supervisor is gone."""
        target = self._choose()
        early = self.draw.random() < 0.3 and self._early < 2
        at = time.monotonic() + self.draw.uniform(0.0, 3.0)
        share = max(1, (len(self.stage.prompts) - self.truth.finished()) // (self._left + 4))
        goal = self.truth.finished() + self.draw.randint(0, 2 * share)
        progressed = False
        while True:
            if self._take_fired():
                return supervisor.poll() is None
            if supervisor.poll() is not None:
                return False
            if (
                self._engine is not None
                and self._engine.process is not None
                and self._engine.process.poll() is not None
            ):
                self._start_engine()
            now = time.monotonic()
            if early and now >= at:
                break
            if not early and not progressed and self.truth.finished() >= goal:
                progressed, at = True, now + self.draw.uniform(0.0, 0.3)
            if progressed and now >= at:
                break
            time.sleep(0.01)
        self._early = self._early + 1 if early else 0
        self._strike(target, supervisor)
        return supervisor.poll() is None

    def _choose(self) -> str:
        if self._engine is None:
            owed = [target for target in ("all", "server") if not self.report.targets[target]]
            if owed:  # only this lane has a server that the supervisor must start again
                return owed[0]
            return self.draw.choices(("worker", "server", "supervisor", "all"), (4, 3, 2, 2))[0]
        return self.draw.choices(("worker", "gate", "server", "supervisor", "all"), (12, 1, 1, 3, 0.5))[0]

    def _strike(self, target: str, supervisor: subprocess.Popen[bytes]) -> None:
        """SIGKILL; the processes that must end by themselves are given ten seconds."""
        pid = supervisor.pid
        worker, prepare, gate = (child_of(pid, name) for name in (WORKER, PREPARE, GATE))
        engine = (
            child_of(pid, ENGINE)
            if self._engine is None
            else self._engine.process.pid
            if self._engine.process
            else None
        )
        aims: dict[str, list[int | None]] = {
            "worker": [worker or prepare],
            "gate": [gate or worker],
            "server": [engine],
            "supervisor": [pid],
            "all": [pid, worker or prepare, engine],
        }
        victims = [p for p in aims[target] if p is not None and state_of(p) not in "ZX"]
        if not victims:
            return
        target = "worker" if target == "gate" and gate is None else target
        kill_and_wait(*victims)
        if target in ("supervisor", "all"):
            supervisor.wait(20)
            orphans = [p for p in (worker, prepare, gate, engine if self._engine is None else None) if p is not None]
            try:
                wait_for(lambda: all(state_of(p) in "ZX" for p in orphans), 10, "orphans end by themselves")
            except AssertionError:
                self.findings.left_over.append(f"of {orphans} some outlived their supervisor: {self.stage.processes()}")
        self._count(target)
        if target in ("server", "all") and self._engine is not None:
            self._start_engine()

    def _ended(self, supervisor: subprocess.Popen[bytes]) -> None:
        """The supervisor ended by itself: only because something under it was killed, or because all is done."""
        code = supervisor.wait(30)
        rows = len(self.stage.prompts)
        if code == 0 and self.truth.finished() == rows:
            say(f"all {rows} rows are done and {self._left} kills are left")
            self._done = True
        elif code not in (1, 4, 13):
            self.findings.wrong.append(f"the supervisor ended with {code}: {words(supervisor)}")
        else:
            say(f"supervisor ended with {code}: {words(supervisor, 300).strip().splitlines()[-1:]}")

    # named points

    def _arm(self, points: list[str], passages: int) -> str:
        for point in points:
            self._armed[point] = self.stage.fault(point)
        return "; ".join(f"{p}=kill@{self.draw.randint(1, passages)},once:{self._armed[p]}" for p in points)

    def _take_fired(self) -> int:
        """Count the armed points whose file is gone: each killed a process. How many there were."""
        fired = [point for point, file in self._armed.items() if not file.exists()]
        for point in fired:
            del self._armed[point]
            self.wanted.remove(point)
            self.report.points[point] += 1
            self._count(f"at {point}")
        return len(fired)

    def _disarm(self) -> None:
        self._take_fired()
        for file in self._armed.values():
            file.unlink(missing_ok=True)
        self._armed.clear()

    def _count(self, what: str) -> None:
        self._left -= 1
        self.report.kills += 1
        self.report.targets[what.split(maxsplit=1)[0]] += 1
        self.truth.look()
        say(
            f"{self.report.name}: kill {self.report.kills}: {what}; {self.truth.finished()} of {len(self.stage.prompts)} files, {len(self.wanted)} points to go"
        )

    # the engine, and the end

    def _start_engine(self) -> None:
        assert self._engine is not None
        self._engine.start(self._arm([p for p in self.wanted if p in SERVER_POINTS][:1], passages=6))

    def _await_engine(self) -> None:
        """Until the drill's engine answers; one that an armed point killed is started again."""
        assert self._engine is not None
        while not self._engine.is_up:
            self._take_fired()
            if self._engine.process is None or self._engine.process.poll() is not None:
                self._start_engine()
            time.sleep(0.05)

    def _end_engine(self) -> None:
        if self._engine is not None and self._engine.process is not None:
            self._engine.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._engine.process.wait(20)

    def _stop(self, supervisor: subprocess.Popen[bytes]) -> None:
        """Stop at once, as a second Ctrl-C does."""
        for _ in range(2):
            supervisor.send_signal(signal.SIGINT)
            time.sleep(0.5)
        try:
            supervisor.wait(60)
        except subprocess.TimeoutExpired:
            self.findings.wrong.append(f"two Ctrl-C did not stop it within 60 s: {words(supervisor)}")
            kill_and_wait(supervisor.pid)

    def _finish(self) -> None:
        """The last resume, without faults; with an engine whose pace is its own."""
        if self._engine is not None:
            self._await_engine()
        self.truth.look()
        last = self.stage.hsjournal(
            "run" if not (self.stage.run_dir / "manifest.toml").exists() else "resume",
            str(self.stage.run_dir),
            *OPTIONS,
        )
        try:
            code = last.wait(FINAL_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.kill(last.pid, signal.SIGKILL)
            code = -9
        if code != 0:
            self.findings.lost.append(f"the last resume ended with {code}: {words(last)}")
