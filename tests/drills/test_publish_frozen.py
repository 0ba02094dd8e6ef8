"""A writer that stops, or freezes in the kernel, inside each step of publishing changes nothing when it is let go."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from hsjournal.errors import ExitCode
from hsjournal.journal.store import Journal
from tests.helpers.drill.alone import Alone, let_go, wait_stuck
from tests.helpers.drill.attached import Served
from tests.helpers.drill.stage import Stage, ended, kill_and_wait, random_prompts, wait_for, words
from tests.helpers.drill.truth import Findings, Truth
from tests.helpers.mounts import ext4

FENCED = 75
ROWS = 6


@contextlib.contextmanager
def ready(served: Served, base: Path | None = None) -> Iterator[Alone]:
    """A prepared run of a few rows; afterwards its files are as they must be and nothing of it is left."""
    with Stage.make(served.model, random_prompts(ROWS, random.Random(5)), base, served.home) as stage:
        alone = Alone(stage, served.engine.url)
        alone.prepare()
        yield alone
        findings = Truth(stage).judge(Findings())
        assert not findings.lines()
        assert [p.name for p in stage.root.iterdir() if Truth(stage).run_id in p.name] == []
        assert [str(p) for p in stage.out_dir.rglob("*") if p.is_file() and p.suffix != ".ckpt"] == []
        assert not (stage.run_dir / "rejects").exists()


def everything(alone: Alone) -> tuple[dict[str, tuple[int, int, str]], list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Every file (inode, change time, digest), every row, and the epoch."""
    files = {
        str(p): (p.stat().st_ino, p.stat().st_ctime_ns, xxhash.xxh3_128_hexdigest(p.read_bytes()))
        for p in alone.stage.out_dir.rglob("*.ckpt")
    }
    with contextlib.closing(sqlite3.connect(f"file:{alone.stage.run_dir / 'journal.db'}?mode=ro", uri=True)) as journal:
        rows = journal.execute("SELECT * FROM sample ORDER BY row").fetchall()
        return files, rows, journal.execute("SELECT epoch FROM run").fetchall()


def finished_files(alone: Alone) -> dict[str, tuple[int, str]]:
    """Inode and digest of every file whose row the journal calls written or verified."""
    files, _, _ = everything(alone)
    with contextlib.closing(sqlite3.connect(f"file:{alone.stage.run_dir / 'journal.db'}?mode=ro", uri=True)) as journal:
        query = "SELECT output_path FROM sample WHERE state IN ('written', 'verified')"
        paths = [str(alone.stage.out_dir / path) for (path,) in journal.execute(query)]
    return {path: (files[path][0], files[path][2]) for path in paths}


STEPS = ("opened", "writing", "written", "synced", "linking", "linked", "published")


@pytest.mark.parametrize("step", STEPS)
def test_a_writer_stopped_in_publishing_changes_nothing_after_its_successor(served: Served, step: str) -> None:
    with ready(served) as alone:
        late = alone.stopped_worker(int(alone.gate()["epoch"]), f"sink.{step}", 2)
        refused = alone.gate()
        assert refused["exit_code"] == ExitCode.LOCKED, "a stopped worker still holds its lock"
        alone.lose_lock()
        successor = alone.stage.hsjournal("resume", str(alone.stage.run_dir), "--plain")
        assert ended(successor) == 0, words(successor)
        before = everything(alone)
        assert let_go(late) == FENCED, words(late)
        assert everything(alone) == before


def test_a_writer_stopped_after_the_last_step_can_only_clean_up(served: Served) -> None:
    """Past its last commit a late worker deletes the dump of a verified row, which nobody needs, and is then fenced."""
    with ready(served) as alone:
        late = alone.stopped_worker(int(alone.gate()["epoch"]), "reap.deleting", 3)
        alone.lose_lock()
        successor = alone.stage.hsjournal("resume", str(alone.stage.run_dir), "--plain")
        assert ended(successor) == 0, words(successor)
        before = everything(alone)
        assert let_go(late) == FENCED, words(late)
        assert everything(alone) == before


@pytest.mark.root
@pytest.mark.parametrize("step", STEPS)
def test_a_writer_frozen_in_the_kernel_changes_nothing_when_the_disk_thaws(
    served: Served, tmp_path: Path, step: str
) -> None:
    """The incident's disk: D state, SIGKILL without effect. The successor, too, waits for that disk; then both go on."""
    with ext4(tmp_path / "disk", 64) as disk, ready(served, tmp_path) as alone:
        alone.stage.out_dir.rmdir()
        (disk.mount / "out").mkdir()
        alone.stage.out_dir.symlink_to(disk.mount / "out")
        late = alone.stopped_worker(int(alone.gate()["epoch"]), f"sink.{step}", 3)
        finished = finished_files(alone)
        assert finished, "rows were finished before the freeze"
        with disk.frozen():
            os.kill(late.pid, signal.SIGCONT)
            wait_stuck(late.pid)
            late.kill()
            with pytest.raises(subprocess.TimeoutExpired):
                late.wait(1.5)
            assert alone.gate()["exit_code"] == ExitCode.LOCKED, "an unkillable worker is never doubled"
            alone.lose_lock()
            with Journal(alone.stage.run_dir / "journal.db") as journal:
                epoch = journal.raise_epoch()
            successor = alone.worker(epoch)
            wait_stuck(successor.pid)
        assert late.wait(30) == -signal.SIGKILL
        assert ended(successor) == 0, words(successor)
        files, rows, _ = everything(alone)
        assert [row[0] for row in rows] == list(range(ROWS))
        assert {path: (files[path][0], files[path][2]) for path in finished} == finished, "not touched since"


@pytest.mark.root
def test_a_run_heals_by_itself_when_a_frozen_disk_thaws(served: Served, tmp_path: Path) -> None:
    with ext4(tmp_path / "disk", 64) as disk, ready(served, tmp_path) as alone:
        alone.stage.out_dir.rmdir()
        (disk.mount / "out").mkdir()
        alone.stage.out_dir.symlink_to(disk.mount / "out")
        armed = alone.stage.fault("first")
        supervisor = alone.stage.hsjournal(
            "resume", str(alone.stage.run_dir), "--plain", HSJOURNAL_FAULTS=f"sink.written=delay:3,once:{armed}"
        )
        wait_for(lambda: not armed.exists(), 60, "a file is being written")
        with disk.frozen():
            time.sleep(5)
            assert supervisor.poll() is None
        assert ended(supervisor) == 0, words(supervisor)


def test_a_killed_supervisor_takes_a_stopped_worker_with_it(served: Served) -> None:
    with ready(served) as alone:
        armed = alone.stage.fault("stop")
        supervisor = alone.stage.hsjournal(
            "resume", str(alone.stage.run_dir), "--plain", HSJOURNAL_FAULTS=f"sink.synced=stop@2,once:{armed}"
        )
        wait_for(lambda: not armed.exists(), 60, "the worker stops")
        kill_and_wait(supervisor.pid)
        supervisor.wait(10)
        wait_for(lambda: not alone.stage.processes(), 10, "its worker is gone")
        again = alone.stage.hsjournal("resume", str(alone.stage.run_dir), "--plain")
        assert ended(again) == 0, words(again)
