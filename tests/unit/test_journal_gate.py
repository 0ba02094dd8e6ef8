"""The gate before a new worker: storage proved, older workers fenced, crashes blamed on whom they fit."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from hsjournal.config import RunPaths
from hsjournal.errors import ExitCode, FencedError, JournalLockedError, NoJournalError, NoRoomError, SchemaError
from hsjournal.events import Event
from hsjournal.journal import gate
from hsjournal.journal.gate import pass_gate, prove_storage
from hsjournal.journal.locks import Lock
from hsjournal.journal.store import Journal, Move
from hsjournal.mirror import Mirror
from hsjournal.states import State
from tests.helpers.journals import put, started, transition
from tests.helpers.mounts import fill as fill_up
from tests.helpers.mounts import tmpfs

SENT = transition(State.PENDING, State.SENT)


@pytest.fixture
def run(tmp_path):
    """A run directory with six pending rows, at epoch 1."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    started(run_dir, [4] * 6)
    paths = RunPaths.of(run_dir)
    Mirror(paths.mirror).create()
    paths.default_out.mkdir()
    return paths


def through(paths: RunPaths, *, crashed: bool = False, max_strikes: int = 3) -> dict[str, object]:
    return pass_gate(paths, paths.default_out, crashed=crashed, max_strikes=max_strikes)


def move(paths: RunPaths, epoch: int, *rows: tuple[int, State]) -> None:
    with Journal(paths.journal) as journal:
        for row, state in rows:
            put(journal, row, state, epoch)


def row_of(paths: RunPaths, row: int) -> dict[str, object]:
    with Journal(paths.journal) as journal:
        return journal.rows_of([row])[0]


def kinds(paths: RunPaths) -> list[tuple[str, int | None]]:
    with Journal(paths.journal) as journal:
        return [(e.kind, e.row) for _, e in journal.events()]


# the storage


def test_the_storage_is_written_synced_and_read_back_and_nothing_stays(tmp_path, monkeypatch):
    calls: list[str] = []

    def watched(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: object) -> object:
            calls.append(name)
            return real(*arguments)

        monkeypatch.setattr(os, name, call)

    for name in ("pwrite", "fsync", "pread"):
        watched(name)
    prove_storage(tmp_path)
    assert calls == ["pwrite", "fsync", "pread"]
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_went_away_is_not_made_again_since_it_may_be_a_mount(run):
    run.default_out.rmdir()
    with pytest.raises(NoRoomError, match="No such file or directory"):
        through(run)
    assert not run.default_out.exists()


