"""Who a process is: its number and its birth, as the kernel counts it from the machine's boot. Standard library only.

A number alone is given to another process some day. A birth in wall-clock time, as psutil gives it, moves with every
step of the clock (it adds the boot's time of day, read anew each time): the same process would look like another one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Stat:
    """What ``/proc/PID/stat`` says of a process: ``birth`` in clock ticks since the machine's boot."""

    pid: int
    birth: int
    state: str
    parent: int
    session: int

    @property
    def has_ended(self) -> bool:
        """Whether it is a zombie, or about to be gone."""
        return self.state in "ZX"

    @property
    def create_time(self) -> float:
        """The birth in seconds since the machine's boot."""
        return self.birth / _TICKS_PER_S


def stat_of(pid: int) -> Stat | None:
    """The process with this number now; None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the name before may hold anything
    return Stat(pid, int(fields[19]), fields[0].decode(), int(fields[1]), int(fields[3]))


def own_create_time() -> float:
    """The birth of this process, in seconds since the machine's boot."""
    stat = stat_of(os.getpid())
    assert stat is not None
    return stat.create_time


def lives(pid: int, create_time: float) -> bool:
    """Whether exactly this process is there and has not ended (a zombie has).

    Args:
        pid: its number.
        create_time: its birth, in seconds since the machine's boot.
    """
    stat = stat_of(pid)
    return stat is not None and stat.create_time == create_time and not stat.has_ended
