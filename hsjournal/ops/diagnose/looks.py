"""A process looked at several times within a second: what stays stuck in all looks, what moves, and since when it hasn't.

Reads /proc only, which answers also while every disk is stuck.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hsjournal.config import Settings
from hsjournal.watch.proc import Process, look_at

_LONGEST_START = 0.6
"""Seconds; a clock that was set meanwhile must not take all the time away."""
_SIGKILL = 1 << 8
_LAST_RAN = re.compile(r"se\.exec_start\s*:\s*([0-9.]+)")
_SWITCHES = re.compile(r"^(?:non)?voluntary_ctxt_switches:\s*([0-9]+)$", re.MULTILINE)
_PENDING = re.compile(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)$", re.MULTILINE)


@dataclass(slots=True)
class Looks:
    """Looks at one process.

    Args:
        pid: of it.
        create_time: with ``pid`` its identity; None takes whoever has the number now.
    """

    pid: int
    create_time: float | None = None
    seen: list[tuple[float, Process | None]] = field(default_factory=list)
    killed: list[bool] = field(default_factory=list)
    _switches: dict[int, int] = field(default_factory=dict)

    def look(self, now: float) -> Process | None:
        """One look more; ``now`` in monotonic seconds."""
        process = look_at(self.pid, self.create_time)
        if process is not None:
            if self.create_time is None:
                self.create_time = process.create_time
            for thread in process.threads:
                self._switches.setdefault(thread.tid, _switches(self.pid, thread.tid))
        self.seen.append((now, process))
        self.killed.append(_kill_is_pending(self.pid) if process is not None else False)
        return process

    @property
    def last(self) -> Process | None:
        """As it is now."""
        return self.seen[-1][1] if self.seen else None

    @property
    def is_unkillable(self) -> bool:
        """Whether SIGKILL was pending at every look: it has been sent, and nobody came to take it."""
        return len(self.killed) > 1 and all(self.killed)

    @property
    def is_still(self) -> bool:
        """Whether no thread has run since the first look."""
        last = self.last
        return last is not None and all(not self._moved(t.tid) for t in last.threads)

    def threads(self) -> list[dict[str, Any]]:
        """Every thread: state, where it waits, whether it was stuck at every look, and for how long it hasn't run."""
        last = self.last
        if last is None:
            return []
        stuck = set.intersection(*({t.tid for t in p.stuck} if p is not None else set() for _, p in self.seen))
        own = _last_ran(os.getpid(), os.getpid())
        found = []
        for thread in last.threads:
            idle = None
            if not self._moved(thread.tid) and own is not None:
                ran = _last_ran(self.pid, thread.tid)
                if ran is not None:  # the clock stands still while a thread doesn't run
                    idle = round(max(own - ran, self.seen[-1][0] - self.seen[0][0]), 1)
            found.append(
                {
                    "tid": thread.tid,
                    "name": thread.name,
                    "state": thread.state,
                    "wchan": thread.wchan,
                    "stuck": thread.tid in stuck,
                    "moved": self._moved(thread.tid),
                    "idle_s": idle,
                }
            )
        return found

    def summary(self) -> dict[str, Any]:
        """The process as a whole, JSON-able."""
        last = self.last
        if last is None:
            return {"alive": False, "pid": self.pid}
        first = next(p for _, p in self.seen if p is not None)
        span = max(1e-3, self.seen[-1][0] - self.seen[0][0])
        return {
            "alive": True,
            "pid": self.pid,
            "rss": last.rss,
            "cpu_percent": round(100 * (last.cpu_s - first.cpu_s) / span, 1),
            "io_bytes_moved": max(0, last.syscalls_written - first.syscalls_written),
            "stopped": last.is_stopped,
            "kill_pending": self.is_unkillable,
            "threads": self.threads(),
        }

    def _moved(self, tid: int) -> bool:
        return _switches(self.pid, tid) != self._switches.get(tid, -1)


def settings_of(command_line: str) -> Settings | None:
    """What a worker of ours was started with, as its command line (``/proc/PID/cmdline``) says."""
    try:
        words = command_line.split("\0")
        return Settings.from_json(words[words.index("--settings") + 1])
    except (ValueError, IndexError, TypeError):
        return None


def _status(pid: int, tid: int) -> str:
    try:
        return Path(f"/proc/{pid}/task/{tid}/status").read_text(errors="replace")
    except OSError:
        return ""


def _switches(pid: int, tid: int) -> int:
    return sum(map(int, _SWITCHES.findall(_status(pid, tid))))


def _kill_is_pending(pid: int) -> bool:
    try:
        tids = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return False
    return any(int(mask, 16) & _SIGKILL for tid in tids for mask in _PENDING.findall(_status(pid, tid)))


def _last_ran(pid: int, tid: int) -> float | None:
    """Seconds, on the scheduler's clock, at which a thread last ran; None where the kernel doesn't tell."""
    try:
        found = _LAST_RAN.search(Path(f"/proc/{pid}/task/{tid}/sched").read_text())
    except OSError:
        return None
    return float(found[1]) / 1000 if found else None


def begin_of_process() -> float:
    """Monotonic seconds at which this process was started: what a person waits for begins there."""
    age = time.time() - psutil.Process().create_time()
    return time.monotonic() - min(max(age, 0.0), _LONGEST_START)
