"""`retry`: failed rows are pending again, and only those that were named."""

from __future__ import annotations

from pathlib import Path

import pytest

from hsjournal.errors import JournalLockedError, NoJournalError, UsageError
from hsjournal.journal.locks import Lock
from hsjournal.journal.store import Journal
from hsjournal.ops.retry import retry
from hsjournal.states import State
from tests.helpers.cli import hsjournal
from tests.helpers.runs import make_run

STATES = [State.FAILED, State.VERIFIED, State.FAILED, State.PENDING, State.SKIPPED]


def test_named_rows_only_strikes_forgiven_and_the_run_open_again(tmp_path: Path) -> None:
    run = make_run(tmp_path, STATES)
    with Journal(run.paths.journal) as journal:
        journal.finish()
        before = journal.epoch
    assert retry(run.paths, [2], "the server is mended").rows == (2,)
    assert run.states() == {0: "failed", 1: "verified", 2: "pending", 3: "pending", 4: "skipped"}
    row = run.row(2)
    assert (row["strikes"], row["actor"], row["reason"], row["attempt"]) == (0, "operator", "the server is mended", 1)
    assert run.events("retried") == [
        {"failed_by": "wrong_count: 3 of 5 rows", "strikes": 3, "reason": "the server is mended"}
    ]
    with Journal(run.paths.journal) as journal:
        assert journal.epoch == before + 1
        (finished,) = journal._connection.execute("SELECT finished_at FROM run").fetchone()
    assert finished is None


def test_all_and_then_none(tmp_path: Path) -> None:
    run = make_run(tmp_path, STATES)
    assert retry(run.paths, None).rows == (0, 2)
    with Journal(run.paths.journal) as journal:
        epoch = journal.epoch
    assert retry(run.paths, None).rows == ()
    with Journal(run.paths.journal) as journal:
        assert journal.epoch == epoch


@pytest.mark.parametrize(("rows", "words"), [([0, 1], "1 (verified)"), ([0, 4], "4 (skipped)"), ([0, 99], "no row 99")])
def test_one_wrong_row_and_nothing_is_changed(tmp_path: Path, rows: list[int], words: str) -> None:
    run = make_run(tmp_path, STATES)
    with pytest.raises(UsageError) as caught:
        retry(run.paths, rows)
    assert words in str(caught.value)
    assert run.states()[0] == "failed"


def test_refused_while_somebody_has_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, STATES)
    for path in (run.paths.supervisor_lock, run.paths.worker_lock):
        lock = Lock(path)
        lock.acquire()
        with pytest.raises(JournalLockedError):
            retry(run.paths, None)
        lock.release()
    with pytest.raises(NoJournalError):
        retry(type(run.paths).of(tmp_path / "nowhere"), None)


def test_the_command(tmp_path: Path) -> None:
    run = make_run(tmp_path, STATES)
    run_dir = run.paths.run_dir
    assert hsjournal("retry", run_dir).code == 2
    assert hsjournal("retry", run_dir, "0", "--all").code == 2
    done = hsjournal("retry", run_dir, "0", "2", "--json")
    assert (done.code, done.json()) == (0, {"retried": 2, "rows": [0, 2]})
    told = hsjournal("retry", run_dir, "--all")
    assert (told.code, "nothing to do" in told.out) == (0, True)
    refused = hsjournal("retry", run_dir, "1")
    assert (refused.code, "1 (verified)" in refused.err) == (2, True)
