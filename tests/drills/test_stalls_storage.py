"""Storage that hangs, is full, or is taken away: told of, waited for by one child, never by the supervisor itself."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from hsjournal.errors import ExitCode
from hsjournal.mirror import Mirror
from hsjournal.watch.verdict import Verdict
from tests.helpers.drill import attached
from tests.helpers.drill.attached import Attached, Served
from tests.helpers.drill.stage import ended, words
from tests.helpers.drill.stalls import QUICK, finishes, notify, outside, told, wait_event
from tests.helpers.mounts import ext4, fill, tmpfs

PACE = 0.1


@pytest.mark.root
def test_with_its_whole_run_directory_frozen_the_supervisor_lives_and_answers(served: Served, tmp_path: Path) -> None:
    """Journal, lock, logs and manifest hang; lines go on to come, the beat goes on, and Ctrl-C ends it."""
    with ext4(tmp_path / "disk", 64) as disk, attached.attached(served, 40) as run:
        (disk.mount / "run").mkdir()
        run.stage.run_dir.symlink_to(disk.mount / "run")
        child = run.run(*QUICK, *notify(run))
        run.wait_files(3, child)
        (folder,) = run.stage.shm.glob("hsjournal-*/*/mirror")
        with disk.frozen():
            run.wait_words("stalled", child, 20)
            last = wait_event(run, "worker_unkillable", child)
            assert any(": D " in thread for thread in last.detail["threads"])
            outside(run).finds(Verdict.UNKILLABLE, str(run.stage.run_dir), "mend")
            ages, lines = [], run.count_words(":", child)
            for _ in range(40):
                time.sleep(0.3)
                ages.append(time.monotonic() - (Mirror(folder).read("supervisor.json") or {})["monotonic"])
            assert max(ages) < 3.0, "it never hangs itself"
            assert run.count_words(":", child) > lines
            begin = time.monotonic()
            os.kill(child.pid, signal.SIGINT)
            assert ended(child, 30) == ExitCode.INTERRUPTED, words(child)
            assert time.monotonic() - begin < 15
            assert "nothing is lost" in words(child)
        assert [t["event"] for t in told(run)] == ["stall"]
        finishes(run, run.run())


def gates(run: Attached) -> list[int]:
    """Every child that waits at the gate."""
    return [pid for pid, command in run.stage.processes().items() if "-m hsjournal.journal.gate" in command]


@pytest.mark.root
def test_one_child_waits_at_the_gate_while_the_storage_hangs(served: Served, tmp_path: Path) -> None:
    with ext4(tmp_path / "disk", 64) as disk, attached.attached(served, 40) as run:
        run.stage.out_dir.parent.rmdir()
        run.stage.out_dir.parent.symlink_to(disk.mount)
        (disk.mount / "lost+found").rmdir()
        child = run.run(*QUICK, "--max-in-flight", "2")
        run.wait_files(3, child)
        os.kill(child.pid, signal.SIGINT)
        assert ended(child) == ExitCode.INTERRUPTED
        with disk.frozen():
            child = run.run(*QUICK)
            said = run.wait_words("the storage hangs", child)
            assert f"writing a test file in {run.stage.out_dir}" in said
            assert "no worker is started before it answers" in said
            first = gates(run)
            assert len(first) == 1
            time.sleep(4)
            assert gates(run) == first
        finishes(run, child)
        assert len(run.truth.events("gate_open")) == 1


def test_a_journal_that_another_program_holds_is_no_hanging_storage(run: Attached) -> None:
    child = run.run(*QUICK, "--max-in-flight", "2")
    run.wait_files(3, child)
    os.kill(child.pid, signal.SIGINT)
    assert ended(child) == ExitCode.INTERRUPTED
    with contextlib.closing(sqlite3.connect(run.stage.run_dir / "journal.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        child = run.run(*QUICK)
        said = run.wait_words("another program has the journal open", child)
        assert "hangs" not in said
        other.execute("ROLLBACK")
    finishes(run, child)
    assert "hangs" not in words(child, 1 << 20)


@pytest.mark.root
def test_a_full_disk_is_told_of_when_it_lasts_and_ends_no_worker(served: Served, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "3m") as small, attached.attached(served, 24) as run:
        run.stage.out_dir.parent.rmdir()
        run.stage.out_dir.parent.symlink_to(small)
        child = run.run(*QUICK, *notify(run))
        run.wait_files(3, child)
        filler = fill(small, leave=24 << 10)
        stall = wait_event(run, "stall", child)
        assert stall.detail["verdict"] == Verdict.DISK_FULL
        assert "is full" in stall.detail["sentence"]
        assert "make room" in stall.detail["way_out"]
        report = outside(run).finds(Verdict.DISK_FULL, str(run.stage.out_dir), "make room")
        assert report["exit_code"] == ExitCode.NO_ROOM
        filler.unlink()
        finishes(run, child)
        assert [t["event"] for t in told(run)] == ["stall", "recovery", "finished"]
        assert run.truth.events("worker_ending") == []
        assert len(run.truth.events("worker_started")) == 1


@pytest.mark.root
def test_a_limit_for_stuck_storage_gives_up_with_4(served: Served, tmp_path: Path) -> None:
    with ext4(tmp_path / "disk", 64) as disk, attached.attached(served, 30) as run:
        run.stage.out_dir.parent.rmdir()
        run.stage.out_dir.parent.symlink_to(disk.mount)
        (disk.mount / "lost+found").rmdir()
        child = run.run(*QUICK, *notify(run), "--stuck-limit", "3")
        run.wait_files(3, child)
        with disk.frozen():
            assert ended(child, 60) == ExitCode.GAVE_UP, words(child)
        assert "did not come back within 3 s" in words(child)
        assert [t["event"] for t in told(run)] == ["stall", "gave_up"]
        finishes(run, run.run())


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_journal_deleted_or_replaced_under_a_live_run(run: Attached, how: str) -> None:
    child = run.run(*notify(run))
    run.wait_files(4, child)
    journal = run.stage.run_dir / "journal.db"
    if how == "deleted":
        journal.unlink()
    else:
        fresh = journal.with_name("other")
        fresh.write_bytes(b"")
        fresh.replace(journal)
    assert ended(child) == ExitCode.NO_JOURNAL, words(child)
    assert f"was {how} under the run" in words(child)
    assert "journal.db.rescued" in words(child)
    assert [t["event"] for t in told(run)] == ["gave_up"]
    assert told(run)[0]["exit_code"] == ExitCode.NO_JOURNAL
    assert told(run)[0]["verdict"] == Verdict.JOURNAL_GONE
    report = outside(run).finds(Verdict.JOURNAL_GONE, str(journal), "journal.db.rescued")
    assert report["exit_code"] == ExitCode.NO_JOURNAL
    for name in ("journal.db", "journal.db-wal", "journal.db-shm"):
        (run.stage.run_dir / name).unlink(missing_ok=True)
    (run.stage.run_dir / "journal.db.rescued").rename(journal)
    with contextlib.closing(sqlite3.connect(journal)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    finishes(run, run.run())
