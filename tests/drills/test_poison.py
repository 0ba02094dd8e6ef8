"""A sample that kills the worker each time ends failed, with the reason; its neighbours don't, and outside kills are nobody's."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from contextlib import closing
from typing import Any

from hsjournal.errors import ExitCode
from tests.helpers.drill import attached
from tests.helpers.drill.attached import Attached, Served
from tests.helpers.drill.stage import child_of, ended, kill_and_wait, state_of, wait_for, words
from tests.helpers.drill.stalls import outside

WORKER = "hsjournal.worker"

PACE = 0.05


def rows_of(run: Attached) -> dict[int, dict[str, Any]]:
    with closing(sqlite3.connect(f"file:{run.stage.run_dir / 'journal.db'}?mode=ro", uri=True)) as journal:
        journal.row_factory = sqlite3.Row
        return {r["row"]: dict(r) for r in journal.execute("SELECT row, state, strikes, suspect, reason FROM sample")}


def fails_alone(run: Attached, faults: dict[int, str], strikes: int) -> None:
    child = run.run(
        "--max-in-flight",
        "4",
        "--max-strikes",
        str(strikes),
        faults="; ".join(f"{f},row:{row}" for row, f in faults.items()),
    )
    assert ended(child, 240) == ExitCode.FAILED_SAMPLES, words(child)
    rows = rows_of(run)
    for row, found in rows.items():
        if row in faults:
            assert (found["state"], found["strikes"]) == ("failed", strikes), found
            assert "crash" in found["reason"], found
        else:
            assert (found["state"], found["strikes"], found["suspect"]) == ("verified", 0, 0), found
    assert run.truth.finished() == len(rows) - len(faults)
    poisons = run.truth.events("poison")
    assert len(poisons) >= len(faults)
    assert all(e["verdict"] == "poison" and "alone in flight" in e["sentence"] for e in poisons)
    said = " ".join(words(child, 1 << 20).split())
    assert f"failed {len(faults)} " in said
    assert all(f"row {row} (s{row}):" in said for row in faults)


def test_native_crashes_and_bugs(served: Served) -> None:
    with attached.attached(served, 14) as run:
        fails_alone(run, {2: "worker.dump_seen=segv", 5: "sink.synced=raise", 9: "sink.opened=abort"}, 2)


def test_a_crash_after_the_link_leaves_no_file_in_the_output(served: Served) -> None:
    """Trainers list the folder: a file that nobody has read back goes aside with its row."""
    with attached.attached(served, 10) as run:
        fails_alone(run, {2: "sink.linked=segv", 5: "sink.published=raise", 7: "verify.reading=abort"}, 2)
        files = [path for path in run.stage.out_dir.rglob("*") if path.is_file()]
        assert len(files) == 7, files
        moved = [e["path"] for e in run.truth.events("file_displaced") if e.get("why") == "its row failed"]
        assert sorted(moved) == [f"rows_0-2000/data_{row}.ckpt" for row in (2, 5, 7)]


def test_a_sample_that_has_the_worker_killed_each_time(served: Served) -> None:
    """A SIGKILL looks as if it came from outside; only one that strikes the same lone row again and again does not."""
    with attached.attached(served, 8) as run:
        fails_alone(run, {3: "worker.dump_seen=kill"}, 1)


def test_the_screen_names_the_poison_while_it_is_dealt_with(served: Served) -> None:
    with attached.attached(served, 8) as run:
        child = run.run("--max-strikes", "2", faults="worker.dump_seen=abort,row:3")
        said = "poison: the worker died with row 3 alone in flight"
        wait_for(lambda: any(said in line for line in outside(run).screen()), 120, said)
        assert ended(child, 240) == ExitCode.FAILED_SAMPLES, words(child)


def drain(worker: int) -> None:
    """Ask it to stop, past the supervisor: it finishes what is in flight, and ends with 130."""
    os.kill(worker, signal.SIGTERM)
    wait_for(lambda: state_of(worker) in "ZX", 60, "it has drained")


def test_kills_from_outside_strike_nobody(served: Served) -> None:
    draw = random.Random(4)
    with attached.attached(served, 120) as run:
        child = run.run("--max-in-flight", "3")
        for number in range(6):
            goal = run.truth.finished() + draw.randint(1, 4)
            run.wait_files(goal, child)
            time.sleep(draw.random() / 5)
            worker = wait_for(lambda: child_of(child.pid, WORKER), 60, "a worker lives")
            if number % 2:
                drain(worker)
            else:
                kill_and_wait(worker)
        assert ended(child, 240) == ExitCode.DONE, words(child)
        run.check()
        assert run.count_words("the worker was asked to stop (exit code 130)", child) >= 1
        assert {r["suspect"] for r in rows_of(run).values()} == {0}
        assert run.truth.events("crash_strike") == []


def test_a_worker_that_dies_by_sigbus_is_told_so(served: Served) -> None:
    """As by a mapped file that was cut short; once is nobody's doing, and the run goes on to its end."""
    with attached.attached(served, 60) as run:
        child = run.run("--max-in-flight", "4")
        run.wait_files(3, child)
        os.kill(wait_for(lambda: child_of(child.pid, WORKER), 60, "a worker lives"), signal.SIGBUS)
        assert ended(child, 240) == ExitCode.DONE, words(child)
        assert "SIGBUS" in words(child, 1 << 20)
        run.check()


def test_a_poison_sample_is_tried_again_on_demand(served: Served) -> None:
    with attached.attached(served, 5) as run:
        held = run.stage.fault("poison")
        child = run.run("--max-strikes", "1", faults=f"worker.dump_seen=raise,row:1,while:{held}")
        assert ended(child, 240) == ExitCode.FAILED_SAMPLES, words(child)
        assert rows_of(run)[1]["state"] == "failed"
        held.unlink()
        again = run.stage.hsjournal("retry", str(run.stage.run_dir), "--all")
        assert ended(again) == 0, words(again)
        last = run.run()
        assert ended(last) == ExitCode.DONE, words(last)
        assert {r["state"] for r in rows_of(run).values()} == {"verified"}


def test_a_worker_killed_while_it_drains_strikes_nobody(served: Served) -> None:
    with attached.attached(served, 60) as run:
        child = run.run("--max-in-flight", "4")
        run.wait_files(3, child)
        os.kill(child.pid, signal.SIGINT)
        time.sleep(0.1)
        worker = child_of(child.pid, WORKER)
        if worker is not None:
            kill_and_wait(worker)
        assert ended(child) == ExitCode.INTERRUPTED, words(child)
        last = run.run()
        assert ended(last) == ExitCode.DONE, words(last)
        run.check()
