"""`reconcile`: the plan without a server, shown and carried out."""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from hsjournal.dump.protocol import RequestId
from hsjournal.errors import HsjournalError, JournalLockedError
from hsjournal.journal.locks import Lock
from hsjournal.journal.store import Journal, Move
from hsjournal.ops.reconcile import reconcile
from hsjournal.sink.folders import temporary_name
from hsjournal.states import DEFERRED, Actor, State, Transition
from tests.helpers.cli import hsjournal
from tests.helpers.dumps import write_dump
from tests.helpers.runs import LAYERS, RUN_ID, MadeRun, make_run


def wreck(folder: Path) -> MadeRun:
    """Row 0 pending, 1 sent with its dump, 2 sent without, 3 verified with its dump left, 4 dumped and gone, 5 dumped.

    Row 6 is dumped, its dump gone and its whole file there; 7 and 8 are written, the file of the one gone and its dump there,
    the file of the other cut short.
    """
    states = [State.PENDING, State.SENT, State.SENT, State.VERIFIED, State.DUMPED, State.DUMPED, *[State.WRITTEN] * 3]
    run = make_run(folder, states)

    def rid(row: int, attempt: int = 1) -> RequestId:
        return RequestId.sample(RUN_ID, row, attempt, len(run.ids[row]))

    for row in (1, 3, 7):
        write_dump(run.root, rid(row), run.ids[row], capture_layers=LAYERS)
    with Journal(run.paths.journal) as journal:  # its worker died between publishing and its commit
        journal.apply([Move(6, 1, Transition(State.WRITTEN, State.DUMPED, Actor.RECONCILE, ""))], journal.epoch)
    run.outputs()[7].unlink()
    os.truncate(run.outputs()[8], 100)
    write_dump(run.root, rid(2, 0), run.ids[2], capture_layers=LAYERS)  # an older attempt
    write_dump(run.root, rid(0), run.ids[0], capture_layers=LAYERS, publish=False)  # its writer is gone
    os.rename(run.root / str(rid(4)), folder / "lost")
    (run.root / "psm_foreign").mkdir()
    (run.root / "hsj-other-1-1-5").mkdir()
    (run.out / "rows_0-2000" / temporary_name(rid(1))).write_bytes(b"half")
    (run.out / "rows_0-2000" / ".hsjournal-hsj-other-1-1-5-00000000.tmp").write_bytes(b"not this run's")
    return run


def everything(run: MadeRun) -> list[str]:
    return sorted(str(p.relative_to(run.paths.run_dir.parent)) for p in run.paths.run_dir.parent.rglob("*"))


def test_a_dry_run_tells_it_all_and_changes_not_a_byte(tmp_path: Path) -> None:
    run = wreck(tmp_path)
    before = run.bytes_of()
    told = reconcile(run.paths, dry_run=True)
    lines = "\n".join(told.plan.lines())
    assert "row 1: sent -> dumped" in lines
    assert "row 2: sent -> pending" in lines
    assert "row 4: dumped -> pending" in lines
    assert "row 6: dumped -> written" in lines
    assert "row 7: written -> dumped" in lines
    assert "row 8: written -> pending" in lines
    assert "leave psm_foreign" in lines
    assert "from the output" in lines
    assert not told.applied
    assert run.bytes_of() == before
    done = reconcile(run.paths, dry_run=False)
    assert list(done.plan.lines()) == list(told.plan.lines())


def test_applied_once_and_a_second_time_nothing(tmp_path: Path) -> None:
    run = wreck(tmp_path)
    done = reconcile(run.paths, dry_run=False)
    assert done.applied
    assert done.freed_bytes > 0
    assert run.states() == dict(
        enumerate(["pending", "dumped", "pending", "verified", "pending", "dumped", "written", "dumped", "pending"])
    )
    assert xxhash.xxh3_128_hexdigest(run.outputs()[6].read_bytes()) == run.row(6)["output_xxh3"]
    assert run.row(7)["reason"] == "rows_0-2000/data_7.ckpt is gone"
    assert "data_8.ckpt is 100 bytes, not" in run.row(8)["reason"]
    left = {p.name for p in run.root.iterdir()}
    assert {name for name in left if f"-{RUN_ID}-" in name} == {
        str(RequestId.sample(RUN_ID, row, 1, len(run.ids[row]))) for row in (1, 5, 7)
    }
    assert {"psm_foreign", "hsj-other-1-1-5"} <= left
    hidden = [p.name for p in run.out.rglob(".*")]
    assert hidden == [".hsjournal-hsj-other-1-1-5-00000000.tmp"]
    with Journal(run.paths.journal) as journal:
        epoch = journal.epoch
    files, states = everything(run), run.states()
    again = reconcile(run.paths, dry_run=False)
    assert again.plan.is_empty
    assert (everything(run), run.states()) == (files, states)
    with Journal(run.paths.journal) as journal:
        assert journal.epoch == epoch
    assert len(run.events("dump_removed")) == 3


