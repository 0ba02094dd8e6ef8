"""Rows in doubt: named in few words, found again in the journal, put back on demand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsjournal.events import Event
from hsjournal.journal.doubt import DOUBTED, GOOD, doubted_rows, ranges, rows_in, rows_since_good
from hsjournal.journal.store import Journal
from hsjournal.ops.doubted import make_again
from hsjournal.states import State
from tests.helpers.cli import hsjournal
from tests.helpers.runs import MadeRun, make_run

STATES = [State.VERIFIED, State.VERIFIED, State.WRITTEN, State.DUMPED, State.SENT, State.PENDING, State.FAILED, State.SKIPPED, State.VERIFIED]  # fmt: skip


@given(st.sets(st.integers(0, 200)))
def test_ranges_and_back(rows: set[int]) -> None:
    assert rows_in(ranges(sorted(rows))) == sorted(rows)


@pytest.mark.parametrize(
    ("rows", "text"), [([], ""), ([7], "7"), ([4, 5], "4-5"), ([4, 5, 6, 9, 11, 12], "4-6, 9, 11-12")]
)
def test_few_words(rows: list[int], text: str) -> None:
    assert ranges(rows) == text


def tell(run: MadeRun, *events: tuple[str, dict[str, Any]]) -> None:
    with Journal(run.paths.journal) as journal:
        journal.apply([], journal.epoch, [Event(kind, None, detail) for kind, detail in events])


def test_what_was_sent_or_under_way_since_the_last_good_one_of_this_server(tmp_path: Path) -> None:
    run = make_run(tmp_path, STATES)
    sent = {row: run.row(row) for row in range(len(STATES))}
    url, boot_id = sent[0]["server"], sent[0]["boot_id"]
    with Journal(run.paths.journal) as journal:
        everything = rows_since_good(journal, url, boot_id)
    assert everything == [
        row for row in (0, 1, 2, 3, 4, 8) if sent[row]["server"] == url and sent[row]["boot_id"] == boot_id
    ]
    later = max(row["sent_at"] or 0.0 for row in sent.values()) + 1.0
    tell(run, (GOOD, {"url": url, "sent_at": later, "under_way": [1, 4]}))
    tell(run, (GOOD, {"url": "http://other", "sent_at": later + 5, "under_way": [2]}))
    with Journal(run.paths.journal) as journal:
        assert rows_since_good(journal, url, boot_id) == [row for row in (1, 4) if row in everything]
        assert rows_since_good(journal, url, "another life") == []


def test_rows_of_every_state_are_put_back_once_and_the_others_stay(tmp_path: Path) -> None:
    run = make_run(tmp_path, STATES, keep_dumps=True)
    files = run.outputs()
    tell(run, (DOUBTED, {"rows": "1-3"}), (DOUBTED, {"rows": "4-7"}))
    with Journal(run.paths.journal) as journal:
        assert doubted_rows(journal) == [1, 2, 3, 4, 5, 6, 7]
    said = hsjournal("retry", run.paths.run_dir, "--doubted")
    assert said.code == 0, said
    assert "4 rows in doubt are pending again" in said.out
    assert run.states() == {
        0: "verified", 1: "pending", 2: "pending", 3: "pending", 4: "pending", 5: "pending", 6: "failed", 7: "skipped",
        8: "verified",
    }  # fmt: skip
    assert set(run.outputs()) == {0, 8}
    aside = list(run.paths.rejects.iterdir())
    assert len(aside) == len(files) - 2
    assert make_again(run.paths).rows == ()
    assert "no row is in doubt" in hsjournal("retry", run.paths.run_dir, "--doubted").out


def test_doubted_is_said_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.FAILED])
    assert hsjournal("retry", run.paths.run_dir, "0", "--doubted").code == 2
    assert hsjournal("retry", run.paths.run_dir, "--all", "--doubted").code == 2
