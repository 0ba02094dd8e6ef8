"""The watcher's judge against made-up runs of which the drill knows when they stalled: neither a false word nor a missed one."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from hsjournal.mirror import Phase
from hsjournal.watch.proc import Process, Thread
from hsjournal.watch.verdict import Finding, Judge, Limits, Look, Row, Verdict

POLL = 2.0
IDLE, STUCK, STOPPED = (
    Thread(1, "main", "S", "ep_poll"),
    Thread(2, "sink", "D", "folio_wait"),
    Thread(1, "main", "T", "do_signal_stop"),
)
ENDS: dict[str, set[Verdict]] = {
    "D state": {Verdict.STORAGE_STALLED},
    "stopped": {Verdict.WORKER_STOPPED},
    "silent at the storage": {Verdict.STORAGE_STALLED},
    "silent at the server": {Verdict.SERVER_STALLED},
    "server away": {Verdict.SERVER_DOWN},
    "sends and rejects": {Verdict.SERVER_STALLED},
    "beats and does nothing": {Verdict.WORKER_STUCK},
    "does not stall": set(),
}
STATES = ("sent", "dumped", "written")


@dataclass(slots=True)
class Story:
    """A run as a sequence of looks.

    Args:
        draw: makes it up.
        end: how it ends, one of :data:`ENDS`.
    """

    draw: random.Random
    end: str
    now: float = 1000.0
    done: int = 5
    number: int = 10
    state: int = 0
    nbytes: int = 0
    attempt: int = 1
    events: list[str] = field(default_factory=list)

    def step(self) -> None:
        """Something of a row passes its mark."""
        if self.state == 1 and self.draw.random() < 0.7:
            self.nbytes += self.draw.choice((1, 4096, 1 << 20))
        elif self.state < len(STATES) - 1:
            self.state += 1
        else:
            self.done, self.number, self.state, self.nbytes, self.attempt = self.done + 1, self.number + 1, 0, 0, 1

    def look(self, *, stalled: bool = False) -> Look:
        """What is seen now."""
        phase = (Phase.WAITING, Phase.WRITING, Phase.VERIFYING)[self.state]
        threads: tuple[Thread, ...] = (IDLE,)
        server, rows_there = None, True
        if stalled:
            match self.end:
                case "D state":
                    phase, threads = Phase.WRITING, (IDLE, STUCK)
                case "stopped":
                    threads = (STOPPED,)
                case "silent at the storage":
                    phase = Phase.SYNCING
                case "silent at the server":
                    phase = Phase.WAITING
                case "server away":
                    phase, server = Phase.WAITING, "connection refused"
                case "sends and rejects":
                    self.attempt += 1
                    phase = Phase.WAITING
                case "beats and does nothing":
                    rows_there = False
        elif self.draw.random() < 0.2:
            threads = (IDLE, STUCK)  # a moment in D is no stall
        row = Row(self.number, self.attempt, 100, phase, self.nbytes)
        rows = (row,) if rows_there else ()
        states = {self.number: STATES[self.state]} if rows_there else {}
        return Look(self.now, Process(1, 1.0, threads, 1.0, 0, 0, 0, 0, 1), states, rows, self.done, server=server)


@dataclass(frozen=True, slots=True)
class Judged:
    """What the judge made of a story; empty where it was right."""

    false_stall: str = ""
    missed_stall: str = ""
    wrong_verdict: str = ""


def tell(draw: random.Random, end: str) -> Judged:
    """One story: moving slowly for a while, then its end."""
    limits = Limits(stall_timeout=draw.choice((10.0, 30.0, 300.0)))
    story = Story(draw, end)
    judge = Judge(limits, story.now)
    next_step = story.now
    until = story.now + draw.uniform(3, 8) * limits.stall_timeout
    while story.now < until:
        if story.now >= next_step:
            story.step()
            next_step = story.now + draw.uniform(0, limits.stall_timeout - 2 * POLL)
        finding = judge.judge(story.look())
        if finding.is_stall:
            return Judged(false_stall=f"{end}: {finding.sentence}, though it moved")
        # Sometimes nobody looks for long: the machine slept. That is nobody's silence.
        story.now += POLL if draw.random() > 0.01 else limits.longest_gap + draw.uniform(1, 3600)
    if not ENDS[end]:
        return Judged()
    return _stall(story, judge)


def patience_of(judge: Judge, look: Look) -> float:
    """Seconds of silence that are all right."""
    return judge.patience(look)


def _stall(story: Story, judge: Judge) -> Judged:
    look = story.look(stalled=True)
    judge.judge(look)  # what it does last may still be a mark
    began = story.now
    deadline = began + patience_of(judge, look) + 2 * POLL
    finding: Finding | None = None
    while story.now <= deadline:
        story.now += POLL
        finding = judge.judge(story.look(stalled=True))
        if finding.is_stall:
            break
    if finding is None or not finding.is_stall:
        return Judged(missed_stall=f"{story.end}: after {story.now - began:.0f} s still {finding}")
    if finding.verdict not in ENDS[story.end]:
        return Judged(wrong_verdict=f"{story.end}: called {finding.verdict}: {finding.sentence}")
    return Judged()


def stories(draw: random.Random, count: int) -> tuple[Counter[str], list[Judged]]:
    """So many stories, of all ends in turn; what was wrong."""
    kinds: Counter[str] = Counter()
    wrong = []
    for number in range(count):
        end = list(ENDS)[number % len(ENDS)]
        kinds[f"judge: {end}"] += 1
        judged = tell(draw, end)
        if judged != Judged():
            wrong.append(judged)
    return kinds, wrong