def test_a_root_that_is_gone_is_an_empty_one(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.SENT, State.DUMPED, State.VERIFIED])
    run.root.rename(tmp_path / "gone")
    assert len(reconcile(run.paths, dry_run=True).plan.moves) == 2
    reconcile(run.paths, dry_run=False)
    assert run.states() == {0: "pending", 1: "pending", 2: "verified"}
    assert not run.root.exists()


def test_applying_needs_the_run_looking_does_not(tmp_path: Path) -> None:
    run = wreck(tmp_path)
    lock = Lock(run.paths.worker_lock)
    lock.acquire()
    assert reconcile(run.paths, dry_run=True).live
    with pytest.raises(JournalLockedError):
        reconcile(run.paths, dry_run=False)
    lock.release()


def test_the_command(tmp_path: Path) -> None:
    run = wreck(tmp_path)
    run_dir = run.paths.run_dir
    dry = hsjournal("reconcile", run_dir, "--dry-run")
    assert dry.code == 0, dry
    assert "row 2: sent -> pending" in dry.out
    assert "nothing was changed" in dry.out
    done = hsjournal("reconcile", run_dir, "--json").json()
    assert (done["moves"], done["applied"], done["temporaries"]) == (6, True, 1)
    again = hsjournal("reconcile", run_dir)
    assert "nothing to do" in again.out


def test_a_refused_dump_is_a_strike_but_how_many_end_a_row_is_for_the_run_to_say(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.SENT, State.VERIFIED])
    with Journal(run.paths.journal) as journal:
        journal.touch(0, State.SENT, journal.epoch, strikes=9)
    rid = RequestId.sample(RUN_ID, 0, 1, len(run.ids[0]))
    write_dump(run.root, rid, run.ids[0], capture_layers=(2, 4, 6))
    reconcile(run.paths, dry_run=False)
    assert (run.row(0)["state"], run.row(0)["strikes"]) == ("pending", 10)


def test_a_written_row_of_a_finished_run_reopens_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.WRITTEN, State.VERIFIED])
    with Journal(run.paths.journal) as journal:
        journal.touch(0, State.WRITTEN, journal.epoch, verify_method=DEFERRED)
        journal.finish()
    run.outputs()[0].unlink()
    reconcile(run.paths, dry_run=False)
    assert run.row(0)["state"] == "pending"
    with closing(sqlite3.connect(run.paths.journal)) as database:
        assert database.execute("SELECT finished_at FROM run").fetchall() == [(None,)]


def test_a_folder_of_several_that_is_not_mounted_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.WRITTEN])
    gone = tmp_path / "unmounted"
    options = run.manifest.options | {"more_out": json.dumps([str(gone)])}
    run.paths.manifest.write_text(replace(run.manifest, options=options).to_toml())
    with pytest.raises(HsjournalError, match="unmounted is not there"):
        reconcile(run.paths, dry_run=True)


def test_a_folder_made_just_now_is_its_writers(tmp_path: Path) -> None:
    """Between making and locking it, a living server's folder looks like one whose writer is gone."""
    run = make_run(tmp_path, [State.SENT])
    name = f".tmp-{RequestId.sample(RUN_ID, 0, 1, len(run.ids[0]))}"
    made, locked, done = threading.Event(), threading.Event(), threading.Event()

    def write() -> None:
        (run.root / name).mkdir()
        made.set()
        time.sleep(0.2)
        folder = os.open(run.root / name, os.O_RDONLY)
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked.set()
        done.wait(30)
        os.close(folder)

    writer = threading.Thread(target=write)
    writer.start()
    assert made.wait(30)
    assert reconcile(run.paths, dry_run=True).plan.removals == ()
    assert locked.is_set()
    done.set()
    writer.join()
    assert [removal.name for removal in reconcile(run.paths, dry_run=True).plan.removals] == [name]
