"""A process stays the same one whatever the wall clock does, and a number alone is nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hsjournal.birth import lives, own_create_time, stat_of
from hsjournal.config import RunPaths
from hsjournal.errors import JournalLockedError
from hsjournal.journal.locks import Lock
from hsjournal.mirror import SUPERVISOR, Heartbeat, Mirror, Phase, read_heartbeat
from hsjournal.ops.diagnose.looks import Looks
from hsjournal.watch.health import Health
from hsjournal.watch.holding import Holding
from hsjournal.watch.onlooker import Onlooker
from hsjournal.watch.proc import look_at
from hsjournal.watch.verdict import Judge, Limits, Verdict
from hsjournal.watch.watcher import Watcher


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield made
    made.kill()
    made.wait()


def step_the_clock(monkeypatch: pytest.MonkeyPatch, by: float) -> None:
    """As NTP or an operator does: the boot's time of day moves with the wall clock, for every later reader."""
    boot, wall = psutil.boot_time(), time.time
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot + by)
    monkeypatch.setattr(psutil, "boot_time", lambda: boot + by)
    monkeypatch.setattr(time, "time", lambda: wall() + by)


def test_a_number_that_was_given_to_another_process_and_a_zombie_are_not_it() -> None:
    assert lives(os.getpid(), own_create_time())
    assert not lives(os.getpid(), own_create_time() - 1)
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    stat = stat_of(ended.pid)
    assert stat is not None
    assert stat.has_ended
    assert not lives(ended.pid, stat.create_time)
    ended.wait()
    assert stat_of(ended.pid) is None


@pytest.mark.parametrize("by", [3600.0, -3600.0, 1.0])
def test_a_step_of_the_clock_makes_no_process_another_one(
    child: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: float
) -> None:
    mirror = Mirror(tmp_path / "a" / "b" / "mirror")
    mirror.folder.parent.mkdir(parents=True)
    mirror.create()
    Heartbeat(mirror.folder, 3).phase(Phase.RUNNING)
    before = look_at(child.pid)
    judge = Judge(Limits(stall_timeout=60), time.monotonic())
    watcher = Watcher(judge, mirror, child.pid, 3, Health([], lambda _url: None))
    assert before is not None
    step_the_clock(monkeypatch, by)
    assert psutil.Process(child.pid).create_time() != pytest.approx(before.create_time), "psutil's does move"
    assert look_at(child.pid, before.create_time) is not None
    assert Looks(child.pid, before.create_time).look(0.0) is not None
    assert watcher.judge().verdict is Verdict.HEALTHY
    beat = read_heartbeat(mirror.folder)
    assert beat is not None
    assert lives(beat.pid, beat.create_time)


def test_who_holds_a_lock_and_who_supervises_is_known_after_a_step_of_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths.of(tmp_path / "run")
    monkeypatch.setattr(RunPaths, "mirror", tmp_path / "a" / "b" / "mirror")
    paths.run_dir.mkdir()
    held = Lock(paths.supervisor_lock)
    held.acquire()
    mirror = Mirror(paths.mirror)
    mirror.folder.parent.mkdir(parents=True)
    mirror.create()
    mirror.write(SUPERVISOR, {"pid": os.getpid(), "create_time": own_create_time()})
    step_the_clock(monkeypatch, 3600.0)
    assert Onlooker(paths).is_going_on
    assert json.loads(paths.supervisor_lock.read_text())["create_time"] == own_create_time()
    with pytest.raises(JournalLockedError, match=f"process {os.getpid()} since"):
        Lock(paths.supervisor_lock).acquire()
    asked = Holding(paths.supervisor_lock)
    refused: JournalLockedError | None = None
    while refused is None:
        try:
            assert not asked.look()
        except JournalLockedError as error:
            refused = error
        time.sleep(0.01)
    assert f"process {os.getpid()} since" in str(refused)
    held.release()
