"""What the worker tells about itself: rows in flight, rates, and the snapshot in the mirror."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from hsjournal.errors import HsjournalError
from hsjournal.journal.store import Journal
from hsjournal.mirror import Phase
from hsjournal.states import INCOMPLETE, State

RATE_WINDOW = 60.0
PACE_OF = 32
"""Samples whose seconds per token, from send to dump, say how long the next one may take."""


@dataclass(slots=True)
class Flight:
    """A row under way."""

    row: int
    sample_id: str
    attempt: int
    tokens: int
    phase: Phase = Phase.IDLE
    since: float = 0.0
    nbytes: int = 0
    state: State = State.PENDING
    server: str = ""

    def enter(self, phase: Phase) -> None:
        """Begin a phase."""
        self.phase, self.since = phase, time.monotonic()


class Tally:
    """Counts per state as committed by this worker, and the rates of the last minute."""

    def __init__(self, counts: dict[State, tuple[int, int, int]], deferred: tuple[int, int, int] = (0, 0, 0)) -> None:
        self.deferred = list(deferred)
        """Rows, tokens and bytes that are written and are read back later: as good as done for now."""
        self.counts = {state: list(value) for state, value in counts.items()}
        self.flights: dict[int, Flight] = {}
        self.started = time.monotonic()
        self.progress = time.monotonic()
        self._highest: dict[int, int] = {}
        self._files: dict[int, int] = {}
        self._done: deque[tuple[float, int, int]] = deque()
        self._totals = [0, 0, 0]
        self.sends = 0
        """Requests that went out; rows that are refused at once are in flight too shortly to be seen there."""
        self._sent: dict[int, float] = {}
        self._paces: deque[tuple[float, int]] = deque(maxlen=PACE_OF)

    def holds(self, row: int, nbytes: int) -> None:
        """A row that an earlier worker wrote has a file of ``nbytes``."""
        self._files[row] = nbytes

    def moved(self, row: int, source: State, target: State, tokens: int, nbytes: int = 0) -> None:
        """A committed change. Only a row that passes its own highest state so far is progress.

        A row that goes back from ``written`` loses its file in the journal, so its bytes are taken off here too.
        """
        had = self._files.pop(row, nbytes)
        there = nbytes if target in (State.WRITTEN, State.VERIFIED) else 0
        away = had if source in (State.WRITTEN, State.VERIFIED) else 0
        if target is State.WRITTEN:
            self._files[row] = nbytes
        for state, sign, size in ((source, -1, away), (target, 1, there)):
            totals = self.counts[state]
            totals[0] += sign
            totals[1] += sign * tokens
            totals[2] += sign * size
        rank = list(State).index(target)
        if target in (State.FAILED, State.SKIPPED) or rank > self._highest.get(row, 0):
            self._highest[row] = rank
            self.progress = time.monotonic()
        sent = self._sent.pop(row, None)
        if target is State.SENT:
            self._sent[row] = time.monotonic()
            self.sends += 1
        elif target is State.DUMPED and sent is not None:
            self._paces.append(((time.monotonic() - sent) / max(1, tokens), tokens))
        if target is State.VERIFIED:
            self._ended(row, tokens, nbytes)

    def put_off(self, row: int, tokens: int, nbytes: int, sign: int = 1) -> None:
        """A written row's read-back was put off; with ``sign`` -1, it is not any longer."""
        for index, amount in enumerate((1, tokens, nbytes)):
            self.deferred[index] += sign * amount
        if sign > 0:
            self._files.pop(row, None)
            self._ended(row, tokens, nbytes)

    def _ended(self, row: int, tokens: int, nbytes: int) -> None:
        self._highest.pop(row, None)
        self._done.append((time.monotonic(), tokens, nbytes))
        for index, amount in enumerate((1, tokens, nbytes)):
            self._totals[index] += amount

    def rates(self) -> dict[str, float]:
        """Verified samples, tokens and bytes per second: over the last minute, and over this worker's life."""
        now = time.monotonic()
        while self._done and now - self._done[0][0] > RATE_WINDOW:
            self._done.popleft()
        life = max(now - self.started, 1e-3)
        span = min(life, RATE_WINDOW)
        recent = [len(self._done), sum(d[1] for d in self._done), sum(d[2] for d in self._done)]
        names = ("samples_per_s", "tokens_per_s", "bytes_per_s")
        return {name: recent[i] / span for i, name in enumerate(names)} | {
            f"{name}_overall": self._totals[i] / life for i, name in enumerate(names)
        }

    def snapshot(self) -> dict[str, Any]:
        """Everything ``status`` and the live screen show, JSON-able; ages in seconds."""
        now = time.monotonic()
        rates = self.rates()
        open_tokens = sum(self.counts[s][1] for s in INCOMPLETE) - self.deferred[1]
        speed = rates["tokens_per_s"] or rates["tokens_per_s_overall"]
        return {
            "at": time.time(),
            "monotonic": now,
            "counts": {str(s): {"rows": c[0], "tokens": c[1], "bytes": c[2]} for s, c in self.counts.items()},
            "deferred": self.deferred[0],
            "rates": rates,
            "eta_s": open_tokens / speed if speed > 0 else None,
            "progress_age_s": now - self.progress,
            "sends": self.sends,
            "pace": statistics.median(pace for pace, _ in self._paces) if self._paces else 0.0,
            "longest_lately": max((tokens for _, tokens in self._paces), default=0),
            "in_flight": [
                {
                    "row": f.row,
                    "sample_id": f.sample_id[:80],
                    "attempt": f.attempt,
                    "tokens": f.tokens,
                    "state": str(f.state),
                    "phase": f.phase.name.lower(),
                    "nbytes": f.nbytes,
                    "age_s": now - f.since,
                    "server": f.server,
                }
                for f in sorted(self.flights.values(), key=lambda f: f.since)
            ],
        }


def totals(journal: Journal) -> tuple[dict[State, tuple[int, int, int]], tuple[int, int, int]]:
    """Rows, tokens and bytes of every state, and of the written rows that are to be read back later."""
    later = journal.deferred()
    counts = {state: (c.rows, c.tokens, c.nbytes) for state, c in journal.counts().items()}
    return counts, (later.rows, later.tokens, later.nbytes)


def refuse_miscount(journal: Journal) -> None:
    """The end's proof: every row of the input is in just one state, by the rows themselves and not by their counters.

    Raises:
        HsjournalError: naming the counts that differ.
    """
    kept = {state: count.rows for state, count in journal.counts().items()}
    counted = journal.recount()
    if kept != counted:
        differ = "; ".join(
            f"{s}: {counted[s]:,} rows, {kept[s]:,} by its counter" for s in State if kept[s] != counted[s]
        )
        raise HsjournalError(f"the counts of {journal.path} do not add up: {differ}", remedy=_MISCOUNT)
    read, rows = journal.rows_read(), sum(counted.values())
    if read is not None and read != rows:
        raise HsjournalError(
            f"rows are missing: {read:,} were read from the input, and {journal.path} holds {rows:,}", remedy=_MISCOUNT
        )


_MISCOUNT = "Somebody changed the journal, or it is damaged: restore it from a copy, and please report it."
