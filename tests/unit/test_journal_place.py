"""Deleted or replaced under an open connection: noticed, and what is still open is saved whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from pathlib import Path

import pytest

from hsjournal.errors import ExitCode
from hsjournal.events import Event
from hsjournal.journal.group import JournalThread
from hsjournal.journal.place import JournalGoneError, Place
from hsjournal.journal.store import Journal
from tests.helpers.journals import copy, started


def test_all_is_well_while_the_name_leads_to_the_open_file(tmp_path: Path) -> None:
    path, _ = started(tmp_path)
    with Journal(path) as journal:
        place = Place(path)
        journal.raise_epoch()
        assert place.problem() is None
        with contextlib.closing(sqlite3.connect(path)) as other:  # SQLite's own comings and goings
            other.execute("SELECT count(*) FROM sample").fetchall()
        assert place.problem() is None


@pytest.mark.parametrize("name", ["journal.db", "journal.db-wal"])
def test_each_of_its_files_is_missed(tmp_path: Path, name: str) -> None:
    path, _ = started(tmp_path)
    with Journal(path) as journal:
        journal.raise_epoch()
        place = Place(path)
        (tmp_path / name).rename(tmp_path / "elsewhere")
        assert place.problem() == f"{tmp_path / name} was deleted under the run"
        (tmp_path / name).write_bytes(b"")
        assert place.problem() == f"{tmp_path / name} was replaced under the run"


def test_what_was_committed_into_a_nameless_file_is_saved(tmp_path: Path) -> None:
    path, _ = started(tmp_path)
    with Journal(path) as journal:
        place = Place(path)
        path.unlink()
        epoch = journal.raise_epoch()  # SQLite says that all is well
        rescued = journal.rescued_by(place)
    assert rescued is not None
    folder = tmp_path / "again"
    folder.mkdir()
    with Journal(copy(rescued, folder)) as again:
        assert again.epoch == epoch
        assert again.counts() != {}


def test_without_a_folder_to_save_it_in_that_is_said(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    path, _ = started(run_dir)
    with Journal(path) as journal:
        place = Place(path)
        run_dir.rename(tmp_path / "moved")
        problem = place.problem()
        assert problem is not None
        assert journal.rescued_by(place) is None
    error = place.gone(problem, None)
    assert "new run directory" in str(error)


async def test_the_journals_thread_claims_nothing_that_is_lost(tmp_path: Path) -> None:
    path, epoch = started(tmp_path)
    thread = JournalThread(path, epoch, pause_limit=5.0, retry_pause=0.05)
    await thread.start()
    await thread.apply(events=[Event("before")])
    path.unlink()
    for _ in range(2):
        with pytest.raises(JournalGoneError, match="was deleted under the run") as caught:
            await thread.apply(events=[Event("after")])
    assert caught.value.exit_code is ExitCode.NO_JOURNAL
    assert "journal.db.rescued" in str(caught.value)
    await thread.stop()
    assert [name for name in os.listdir(tmp_path) if "rescued" in name] == ["journal.db.rescued"]


async def test_it_is_missed_also_while_nothing_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsjournal.journal.group.GUARD_EVERY", 0.05)
    path, epoch = started(tmp_path)
    thread = JournalThread(path, epoch, pause_limit=5.0, retry_pause=0.05)
    await thread.start()
    path.rename(tmp_path / "moved")
    async with asyncio.timeout(5):
        with pytest.raises(JournalGoneError):
            await thread.guard()
    await thread.stop()
