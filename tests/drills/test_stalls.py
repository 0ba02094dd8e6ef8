"""Workers that stall, on real processes: noticed in time, named, ended, told of once; and no false alarm."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from hsjournal.mirror import Mirror
from hsjournal.watch.alarm import Alarm
from hsjournal.watch.desk import Desk
from hsjournal.watch.health import Health
from hsjournal.watch.life import Life, Watch
from hsjournal.watch.lives import Lives
from hsjournal.watch.notify import Addressees, Notifier
from hsjournal.watch.server_care import ServerCare
from hsjournal.watch.verdict import Judge, Limits, Verdict
from hsjournal.watch.view import View
from hsjournal.watch.watcher import Watcher
from tests.helpers.cli import hsjournal
from tests.helpers.drill.alone import thread_states
from tests.helpers.drill.attached import Attached
from tests.helpers.drill.stage import child_of, wait_for
from tests.helpers.drill.stalls import POLL, QUICK, STALL, WORKER, finishes, held, notify, outside, told, wait_event

PACE = 0.1
SLACK = 3.0
"""Seconds that a machine with other work may add to a detection."""

NOBODY = Health([], lambda _url: None)
"""No server at all."""


def test_a_thread_stuck_in_the_kernel_behind_a_sleeping_main_thread(run: Attached) -> None:
    """D, but killable: TERM has no effect on that thread, KILL has; what it had started ends with it."""
    fifo, armed = run.stage.base / "fifo", run.stage.fault("stuck")
    os.mkfifo(fifo)
    child = run.run(*QUICK, *notify(run), faults=f"sink.writing=stuck:{fifo},once:{armed},row:5")
    wait_for(lambda: not armed.exists(), 60, "it is stuck")
    worker = child_of(child.pid, WORKER)
    assert worker is not None
    wait_for(lambda: "D" in thread_states(worker), 5, "a thread hangs in the kernel")
    wait_for(lambda: thread_states(worker)[0] == "S", 2, "the main thread sleeps as always, between two beats")
    kin = psutil.Process(worker).children()
    stall = wait_event(run, "stall", child)
    # Counted from the last thing that moved: the other rows went on for a while after it.
    assert STALL <= stall.detail["silent_s"] <= STALL + 2 * POLL + SLACK
    assert stall.detail["verdict"] == Verdict.STORAGE_STALLED
    assert stall.row == 5
    assert any(t.startswith("sink-") and ": D" in t for t in stall.detail["threads"]), stall.detail
    assert "row 5" in stall.detail["sentence"]
    outside(run).finds(Verdict.STORAGE_STALLED, str(run.stage.out_dir), "the run goes on by itself")
    wait_for(lambda: not psutil.pid_exists(worker), 20, "the worker is gone")
    finishes(run, child)
    steps = [e["step"] for e in run.truth.events("worker_ending")]
    assert steps[0] == "SIGTERM"
    assert set(steps) <= {"SIGTERM", "SIGKILL"}
    assert psutil.wait_procs(kin, timeout=10)[1] == []
    assert run.truth.events("worker_ended")[0]["why"] == "storage_stalled"
    assert [t["event"] for t in told(run)] == ["stall", "recovery", "finished"]
    assert told(run)[0]["row"] == 5


def test_a_stopped_worker_is_replaced_and_a_late_cont_changes_nothing(run: Attached) -> None:
    child = run.run(*QUICK)
    run.wait_files(3, child)
    worker = wait_for(lambda: child_of(child.pid, WORKER), 20, "a worker lives")
    os.kill(worker, signal.SIGSTOP)
    begin = time.monotonic()
    stall = wait_event(run, "stall", child)
    assert stall.at - time.time() + time.monotonic() - begin < STALL + 2 * POLL + SLACK
    assert stall.detail["verdict"] == Verdict.WORKER_STOPPED
    wait_for(lambda: child_of(child.pid, WORKER) not in (None, worker), 30, "another worker lives")
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGCONT)
    finishes(run, child)
    assert [e["step"] for e in run.truth.events("worker_ending")] == ["SIGKILL"]
    assert len(run.truth.events("recovered")) == 1


def test_a_short_stop_is_no_stall(run: Attached) -> None:
    child = run.run(*QUICK)
    run.wait_files(3, child)
    worker = wait_for(lambda: child_of(child.pid, WORKER), 20, "a worker lives")
    os.kill(worker, signal.SIGSTOP)
    time.sleep(STALL / 4)
    os.kill(worker, signal.SIGCONT)
    finishes(run, child)
    assert run.truth.events("stall") == []
    assert len(run.truth.events("worker_started")) == 1


# Beats, writes snapshots and logs every half second, and does nothing; deaf to SIGTERM.
IDLER = """
import signal, sys, time
from pathlib import Path
from hsjournal.mirror import SNAPSHOT, Heartbeat, Mirror, Phase
signal.signal(signal.SIGTERM, signal.SIG_IGN)
mirror = Mirror(Path(sys.argv[1]))
beat = Heartbeat(mirror.folder, 3)
beat.phase(Phase.RUNNING)
counts = {s: {"rows": 1, "tokens": 1, "bytes": 1} for s in ("pending", "verified", "failed", "skipped")}
while True:
    beat.beat()
    print("working hard", file=sys.stderr, flush=True)
    mirror.write(SNAPSHOT, {"epoch": 3, "monotonic": time.monotonic(), "counts": counts, "in_flight": [], "pauses": {}})
    time.sleep(0.5)
