"""Several throw-away children at once, each looking at one place: who has not answered by the deadline is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hsjournal.ops.diagnose import glance
from hsjournal.watch.proc import Process, look_at

GLANCE = Path(glance.__file__)
_MOST_ANSWER = 16 << 20


@dataclass(slots=True)
class _Child:
    name: str
    heard: bytearray = field(default_factory=bytearray)
    ended: bool = False

    @property
    def pid(self) -> int | None:
        """Its number, which it says before it looks at anything."""
        first, newline, _ = self.heard.partition(b"\n")
        return int(first) if newline else None


class Asking:
    """Children under way.

    They are started in groups by an exec that forks, so that ten cost hardly more than one. A child that is stuck in
    the kernel ignores even SIGKILL until its disk comes back: it is killed and not waited for.
    """

    def __init__(self) -> None:
        self._children: dict[int, _Child] = {}
        self._starters: list[subprocess.Popen[bytes]] = []

    def ask(self, questions: Mapping[str, Sequence[str]]) -> None:
        """Start a child for each question: its name, and the words for :mod:`hsjournal.ops.diagnose.glance`."""
        if not questions:
            return
        pipes = {name: os.pipe() for name in questions}
        words = [[pipes[name][1], *question] for name, question in questions.items()]
        self._starters.append(
            subprocess.Popen(
                [sys.executable, "-I", "-S", str(GLANCE), json.dumps(words)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                pass_fds=[write for _, write in pipes.values()],
            )
        )
        for name, (read, write) in pipes.items():
            os.close(write)
            self._children[read] = _Child(name)

    def answers(self, deadline: float) -> dict[str, dict[str, Any]]:
        """What was answered until ``deadline`` (monotonic seconds); every question has an answer, if only an ``error``."""
        self._listen(deadline)
        found = {child.name: _answer(child) for child in self._children.values()}
        for starter in self._starters:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(starter.pid, signal.SIGKILL)  # all of its children
            with contextlib.suppress(subprocess.TimeoutExpired):
                starter.wait(0.05)
        for fd in self._children:
            os.close(fd)
        self._children, self._starters = {}, []
        return found

    def _listen(self, deadline: float) -> None:
        poll = select.poll()
        for fd in self._children:
            poll.register(fd, select.POLLIN | select.POLLHUP)
        while not all(child.ended for child in self._children.values()):
            left = max(0.0, deadline - time.monotonic())
            ready = poll.poll(1000 * left)
            for fd, _ in ready:
                child = self._children[fd]
                piece = os.read(fd, 1 << 16)
                child.heard += piece
                if not piece or len(child.heard) > _MOST_ANSWER:
                    poll.unregister(fd)
                    child.ended = True
            if not ready and left == 0.0:
                return


def _waits_at(process: Process) -> str:
    """Where in the kernel it waits; empty when it runs, or sleeps of its own will.

    A network or user-space file system may let its users wait in an interruptible sleep, which is no state D.
    """
    if process.stuck:
        return process.stuck[0].wchan or "an unknown place"
    asleep = [t.wchan for t in process.threads if t.state == "S" and t.wchan and "nanosleep" not in t.wchan]
    return asleep[0] if len(asleep) == len(process.threads) and asleep else ""


def _answer(child: _Child) -> dict[str, Any]:
    if not child.ended:
        seen = look_at(child.pid) if child.pid is not None else None
        if seen is not None and (where := _waits_at(seen)):
            return {"error": f"no answer in time: it hangs in the kernel at {where}", "hangs": True}
        return {"error": "no answer in time", "late": True}
    try:
        value = json.loads(child.heard.partition(b"\n")[2].decode(errors="replace"))
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"error": "the look at it failed"}
