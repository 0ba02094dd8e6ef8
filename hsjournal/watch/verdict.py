"""From what was seen to what it means: pure, the clock injected.

Progress is one thing only: a row passed its own highest mark so far, a state or bytes written. Log lines, heartbeats,
retries and repeats are none. One look at a thread in D is no stall, and a slow but moving run is never called stalled.
What each verdict does stands in :mod:`hsjournal.watch.deeds`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

from hsjournal.mirror import Phase
from hsjournal.watch.pauses import pause_of
from hsjournal.watch.places import Places
from hsjournal.watch.proc import Process, Thread
from hsjournal.watch.sight import PAUSES, Finding, Limits, Look, Row, Verdict

__all__ = ["AT_SERVER", "PAUSES", "Finding", "Judge", "Limits", "Look", "Row", "Verdict", "unkillable", "words"]

STATE_RANK = {"pending": 0, "sent": 1, "dumped": 2, "written": 3, "verified": 4}
STORAGE_PHASES = frozenset(
    {Phase.CHECKING, Phase.WRITING, Phase.SYNCING, Phase.PUBLISHING, Phase.VERIFYING, Phase.COMMITTING, Phase.DELETING}
)
_BEGINNING = (None, Phase.STARTING, Phase.RECONCILING, Phase.PREFLIGHT)
AT_SERVER = (Phase.SENDING, Phase.WAITING)
"""A row in one of these waits for its server."""
_EVIDENCE = 3
"""Looks in a row that must show the same thread stuck."""
_WAKING = frozenset({"balance_dirty_pages", "balance_dirty_pages_ratelimited_flags"})
"""Where a thread that is held up wakes by itself to look, and goes back to sleep."""
_MOST_COMPUTING = 5
"""Times its patience that a server of our own may compute without a result: then it is taken to spin."""
_MOST_MARKS = 100_000


class Judge:
    """Remembers marks and looks, over the lives of workers, so that a replay is no progress.

    Args:
        limits: when a silence is a stall.
        now: monotonic seconds; the first moment.
    """

    def __init__(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self._progress_at = now
        self._marks: dict[int, tuple[int, int]] = {}
        self._attempts: dict[int, int] = {}
        self._done = -1
        self._pace, self._longest_lately = 0.0, 0
        self._looks: deque[Look] = deque(maxlen=_EVIDENCE)
        self._at_work: tuple[tuple[Row, ...], float] = ((), now)
        self._at_server: tuple[tuple[Row, ...], float] = ((), now)
        self._sends: int | None = None
        self._sent_at = -inf
        self._last_at = now
        self._silent = self._paused = 0.0
        self._late = 0
        self._hanging: dict[int, float] = {}

    @property
    def progress_at(self) -> float:
        """When a row last passed its mark; set it to what is known of the time before the first look."""
        return self._progress_at

    @progress_at.setter
    def progress_at(self, at: float) -> None:
        self._progress_at, self._silent = at, max(0.0, self._last_at - at)

    def new_life(self, now: float) -> None:
        """A new worker, or a new server, gets its full time."""
        self._looks.clear()
        self._hanging = {}
        self._at_work = self._at_server = ((), now)
        self._sends, self._sent_at = None, -inf
        self._last_at = now
        self._silent = self._paused = 0.0

    def patience(self, look: Look) -> float:
        """Seconds of silence that are all right now."""
        seconds = self.limits.patience(look.rows, self._pace, self._longest_lately)
        is_between = look.phase in _BEGINNING or not look.rows  # preflight, canary, reconciliation, the last sweep
        # Who is stopped does nothing that may take time.
        return max(seconds, self.limits.start_wait) if is_between and not _is_stopped(look) else seconds

    def judge(self, look: Look) -> Finding:
        """Take one more look and say what it means."""
        unseen = max(0.0, look.at - self._last_at)
        self._last_at = look.at
        self._looks.append(look)
        self._remember(look)
        # Who is stopped ends no pause, and tells of none.
        paused, moved = None if _is_stopped(look) else pause_of(look), self._moved(look)
        self._follow_hanging(look, unseen if unseen <= self.limits.longest_gap else 0.0, moved=moved)
        if moved:
            self._progress_at, self._silent, self._paused = look.at, 0.0, 0.0
            self._attempts = {}
        elif unseen <= self.limits.longest_gap:
            # The time of pauses does not count as silence; but it adds up, so that no flapping hides it.
            self._silent, self._paused = self._silent + unseen * (not paused), self._paused + unseen * bool(paused)
        for row in look.rows:  # not all were in flight at the moment of the last progress
            self._attempts.setdefault(row.row, row.attempt)
        if look.process is None:
            return Finding(Verdict.WORKER_DEAD, "the worker is gone", self._silent)
        if look.killed_at is not None and look.at - look.killed_at >= self.limits.kill_wait:
            return unkillable(look.process, self._silent, look.rows, look.places)
        patience = self.patience(look)
        if paused is not None:
            hanging = max((self._hanging[thread.tid] for thread in self._always_stuck()), default=0.0)
            if hanging >= patience:  # what a pause explains is no thread that the kernel never lets go
                return self._stalled(look, hanging)
            overdue = self._paused >= self.limits.stall_timeout
            return Finding(*paused, silent_s=self._paused, overdue=overdue)
        self._late = self._late + 1 if self._silent >= patience else 0
        computes = self._silent < _MOST_COMPUTING * patience and self._is_computing(look)
        if self._late and not computes and not self._lacks_evidence(look.process):
            return self._stalled(look, self._silent)
        verdict = Verdict.HEALTHY if self._silent < patience / 2 else Verdict.SLOW
        return Finding(verdict, f"last progress {self._silent:.0f} s ago", self._silent)

    def _moved(self, look: Look) -> bool:
        """Whether a row went beyond its own highest mark, or one more row is done."""
        rows = {row.row: row for row in look.rows}
        if look.pace:  # a new worker does not know it yet
            self._pace, self._longest_lately = look.pace, look.longest_lately
        moved = look.done > self._done >= 0
        self._done = max(self._done, look.done)
        for number, state in (dict.fromkeys(rows, "sent") | look.states).items():
            row = rows.get(number)
            mark = (STATE_RANK.get(state, 0), row.nbytes if row else 0)
            if mark > self._marks.get(number, (0, 0)):
                self._marks[number] = mark
                moved = True
        if len(self._marks) > _MOST_MARKS:
            self._marks = {row: mark for row, mark in self._marks.items() if row in look.states}
        return moved

    def _is_computing(self, look: Look) -> bool:
        """Whether the silence is that of a server of our own at work, and of nobody else."""
        idle = look.process is not None and not _is_stopped(look) and not self._always_stuck()
        return idle and look.server_busy and bool(look.rows) and not any(r.phase in STORAGE_PHASES for r in look.rows)

    def _lacks_evidence(self, process: Process) -> bool:
        """Whether a thread hangs in the kernel, and two more looks will tell if it is always the same."""
        return bool(process.stuck) and self._late < _EVIDENCE and not self._always_stuck()

    def _follow_hanging(self, look: Look, unseen: float, *, moved: bool) -> None:
        """For each thread in D, how long it has been so at every look, while no row moved."""
        before = {} if moved or look.process is None else self._hanging
        stuck = look.process.stuck if look.process is not None else ()
        self._hanging = {t.tid: before[t.tid] + unseen if t.tid in before else 0.0 for t in stuck}

    def _stalled(self, look: Look, silent: float) -> Finding:
        process = look.process
        assert process is not None
        stuck = self._always_stuck()
        lately = look.at - silent / 2  # who came to its step only then does not stand still there
        first = _first_at_storage(look.rows, None if stuck else lately)
        since = f"no progress for {silent:.0f} s"
        row, threads = first.row if first else None, tuple(map(words, stuck))
        if stuck:
            said = (
                f"{since}: {_storage(look.places, first, stuck)} is stuck; {len(stuck)} thread(s) of the worker in "
                f"uninterruptible sleep, {stuck[0].name} at {stuck[0].wchan or 'an unknown place'}{_at(first, ' (', ')')}"
            )
            return self._overdue(Verdict.STORAGE_STALLED, said, silent, row, threads)
        if process.is_stopped:
            said = f"{since}: the worker is stopped by a signal or a debugger"
            return self._overdue(Verdict.WORKER_STOPPED, said, silent, row, tuple(map(words, process.threads[:3])))
        if first:
            said = f"{since}: row {first.row} is in {first.phase.name.lower()} and does not move: {_storage(look.places, first)}"
            return self._overdue(Verdict.STORAGE_STALLED, said, silent, row)
        if look.server is not None:
            said = f"{since}: the server does not answer ({look.server})"
            return self._overdue(Verdict.SERVER_DOWN, said, silent)
        again = [r for r in self._lately(self._at_work) if r.attempt > self._attempts.get(r.row, r.attempt) + 1]
        if again:
            said = f"{since}: row {again[0].row} is at attempt {again[0].attempt}; what the server sends is refused again and again"
            return self._overdue(Verdict.SERVER_STALLED, said, silent, again[0].row)
        waiting = self._lately(self._at_server)
        if waiting:
            where = ", ".join(sorted({row.server for row in waiting if row.server})) or "the server"
            answers = "which answers its health check and" if look.asked else "which"
            said = f"{since}: {len(waiting)} request(s) at {where}, {answers} sends no dump"
            return self._overdue(Verdict.SERVER_STALLED, said, silent, min(waiting, key=lambda r: r.since).row)
        if self._last_at - self._sent_at < self.limits.stall_timeout:  # too shortly in flight to be seen there
            said = f"{since}: requests go out, and what the server sends is refused again and again"
            return self._overdue(Verdict.SERVER_STALLED, said, silent)
        return self._overdue(Verdict.WORKER_STUCK, f"{since}: the worker lives and does nothing", silent)

    def _remember(self, look: Look) -> None:
        """Between two attempts no row may be at the server, or in flight at all: what was seen just before speaks then."""
        if look.rows:
            self._at_work = look.rows, look.at
        if waiting := tuple(row for row in look.rows if row.phase in AT_SERVER):
            self._at_server = waiting, look.at
        if self._sends is not None and look.sends > self._sends:
            self._sent_at = look.at
        self._sends = look.sends

    def _lately(self, seen: tuple[tuple[Row, ...], float]) -> tuple[Row, ...]:
        rows, at = seen
        return rows if self._last_at - at < self.limits.stall_timeout else ()

    def _overdue(
        self, verdict: Verdict, sentence: str, silent: float, row: int | None = None, threads: tuple[str, ...] = ()
    ) -> Finding:
        return Finding(verdict, sentence, silent, row, threads, overdue=True)

    def _always_stuck(self) -> list[Thread]:
        """Threads in D at every one of the last looks: one look alone is no stall."""
        recent = [look.process for look in self._looks if look.process is not None]
        if len(recent) < _EVIDENCE:
            return []
        everywhere = set.intersection(*({_sleep_of(t) for t in process.stuck} for process in recent))
        return [t for t in recent[-1].stuck if _sleep_of(t) in everywhere]


def _sleep_of(thread: Thread) -> tuple[int, int]:
    """What stays the same while a thread sleeps on: many short waits for a disk that answers are not one long one."""
    return thread.tid, 0 if thread.wchan in _WAKING else thread.switches


def _is_stopped(look: Look) -> bool:
    return look.process is not None and look.process.is_stopped


def unkillable(process: Process, silent: float, rows: tuple[Row, ...] = (), places: Places | None = None) -> Finding:
    """What does not die of SIGKILL, or can't be killed by us, and waits in the kernel.

    Args:
        process: it.
        silent: seconds that it has waited.
        rows: that it had in flight, as far as they are known.
        places: where the run keeps its things.
    """
    threads = process.stuck or process.threads
    first = _first_at_storage(rows)
    where = words(threads[0]) if threads else "at an unknown place"
    said = (
        f"worker {process.pid} does not die of SIGKILL: it waits in the kernel for {_storage(places, first, process.stuck)} "
        f"({where}{_at(first, '; ')}); no second one is started beside it"
    )
    row = first.row if first else None
    return Finding(Verdict.UNKILLABLE, said, silent, row, tuple(map(words, threads)), overdue=True)


def _first_at_storage(rows: tuple[Row, ...], before: float | None = None) -> Row | None:
    """The row that has been at a step of the storage for longest; with ``before``, only one that came to it by then."""
    at_storage = [row for row in rows if row.phase in STORAGE_PHASES and (before is None or row.since <= before)]
    return min(at_storage, key=lambda row: row.since, default=None)


def _storage(places: Places | None, first: Row | None, threads: Sequence[Thread] = ()) -> str:
    """The storage by its path, where it is known."""
    known = (places or Places()).of(first.phase if first else None, [thread.name for thread in threads])
    return f"the storage of {known}" if known else "the storage"


def _at(first: Row | None, before: str, after: str = "") -> str:
    return f"{before}row {first.row}, {first.phase.name.lower()}{after}" if first else ""


def words(thread: Thread) -> str:
    """A thread as ``name: state wchan``."""
    return f"{thread.name}: {thread.state} {thread.wchan}".strip()
