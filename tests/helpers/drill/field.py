"""Faults on real processes: a run of ``hsjournal`` that is attached to a live tiny engine, and what befalls both."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hsjournal.events import Event
from hsjournal.mirror import Mirror
from hsjournal.watch.verdict import Verdict
from tests.helpers.drill.attached import Attached, Served
from tests.helpers.drill.knobs import LATE_S, STORAGE, Knobs, WorkerKnobs
from tests.helpers.drill.report import say
from tests.helpers.drill.spoiling import cut_short, delete
from tests.helpers.drill.stage import Stage, child_of, ended, kill_and_wait, state_of, wait_for, words
from tests.helpers.drill.stall_book import Stalls
from tests.helpers.drill.truth import Findings, Truth
from tests.helpers.mounts import Disk, fill

STALL_S, POLL_S = 5.0, 0.5
SLACK_S = 4.0
"""Beside the time-out and two polls: what a machine may need that does other things too."""
SHORT_S = 1.0
OPTIONS = (
    "--stall-timeout", str(STALL_S), "--poll-interval", str(POLL_S), "--retry-pause", "0.3", "--sample-timeout", "5",
    "--connect-timeout", "5", "--pause-limit", "180", "--max-strikes", "30", "--max-in-flight", "4",
)  # fmt: skip
SHORTEST = 30
"""Tokens of the shortest row: a longer sample is given more time, and all are to have about the same."""


class Field:
    """One run under faults.

    Args:
        served: the engine.
        rows: of the run.
        draw: the seed's random numbers.
        base: where its folders are made.
        knobs: of the engine.
        disk: the file system of its own that ``base`` lies on.
    """

    def __init__(
        self, served: Served, rows: int, draw: random.Random, base: Path, knobs: Knobs, disk: Disk | None = None
    ) -> None:
        self.served, self.draw, self.disk, self.knobs = served, draw, disk, knobs
        self.run = Attached(served, rows, base, SHORTEST)
        self.stalls = Stalls()
        self.findings = Findings()
        self._worker_knobs = WorkerKnobs(self.run.stage.base)
        knobs.pace.touch()
        self.child = self._start()
        self.run.wait_files(2, self.child, 120)

    @property
    def stage(self) -> Stage:
        """Where it plays."""
        return self.run.stage

    @property
    def truth(self) -> Truth:
        """What must be true."""
        return self.run.truth

    @property
    def is_over(self) -> bool:
        """Whether so few rows are left that a fault might find none."""
        return self.child.poll() is not None or self.truth.finished() > len(self.stage.prompts) - 16

    def _start(self) -> subprocess.Popen[bytes]:
        return self.run.run(*OPTIONS, faults=self._worker_knobs.faults)

    @property
    def worker(self) -> int:
        """Of the run; waited for."""
        return int(wait_for(lambda: child_of(self.child.pid, "hsjournal.worker"), 60, "a worker is there"))

    @property
    def _engine(self) -> int:
        process = self.served.engine.process
        assert process is not None
        return process.pid

    # faults; each returns when rows come through again, and False when there was nothing for it to befall

    def kill_worker(self) -> None:
        """SIGKILL."""
        kill_and_wait(self.worker)
        self.truth.look()
        self._goes_on()

    def kill_supervisor(self) -> None:
        """SIGKILL, and a resume."""
        worker = child_of(self.child.pid, "hsjournal.worker")
        kill_and_wait(self.child.pid)
        if worker is not None:
            wait_for(lambda: state_of(worker) in "ZX", 15, "the worker ends with its supervisor")
        self.truth.look()
        self.child = self._start()
        self._goes_on()

    def restart_server(self) -> None:
        """SIGKILL, and another life at the same address."""
        with self._may_stall():
            kill_and_wait(self._engine)
            self.served.engine.start(self.knobs.faults)
            self.served.engine.wait()
            self._is_over()

    def stop_worker_shortly(self) -> None:
        """SIGSTOP, and SIGCONT long before it is a stall."""
        self._hold(self.worker, SHORT_S)

    def stop_worker(self) -> None:
        """SIGSTOP for good: it must be seen, and another one started."""
        worker = self.worker
        with self._may_stall():
            os.kill(worker, signal.SIGSTOP)
            self._is_called("a stopped worker", {Verdict.WORKER_STOPPED}, "is stopped")
            wait_for(lambda: state_of(worker) in "ZX", 30, "the stopped worker is ended")
            self._is_over()

    def stop_server_shortly(self) -> None:
        """As a long garbage collection."""
        self._hold(self._engine, SHORT_S)

    def stop_server(self) -> None:
        """It takes connections, and answers nothing."""
        with self._may_stall():
            os.kill(self._engine, signal.SIGSTOP)
            try:
                self._is_called(
                    "a stopped server", {Verdict.SERVER_STALLED, Verdict.SERVER_DOWN}, self.served.engine.url
                )
            finally:
                os.kill(self._engine, signal.SIGCONT)
            self._is_over()

    def stuck_thread(self) -> bool:
        """A thread that waits in the kernel, D, until the worker is killed."""
        with self._may_stall():
            self._worker_knobs.stuck.touch()
            fired = self._until(lambda: not self._worker_knobs.stuck.exists())
            self._worker_knobs.stuck.unlink(missing_ok=True)
            if fired:
                self._is_called("a thread in D", {Verdict.STORAGE_STALLED}, str(self.stage.out_dir), others_move_s=60.0)
            self._is_over()
        return fired

    def break_storage(self) -> bool:
        """Its disk answers with errors for a while: until the worker has said so, at least."""
        file, begin = self._worker_knobs.broken[self.draw.choice(sorted(STORAGE))], time.time()
        file.touch()
        fired = self._until(lambda: any(event.at >= begin for event in self.seen("paused")))
        time.sleep(SHORT_S)
        file.unlink()
        self._until(
            lambda: len(self.seen("resumed")) >= len(self.seen("paused"))
        )  # else the next fault finds it paused
        self._goes_on()
        return fired

    def slow_storage(self) -> None:
        """Every write takes long, and it is no stall."""
        self._worker_knobs.slow.touch()
        time.sleep(2 * SHORT_S)
        self._worker_knobs.slow.unlink()
        self._goes_on()

    def spoil_dump(self) -> bool:
        """A dump loses bytes before it is published: it must be refused, and sent again."""
        return self._touch_dump(cut_short)

    def delete_dump(self) -> bool:
        """Somebody deletes a complete dump."""
        return self._touch_dump(delete)

    def late_dumps(self) -> None:
        """Dumps that come after their requests were given up."""
        with self._may_stall():
            self.knobs.late.touch()
            time.sleep(SHORT_S)
            self.knobs.late.unlink()
            time.sleep(LATE_S)
            self._is_over()

    def freeze_shortly(self) -> None:
        """The disk hangs for a moment, as a flush does."""
        assert self.disk is not None
        with self.disk.frozen():
            time.sleep(SHORT_S)
        self._goes_on()

    def freeze(self) -> None:
        """The disk hangs: it must be called, and named; nothing kills the worker until the thaw."""
        assert self.disk is not None
        with self._may_stall():
            with self.disk.frozen():
                self._is_called("a frozen disk", {Verdict.STORAGE_STALLED}, str(self.stage.base))
            self._is_over()

    def fill_disk(self) -> None:
        """A really full disk."""
        assert self.disk is not None
        filler = fill(self.disk.mount, leave=8 << 10)
        time.sleep(2 * SHORT_S)
        filler.unlink()
        self._goes_on()

    # how

    def _hold(self, pid: int, seconds: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        self._goes_on()

    def _touch_dump(self, act: Callable[[Path, str], str]) -> bool:
        root, run_id, names = self.stage.root, self.truth.run_id, list[str]()

        def touched() -> bool:
            names.append(act(root, run_id))
            return bool(names[-1])

        fired = self._until(touched)
        self.truth.spoiled(names[-1])
        self._goes_on()
        return fired

    @staticmethod
    def _until(act: Callable[[], bool]) -> bool:
        """Whether it came true within ten seconds."""
        deadline = time.monotonic() + 10
        while not (fired := act()) and time.monotonic() < deadline:
            time.sleep(0.005)
        return fired

    @contextlib.contextmanager
    def _may_stall(self) -> Iterator[None]:
        begin = time.time()
        try:
            yield
        finally:
            self.stalls.allowed.append((begin, time.time()))

    def _is_called(self, what: str, wanted: set[str], named: str, others_move_s: float = 0.0) -> None:
        """The supervisor must call it a stall within the time-out and two polls, and what it is and where.

        Counted from now or, where other rows go on for a while, from the last one that moved.
        """
        begin, bound = time.time(), STALL_S + 2 * POLL_S + SLACK_S
        limit = bound + others_move_s
        while time.time() - begin < limit:
            if told := [event for event in self.seen("stall") if event.at >= begin]:
                took = min(time.time() - begin, told[0].detail["silent_s"]) if others_move_s else time.time() - begin
                self.stalls.called.append(took)
                if took > bound:
                    break
                self.stalls.judge(what, told[0], wanted, named)
                return
            time.sleep(0.05)
        self.stalls.missed.append(f"{what}: no stall within {limit:.1f} s; {words(self.child, 300)}")

    def _is_over(self) -> None:
        """Every stall that was called is over: the next one is another one."""
        wait_for(
            lambda: len(self.seen("recovered")) >= len(self.seen("stall")) or self.child.poll() is not None,
            120, f"it is over: {words(self.child)}",
        )  # fmt: skip
        self._goes_on()

    def seen(self, kind: str) -> list[Event]:
        """The events of a kind so far, as the mirror has them."""
        run_dir = os.fsencode(os.path.abspath(self.stage.run_dir))
        name = hashlib.sha256(run_dir).hexdigest()[:16]
        mirror = Mirror(self.stage.shm / f"hsjournal-{os.getuid()}" / name / "mirror")
        return [event for _, event in mirror.events() if event.kind == kind]

    def _goes_on(self) -> None:
        """Two more rows come through, or all are done."""
        before, rows = self.truth.finished(), len(self.stage.prompts)
        goal = min(rows, before + 2)
        wait_for(
            lambda: self.truth.finished() >= goal or self.child.poll() is not None,
            120,
            f"it goes on: {words(self.child)}",
        )

    def end(self) -> list[float]:
        """Without faults, and at full speed, to the end; when stalls were called in all."""
        self.knobs.pace.unlink()
        try:
            code = ended(self.child, 300)
        except AssertionError as error:
            self.findings.lost.append(str(error))
            return []
        if code != 0:
            say(f"it ended with {code}: {words(self.child, 400)}")
            again = self._start()
            if ended(again, 300) != 0:
                self.findings.lost.append(f"the last resume ended with {again.returncode}: {words(again)}")
        self.truth.judge(self.findings)
        run = self.truth.run_id
        self.findings.left_over += [str(p) for p in self.stage.root.iterdir() if run in p.name and not p.is_symlink()]
        self.findings.left_over += [
            str(p) for p in self.stage.out_dir.rglob("*") if p.is_file() and p.suffix != ".ckpt"
        ]
        return self.truth.times("stall")
