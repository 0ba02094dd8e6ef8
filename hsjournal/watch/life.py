"""One worker's life: started by exec, followed, watched, and ended when it stalls."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from hsjournal.events import Event
from hsjournal.mirror import SNAPSHOT, STDERR, STDERR_BEFORE
from hsjournal.watch.alarm import Alarm
from hsjournal.watch.children import exit_words, start
from hsjournal.watch.deeds import Deed, meaning
from hsjournal.watch.desk import DRAW_EVERY, Desk
from hsjournal.watch.escalation import Escalation, Step
from hsjournal.watch.server_care import ServerCare
from hsjournal.watch.verdict import Finding, Judge, Verdict
from hsjournal.watch.watcher import Watcher

HURRY = 5.0
"""Seconds that a worker may take after the second signal, and after SIGKILL."""


@dataclass(frozen=True, slots=True)
class End:
    """How a life ended.

    Args:
        returncode: of the worker; None when it is stuck in the kernel and was left behind.
        by_us: whether the supervisor ended it because of a stall.
    """

    returncode: int | None
    by_us: bool


@dataclass(frozen=True, slots=True)
class Watch:
    """Who watches it.

    Args:
        judge: keeps the marks over lives.
        watcher: makes the eyes for a worker: process number and epoch.
        alarm: told of each finding.
        care: restarts a server of our own.
        every: seconds between two looks.
        stuck: called with a sentence and the seconds since SIGKILL had no effect; may raise to give up.
    """

    judge: Judge
    watcher: Callable[[int, int], Watcher]
    alarm: Alarm
    care: ServerCare
    every: float
    stuck: Callable[[str, float], None]


class Life:
    """Runs one worker to its end.

    Args:
        command: its command line.
        lifeline: the descriptor that ends it with us.
        epoch: of it.
        desk: shows, records, and remembers signals.
        watch: what watches it.
        progressed: told how many rows are verified.
    """

    def __init__(
        self,
        command: list[str],
        lifeline: int,
        epoch: int,
        desk: Desk,
        watch: Watch,
        progressed: Callable[[int], None],
    ) -> None:
        self._desk, self._watch, self._epoch, self._progressed = desk, watch, epoch, progressed
        said = desk.mirror.folder / STDERR
        with contextlib.suppress(OSError):
            said.replace(desk.mirror.folder / STDERR_BEFORE)  # the next worker puts it into the log
        with said.open("wb") as errors:
            self.worker = start(command, lifeline=lifeline, stderr=errors)
        self._watcher = watch.watcher(self.worker.pid, epoch)
        self._next_look = time.monotonic() + watch.every
        self._ending: Escalation | None = None
        self._why: Finding | None = None
        self._obeyed = 0
        self._hurry: float | None = None
        self._finding: Finding | None = None

    def run(self) -> End:
        """Until the worker is reaped; or left behind, when a signal came and nothing can end it.

        Raises:
            GaveUpError: when the server died too often, or by the policy about stuck workers.
        """
        desk, worker = self._desk, self.worker
        desk.view.lives += 1
        desk.view.worker_pid = worker.pid
        desk.say("running", self._words())
        while worker.poll() is None and not self._is_left():
            self._obey()
            if self._watch.care.look():
                self._watch.judge.new_life(time.monotonic())
            self._follow()
            self._look()
            self._go_on_ending()
            time.sleep(DRAW_EVERY)
        self._follow()
        desk.view.worker_pid = None
        returncode = worker.poll()
        if self._ending is not None:
            self._ended(self._ending, returncode)
        return End(returncode, self._why is not None)

    def _words(self) -> str:
        return f"worker {self.worker.pid}, epoch {self._epoch}"

    def _follow(self) -> None:
        snapshot = self._desk.mirror.read(SNAPSHOT)
        if snapshot is not None and snapshot.get("epoch") == self._epoch:
            self._desk.view.snapshot = snapshot
            self._progressed(int(snapshot["counts"]["verified"]["rows"]) + int(snapshot.get("deferred", 0)))
        self._desk.draw()

    def _obey(self) -> None:
        """The first signal drains, the second stops now, and what does not stop is killed."""
        if len(self._desk.signals) > self._obeyed:
            self._obeyed += 1
            self.worker.terminate()
            self._desk.say("draining", "finishing what is in flight; Ctrl-C again stops now, nothing is lost")
            self._hurry = time.monotonic() + HURRY if self._obeyed > 1 else None
        elif self._hurry is not None and time.monotonic() > self._hurry and self._ending is None:
            self._ending = Escalation(self.worker, time.monotonic(), term_wait=0.0, kill_wait=HURRY)

    def _is_left(self) -> bool:
        """Whether we were asked to stop, and the worker does not die of anything."""
        return bool(self._desk.signals) and self._ending is not None and self._ending.at is Step.UNKILLABLE

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self._watch.every
        killed_at = self._ending.killed_at if self._ending is not None else None
        finding = self._watcher.judge(killed_at)
        if finding.verdict is Verdict.WORKER_DEAD:
            return  # it is reaped in a moment, and then spoken of
        self._finding = finding
        self._watch.alarm.see(finding, self._watch.judge.progress_at, self._epoch)
        if finding.overdue:
            way_out = meaning(finding.verdict).way_out
            self._desk.say("draining" if self._obeyed else "stalled", f"{finding.sentence}; {way_out}")
            self._act(finding)
        elif self._desk.view.stage == "stalled":
            self._desk.say("running", self._words())

    def _act(self, finding: Finding) -> None:
        match meaning(finding.verdict).deed:
            case Deed.END_WORKER if self._ending is None:
                self._why = finding
                limits = self._watch.judge.limits
                deaf = finding.verdict is Verdict.WORKER_STOPPED
                self._ending = Escalation(
                    self.worker, time.monotonic(), 0.0 if deaf else limits.kill_wait, limits.kill_wait
                )
                self._told(Step.TERM, finding) if not deaf else None
            case Deed.RESTART_SERVER if self._watch.care.restart(finding, self._epoch):
                self._watch.judge.new_life(time.monotonic())

    def _go_on_ending(self) -> None:
        ending = self._ending
        if ending is None:
            return
        before, now = ending.at, time.monotonic()
        if ending.step(now) is not before:
            self._told(ending.at, self._finding)
        if ending.at is Step.UNKILLABLE and ending.killed_at is not None and self._finding is not None:
            self._watch.stuck(self._finding.sentence, now - ending.killed_at)

    def _told(self, step: Step, finding: Finding | None) -> None:
        """Who ends it, why, and what was seen: an event at each step."""
        why = self._why
        facts = {
            "who": "supervisor",
            "step": step.value,
            "pid": self.worker.pid,
            "why": str(why.verdict) if why else "asked to stop twice",
            "threads": list(finding.threads) if finding else [],
        }
        kind = "worker_unkillable" if step is Step.UNKILLABLE else "worker_ending"
        self._desk.record(Event(kind, why.row if why else None, facts, epoch=self._epoch))

    def _ended(self, ending: Escalation, returncode: int | None) -> None:
        children = ending.close() if returncode is not None else []
        facts = {
            "who": "supervisor",
            "how": exit_words(returncode) if returncode is not None else "left behind: it waits in the kernel",
            "why": str(self._why.verdict) if self._why else "asked to stop twice",
            "after_step": ending.at.value,
            "children": children,
        }
        self._desk.record(Event("worker_ended", self._why.row if self._why else None, facts, epoch=self._epoch))


def end_now(worker: subprocess.Popen[bytes]) -> None:
    """On our own way out: SIGKILL, and a short wait."""
    if worker.poll() is None:
        worker.kill()
        try:
            worker.wait(HURRY)
        except subprocess.TimeoutExpired:
            return
