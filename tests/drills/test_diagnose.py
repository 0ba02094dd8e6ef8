"""``diagnose`` on real processes: it answers in two seconds, names what is wrong, and changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hsjournal.errors import ExitCode
from hsjournal.watch.presence import SILENT_S
from tests.helpers.cli import hsjournal
from tests.helpers.drill import attached
from tests.helpers.drill.alone import wait_stuck
from tests.helpers.drill.attached import Attached, Served
from tests.helpers.drill.seen import Outside
from tests.helpers.drill.stage import child_of, ended, kill_and_wait, wait_for, words
from tests.helpers.mounts import ext4

ROWS = 60
PACE = 0.25
MOST_S = 2.0
BUSY_S = 4.0
"""What a machine that other tests keep busy may need; the median over all calls must be within ``MOST_S``."""
TOOK: list[float] = []

HIDDEN = """
import os, sys, threading, time
def block():
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 3, sys.argv[1], os.O_WRONLY, 0)])
threading.Thread(target=block, daemon=True).start()
time.sleep(120)
"""


def diagnose(run: Attached) -> dict[str, Any]:
    """Its report; checked to be quick, and to have an exit code that agrees."""
    done = hsjournal("diagnose", run.stage.run_dir, "--json", HSJOURNAL_SHM=str(run.stage.shm))
    report = done.json()
    TOOK.append(report["took_s"])  # since the start of its process
    assert TOOK[-1] < BUSY_S
    assert done.code == report["exit_code"], done.err
    text = hsjournal("diagnose", run.stage.run_dir, HSJOURNAL_SHM=str(run.stage.shm)).out
    assert text.startswith("VERDICT    ")
    assert report["next_step"]
    return report


def picture(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every byte and time below a folder, but for SQLite's shared memory, in which readers mark their place."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if not p.name.endswith("-shm")):
        status = path.lstat()
        found[str(path)] = (status.st_mtime_ns, status.st_size, path.read_bytes() if path.is_file() else b"")
    return found


def test_a_run_from_health_to_its_end(served: Served) -> None:
    with attached.attached(served, ROWS) as run:
        child = run.run("--max-in-flight", "4")
        run.wait_files(3, child)
        report = diagnose(run)
        assert report["verdict"] in ("healthy", "slow")
        assert report["worker"]["alive"]
        assert report["supervisor"]["alive"]
        assert report["server"]["answers"]
        assert report["next_request"]["rid"].startswith(f"hsj-{run.truth.run_id}-")
        assert {room["what"] for room in report["room"]} >= {"run directory", "output", "hand-over root"}
        assert report["progress"]["age_s"] < 60

        worker = child_of(child.pid, "hsjournal.worker")
        assert worker is not None
        os.kill(worker, signal.SIGSTOP)
        report = diagnose(run)
        assert (report["verdict"], report["exit_code"]) == ("worker_stopped", ExitCode.ERROR)
        assert report["next_step"] == f"kill -CONT {worker}"

        engine = served.engine.process
        assert engine is not None
        os.kill(engine.pid, signal.SIGSTOP)
        report = diagnose(run)
        assert not report["server"]["answers"]
        os.kill(engine.pid, signal.SIGCONT)

        kill_and_wait(child.pid)
        os.kill(worker, signal.SIGCONT)
        wait_for(lambda: not Path(f"/proc/{worker}").exists(), 30, "the worker has ended with its supervisor")
        before = picture(run.stage.run_dir)
        report = diagnose(run)
        assert (report["verdict"], report["exit_code"]) == ("supervisor_dead", ExitCode.ERROR)
        assert "resume" in report["next_step"]
        for directory in report["handover"]["directories"]:
            if directory["complete"] and directory["name"].startswith(f"hsj-{run.truth.run_id}-"):
                assert directory["row"] is not None
                assert directory["owner"].startswith(f"row {directory['row']}'s")
        assert picture(run.stage.run_dir) == before, "no byte of the run directory has changed"

        assert ended(again := run.run()) == 0, words(again)
        before = picture(run.stage.run_dir)
        report = diagnose(run)
        assert (report["verdict"], report["exit_code"]) == ("complete", ExitCode.DONE)
        assert report["counts"]["verified"] == ROWS
        assert picture(run.stage.run_dir) == before
        run.check()


def test_a_stopped_supervisor_is_told_of_while_its_worker_lives(served: Served) -> None:
    """At once by ``diagnose``, which sees its state; after a while by all others, whatever holds it."""
    with attached.attached(served, ROWS) as run:
        child = run.run("--max-in-flight", "1")
        run.wait_files(2, child)
        outside = Outside(run.stage.run_dir, run.stage.shm)
        os.kill(child.pid, signal.SIGSTOP)
        try:
            report = outside.asks("diagnose", "--json").json()
            assert (report["verdict"], report["exit_code"]) == ("supervisor_stuck", ExitCode.ERROR)
            assert report["worker"]["alive"]
            assert "a signal or a debugger has stopped it" in report["sentence"]
            assert outside.asks("status", "--json").json()["supervisor"]["alive"]
            report = outside.finds("supervisor_stuck", str(child.pid), "SIGCONT", within=SILENT_S + 10)
            assert any(line.startswith("hsjournal NOT WATCHED") for line in outside.screen())
            status = outside.asks("status", "--json").json()
            assert (status["supervisor"]["state"], status["verdict"]["verdict"]) == ("silent", "supervisor_stuck")
            assert status["supervisor"]["beat_age_s"] >= SILENT_S
            assert "PROBLEM" in outside.asks("status").out
        finally:
            os.kill(child.pid, signal.SIGCONT)
        assert ended(child) == 0, words(child)
        run.check()


def test_where_there_never_was_a_journal(tmp_path: Path) -> None:
    assert hsjournal("diagnose", tmp_path).code == ExitCode.NO_JOURNAL
    assert hsjournal("diagnose", tmp_path / "nowhere").code == ExitCode.NO_JOURNAL
    assert list(tmp_path.iterdir()) == []
    assert hsjournal("diagnose").code == ExitCode.USAGE
    assert hsjournal("diagnose", tmp_path, "--pid", "1").code == ExitCode.USAGE


@pytest.mark.root
def test_a_frozen_disk_with_everything_on_it(served: Served, tmp_path: Path) -> None:
    """Run directory, journal, log and output lie on it, and the worker hangs in the kernel."""
    with ext4(tmp_path / "disk", 64) as disk:
        run = Attached(served, ROWS, disk.mount)
        with run.stage:
            child = run.run("--max-in-flight", "4")
            run.wait_files(3, child)
            worker = child_of(child.pid, "hsjournal.worker")
            assert worker is not None
            with disk.frozen():
                wait_stuck(worker)

                def told() -> dict[str, Any] | None:
                    report = diagnose(run)
                    hangs = "hang in the kernel" in report["sentence"] or report["verdict"] == "storage_stalled"
                    return report if hangs else None

                report = wait_for(told, 30, "it says that the disk hangs")  # once the other rows stand still, too
                stuck = [t for t in report["worker"]["threads"] if t["stuck"]]
                assert stuck
                assert stuck[0]["wchan"]
                assert stuck[0]["wchan"] in report["sentence"]
                assert report["worker"]["alive"]
            assert ended(child) == 0, words(child)
            run.check()


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path, Path]]:
    """The incident's client: a thread in D behind a sleeping main thread, a silent log, two complete dumps unread."""
    root, log, fifo = tmp_path / "dumps", tmp_path / "client.log", tmp_path / "fifo"
    os.mkfifo(fifo)
    for number in (22391, 22392, 22393):
        folder = root / f"req_{number}"
        folder.mkdir(parents=True)
        (folder / "meta.json").write_text(json.dumps({"num_tokens": 100 + number % 3}))
        (folder / "final.pt").write_bytes(bytes(1000))
        if number < 22393:
            (folder / "done").touch()
    (root / "psm_x").touch()
    log.write_text("processed 18421/37312\n")
    for path in (log, root):
        os.utime(path, (time.time() - 7200,) * 2)
    child = subprocess.Popen([sys.executable, "-c", HIDDEN, str(fifo)])
    try:
        wait_for(lambda: "D" in _states(child.pid), 20, "it hangs")
        yield child, log, root
    finally:
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        child.kill()
        child.wait()
        os.close(reader)


