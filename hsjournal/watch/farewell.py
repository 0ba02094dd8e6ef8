"""How a supervisor takes its leave: what it tells of its end, to whom, and what it leaves for those who ask later."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from hsjournal.config import RunPaths
from hsjournal.errors import ExitCode, HsjournalError
from hsjournal.events import Event
from hsjournal.mirror import SUPERVISOR
from hsjournal.watch.alarm import Alarm
from hsjournal.watch.children import ask, module
from hsjournal.watch.desk import Desk
from hsjournal.watch.notify import Notifier
from hsjournal.watch.presence import ENDED, Ending
from hsjournal.watch.verdict import Verdict

LAST_WORD_DEADLINE = 10.0
"""Seconds for the last events to get into the journal."""


class Farewell:
    """Knows the run's end once it has come.

    Args:
        paths: of the run.
        out_dir: the output folder.
        desk: keeps events.
        alarm: is over by a good end.
        notifier: tells somebody.
    """

    def __init__(self, paths: RunPaths, out_dir: Path, desk: Desk, alarm: Alarm, notifier: Notifier) -> None:
        self._paths, self._out_dir = paths, out_dir
        self._desk, self._alarm, self._notifier = desk, alarm, notifier
        self._ending = Ending.by_error(HsjournalError("an unforeseen error"), paths.run_dir)

    def by_code(self, code: ExitCode) -> None:
        """Every row has ended, or a signal asked for the end."""
        asked = signal.Signals(self._desk.signals[0]).name if self._desk.signals else "itself"
        self._ending = Ending.by_code(code, asked, self._paths.run_dir)
        if code in (ExitCode.DONE, ExitCode.FAILED_SAMPLES):
            words = "every row has ended" + (", some of them failed" if code is ExitCode.FAILED_SAMPLES else "")
            self._alarm.finish(words)
            self._notifier.tell("finished", sentence=words, exit_code=int(code), counts=self._counts())

    def by_error(self, error: HsjournalError) -> None:
        """The run gives up."""
        self._ending = Ending.by_error(error, self._paths.run_dir)
        if not self._desk.owns_run:
            return
        facts = {
            "verdict": self._verdict(),
            "sentence": str(error),
            "exit_code": int(error.exit_code),
            "counts": self._counts(),
        }
        self._desk.record(Event("gave_up", None, facts))
        self._alarm.forget()
        self._notifier.tell("gave_up", **facts)

    def leave(self) -> None:
        """Put the end where it can be asked for: in the mirror, and in the journal if that answers in time."""
        view = self._desk.view
        self._desk.record(Event(ENDED, None, self._ending.facts()))
        with contextlib.suppress(HsjournalError):
            ask(
                module("hsjournal.journal.gate", str(self._paths.run_dir), str(self._out_dir), "--events-only"),
                2.0 if self._alarm.is_on else LAST_WORD_DEADLINE,
            )
        named = {"run_dir": view.run_dir, "out_dir": view.out_dir, "server": view.server, "lives": view.lives}
        self._desk.mirror.write(SUPERVISOR, named | self._ending.facts())

    def _verdict(self) -> str | None:
        """What it was that the run ends of, where that has a name."""
        if self._ending.verdict is Verdict.JOURNAL_GONE:
            return str(self._ending.verdict)
        verdict = self._desk.view.verdict or {}
        return str(verdict["verdict"]) if verdict.get("overdue") else None

    def _counts(self) -> dict[str, int]:
        counts = (self._desk.view.snapshot or {}).get("counts", {})
        return {state: int(count["rows"]) for state, count in counts.items()}
