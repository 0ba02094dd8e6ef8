"""What is looked at and what comes of it, as values: a verdict, a row, a look, the limits, a finding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from hsjournal.mirror import Phase
from hsjournal.watch.places import Places
from hsjournal.watch.proc import Process


class Verdict(StrEnum):
    """How a run is."""

    HEALTHY = "healthy"  # rows pass their marks
    SLOW = "slow"  # they do, but rarely
    WAITING = "waiting"  # a legitimate pause with its own limit: the worker says why
    STORAGE_STALLED = "storage_stalled"  # the consumer's side: output, journal or hand-over root
    SERVER_STALLED = "server_stalled"  # it takes requests, and nothing comes
    SERVER_DOWN = "server_down"  # it takes no requests
    WORKER_STOPPED = "worker_stopped"  # a signal or a debugger stopped it
    WORKER_STUCK = "worker_stuck"  # it lives, and does nothing, and nothing explains it
    PREPARATION_STUCK = "preparation_stuck"  # as the worker, before there is one: a new run does not get ready
    WORKER_DEAD = "worker_dead"
    UNKILLABLE = "unkillable"  # SIGKILL has no effect: it waits in the kernel
    DISK_FULL = "disk_full"  # output or journal: no room, or over quota
    DISK_FAILING = "disk_failing"  # output or journal: I/O errors, read-only, gone
    SHM_FULL = "shm_full"  # the hand-over root has no room
    ROOT_GONE = "root_gone"  # the hand-over root was deleted, or answers with errors
    JOURNAL_GONE = "journal_gone"  # deleted or replaced under the live run
    FAILURES = "failures_in_a_row"  # many samples in a row failed
    POISON = "poison"  # a sample that the worker or the server dies of
    SUPERVISOR_DEAD = "supervisor_dead"  # killed: nobody watches a run that is not complete
    SUPERVISOR_STUCK = "supervisor_stuck"  # it lives, and gives no sign of life
    NOT_RUNNING = "not_running"  # the run ended by itself before all of its rows, or was never begun


@dataclass(frozen=True, slots=True)
class Row:
    """A row in flight at one moment.

    ``since`` is when its phase began, monotonic seconds, 0 where unknown; ``server`` the address it goes to, if known.
    """

    row: int
    attempt: int
    tokens: int
    phase: Phase
    nbytes: int = 0
    since: float = 0.0
    server: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen at one moment (``at``: seconds, monotonic).

    Args:
        at: when.
        process: of the worker; None when it is gone.
        states: state of each row in flight.
        rows: in flight, with the phase of the thread that works on each.
        done: rows that are verified, failed or skipped.
        pauses: the worker's own sentences, by name.
        server: None when one that rows wait for answers, else why none does; asked from time to time only.
        asked: whether those servers have been asked at all; not yet is no answer.
        killed_at: when SIGKILL was sent to this worker, None when it wasn't.
        phase: of the worker as a whole, None before its first heartbeat.
        server_busy: whether a server of our own was computing since the last look.
        pace: seconds from send to dump that a token has taken lately, in the middle of the samples; 0 when not known.
        longest_lately: tokens of the longest of these samples.
        sends: requests that this worker has sent so far.
        troubles: what ails the storage of a pause, as :class:`hsjournal.errors.Trouble` names it, by the pause's name.
        places: where the run keeps its things.
    """

    at: float
    process: Process | None
    states: dict[int, str]
    rows: tuple[Row, ...]
    done: int
    pauses: dict[str, str] = field(default_factory=dict)
    server: str | None = None
    killed_at: float | None = None
    phase: Phase | None = Phase.RUNNING
    server_busy: bool = False
    pace: float = 0.0
    longest_lately: int = 0
    sends: int = 0
    troubles: Mapping[str, str] = field(default_factory=dict)
    places: Places = field(default_factory=Places)
    asked: bool = True


_MUCH_LONGER = 1.5
"""Samples up to so many times as long as those before them need no other time than they did."""
_FAR_LONGER = 10.0
"""Beyond so many times their length, the pace of short samples says little: most of it is what each of them costs."""
_MOST_BY_PACE = 3.0
"""There it makes the time that a sample gets by its length alone longer by no more than this."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a silence is a stall.

    Args:
        stall_timeout: seconds without progress, for a sample of ordinary length.
        ordinary_tokens: what needs no extra time. A longer sample gets as many times the time as it is longer; one that is
            much longer than those before it gets twice as long as it would take at their pace, within bounds.
        kill_wait: seconds after SIGKILL until a process counts as unkillable.
        start_wait: seconds that a worker may take, at least, for what it does without a row in flight: imports,
            preflight, reconciliation, canaries, the last sweep.
        longest_gap: seconds between two looks after which nobody was watching (the machine slept, or we were
            stopped): such a gap is nobody's silence.
    """

    stall_timeout: float = 300.0
    ordinary_tokens: int = 8192
    kill_wait: float = 5.0
    start_wait: float = 60.0
    longest_gap: float = 30.0

    @classmethod
    def of(cls, stall_timeout: float, poll_interval: float) -> Limits:
        """As the settings of a start say, both in seconds."""
        kill_wait = min(5.0, max(1.0, stall_timeout))
        return cls(stall_timeout, kill_wait=kill_wait, longest_gap=max(30.0, 5 * poll_interval))

    def patience(self, rows: tuple[Row, ...], pace: float = 0.0, longest_lately: int = 0) -> float:
        """Seconds of silence that are all right with ``rows`` in flight, by what samples have taken lately."""
        longest = max((row.tokens for row in rows), default=0)
        seconds = self.stall_timeout * max(1.0, longest / self.ordinary_tokens)
        if longest <= _MUCH_LONGER * longest_lately:
            return seconds
        most = max(_MOST_BY_PACE * seconds, 2 * pace * _FAR_LONGER * longest_lately)
        return max(seconds, min(2 * pace * longest, most))


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict with its reasons.

    Args:
        verdict: what it is.
        sentence: for people.
        silent_s: seconds since the last progress that count: in a pause those of the pause, else those outside.
        row: the row concerned, if one is.
        threads: the threads that show it, as ``name: state wchan``.
        overdue: whether it has lasted so long that something is done, and somebody is told.
    """

    verdict: Verdict
    sentence: str
    silent_s: float
    row: int | None = None
    threads: tuple[str, ...] = ()
    overdue: bool = False

    @property
    def is_stall(self) -> bool:
        """Whether it is more than a pause that the worker explains, or a moment's silence."""
        return self.overdue and self.verdict not in PAUSES


PAUSES = frozenset(
    {Verdict.WAITING, Verdict.DISK_FULL, Verdict.DISK_FAILING, Verdict.SHM_FULL, Verdict.ROOT_GONE, Verdict.FAILURES}
)
"""The worker waits, says why, and goes on by itself; each has its own limit."""
