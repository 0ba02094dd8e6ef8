"""Runs with a short patience: how they are started, and what they have told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

from hsjournal.errors import ExitCode
from hsjournal.events import Event
from hsjournal.mirror import Mirror
from tests.helpers.drill.attached import Attached
from tests.helpers.drill.seen import Outside
from tests.helpers.drill.stage import ended, wait_for, words

STALL, POLL = 4.0, 0.25
QUICK = ("--stall-timeout", str(STALL), "--poll-interval", str(POLL))
WORKER = "hsjournal.worker"


def outside(run: Attached) -> Outside:
    """Somebody who only looks on."""
    return Outside(run.stage.run_dir, run.stage.shm)


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """What a process says, or does, stays as it is for the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def told(run: Attached) -> list[dict[str, Any]]:
    """What the notify command got, in order."""
    path = run.stage.base / "told"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def notify(run: Attached) -> tuple[str, str]:
    """Options that write what is told into a file."""
    return "--notify-command", f"(cat; echo) >> {run.stage.base / 'told'}"


def look(run: Attached, kind: str) -> list[Event]:
    """The events of one kind in the mirror, while the run is on."""
    (folder,) = run.stage.shm.glob("hsjournal-*/*/mirror")
    return [event for _, event in Mirror(folder).events() if event.kind == kind]


def wait_event(run: Attached, kind: str, child: subprocess.Popen[bytes], seconds: float = 40.0) -> Event:
    """The last event of a kind, once there is one."""

    def found() -> list[Event]:
        assert child.poll() is None, words(child)
        return look(run, kind)

    event: Event = wait_for(found, seconds, f"{kind} is recorded")[-1]
    return event


def finishes(run: Attached, child: subprocess.Popen[bytes]) -> None:
    """It ends well, and all is as it must be."""
    assert ended(child) == ExitCode.DONE, words(child)
    run.check()
