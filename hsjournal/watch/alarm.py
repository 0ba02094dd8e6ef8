"""One alarm for a stall and one line for its end, however often it is looked at: events, notifications, the view."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from hsjournal.events import Event
from hsjournal.watch.deeds import meaning
from hsjournal.watch.desk import Desk
from hsjournal.watch.notify import Notifier
from hsjournal.watch.verdict import Finding, Verdict

ALARM = "alarm.json"
"""In the mirror while a stall was told of and is not over: since when (monotonic seconds), and its verdict."""


class Alarm:
    """Raised by the first overdue finding, kept up over workers' and supervisors' lives, ended by progress alone.

    Args:
        desk: keeps events and shows the verdict.
        notifier: tells somebody.
    """

    def __init__(self, desk: Desk, notifier: Notifier) -> None:
        self._desk, self._notifier = desk, notifier
        self._since: float | None = None
        self._heard = 0.0
        self._verdict: Verdict | None = None
        self._is_kept = False

    @property
    def is_on(self) -> bool:
        """Whether a stall was told of and is not over yet."""
        return self._since is not None

    def take_over(self) -> None:
        """Go on with the alarm of a supervisor that is gone: its stall was told of, and may be over by now."""
        told, now = self._desk.mirror.read(ALARM) or {}, time.monotonic()
        with contextlib.suppress(KeyError, TypeError, ValueError):
            since, verdict = float(told["since"]), Verdict(told["verdict"])
            if since <= now:  # else of another boot of the machine
                self._since, self._verdict, self._heard, self._is_kept = since, verdict, now, True

    def forget(self) -> None:
        """The run gives up, which is told: whoever starts it again is told of its next stall."""
        self._drop()

    def see(self, finding: Finding, progress_at: float, epoch: int) -> None:
        """Take a finding.

        Args:
            finding: of one look.
            progress_at: when a row last passed its mark, monotonic seconds.
            epoch: of the worker that was looked at.
        """
        self._desk.view.verdict = _shown(finding)
        if finding.overdue:
            self._raise(finding, epoch)
        elif self._since is not None and progress_at > self._heard:
            self._end(finding.sentence)

    def finish(self, sentence: str) -> None:
        """The run came to a good end: a stall is over by that."""
        if self._since is not None:
            self._end(sentence)

    def _raise(self, finding: Finding, epoch: int) -> None:
        if finding.verdict is self._verdict:
            return
        began = self._since is None
        self._verdict = finding.verdict
        facts = _facts(finding)
        self._desk.record(Event("stall" if began else "stall_verdict", finding.row, facts, epoch=epoch))
        if began:
            self._since = self._heard = time.monotonic()
        self._keep()
        if began:
            self._notifier.tell("stall", row=finding.row, **facts)

    def _end(self, sentence: str) -> None:
        assert self._since is not None
        facts = {
            "after_s": round(time.monotonic() - self._since, 1),
            "verdict": str(self._verdict),
            "sentence": sentence,
        }
        self._since, self._verdict = None, None
        self._keep()
        self._desk.record(Event("recovered", None, facts))
        self._notifier.tell("recovery", **facts)

    def _keep(self) -> None:
        """For the next supervisor; the mirror of a run that is not ours is left alone."""
        if self._since is not None and self._desk.owns_run:
            self._is_kept = self._desk.mirror.write(ALARM, {"since": self._since, "verdict": self._verdict})
        else:
            self._drop()

    def _drop(self) -> None:
        if self._is_kept:
            self._is_kept = not self._desk.mirror.write(ALARM, {})


def _facts(finding: Finding) -> dict[str, Any]:
    return {
        "verdict": str(finding.verdict),
        "sentence": finding.sentence,
        "way_out": meaning(finding.verdict).way_out,
        "silent_s": round(finding.silent_s, 1),
        "threads": list(finding.threads),
    }


def _shown(finding: Finding) -> dict[str, Any]:
    return _facts(finding) | {"row": finding.row, "overdue": finding.overdue, "at": time.time()}