def _states(pid: int) -> list[str]:
    tasks = Path(f"/proc/{pid}/task")
    return [(tasks / tid / "stat").read_text().rpartition(")")[2].split()[0] for tid in os.listdir(tasks)]


def test_a_foreign_pipeline_of_the_incidents_kind(pipeline: tuple[subprocess.Popen[bytes], Path, Path]) -> None:
    child, log, root = pipeline
    before = picture(root)
    arguments = ("--pid", str(child.pid), "--log", log, "--root", root, "--stall-timeout", "1")
    done = hsjournal("diagnose", *arguments, "--json")
    report = done.json()
    assert report["took_s"] < BUSY_S
    assert (report["verdict"], done.code) == ("storage_stalled", ExitCode.ERROR)
    assert report["progress"]["age_s"] >= 7000
    stuck = [t for t in report["worker"]["threads"] if t["stuck"]]
    assert [t["state"] for t in stuck] == ["D"]
    assert stuck[0]["tid"] != child.pid, "behind a sleeping main thread"
    complete = [d["name"] for d in report["handover"]["directories"] if d["complete"]]
    assert complete == ["req_22391", "req_22392"]
    assert report["handover"]["highest_number"] == 22393
    assert "2 complete dump(s) lie unread" in report["sentence"]
    assert "adopt" in report["next_step"]
    assert "18421/37312" in hsjournal("diagnose", *arguments).out
    assert picture(root) == before
    child.kill()
    wait_for(
        lambda: hsjournal("diagnose", *arguments, "--json").json()["verdict"] == "worker_dead", 30, "seen to be dead"
    )


def test_a_health_probe_keeps_the_root_fresh_and_is_no_progress_of_the_client(tmp_path: Path) -> None:
    """The client sleeps beside two dumps that it never reads; a probe's directory has just come."""
    root, log = tmp_path / "dumps", tmp_path / "client.log"
    for number in (1, 2, 3):
        (root / f"req_{number}").mkdir(parents=True)
        (root / f"req_{number}" / "done").touch()
    log.write_text("processed 1/9\n")
    for old in (log, root / "req_1", root / "req_2"):
        os.utime(old, (time.time() - 7200,) * 2)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"]) as child:
        arguments: list[str | Path] = ["--pid", str(child.pid), "--root", root]
        try:
            for more in (("--log", log), ()):
                report = hsjournal("diagnose", *arguments, *more, "--json").json()
                assert report["verdict"] == "worker_stuck", report["sentence"]
                assert report["progress"]["age_s"] >= 7000
            time.sleep(1)
            (root / "req_3" / "done").unlink()
            (root / "req_3").rmdir()  # what the client reads, it removes
            report = hsjournal("diagnose", *arguments, "--log", log, "--json").json()
            assert (report["verdict"], report["exit_code"]) == ("healthy", 0)
        finally:
            child.kill()


def test_it_was_quick() -> None:
    if not TOOK:
        pytest.skip("nothing was timed: run this test with the others of this file")
    assert sorted(TOOK)[len(TOOK) // 2] < MOST_S, TOOK
