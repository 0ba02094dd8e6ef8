"""A process tree of our own: who belongs to it, by number and time of birth, and how it is ended. Standard library only.

A process is hit through its descriptor after its time of birth was compared, so a number that was given to another
process meanwhile is never hit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from hsjournal.birth import Stat, stat_of

_KILL_WAIT_S = 10.0
_ROUND_S = 0.02


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """One process: its number, and its birth in clock ticks since the machine's boot."""

    pid: int
    birth: int


def member_of(pid: int) -> Member | None:
    """The process with this number now; None when there is none."""
    stat = stat_of(pid)
    return _member(stat) if stat is not None else None


def is_alive(member: Member) -> bool:
    """Whether it still runs; a zombie does not."""
    stat = stat_of(member.pid)
    return stat is not None and _member(stat) == member and not stat.has_ended


def descendants(pid: int) -> set[Member]:
    """Every living process below ``pid``, without it."""
    by_parent: dict[int, list[Stat]] = {}
    for stat in _all():
        by_parent.setdefault(stat.parent, []).append(stat)
    found: set[Member] = set()
    todo = [pid]
    while todo:
        for stat in by_parent.get(todo.pop(), ()):
            todo.append(stat.pid)
            if not stat.has_ended:
                found.add(_member(stat))
    return found


def in_session(leader: Member) -> set[Member]:
    """Every living process of the session that ``leader`` led, also when it is gone: none older than it."""
    return {
        _member(stat)
        for stat in _all()
        if stat.session == leader.pid and stat.birth >= leader.birth and not stat.has_ended
    }


def send(member: Member, how: int) -> None:
    """A signal for exactly this process; nothing when it is gone."""
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(member.pid)
        try:
            if member_of(member.pid) == member:
                signal.pidfd_send_signal(fd, how)
        finally:
            os.close(fd)


def kill_all(find: Callable[[], Collection[Member]], meanwhile: Callable[[], object] = lambda: None) -> set[Member]:
    """SIGKILL whoever ``find`` names, again and again until it names nobody: a tree may grow while it is felled.

    Returns:
        Who is left after ten seconds: processes that wait in the kernel.
    """
    deadline = time.monotonic() + _KILL_WAIT_S
    while (left := set(find())) and time.monotonic() < deadline:
        for member in left:
            send(member, signal.SIGKILL)
        meanwhile()
        time.sleep(_ROUND_S)
    return left


def living(members: Iterable[Member]) -> set[Member]:
    """Those of ``members`` that still run."""
    return {member for member in members if is_alive(member)}


def _all() -> Iterable[Stat]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := stat_of(int(name))) is not None:
            yield stat


def _member(stat: Stat) -> Member:
    return Member(stat.pid, stat.birth)