def test_what_a_killed_gate_left_is_cleared_away(tmp_path):
    code = (
        "import os; from pathlib import Path; from hsjournal.journal import gate\n"
        "os.fsync = lambda fd: os.kill(os.getpid(), 9)\n"
        f"gate.prove_storage(Path({str(tmp_path)!r}))"
    )
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
        assert len(list(tmp_path.iterdir())) == 1
    prove_storage(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_other_bytes_than_were_written_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pread", lambda *_: b"other")
    with pytest.raises(NoRoomError, match="gives back other bytes"):
        prove_storage(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
def test_a_full_output_is_named_and_the_epoch_stays(run, tmp_path):
    with tmpfs(tmp_path / "small", "1m") as mount:
        fill_up(mount)
        with pytest.raises(NoRoomError, match=r"small.*No space left.*Make room"):
            pass_gate(run, mount, crashed=False, max_strikes=3)
    with Journal(run.journal) as journal:
        assert journal.epoch == 1


def test_an_output_that_is_a_file_is_named(run, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NoRoomError, match="can't be written"):
        pass_gate(run, tmp_path / "file", crashed=False, max_strikes=3)


# the epoch


def test_each_passage_raises_the_epoch_and_fences_whoever_came_before(run):
    assert through(run) == {"epoch": 2, "in_flight": [], "blamed": {}}
    assert through(run)["epoch"] == 3
    with Journal(run.journal) as journal, pytest.raises(FencedError):
        journal.apply([Move(0, 0, SENT, {"attempt": 1})], 2)


def test_a_worker_that_still_lives_closes_it(run, monkeypatch):
    monkeypatch.setattr(gate, "prove_storage", lambda _folder: pytest.fail("the storage is not even touched beside it"))
    lock = Lock(run.worker_lock)
    lock.acquire()
    with pytest.raises(JournalLockedError, match=r"still lives.*ends when the storage comes back"):
        through(run)
    with Journal(run.journal) as journal:
        assert journal.epoch == 1
    assert list(run.default_out.iterdir()) == []
    monkeypatch.undo()
    lock.release()
    assert through(run)["epoch"] == 2


def test_rows_in_flight_are_told_of_the_last_worker_only(run):
    move(run, 1, (0, State.SENT), (1, State.VERIFIED), (2, State.DUMPED))
    assert through(run)["in_flight"] == [0, 2]
    move(run, 2, (3, State.WRITTEN))
    assert through(run)["in_flight"] == [3]
    assert through(run)["in_flight"] == []


# blame


def test_after_a_plain_end_nobody_is_blamed(run):
    move(run, 1, (0, State.SENT))
    through(run, crashed=False)
    assert (row_of(run, 0)["strikes"], row_of(run, 0)["suspect"]) == (0, 0)


def test_several_in_flight_are_suspects_without_a_strike(run):
    move(run, 1, (0, State.SENT), (1, State.DUMPED), (2, State.VERIFIED))
    through(run, crashed=True)
    assert [(row_of(run, r)["strikes"], row_of(run, r)["suspect"]) for r in range(4)] == [
        (0, 1),
        (0, 1),
        (0, 0),
        (0, 0),
    ]
    assert [row_of(run, r)["state"] for r in range(2)] == ["sent", "dumped"]
    assert kinds(run) == [("suspect", 0), ("suspect", 1)]


def test_one_alone_gets_a_strike_each_time_and_fails_at_the_last(run):
    for epoch in (1, 2, 3):
        with Journal(run.journal) as journal:
            if epoch > 1:
                journal.take(4, State.DUMPED, epoch)  # the next worker runs it alone
            else:
                put(journal, 4, State.DUMPED, epoch)
        through(run, crashed=True)
        row = row_of(run, 4)
        assert row["strikes"] == epoch
        assert "crashed with this sample alone" in str(row["reason"])
    assert (row["state"], row["suspect"], row["attempt"]) == ("failed", 0, 1)
    assert kinds(run) == [("crash_strike", 4)] * 3


def test_a_row_inherited_in_flight_is_blamed_once_the_new_worker_takes_it(run):
    """Found dumped by the next worker, it is not sent again: without ``take`` its crashes would count for nobody."""
    move(run, 1, (0, State.DUMPED), (1, State.DUMPED))
    through(run, crashed=True)
    assert through(run, crashed=True)["in_flight"] == []  # that worker died before it took anything
    with Journal(run.journal) as journal:
        journal.take(0, State.DUMPED, 3)
    assert through(run, crashed=True)["in_flight"] == [0]
    assert (row_of(run, 0)["strikes"], row_of(run, 1)["strikes"]) == (1, 0)


@pytest.mark.parametrize("state", [State.SENT, State.DUMPED, State.WRITTEN])
def test_strikes_used_up_fail_the_row_from_wherever_it_is(run, state):
    move(run, 1, (2, state))
    through(run, crashed=True, max_strikes=1)
    row = row_of(run, 2)
    assert (row["state"], row["actor"], row["output_bytes"]) == ("failed", "reconcile", 0)


# events


def test_the_mirrors_events_are_entered_once(run):
    mirror = Mirror(run.mirror)
    mirror.record(Event("one", 3, {"x": 1}, epoch=1))
    through(run)
    mirror.record(Event("two"))
    through(run)
    through(run)
    with Journal(run.journal) as journal:
        found = [event for _, event in journal.events()]
    assert [e.kind for e in found] == ["one", "two"]
    assert (found[0].row, found[0].detail, found[0].epoch) == (3, {"x": 1}, 1)


# as a child


def ask(run: RunPaths, *more: str) -> tuple[int, dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-m", "hsjournal.journal.gate", str(run.run_dir), str(run.default_out), *more],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_as_a_child_it_answers_in_json(run):
    move(run, 1, (5, State.SENT))
    assert ask(run, "--after", "crash", "--max-strikes", "2") == (0, {"epoch": 2, "in_flight": [5], "blamed": {"5": 1}})
    assert row_of(run, 5)["strikes"] == 1
    Mirror(run.mirror).record(Event("late"))
    assert ask(run, "--events-only") == (0, {})
    assert kinds(run)[-1] == ("late", None)
    assert row_of(run, 5)["epoch"] == 1


def test_as_a_child_every_refusal_has_its_exit_code(run, tmp_path):
    lock = Lock(run.worker_lock)
    lock.acquire()
    code, answer = ask(run)
    assert (code, answer["exit_code"]) == (ExitCode.LOCKED, ExitCode.LOCKED)
    lock.release()
    run.journal.write_bytes(b"garbage" * 1000)
    code, answer = ask(run)
    assert (code, answer["exit_code"]) == (ExitCode.SCHEMA, ExitCode.SCHEMA)
    assert "Restore it from a copy" in str(answer["remedy"])
    run.journal.unlink()
    code, answer = ask(run)
    assert (code, answer["exit_code"]) == (ExitCode.NO_JOURNAL, ExitCode.NO_JOURNAL)
    assert not run.journal.exists()


def test_a_journal_of_a_newer_version_closes_it(run):
    with closing(sqlite3.connect(run.journal)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(SchemaError, match="newer"):
        through(run)
    assert gate.main([str(run.run_dir), str(run.default_out)]) == ExitCode.SCHEMA


def test_without_a_journal_there_is_no_way_through(tmp_path):
    paths = RunPaths.of(tmp_path)
    paths.default_out.mkdir()
    with pytest.raises(NoJournalError):
        pass_gate(paths, paths.default_out, crashed=False, max_strikes=3)
