"""The eyes on the child that makes a new run ready: it says each step and reads prompts, or something holds it."""

from __future__ import annotations

import time
from dataclasses import replace

from hsjournal.config import Settings
from hsjournal.watch.alarm import Alarm
from hsjournal.watch.deeds import meaning
from hsjournal.watch.desk import Desk
from hsjournal.watch.gatekeeper import give_up_when_stuck
from hsjournal.watch.proc import look_at
from hsjournal.watch.verdict import Finding, Judge, Limits, Look, Verdict

IMPORTS_S = 60.0
"""It may take so long before its first word."""
_STEP_BYTES = 1 << 20
"""So much read or written is progress too: a pass over large prompts says nothing until it is through."""


class PreparationWatch:
    """Judges it as a worker is judged, but for what is done: nothing is ended, since nothing could take its place.

    Args:
        pid: of the child.
        settings: of this start.
        desk: shows it.
        alarm: raised when it does not move.
    """

    def __init__(self, pid: int, settings: Settings, desk: Desk, alarm: Alarm) -> None:
        self._pid, self._settings, self._desk, self._alarm = pid, settings, desk, alarm
        limits = Limits.of(settings.stall_timeout, settings.poll_interval)
        self._judge = Judge(replace(limits, start_wait=0.0), time.monotonic())
        self._imports_until = time.monotonic() + IMPORTS_S
        self._next, self._lines, self._step, self._is_told = 0.0, 0, "", False

    def heard(self, step: str | None) -> None:
        """A line came; ``step`` is what it says that is being done, None for any other line."""
        self._lines += 1
        if step is not None:
            self._step, self._is_told = step, False
            self._desk.say("preparing", step)

    def look(self) -> None:
        """One look, if it is time.

        Raises:
            GaveUpError: by policy, when the storage hangs for too long.
        """
        now = time.monotonic()
        process = look_at(self._pid)
        if now < self._next or process is None or (not self._lines and now < self._imports_until):
            return
        self._next = now + self._settings.poll_interval
        moved = (process.syscalls_read + process.syscalls_written) // _STEP_BYTES
        found = self._judge.judge(Look(now, process, {}, (), done=self._lines + moved))
        finding = self._in_words(found) if found.overdue else found
        self._alarm.see(finding, self._judge.progress_at, 0)
        if finding.overdue:
            self._is_told = True
            self._desk.say("preparing", f"{finding.sentence}; {meaning(finding.verdict).way_out}")
            if finding.verdict is Verdict.STORAGE_STALLED:
                give_up_when_stuck(self._settings, finding.silent_s, finding.sentence)
        elif self._is_told:
            self._is_told = False
            self._desk.say("preparing", self._step)

    def ended(self) -> None:
        """The run is ready: what held it is over."""
        self._alarm.finish("the run is ready")
        self._desk.view.verdict = None

    def _in_words(self, found: Finding) -> Finding:
        since = f"{self._step or 'starting to prepare the run'}: nothing has moved for {found.silent_s:.0f} s"
        if found.verdict is Verdict.STORAGE_STALLED:
            return replace(found, sentence=f"{since}: the storage hangs ({found.threads[0]})")
        held = "is stopped by a signal or a debugger" if found.verdict is Verdict.WORKER_STOPPED else "sleeps"
        said = f"{since}, and process {self._pid}, which prepares the run, {held}"
        return replace(found, verdict=Verdict.PREPARATION_STUCK, sentence=said)
