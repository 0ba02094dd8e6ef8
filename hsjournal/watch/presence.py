"""Whether somebody watches a run, and how its last supervisor went: from shared memory, else from the journal's events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from hsjournal.birth import lives
from hsjournal.errors import ExitCode, HsjournalError
from hsjournal.watch.deeds import meaning
from hsjournal.watch.proc import look_at
from hsjournal.watch.sight import Verdict

SILENT_S = 15.0
"""A supervisor beats several times a second, whatever else it does: one that was silent for so long does not run."""
STARTED, ENDED = "supervisor_started", "supervisor_ended"
"""The events of its first and of its last moment."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a supervisor ended, by its own account.

    Args:
        at: seconds since 1970, UTC.
        exit_code: of the command.
        sentence: why.
        remedy: what to do next.
    """

    at: float
    exit_code: int
    sentence: str
    remedy: str

    @classmethod
    def by_error(cls, error: HsjournalError, run_dir: object) -> Self:
        """An end with an error; where the error has no remedy, or one that leaves it out, `resume` is the next step."""
        resume = f"hsjournal resume {run_dir}"
        remedy = error.remedy or f"Go on with: {resume}"
        if "resume" not in remedy:
            remedy += f" Then: {resume}"
        return cls(time.time(), int(error.exit_code), error.message, remedy)

    @classmethod
    def by_code(cls, code: ExitCode, signal_name: str, run_dir: object) -> Self:
        """An end without one: every row has ended, or a signal asked for it."""
        if code in (ExitCode.DONE, ExitCode.FAILED_SAMPLES):
            return cls(time.time(), int(code), "every row had ended", f"For rows put back: hsjournal resume {run_dir}")
        said = f"stopped by {signal_name}; nothing is lost"
        return cls(time.time(), int(code), said, f"Go on with: hsjournal resume {run_dir}")

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Self | None:
        """The inverse of :meth:`facts`; None when ``told`` is of a program that said less."""
        try:
            return cls(float(told["ended"]), int(told["exit_code"]), str(told["sentence"]), str(told["remedy"]))
        except (KeyError, TypeError, ValueError):
            return None

    def facts(self) -> dict[str, Any]:
        """JSON-able, for the mirror and for the event."""
        return {"ended": self.at, "exit_code": self.exit_code, "sentence": self.sentence, "remedy": self.remedy}

    @property
    def verdict(self) -> Verdict:
        """What it makes of the run."""
        return Verdict.JOURNAL_GONE if self.exit_code == ExitCode.NO_JOURNAL else Verdict.NOT_RUNNING

    @property
    def words(self) -> str:
        """When, with what exit code, and why."""
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.at))
        return f"ended at {when} with exit {self.exit_code}: {self.sentence}"


class Presence(StrEnum):
    """How the supervisor of a run is."""

    ALIVE = "alive"
    SILENT = "silent"  # it is there, and does not run: stopped, or stuck in the kernel
    ENDED = "ended"  # by itself
    DEAD = "dead"  # killed, or with its machine
    NONE = "none"  # nothing tells of one


@dataclass(frozen=True, slots=True)
class Watched:
    """Who watches a run.

    Args:
        presence: of its supervisor.
        pid: of it, None when that is not known.
        beat_age_s: since its last sign of life, None when it gave none or has ended.
        ending: how it ended, where it could still tell.
    """

    presence: Presence
    pid: int | None = None
    beat_age_s: float | None = None
    ending: Ending | None = None

    @property
    def is_alive(self) -> bool:
        """Whether its process is there, be it that it does not run."""
        return self.presence in (Presence.ALIVE, Presence.SILENT)


def watched(record: Mapping[str, Any] | None, last: Mapping[str, Any] | None = None) -> Watched:
    """Who watches a run now.

    Args:
        record: the supervisor's in the mirror, which is newer than any event; None or empty when it is gone.
        last: the journal's last event of a supervisor's start or end, with ``kind`` and ``detail``; None when unknown.
    """
    record = record or {}
    if "pid" in record:
        pid, age = int(record["pid"]), time.monotonic() - float(record.get("monotonic", time.monotonic()))
        if not lives(pid, float(record["create_time"])):
            return Watched(Presence.DEAD, pid)
        return Watched(Presence.SILENT if age > SILENT_S else Presence.ALIVE, pid, round(max(0.0, age), 2))
    if "ended" in record:
        return Watched(Presence.ENDED, ending=Ending.of(record))
    if last is None:
        return Watched(Presence.NONE)
    return (
        Watched(Presence.ENDED, ending=Ending.of(last["detail"])) if last["kind"] == ENDED else Watched(Presence.DEAD)
    )


def verdict_on(who: Watched, *, complete: bool) -> dict[str, Any] | None:
    """What is to be said of a run that nobody watches, JSON-able; None when somebody does, or when it is complete."""
    if who.presence is Presence.SILENT:
        return _told(Verdict.SUPERVISOR_STUCK, silence(who))
    if who.presence is Presence.ALIVE or complete:
        return None
    if who.presence is Presence.DEAD:
        return _told(Verdict.SUPERVISOR_DEAD, "its supervisor died: nobody watches this run, and rows are left")
    if who.ending is None:
        return _told(Verdict.NOT_RUNNING, "nobody works on this run, and rows are left")
    return _told(who.ending.verdict, who.ending.words) | {"way_out": who.ending.remedy}


def silence(who: Watched) -> str:
    """A supervisor that is there and does not run, in words."""
    process = look_at(who.pid) if who.pid is not None else None
    how = ""
    if process is not None and process.is_stopped:
        how = ": a signal or a debugger has stopped it"
    elif process is not None and process.stuck:
        how = f": it hangs in the kernel at {process.stuck[0].wchan or 'an unknown place'}"
    since = f" for {who.beat_age_s:.0f} s" if who.beat_age_s is not None else ""
    return f"the supervisor (pid {who.pid}) lives and has given no sign of life{since}{how}; nobody watches this run"


def _told(verdict: Verdict, sentence: str) -> dict[str, Any]:
    return {"verdict": str(verdict), "sentence": sentence, "way_out": meaning(verdict).way_out, "overdue": True}
