"""The supervisor's lock by way of a child: as good as one's own, and never a wait on a disk."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from hsjournal.errors import JournalLockedError, NoJournalError
from hsjournal.journal.locks import Lock, is_held, read_holder
from hsjournal.watch.holding import Holding


def take(lock: Holding) -> None:
    deadline = time.monotonic() + 10
    while not lock.look():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("exists", [False, True])
def test_it_holds_as_one_taken_in_process_does(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "supervisor.lock"
    if exists:
        path.touch()
    lock = Holding(path)
    held = [lock.is_ours]
    take(lock)
    assert [*held, lock.is_ours] == [False, True]
    assert is_held(path)
    assert (read_holder(path) or {})["pid"] == os.getpid()
    with pytest.raises(JournalLockedError, match=f"process {os.getpid()}"):
        Lock(path).acquire()
    assert psutil.Process().children() == [], "nothing is left of the child"
    lock.release()
    assert not is_held(path)
    Lock(path).acquire()


def test_somebody_else_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "supervisor.lock"
    theirs = Lock(path)
    theirs.acquire()
    with pytest.raises(JournalLockedError, match=f"is in use: process {os.getpid()} since"):
        take(Holding(path))
    theirs.release()


def test_a_run_directory_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(NoJournalError, match="is gone"):
        take(Holding(tmp_path / "nowhere" / "supervisor.lock"))


def test_a_disk_that_hangs_hangs_nobody_but_the_child(tmp_path: Path) -> None:
    """A FIFO stands for it: opening one for reading waits for a writer."""
    path = tmp_path / "supervisor.lock"
    os.mkfifo(path)
    lock = Holding(path)
    begin, looks = time.monotonic(), 0
    while time.monotonic() - begin < 1.0:
        assert not lock.look()
        looks += 1
        time.sleep(0.01)
    assert looks > 20
    assert len(psutil.Process().children()) == 1, "one child, however often it is asked"
    lock.release()
    assert psutil.Process().children() == []
