"""Before the worker: the run's lock, the server of our own, and a new run made ready by its child."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hsjournal.config import Settings
from hsjournal.errors import HsjournalError
from hsjournal.events import Event
from hsjournal.server.own import OwnServer
from hsjournal.watch.alarm import Alarm
from hsjournal.watch.children import KILL_GRACE, ChildError, exit_words, module, start
from hsjournal.watch.desk import DRAW_EVERY, Desk
from hsjournal.watch.gatekeeper import give_up_when_stuck
from hsjournal.watch.holding import Holding
from hsjournal.watch.preparation import PreparationWatch
from hsjournal.watch.verdict import Finding, Verdict

_SAY_AFTER_S = 5.0
HANGS_AFTER = 2.0
"""Seconds after which a lock that can't be asked for is spoken of."""


def take(lock: Holding, place: Path, desk: Desk, settings: Settings, alarm: Alarm) -> None:
    """Get the run's lock, which lies at ``place``; its disk may hang meanwhile, we don't.

    Raises:
        JournalLockedError, NoRoomError, NoJournalError: as :meth:`Holding.look`.
        GaveUpError: by policy, when the storage hangs for too long.
        StoppedError: when a signal comes.
    """
    since = time.monotonic()
    while not lock.look():
        desk.check_stop()
        if (waited := time.monotonic() - since) > HANGS_AFTER:
            words = f"{place} can't be opened for {waited:.0f} s: its storage hangs"
            overdue = waited > settings.stall_timeout
            alarm.see(Finding(Verdict.STORAGE_STALLED, words, waited, overdue=overdue), 0.0, 0)
            desk.say("waiting", words)
            give_up_when_stuck(settings, waited, words)
        time.sleep(DRAW_EVERY if waited > HANGS_AFTER else 0.01)
    desk.owns_run = True
    alarm.finish(f"{place} is there: its storage answers")
    desk.view.verdict = None


def launch(server: OwnServer, desk: Desk) -> None:
    """Start a server of our own and wait until it is ready.

    Raises:
        LaunchError: when it ends first or takes too long, with its last words.
        StoppedError: when a signal comes.
    """
    desk.say("preparing", f"starting {server.name} at {server.url}")
    since = time.monotonic()

    def keep_waiting() -> bool:
        if (waited := time.monotonic() - since) > _SAY_AFTER_S:
            desk.say("preparing", f"starting {server.name} at {server.url}: {waited:.0f} s so far")
        desk.draw()
        return not desk.signals

    server.start()
    info = server.wait_ready(keep_waiting)
    desk.check_stop()
    ours = info.get("hsjournal") if isinstance(info.get("hsjournal"), dict) else {}
    desk.view.server = f"{server.url} ({server.name}, {(ours or {}).get('dtype') or info.get('dtype', '?')})"


def prepare(
    fields: dict[str, Any], lifeline: int, desk: Desk, settings: Settings, alarm: Alarm
) -> None:  # fmt: skip
    """Run :mod:`hsjournal.prepare` as a child and show how far it is.

    Args:
        fields: of its request.
        lifeline: descriptor that ends it with us.
        desk: shows it.
        settings: of this start.
        alarm: raised when it does not move; the child is looked at and never ended, it goes on when its storage lets it.

    Raises:
        ChildError: when it refuses, with its exit code.
        StoppedError: when a signal comes; the next start begins this step anew.
    """
    request = json.dumps(fields | {"parent_fd": lifeline})
    errors_file = desk.mirror.folder / "prepare.err"
    with errors_file.open("wb") as errors:
        child = start(module("hsjournal.prepare", request), lifeline=lifeline, stdout=subprocess.PIPE, stderr=errors)
    answer: dict[str, Any] = {}
    watch = PreparationWatch(child.pid, settings, desk, alarm)
    for answer in _lines(child, desk, watch):
        watch.heard(str(answer["step"]) if "step" in answer else None)
        if "progress" in answer:
            desk.view.progress = answer["progress"]
        if "preflight" in answer:
            desk.record(Event("preflight", None, answer["preflight"]))
            desk.view.notes.extend(_notes(answer["preflight"]))
        if "forecast" in answer:
            desk.view.forecast = answer["forecast"]
            desk.record(Event("forecast", None, answer["forecast"]))
            desk.draw()
    if "error" in answer:
        raise ChildError(str(answer["error"]), answer.get("remedy"), int(answer.get("exit_code", 1)))
    if "ready" not in answer:
        said = (errors_file.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise HsjournalError(
            f"preparing the run ended with {exit_words(child.returncode)}: {said}",
            remedy="Run it again; if it was killed, look for want of memory (`dmesg`, `hsjournal doctor`).",
        )
    watch.ended()


def _notes(found: dict[str, Any]) -> Iterator[str]:
    """What of a preflight is for people."""
    agreement = found["agreement"] or {"note": "no probe prompt: the hand-over root has no room for one"}
    if agreement["note"] and found["engine"] != "embedded":  # which is never asked in company
        yield f"preflight: {agreement['note']}"
    if found["draft_config"]:
        yield f"for the draft model's config.json, so that SGLang serves the same layers: {found['draft_config']}"


def _lines(child: subprocess.Popen[bytes], desk: Desk, watch: PreparationWatch) -> Iterator[dict[str, Any]]:
    """What the child prints, until it ends; drawing and watching meanwhile."""
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    pending = b""
    try:
        while True:
            ended = child.poll() is not None
            pending += child.stdout.read() or b""
            *lines, pending = pending.split(b"\n")
            for line in lines:
                yield json.loads(line)
            if ended:
                return
            desk.check_stop()
            watch.look()
            time.sleep(DRAW_EVERY / 2)
            desk.draw()
    finally:
        if child.poll() is None:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: it ends when its disk lets it
                child.wait(KILL_GRACE)
        child.stdout.close()
