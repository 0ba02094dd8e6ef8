"""What /proc says of a process: every thread's state and where in the kernel it waits, never only the main thread's.

A stuck I/O thread hides behind a sleeping main thread: ``psutil.Process.status()`` and the first line of ``top`` show the
main thread alone. Reading these files never blocks on a stuck disk.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from hsjournal.birth import stat_of


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread: ``state`` is the kernel's letter (R, S, D, T, t, Z, X, I), ``wchan`` where it waits, if it may be read.

    ``switches`` says of one in D how often it has given its core away: the same number twice is the same sleep.
    """

    tid: int
    name: str
    state: str
    wchan: str
    switches: int = 0


@dataclass(frozen=True, slots=True)
class Process:
    """A process at one moment.

    Args:
        pid: its number.
        create_time: with ``pid`` its identity; seconds from the machine's boot to its start.
        threads: all of them.
        cpu_s: user and system time so far.
        read_bytes: from storage so far, -1 where it may not be read.
        written_bytes: to storage so far, -1 where it may not be read.
        syscalls_read: bytes that passed through read calls, -1 where it may not be read.
        syscalls_written: bytes that passed through write calls, -1 where it may not be read.
        rss: resident bytes.
    """

    pid: int
    create_time: float
    threads: tuple[Thread, ...]
    cpu_s: float
    read_bytes: int
    written_bytes: int
    syscalls_read: int
    syscalls_written: int
    rss: int

    @property
    def stuck(self) -> tuple[Thread, ...]:
        """Threads in uninterruptible sleep."""
        return tuple(t for t in self.threads if t.state == "D")

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return bool(self.threads) and all(t.state in "Tt" for t in self.threads)


def look_at(pid: int, create_time: float | None = None) -> Process | None:
    """A process as it is now; None when it is gone, a zombie, or another one than ``create_time`` says."""
    stat = stat_of(pid)
    if stat is None or (create_time is not None and stat.create_time != create_time):
        return None
    if stat.has_ended and not _living_threads(pid):
        return None
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        rss = process.memory_info().rss
    except psutil.Error:
        return None
    io = _io(pid)
    return Process(
        pid=pid,
        create_time=stat.create_time,
        threads=_living_threads(pid),
        cpu_s=times.user + times.system,
        read_bytes=io.get("read_bytes", -1),
        written_bytes=io.get("write_bytes", -1),
        syscalls_read=io.get("rchar", -1),
        syscalls_written=io.get("wchar", -1),
        rss=rss,
    )


def _living_threads(pid: int) -> tuple[Thread, ...]:
    """Every thread that isn't a zombie; a killed process whose thread is stuck in the kernel shows that one still."""
    found = []
    folder = Path(f"/proc/{pid}/task")
    try:
        tids = sorted(int(name) for name in os.listdir(folder))
    except OSError:
        return ()
    for tid in tids:
        thread = _thread(folder / str(tid), tid)
        if thread is not None and thread.state not in "ZX":
            found.append(thread)
    return tuple(found)


def _thread(folder: Path, tid: int) -> Thread | None:
    try:
        stat = (folder / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name stands in parentheses and may hold anything, parentheses and spaces too.
    name = stat[stat.index("(") + 1 : stat.rindex(")")]
    state = stat[stat.rindex(")") + 2]
    try:
        wchan = (folder / "wchan").read_text().strip()
    except OSError:
        wchan = ""
    return Thread(tid, name, state, wchan if wchan != "0" else "", _switches(folder) if state == "D" else 0)


def _switches(folder: Path) -> int:
    try:
        lines = (folder / "status").read_text(errors="replace").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if "voluntary_ctxt_switches" in line)


def _io(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return {}
    return {key: int(value) for key, _, value in (line.partition(": ") for line in lines) if value.isdigit()}
