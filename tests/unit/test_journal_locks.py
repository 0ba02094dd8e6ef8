"""The locks of a run directory: whoever holds one is named, and a death frees it at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hsjournal.birth import own_create_time
from hsjournal.errors import ExitCode, JournalLockedError
from hsjournal.journal.locks import Lock, is_held, read_holder
from tests.helpers.mounts import fill, tmpfs


@pytest.fixture
def path(tmp_path):
    return tmp_path / "supervisor.lock"


@pytest.fixture
def holder(path):
    """A child that holds the lock and waits; with a child of its own, made by exec."""
    code = (
        "import subprocess, sys, time; from pathlib import Path; from hsjournal.journal.locks import Lock\n"
        f"Lock(Path({str(path)!r})).acquire()\n"
        "grandchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(grandchild.pid, flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    yield child
    os.kill(grandchild, signal.SIGKILL)
    child.kill()
    child.wait()
    child.stdout.close()


def refusal(path: Path) -> str:
    begin = time.monotonic()
    with pytest.raises(JournalLockedError) as caught:
        Lock(path).acquire()
    assert time.monotonic() - begin < 2
    assert caught.value.exit_code is ExitCode.LOCKED
    return str(caught.value)


def test_a_second_holder_is_refused_with_who_and_since(path, holder):
    words = refusal(path)
    assert f"process {holder.pid} since 20" in words
    assert "supervisor.lock" in words
    assert str(path.parent) in words
    assert "hsjournal status" in words


def test_also_within_one_process(path):
    lock = Lock(path)
    lock.acquire()
    assert f"process {os.getpid()}" in refusal(path)
    lock.release()
    Lock(path).acquire()


def test_it_is_free_as_soon_as_its_holder_is_killed_though_a_child_of_it_lives_on(path, holder):
    assert is_held(path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert not is_held(path)
    lock = Lock(path)
    lock.acquire()
    assert read_holder(path)["pid"] == os.getpid()  # type: ignore[index]
    lock.release()


def test_a_stopped_holder_holds_it(path, holder):
    holder.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, holder.pid, os.WSTOPPED)
    assert is_held(path)
    assert f"process {holder.pid}" in refusal(path)
    holder.send_signal(signal.SIGCONT)


def test_looking_leaves_the_file_as_it_is(path, holder):
    before = (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino)
    for _ in range(3):
        assert is_held(path)
    holder.kill()
    holder.wait()
    for _ in range(3):
        assert not is_held(path)
    assert (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) == before


def test_looking_for_a_lock_that_never_was_makes_none(path):
    assert not is_held(path)
    assert not path.exists()
    assert read_holder(path) is None


def test_looking_all_the_time_never_refuses_a_holder(path):
    path.touch()
    code = f"from pathlib import Path; from hsjournal.journal.locks import is_held\nprint(flush=True)\nwhile True: is_held(Path({str(path)!r}))"
    looker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert looker.stdout is not None
    looker.stdout.readline()
    try:
        for _ in range(300):
            lock = Lock(path)
            lock.acquire()
            lock.release()
    finally:
        looker.kill()
        looker.wait()
        looker.stdout.close()


def test_it_is_never_unlinked_and_old_words_do_not_show_through(path):
    path.write_text("x" * 5000)
    inode = path.stat().st_ino
    lock = Lock(path)
    lock.acquire()
    body = json.loads(path.read_text())
    assert body["pid"] == os.getpid()
    assert body["create_time"] == own_create_time()
    lock.release()
    lock.release()
    assert path.stat().st_ino == inode


def test_a_holder_that_is_gone_is_not_blamed(path):
    """Something else has locked the file: its words are of a process that ended long ago."""
    path.write_text(json.dumps({"pid": os.getpid(), "create_time": 1.0, "since": "1970-01-01"}))
    child = subprocess.Popen(["flock", str(path), "sleep", "30"])
    try:
        while not is_held(path):
            assert child.poll() is None
            time.sleep(0.02)
        assert "another process holds" in refusal(path)
    finally:
        for process in psutil.Process(child.pid).children():
            process.kill()
        child.kill()
        child.wait()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"pid": 1}', b"\xff\xfe"])
def test_a_lock_file_with_other_words_is_no_obstacle(path, content):
    path.write_bytes(content)
    assert read_holder(path) is None
    lock = Lock(path)
    lock.acquire()
    lock.release()


@pytest.mark.root
def test_a_full_disk_does_not_stop_the_lock(tmp_path):
    with tmpfs(tmp_path / "small", "1m") as mount:
        fill(mount)
        lock = Lock(mount / "supervisor.lock")
        lock.acquire()
        assert is_held(mount / "supervisor.lock")
        assert "holds supervisor.lock" in refusal(mount / "supervisor.lock")
        lock.release()
        assert not is_held(mount / "supervisor.lock")
