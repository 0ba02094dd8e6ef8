"""Fleets by submitit's local executor and by hand: a task is pre-empted and queued again, a shard moves to another node."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.cli import hsjournal, started
from tests.helpers.fleets import incarnation, index_of, make_job, stamps, until

ROWS = 24


def _fleet(base: Path, *more: str) -> list[str | Path]:
    """The command of a fleet of two shards on this machine."""
    return ["fleet", "run", "--slurm", "--executor", "local", "--shards", "2", "--base", base, *more, "--plain"]


@pytest.mark.timeout(420)
def test_an_array_with_a_task_that_is_preempted_and_queued_again(tmp_path: Path):
    job = make_job(tmp_path, ROWS)
    slow = tmp_path / "slow"
    slow.touch()
    base, log = tmp_path / "base", tmp_path / "driver.log"
    fleet = _fleet(base, "--name", "f")
    faults = f"sink.opened=delay:0.5,while:{slow}"
    driver = started(*fleet, *job, log=log, HSJOURNAL_FAULTS=faults, OMP_NUM_THREADS="1")
    try:
        first = base / "f" / "shard-00001-of-00002"
        until(lambda: len(stamps(first)) >= 3, 150, log.read_text())
        before = stamps(first)
        _task_of(driver.pid, first).send_signal(signal.SIGUSR2)  # what Slurm sends by submitit's order
        until(lambda: incarnation(first) == 2, 120, log.read_text())
        slow.unlink()
        assert driver.wait(180) == 0, log.read_text()
    finally:
        for process in psutil.Process(driver.pid).children(recursive=True) if driver.poll() is None else ():
            process.kill()
        driver.kill()
        driver.wait()
    told = (base / ".starts/f/shard-00001-of-00002/told-000001.json").read_text()
    assert json.loads(told)["sentence"] == "drained; queued again"
    assert stamps(first).items() >= before.items()
    _whole(tmp_path, base)

    # The same command on a fleet that is done finds that out, and starts no engine.
    again = hsjournal(*fleet, *job)
    assert again.code == 0, again
    assert incarnation(first) == 3
    _whole(tmp_path, base)


@pytest.mark.timeout(420)
def test_the_same_command_watches_the_tasks_that_are_under_way(tmp_path: Path):
    job = [*make_job(tmp_path, ROWS), "--sink-threads", "1"]
    slow = tmp_path / "slow"
    slow.touch()
    base, log = tmp_path / "base", tmp_path / "driver.log"
    fleet = _fleet(base)
    driver = started(*fleet, *job, log=log, HSJOURNAL_FAULTS=f"sink.opened=delay:6,while:{slow}", OMP_NUM_THREADS="1")
    runs = [base / "fleet" / f"shard-0000{number}-of-00002" for number in (1, 2)]
    tasks: list[psutil.Process] = []
    try:
        until(lambda: all(stamps(run) for run in runs), 200, log.read_text())
        tasks = psutil.Process(driver.pid).children(recursive=True)
        driver.send_signal(signal.SIGINT)
        assert driver.wait(60) == 130
        assert "the same command watches them again" in log.read_text()

        other = hsjournal(*fleet, *job, "--max-strikes", "2")
        assert other.code == 2, other
        assert "is under way with other options" in other.err
        detached = hsjournal(*fleet, *job, "--detach")
        assert "under way already" in detached.out, detached
        slow.unlink()
        again = hsjournal(*fleet, *job)
        assert again.code == 0, again
        assert "under way already" in again.out
        assert "2 of 2 shards ended" in again.out
        assert [incarnation(run) for run in runs] == [1, 1]
        _whole(tmp_path, base)
    finally:
        for process in tasks:
            with contextlib.suppress(psutil.Error):
                process.kill()
        driver.kill()
        driver.wait()


@pytest.mark.timeout(420)
def test_a_shard_that_starts_elsewhere_takes_over_what_is_there_and_the_older_start_gives_way(tmp_path: Path):
    job = make_job(tmp_path, ROWS)
    slow = tmp_path / "slow"
    slow.touch()
    fleet: list[str | Path] = [
        "fleet",
        "shard",
        "1/1",
        "--store",
        tmp_path / "store",
        "--out",
        tmp_path / "out",
        "--name",
        "f",
    ]
    name, log = "shard-00001-of-00001", tmp_path / "older.log"
    here, there = tmp_path / "a" / "f" / name, tmp_path / "b" / "f" / name
    faults = f"sink.opened=delay:6,while:{slow}"  # it must still be at it when the other one has started
    older = started(*fleet, "--base", tmp_path / "a", *job, log=log, HSJOURNAL_FAULTS=faults)
    try:
        until(lambda: len(list((tmp_path / "out").rglob("*.ckpt"))) >= 3, 150, log.read_text())
        newer = hsjournal(*fleet, "--base", tmp_path / "b", *job)
        assert newer.code == 0, newer
        assert older.wait(60) == 1
    finally:
        older.terminate()
        older.wait()
    assert "incarnation 2 of shard 1/1 was started elsewhere" in log.read_text()
    assert "adopted" in newer.out
    lines = _whole(tmp_path, there)
    assert {Path(line["file"]).parents[1] for line in lines} == {tmp_path / "out" / "f" / f"{name}.000002"}
    took = [e for e in _events(there) if e["kind"] == "adopting"]
    assert took[0]["detail"]["files"] >= 3
    alone = hsjournal("fleet", "merge", here, "--to", tmp_path / "alone.jsonl")
    assert alone.code == 2, alone
    assert "incarnation 2 of shard 1/1 was started" in alone.err


def _task_of(driver: int, run_dir: Path) -> psutil.Process:
    """submitit's process that waits for the run there."""
    for process in psutil.Process(driver).children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:  # it has just ended
            continue
        if str(run_dir) in words and "hsjournal.cli.main" in words:
            task = process.parent()
            assert task is not None
            assert "submitit.core._submit" in task.cmdline()
            return task
    raise AssertionError(f"nobody runs {run_dir}")


def _whole(folder: Path, place: Path) -> list[dict[str, Any]]:
    merged = hsjournal("fleet", "merge", place, "--to", folder / "index.jsonl", "--json")
    assert merged.code == 0, merged
    sound = hsjournal("fleet", "verify", place, "--json")
    assert sound.code == 0, sound
    assert sound.json()["checked"] == ROWS
    lines = index_of(folder / "index.jsonl")
    assert [line["id"] for line in lines] == [f"s{number}" for number in range(ROWS)]
    return lines


def _events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in hsjournal("events", run_dir).out.splitlines()]
