"""Waiting at the gate for the next worker: one child at a time, however long the storage hangs."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from hsjournal.config import RunPaths, Settings
from hsjournal.errors import ExitCode, GaveUpError, JournalLockedError, NoRoomError
from hsjournal.events import Event
from hsjournal.watch.alarm import Alarm
from hsjournal.watch.children import ChildError, DiedError, Patient, module
from hsjournal.watch.desk import DRAW_EVERY, Desk
from hsjournal.watch.leftover import Leftover, rows_of
from hsjournal.watch.lives import Lives
from hsjournal.watch.pauses import of_trouble
from hsjournal.watch.places import Places
from hsjournal.watch.proc import Process, look_at
from hsjournal.watch.verdict import Finding, Limits, Verdict, unkillable, words

WRITING = "writing to "
"""The gate's step at the journal begins so."""
BUSY_S = 40.0
"""SQLite waits 30 s for another writer, then the child answers."""
PATIENCE_S = 3.0
"""Seconds after which it is told that the gate is still closed."""


@dataclass(frozen=True, slots=True)
class Passed:
    """The gate is open.

    Args:
        epoch: of the next worker.
        in_flight: rows that the last one left.
        blamed: strikes of those that its crash is held against.
    """

    epoch: int
    in_flight: list[int]
    blamed: dict[int, int]


