"""At the gate: a worker that is only just ending is no unkillable one, and one that is gets its row and its disk named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from hsjournal.config import SHM_VARIABLE, RunPaths, Settings
from hsjournal.errors import ExitCode
from hsjournal.mirror import Mirror
from hsjournal.watch.alarm import Alarm
from hsjournal.watch.children import ChildError
from hsjournal.watch.desk import Desk, StoppedError
from hsjournal.watch.gatekeeper import Gatekeeper
from hsjournal.watch.lives import Lives
from hsjournal.watch.notify import Addressees, Notifier
from hsjournal.watch.places import Places
from hsjournal.watch.proc import look_at
from hsjournal.watch.view import View

# A worker's lock and heartbeat, and a thread that the kernel keeps in D while it starts a child that opens a FIFO.
HOLDER = """
import os, sys, threading, time
from pathlib import Path
from hsjournal.journal.locks import Lock
from hsjournal.lifeline import name_thread
from hsjournal.mirror import Heartbeat, Phase
lock, mirror, fifo = map(Path, sys.argv[1:])
Lock(lock).acquire()
beat = Heartbeat(mirror, 1)
beat.slot(1, 7, 1, Phase.SYNCING, 4096)
def block():
    name_thread("block-writer")
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 3, str(fifo), os.O_WRONLY, 0)])
threading.Thread(target=block, daemon=True).start()
time.sleep(60)
"""


@dataclass
class Scene:
    """A run directory without a journal, so that an open gate says 10, and whoever holds its worker's lock."""

    paths: RunPaths
    desk: Desk
    keeper: Gatekeeper
    fifo: Path

    def told(self) -> list[dict[str, str]]:
        return [event.detail for _, event in self.desk.mirror.events() if event.kind == "gate_closed"]

    @contextmanager
    def holder(self) -> Iterator[Callable[[], None]]:
        """A worker that hangs in the kernel; what is yielded lets it go."""
        command = [
            sys.executable,
            "-c",
            HOLDER,
            *map(str, (self.paths.worker_lock, self.desk.mirror.folder, self.fifo)),
        ]
        child = subprocess.Popen(command)

        def let_go() -> None:
            reader = os.open(self.fifo, os.O_RDONLY | os.O_NONBLOCK)
            child.kill()
            child.wait()
            os.close(reader)

        try:
            while not ((seen := look_at(child.pid)) and seen.stuck):
                time.sleep(0.02)
            yield let_go
        finally:
            if child.poll() is None:
                let_go()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv(SHM_VARIABLE, str(tmp_path / "shm"))
    (tmp_path / "shm").mkdir()
    os.mkfifo(tmp_path / "fifo")
    paths = RunPaths.of(tmp_path / "run")
    paths.default_out.mkdir(parents=True)
    mirror = Mirror(paths.mirror)
    mirror.create()
    desk = Desk(mirror, View(), lambda _view: None)
    alarm = Alarm(desk, Notifier(Addressees(), desk.record, {}))
    settings = Settings("http://127.0.0.1:9", "/root", stall_timeout=1.5, retry_pause=0.1)
    places = Places(str(paths.run_dir), str(paths.default_out), "/root")
    lifeline, held = os.pipe()
    yield Scene(paths, desk, Gatekeeper(paths, places, settings, desk, alarm, Lives(), lifeline), tmp_path / "fifo")
    os.close(lifeline)
    os.close(held)


def test_a_worker_that_is_only_just_ending_is_nobodys_alarm(scene: Scene) -> None:
    with scene.holder() as let_go:
        begin, draw = time.monotonic(), scene.desk.draw
        gone: list[float] = []

        def drawn() -> None:
            draw()
            if "still lives" in scene.desk.view.sentence and not gone:
                gone.append(time.monotonic())
                let_go()

        scene.desk.draw = drawn  # type: ignore[method-assign]
        with pytest.raises(ChildError) as caught:
            scene.keeper.wait_open("end")
    assert caught.value.exit_code is ExitCode.NO_JOURNAL, "the gate was open"
    assert gone
    assert time.monotonic() - begin < 30
    assert scene.told() == []
    assert [event.kind for _, event in scene.desk.mirror.events()] == []


def test_one_that_the_kernel_keeps_is_named_with_its_row_and_its_disk_once(scene: Scene) -> None:
    def drawn(view: View) -> None:
        if (view.verdict or {}).get("silent_s", 0.0) > 1.0:
            scene.desk.signals.append(2)

    scene.desk._show = drawn
    with scene.holder(), pytest.raises(StoppedError):
        scene.keeper.wait_open("end")
    (told,) = scene.told()
    assert told["verdict"] == "unkillable"
    out = scene.paths.default_out
    assert f"it waits in the kernel for the storage of {out} (block-writer: D" in told["why"]
    assert "; row 7, syncing); no second one is started beside it" in told["why"]
    assert (scene.desk.view.verdict or {})["row"] == 7
    (stall,) = [event for _, event in scene.desk.mirror.events() if event.kind == "stall"]
    assert stall.row == 7
