"""events: each once, in order, from journal and mirror; followed to the run's end; a stuck journal hides no mirror."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hsjournal.birth import own_create_time
from hsjournal.config import RunPaths
from hsjournal.events import Event
from hsjournal.journal.store import Journal
from hsjournal.mirror import SUPERVISOR, Mirror
from hsjournal.states import State
from tests.helpers.cli import REPOSITORY, hsjournal
from tests.helpers.mounts import ext4
from tests.helpers.runs import MadeRun, make_run


@pytest.fixture(autouse=True)
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HSJOURNAL_SHM", str(tmp_path / "shm"))
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def made(folder: Path) -> tuple[MadeRun, Mirror]:
    """A run whose journal has three events of the mirror, which has two more."""
    run = make_run(folder, [State.PENDING])
    mirror = Mirror(run.paths.mirror)
    mirror.create()
    for number in range(3):
        mirror.record(Event("step", number, {"words": f"☃ \x1b {number}"}, at=1000.5 + number))
    with Journal(run.paths.journal) as journal:
        journal.add_events(mirror.events())
    for number in (3, 4):
        mirror.record(Event("step" if number == 3 else "stall", number, {}, at=1000.5 + number))
    return run, mirror


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_each_event_once_in_order(tmp_path: Path) -> None:
    run, _ = made(tmp_path)
    before = run.bytes_of()
    found = lines(hsjournal("events", run.paths.run_dir).out)
    mine = [event for event in found if event["kind"] in ("step", "stall")]
    assert [event["row"] for event in mine] == [0, 1, 2, 3, 4]
    assert mine[0]["detail"] == {"words": "☃ \x1b 0"}
    assert mine[0]["at"] == 1000.5
    assert [e["row"] for e in lines(hsjournal("events", run.paths.run_dir, "--kind", "stall").out)] == [4]
    assert run.bytes_of() == before


def test_no_run(tmp_path: Path) -> None:
    assert hsjournal("events", tmp_path).code == 10


def test_following_ends_with_the_run(tmp_path: Path) -> None:
    run, mirror = made(tmp_path)
    own = {"pid": os.getpid(), "create_time": own_create_time()}
    mirror.write(SUPERVISOR, own)
    child = subprocess.Popen(
        [sys.executable, "-m", "hsjournal.cli.main", "events", str(run.paths.run_dir), "--follow", "--kind", "late"],
        stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        time.sleep(0.5)
        for number in range(3):
            mirror.record(Event("late", number))
            assert json.loads(child.stdout.readline())["row"] == number
        assert child.poll() is None
        mirror.write(SUPERVISOR, own | {"create_time": 1.0})
        assert child.wait(30) == 0
        assert child.stdout.read() == ""
    finally:
        child.kill()
        child.wait()
        child.stdout.close()  # type: ignore[union-attr]


@pytest.mark.root
def test_a_frozen_journal_hides_no_mirror(tmp_path: Path) -> None:
    with ext4(tmp_path / "disk", 64) as disk:
        run, _ = made(disk.mount)
        writer = Journal(RunPaths.of(run.paths.run_dir).journal)  # with a log beside it, a reader has to write too
        with writer, disk.frozen():
            done = hsjournal("events", run.paths.run_dir, "--kind", "step", "--kind", "stall", timeout=60)
    rows = [event["row"] for event in lines(done.out)]
    assert {3, 4} <= set(rows)
    assert len(rows) == len(set(rows))
    if done.code:
        assert "storage hangs" in done.err