class Gatekeeper:
    """Asks :mod:`hsjournal.journal.gate` until it opens; says why it doesn't.

    Args:
        paths: of the run.
        places: where the run keeps its things.
        settings: of this start.
        desk: shows and records.
        alarm: raised when it takes long.
        lives: bounds how often the gate's child may die.
        lifeline: descriptor that ends the child with us.
    """

    def __init__(
        self, paths: RunPaths, places: Places, settings: Settings, desk: Desk, alarm: Alarm, lives: Lives, lifeline: int
    ) -> None:
        self._paths, self._places, self._settings = paths, places, settings
        self._desk, self._alarm, self._lives, self._lifeline = desk, alarm, lives, lifeline
        self._told: list[str] = []
        self._stuck_since: float | None = None
        self._closed_since: float | None = None
        self._kill_wait = Limits.of(settings.stall_timeout, settings.poll_interval).kill_wait
        self._leftover = Leftover(self._kill_wait)

    def wait_open(self, after: str) -> Passed:
        """Prove the storage and get a new epoch; waits while the storage hangs or a worker still lives.

        Args:
            after: ``crash`` or ``end``: how the last worker went.

        Raises:
            NoRoomError, JournalLockedError: when it stayed closed past the pause limit.
            GaveUpError: when the storage hung past the limit for that, if one is set.
            ChildError: when there is nothing to wait for.
            StoppedError: when a signal comes.
        """
        self._told, self._stuck_since, self._closed_since = [], None, None
        self._leftover = Leftover(self._kill_wait)
        command = module(
            "hsjournal.journal.gate", str(self._paths.run_dir), self._places.out_dir,
            "--after", after, "--max-strikes", str(self._settings.max_strikes), "--parent-fd", str(self._lifeline),
        )  # fmt: skip
        while True:
            try:
                answer = self._ask(command)
            except DiedError as error:  # as with a worker: once is nothing, time and again is too much
                pause = self._lives.died()
                self._desk.record(Event("gate_died", None, {"why": str(error), "next_in_s": pause}))
                if pause is None:
                    raise
                self._desk.sleep(pause)
            except ChildError as error:
                if error.exit_code not in (ExitCode.LOCKED, ExitCode.NO_ROOM):
                    raise
                self._closed(error)
                self._desk.sleep(self._settings.retry_pause)
            else:
                if self._told:
                    self._desk.record(Event("gate_open", None, {"after": self._told[-1]}))
                blamed = {int(row): int(strikes) for row, strikes in answer["blamed"].items()}
                return Passed(int(answer["epoch"]), list(answer["in_flight"]), blamed)

    def _ask(self, command: list[str]) -> dict[str, Any]:
        """One child to its end; as long as it hangs in the kernel, no second one is started beside it."""
        child = Patient(command, self._lifeline)
        try:
            while (answer := child.look()) is None:
                if child.step_age > PATIENCE_S:
                    self._hangs(child)
                self._desk.sleep(DRAW_EVERY / 5 if child.step_age < PATIENCE_S else DRAW_EVERY)
            return answer
        finally:
            child.close()

    def _hangs(self, child: Patient) -> None:
        seen = look_at(child.process.pid)
        if seen is None or not child.step:  # ended just now, or not yet begun on a busy machine
            return
        if not seen.stuck and child.step.startswith(WRITING) and child.step_age < BUSY_S:
            self._tell(f"{child.step} takes long: another program has the journal open", None)
            return
        where = words(seen.stuck[0]) if seen.stuck else "it sleeps"
        said = f"{child.step} for {child.step_age:.0f} s: the storage hangs ({where}); no worker is started before it answers"
        self._stuck(Finding(Verdict.STORAGE_STALLED, said, child.step_age, threads=tuple(map(words, seen.stuck))))

    def _closed(self, error: ChildError) -> None:
        """It answered, and said no."""
        now = time.monotonic()
        holder = self._holder(error.answer.get("holder"))
        if self._leftover.is_unkillable(holder, now) and holder is not None:
            rows = rows_of(self._desk.mirror, holder)
            self._stuck(unkillable(holder, now - (self._stuck_since or now), rows, self._places))
            return
        self._stuck_since = None
        self._closed_since = since = self._closed_since if self._closed_since is not None else now
        if self._leftover.is_doubtful and now - since < 2 * self._kill_wait:  # it may be ending just now
            self._desk.say("waiting", str(error))
            return
        said, locked = str(error), error.exit_code is ExitCode.LOCKED
        verdict = Verdict.WAITING if locked else of_trouble(error.answer.get("trouble"))
        self._tell(said, Finding(verdict, said, now - since, overdue=now - since > self._settings.stall_timeout))
        if now - since > self._settings.pause_limit:
            kind = JournalLockedError if locked else NoRoomError
            raise kind(f"no worker could be started for {self._settings.pause_limit:.0f} s: {said}") from None

    def _holder(self, named: dict[str, Any] | None) -> Process | None:
        return look_at(int(named["pid"]), float(named["create_time"])) if named else None

    def _stuck(self, finding: Finding) -> None:
        """The storage hangs, and so does a child or a worker of an earlier life; that is waited for."""
        now = time.monotonic()
        self._stuck_since = since = self._stuck_since if self._stuck_since is not None else now
        self._closed_since = None
        overdue = now - since > self._settings.stall_timeout or finding.verdict is Verdict.UNKILLABLE
        self._tell(finding.sentence, replace(finding, silent_s=now - since, overdue=overdue))
        give_up_when_stuck(self._settings, now - since, finding.sentence)

    def _tell(self, sentence: str, finding: Finding | None) -> None:
        kind = str(finding.verdict) if finding else sentence
        if kind not in self._told:  # each once, also when two of them take turns
            self._told.append(kind)
            threads = list(finding.threads) if finding else []
            self._desk.record(Event("gate_closed", None, {"why": sentence, "verdict": kind, "threads": threads}))
        if finding is not None:
            self._alarm.see(finding, 0.0, 0)
        self._desk.say("waiting", sentence)


def give_up_when_stuck(settings: Settings, seconds: float, sentence: str) -> None:
    """By policy: end when the storage has hung for too long.

    Raises:
        GaveUpError: past the limit, if there is one.
    """
    if 0 < settings.stuck_limit < seconds:
        raise GaveUpError(
            f"the storage did not come back within {settings.stuck_limit:.0f} s: {sentence}",
            remedy="Mend it, then `hsjournal resume`; nothing is lost.",
        )
