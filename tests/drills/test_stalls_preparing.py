"""A new run that does not get ready, its disk frozen while prompts come in: noticed, told of once, and gone on with."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hsjournal.errors import ExitCode
from hsjournal.watch.verdict import Verdict
from tests.helpers.cli import hsjournal
from tests.helpers.drill import attached
from tests.helpers.drill.attached import Attached, Served
from tests.helpers.drill.stage import child_of, ended, wait_for, words
from tests.helpers.drill.stalls import POLL, QUICK, finishes, look, notify, told, wait_event
from tests.helpers.mounts import ext4

ROWS = 12
HALF_WAY = "ingest.batch=delay:6"
"""Between the rows and the end of ingestion, for less than a stall's time."""
PATIENT = ("--stall-timeout", "9", "--poll-interval", str(POLL))


def rows_are_in(run: Attached) -> Callable[[], bool]:
    def are_in() -> bool:
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(
                sqlite3.connect(f"file:{run.stage.run_dir / 'journal.db'}?mode=ro", uri=True)
            ) as journal,
        ):
            return bool(journal.execute("SELECT count(*) FROM sample").fetchone()[0] == ROWS)
        return False

    return are_in


def signs_of_life(listening: socket.socket) -> list[dict[str, str]]:
    """What systemd has heard since the last look."""
    heard = []
    with contextlib.suppress(BlockingIOError):
        while True:
            heard.append(dict(line.split("=", 1) for line in listening.recv(4096).decode().split("\n")))
    return heard


@pytest.mark.root
def test_a_disk_that_freezes_while_prompts_come_in(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        ext4(tmp_path / "disk", 64) as disk,
        attached.attached(served, ROWS) as run,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd,
    ):
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        (disk.mount / "run").mkdir()
        run.stage.run_dir.symlink_to(disk.mount / "run")
        child = run.run(*PATIENT, *notify(run), faults=HALF_WAY)
        wait_for(rows_are_in(run), 60, "the rows are in")
        with disk.frozen():
            stall = wait_event(run, "stall", child)
            assert stall.detail["verdict"] == Verdict.STORAGE_STALLED
            assert "reading the prompts" in stall.detail["sentence"]
            assert any(": D " in thread for thread in stall.detail["threads"])
            time.sleep(1.5)
            signs_of_life(systemd)
            time.sleep(2.5)
            heard = signs_of_life(systemd)
            assert heard
            assert not [line for line in heard if "WATCHDOG" in line or "EXTEND_TIMEOUT_USEC" in line]
            asked = hsjournal("diagnose", run.stage.run_dir, "--json", HSJOURNAL_SHM=str(run.stage.shm))
            assert asked.code == ExitCode.ERROR, asked
            assert asked.json()["verdict"] == Verdict.STORAGE_STALLED
            assert len(look(run, "stall")) == 1
        finishes(run, child)
        assert [t["event"] for t in told(run)] == ["stall", "recovery", "finished"]


def test_a_child_that_is_stopped_is_told_of_and_never_ended(run: Attached) -> None:
    child = run.run(*PATIENT, *notify(run), faults=HALF_WAY)
    prepares = wait_for(lambda: child_of(child.pid, "hsjournal.prepare"), 60, "a child prepares")
    run.wait_words("reading the prompts", child)
    os.kill(prepares, signal.SIGSTOP)
    stall = wait_event(run, "stall", child)
    assert stall.detail["verdict"] == Verdict.PREPARATION_STUCK
    assert "is stopped by a signal" in stall.detail["sentence"]
    os.kill(prepares, signal.SIGCONT)
    assert ended(child) == ExitCode.DONE, words(child)
    assert [t["event"] for t in told(run)] == ["stall", "recovery", "finished"]


@pytest.mark.root
def test_a_disk_that_is_frozen_before_the_run_begins(served: Served, tmp_path: Path) -> None:
    """The command itself writes nothing that could hang: it says what it waits for, and Ctrl-C ends it."""
    with ext4(tmp_path / "disk", 64) as disk, attached.attached(served, ROWS) as run:
        (disk.mount / "run").mkdir()
        run.stage.run_dir.symlink_to(disk.mount / "run")
        with disk.frozen():
            child = run.run(*QUICK, "--out", str(run.stage.run_dir / "out"))
            run.wait_words("has not answered for", child)
            os.kill(child.pid, signal.SIGINT)
            assert ended(child, 30) == ExitCode.INTERRUPTED, words(child)


@pytest.mark.root
def test_a_lock_that_cannot_be_asked_for_is_told_of(served: Served, tmp_path: Path) -> None:
    with ext4(tmp_path / "disk", 64) as disk, attached.attached(served, 40) as run:
        (disk.mount / "run").mkdir()
        run.stage.run_dir.symlink_to(disk.mount / "run")
        child = run.run(*QUICK, "--max-in-flight", "1")
        run.wait_files(2, child)
        os.kill(child.pid, signal.SIGINT)
        assert ended(child) == ExitCode.INTERRUPTED, words(child)
        (run.stage.run_dir / "supervisor.lock").unlink()
        with disk.frozen():
            child = run.run(*QUICK, *notify(run))
            run.wait_words("supervisor.lock can't be opened for", child)
            wait_for(lambda: told(run), 30, "somebody is told")
        finishes(run, child)
        assert [t["event"] for t in told(run)] == ["stall", "recovery", "finished"]
        assert told(run)[0]["verdict"] == Verdict.STORAGE_STALLED
