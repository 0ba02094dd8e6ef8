"""Looking at a real process through a real mirror, and ending one that does not want to."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hsjournal.mirror import HEARTBEAT, SNAPSHOT, Mirror
from hsjournal.server.tree import Member, member_of, send
from hsjournal.watch import escalation
from hsjournal.watch.escalation import Escalation, Step
from hsjournal.watch.health import Health
from hsjournal.watch.verdict import Judge, Limits, Verdict
from hsjournal.watch.watcher import Watcher

# A worker that beats: row 7 is being written, up to as many bytes as it is told on its standard input.
BEATER = """
import sys
from pathlib import Path
from hsjournal.mirror import Heartbeat, Phase
beat = Heartbeat(Path(sys.argv[1]), 3)
beat.phase(Phase.RUNNING)
for line in sys.stdin:
    beat.slot(1, 7, 1, Phase.WRITING, int(line))
    print("done", flush=True)
"""


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    made = Mirror(tmp_path / "a" / "b" / "mirror")
    made.folder.parent.mkdir(parents=True)
    made.create()
    return made


@pytest.fixture
def beater(mirror: Mirror) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", BEATER, str(mirror.folder)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while not (mirror.folder / HEARTBEAT).exists():
        time.sleep(0.02)
    yield child
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        pipe.close()


def write_up_to(child: subprocess.Popen[str], nbytes: int) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{nbytes}\n")
    child.stdin.flush()
    assert child.stdout.readline() == "done\n"


def snapshot(mirror: Mirror, **changes: object) -> None:
    body = {"epoch": 3, "monotonic": time.monotonic(), "counts": {}, "in_flight": [], "pauses": {}}
    mirror.write(SNAPSHOT, body | changes)


def watcher_of(mirror: Mirror, pid: int, stall: float) -> Watcher:
    judge = Judge(Limits(stall_timeout=stall), time.monotonic())
    return Watcher(judge, mirror, pid, 3, Health(["http://a:1"], lambda _url: None))


def test_bytes_that_a_thread_moves_are_progress_though_the_main_loop_says_nothing(
    mirror: Mirror, beater: subprocess.Popen[str]
) -> None:
    watcher = watcher_of(mirror, beater.pid, 0.6)
    for step in range(8):
        write_up_to(beater, 1000 * (step + 1))
        snapshot(mirror, in_flight=[{"row": 7, "attempt": 1, "tokens": 10, "phase": "writing", "state": "dumped"}])
        assert not watcher.judge().is_stall
        time.sleep(0.15)
    time.sleep(0.7)
    finding = watcher.judge()
    assert finding.verdict is Verdict.STORAGE_STALLED
    assert finding.row == 7


def test_a_snapshot_of_another_epoch_is_not_of_this_worker(mirror: Mirror, beater: subprocess.Popen[str]) -> None:
    snapshot(mirror, epoch=2, pauses={"output": "the output folder /o is full"})
    assert watcher_of(mirror, beater.pid, 60).judge().verdict is Verdict.HEALTHY
    snapshot(mirror, pauses={"output": "the output folder /o is full"}, troubles={"output": "full"})
    assert watcher_of(mirror, beater.pid, 60).judge().verdict is Verdict.DISK_FULL


def test_a_pause_that_an_old_snapshot_tells_of_is_not_believed(mirror: Mirror, beater: subprocess.Popen[str]) -> None:
    snapshot(mirror, monotonic=time.monotonic() - 60, pauses={"output": "the output folder /o is full"})
    assert watcher_of(mirror, beater.pid, 60).judge().verdict is Verdict.HEALTHY


def test_a_worker_that_is_gone_is_said_to_be(mirror: Mirror, beater: subprocess.Popen[str]) -> None:
    watcher = watcher_of(mirror, beater.pid, 60)
    beater.kill()
    beater.wait()
    assert watcher.judge().verdict is Verdict.WORKER_DEAD


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def talking(code: str) -> tuple[subprocess.Popen[bytes], bytes]:
    """A process, and the first line that it says."""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    line = child.stdout.readline()
    child.stdout.close()
    return child, line


def test_one_that_ignores_term_is_killed() -> None:
    child, _ = talking(DEAF)
    ending = Escalation(child, time.monotonic(), 0.3)
    assert ending.step(time.monotonic()) is Step.TERM
    time.sleep(0.4)
    assert ending.step(time.monotonic()) is Step.KILL
    assert child.wait(10) == -9
    assert ending.close() == []


def test_what_it_had_started_ends_after_it_and_nobody_else() -> None:
    """Collected before the kill: afterwards it is nobody's child any more."""
    decoy = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    child, line = talking(FAMILY)
    grandchild = psutil.Process(int(line))
    ending = Escalation(child, time.monotonic(), 0.0)
    assert ending.step(time.monotonic()) is Step.KILL
    assert child.wait(10) == -9
    assert grandchild.is_running()
    assert ending.close() == [grandchild.pid]
    assert psutil.wait_procs([grandchild], timeout=10)[1] == []
    assert decoy.poll() is None
    decoy.kill()
    decoy.wait()


def test_a_number_that_was_given_to_somebody_else_is_not_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    send(Member(child.pid, 1), signal.SIGKILL)
    time.sleep(0.2)
    assert child.poll() is None
    itself = member_of(child.pid)
    assert itself is not None
    send(itself, signal.SIGKILL)
    assert child.wait(10) == -9
    send(itself, signal.SIGKILL)  # gone: nothing


def test_a_stopped_one_that_can_not_hear_is_killed_at_once() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    child.send_signal(signal.SIGSTOP)
    ending = Escalation(child, time.monotonic(), 0.0)
    assert ending.step(time.monotonic()) is Step.KILL
    assert child.wait(10) == -9


def test_what_does_not_die_of_it_is_unkillable(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(child, "terminate", lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(child, "kill", lambda: None)
        ending = Escalation(child, 0.0)
        assert ending.step(escalation.TERM_WAIT_S) is Step.KILL
        assert ending.killed_at == escalation.TERM_WAIT_S
        assert ending.step(escalation.TERM_WAIT_S + 1) is Step.KILL
        assert ending.step(escalation.TERM_WAIT_S + escalation.KILL_WAIT_S) is Step.UNKILLABLE
    child.kill()
    child.wait()


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_the_wall_clock_may_jump_by_an_hour(
    mirror: Mirror, beater: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """A real worker-like process, real looks: decisions are made by the monotonic clock alone."""
    watcher = watcher_of(mirror, beater.pid, 1.0)
    write_up_to(beater, 1000)
    snapshot(mirror, in_flight=[{"row": 7, "attempt": 1, "tokens": 10, "phase": "writing", "state": "dumped"}])
    assert watcher.judge().verdict is Verdict.HEALTHY
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    assert watcher.judge().verdict is Verdict.HEALTHY
    time.sleep(0.6)
    assert watcher.judge().verdict is Verdict.SLOW
    write_up_to(beater, 2000)
    assert watcher.judge().verdict is Verdict.HEALTHY
    time.sleep(1.1)
    assert watcher.judge().is_stall