"""


def test_a_worker_that_logs_and_beats_and_does_nothing(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "a" / "b" / "mirror")
    mirror.folder.parent.mkdir(parents=True)
    mirror.create()
    desk = Desk(mirror, View(), lambda _view: None)
    judge = Judge(Limits(STALL, kill_wait=1.0, start_wait=4.0), time.monotonic())
    alarm = Alarm(desk, Notifier(Addressees(), desk.record, {}))
    care = ServerCare(None, desk, Lives(), tmp_path / "log")
    lifeline, held = os.pipe()
    watch = Watch(
        judge, lambda pid, epoch: Watcher(judge, mirror, pid, epoch, NOBODY), alarm, care, POLL, lambda *_: None
    )
    begin = time.monotonic()
    life = Life([sys.executable, "-c", IDLER, str(mirror.folder)], lifeline, 3, desk, watch, lambda _verified: None)
    end = life.run()
    assert (end.returncode, end.by_us) == (-signal.SIGKILL, True)
    assert time.monotonic() - begin < 15
    events = {e.kind: e for _, e in mirror.events()}
    assert events["stall"].detail["verdict"] == Verdict.WORKER_STUCK
    assert events["worker_ending"].detail["step"] == "SIGKILL"
    assert "working hard" in (mirror.folder / "worker.err").read_text()
    os.close(lifeline)
    os.close(held)


def test_a_silent_worker_that_moves_bytes_slowly_for_ten_simulated_minutes(tmp_path: Path) -> None:
    """A real process, real looks, the clock in our hand: a byte every 18 seconds of it, and never a word."""
    from tests.unit.test_watch_watcher import BEATER

    mirror = Mirror(tmp_path / "a" / "b" / "mirror")
    mirror.folder.parent.mkdir(parents=True)
    mirror.create()
    command = [sys.executable, "-c", BEATER, str(mirror.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        begin = time.monotonic()
        clock, verdicts = [begin], set()
        judge = Judge(Limits(stall_timeout=30.0), clock[0])
        watcher = None
        for second in range(0, 600, 2):
            clock[0] = begin + second
            if second % 18 == 0:
                worker.stdin.write(f"{1 + second // 18}\n")
                worker.stdin.flush()
                worker.stdout.readline()
            watcher = watcher or Watcher(judge, mirror, worker.pid, 3, NOBODY, clock=lambda: clock[0])
            verdicts.add(watcher.judge().verdict)
        assert verdicts <= {Verdict.HEALTHY, Verdict.SLOW}
        assert watcher is not None
        for second in range(600, 640, 2):
            clock[0] = begin + second
            last = watcher.judge()
        assert last.verdict is Verdict.STORAGE_STALLED, "and when the bytes stop, it is one"
        worker.stdin.close()
        worker.kill()


def test_what_hsjournal_says_of_itself_while_it_is_stalled(run: Attached) -> None:
    child = run.run(*QUICK)
    run.wait_files(2, child)
    worker = wait_for(lambda: child_of(child.pid, WORKER), 20, "a worker lives")
    os.kill(worker, signal.SIGSTOP)
    with held(child.pid):
        report = outside(run).asks("diagnose", "--json").json()
    assert (report["verdict"], report["next_step"]) == (Verdict.WORKER_STOPPED, f"kill -CONT {worker}")
    wait_event(run, "stall", child)
    wait_for(lambda: any("worker stopped:" in line for line in outside(run).screen()), 20, "the screen says so")
    with held(child.pid):
        verdict = hsjournal("status", run.stage.run_dir, "--json", HSJOURNAL_SHM=str(run.stage.shm)).json()["verdict"]
    assert verdict["verdict"] == Verdict.WORKER_STOPPED
    assert "is stopped" in verdict["sentence"]
    finishes(run, child)
