"""A screen that fails costs the screen: lines come instead, one event says why, and who runs goes on."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from hsjournal.mirror import SUPERVISOR, Mirror
from hsjournal.states import State
from hsjournal.ui.live import LiveScreen
from hsjournal.ui.plain import PlainScreen
from hsjournal.ui.sturdy import Sturdy
from hsjournal.watch.desk import Desk
from hsjournal.watch.view import View
from hsjournal.worker.tally import Tally


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    made = Mirror(tmp_path / "a" / "b" / "mirror")
    made.folder.parent.mkdir(parents=True)
    made.create()
    return made


def undrawable() -> View:
    """GPU figures without a figure: what a library's other version could bring."""
    snapshot = Tally(dict.fromkeys(State, (0, 0, 0))).snapshot() | {"pauses": {}}
    return View(stage="running", sentence="worker 7", snapshot=snapshot, gpus=[{}])


def test_a_live_screen_that_fails_becomes_lines_and_one_event(mirror: Mirror) -> None:
    terminal, lines = io.StringIO(), io.StringIO()
    live = LiveScreen(Console(file=terminal, force_terminal=True, width=80, height=24))
    screen = Sturdy(live, PlainScreen(lines))
    desk = Desk(mirror, undrawable(), screen.show)
    for _ in range(3):
        desk.draw()
    screen.close()
    assert "running: 0/0 verified" in lines.getvalue()
    failed = [event for _, event in mirror.events() if event.kind == "screen_failed"]
    assert len(failed) == 1
    assert failed[0].detail["why"].startswith("KeyError: 'gpu' (frame.py:")
    assert (mirror.read(SUPERVISOR) or {})["stage"] == "running"


def test_lines_that_fail_too_end_nothing(mirror: Mirror) -> None:
    closed = io.StringIO()
    screen = PlainScreen(closed)
    view = undrawable()
    view.snapshot = {}
    desk = Desk(mirror, view, screen.show)
    for _ in range(3):
        desk.draw()
    screen.close()
    assert [event.kind for _, event in mirror.events()] == ["screen_failed"]
