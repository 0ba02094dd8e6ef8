"""Looking at real processes: threads behind the main one, stopped ones, dead ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hsjournal.watch.proc import look_at

# A thread starts a child that blocks while it opens a FIFO before it execs: the kernel keeps the thread in D until then.
HIDDEN = """
import os, sys, threading, time
fifo = sys.argv[1]
def block():
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 3, fifo, os.O_WRONLY, 0)])
threading.Thread(target=block, daemon=True).start()
time.sleep(60)
"""


def _hidden(pid: int) -> bool:
    """Whether the main thread sleeps like any other while one behind it is stuck."""
    seen = look_at(pid)
    if seen is None:
        return False
    states = {t.tid == pid: t.state for t in seen.threads}
    return states == {True: "S", False: "D"} and [t.tid for t in seen.stuck] == [
        t.tid for t in seen.threads if t.tid != pid
    ]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_stuck_thread_is_seen_behind_a_sleeping_main_thread(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    child = subprocess.Popen([sys.executable, "-c", HIDDEN, str(fifo)])
    try:
        wait_for(lambda: _hidden(child.pid))
        first, second = (seen.stuck for seen in (look_at(child.pid), look_at(child.pid)) if seen is not None)
        assert first == second, "the same sleep at two looks"
        assert first[0].switches > 0
    finally:
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)  # lets the spawned child go on and end
        child.kill()
        child.wait()
        os.close(reader)


def test_a_stopped_process_and_one_that_goes_on() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        child.send_signal(signal.SIGSTOP)
        wait_for(lambda: bool((seen := look_at(child.pid)) and seen.is_stopped))
        child.send_signal(signal.SIGCONT)
        wait_for(lambda: bool((seen := look_at(child.pid)) and not seen.is_stopped))
    finally:
        child.kill()
        child.wait()


def test_a_dead_process_is_gone_also_before_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    wait_for(lambda: look_at(child.pid) is None)
    child.wait()
    assert look_at(child.pid) is None


def test_a_number_that_was_given_to_another_process_is_not_ours() -> None:
    me = look_at(os.getpid())
    assert me is not None
    assert look_at(os.getpid(), me.create_time) is not None
    assert look_at(os.getpid(), me.create_time - 100) is None


def test_bytes_and_time_are_counted(tmp_path: Path) -> None:
    before = look_at(os.getpid())
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    sum(range(1_000_000))
    after = look_at(os.getpid())
    assert before is not None
    assert after is not None
    assert after.syscalls_written - before.syscalls_written >= 1 << 20
    assert after.cpu_s >= before.cpu_s
