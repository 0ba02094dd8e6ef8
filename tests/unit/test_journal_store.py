"""The store: compare-and-set, all or nothing, and what goes in comes out."""

from __future__ import annotations

from array import array

import pytest

from hsjournal.errors import FencedError, HsjournalError
from hsjournal.events import Event
from hsjournal.journal import queries
from hsjournal.journal.store import IntegrityError, Journal, Move, NewRow
from hsjournal.states import Actor, State, Transition
from tests.helpers.journals import FILE, RUN, empty_journal, fill, new_row, put, started, transition, values_for

SENT = transition(State.PENDING, State.SENT)
DUMPED = transition(State.SENT, State.DUMPED)


@pytest.fixture
def journal(tmp_path):
    path, epoch = started(tmp_path, [4, 5, 6, 7])
    assert epoch == 1
    with Journal(path) as opened:
        yield opened


def send(row: int, attempt: int = 0) -> Move:
    return Move(row, attempt, SENT, {"attempt": attempt + 1})


def states_of(journal: Journal) -> list[tuple[str, int]]:
    return [(r["state"], r["attempt"]) for r in journal.all_rows()]


# compare-and-set


def test_a_batch_moves_every_row_and_says_who_and_when(journal):
    journal.apply([send(0), send(2)], 1, [Event("hello")])
    assert states_of(journal) == [("sent", 1), ("pending", 0), ("sent", 1), ("pending", 0)]
    row = journal.rows_of([2])[0]
    assert (row["actor"], row["epoch"]) == ("worker", 1)
    assert row["changed_at"] > 1e9
    assert [e.kind for _, e in journal.events()] == ["hello"]


@pytest.mark.parametrize(
    ("bad", "epoch", "words"),
    [
        (send(2, attempt=5), 1, r"row 2 is \(pending, attempt 0\), not \(pending, attempt 5\)"),
        (Move(2, 0, DUMPED), 1, r"row 2 is \(pending, attempt 0\), not \(sent, attempt 0\)"),
        (send(99), 1, "row 99 is absent"),
        (send(2), 0, r"epoch 0 is over \(now 1\)"),
        (send(2), 2, r"epoch 2 is over \(now 1\)"),
    ],
    ids=["attempt", "state", "no such row", "older epoch", "epoch of the future"],
)
def test_one_row_that_is_not_as_expected_undoes_the_whole_batch(journal, bad, epoch, words):
    before = (states_of(journal), journal.counts())
    good = Move(0, 0, SENT, {"attempt": 1}, Event("sent_event", 0))
    with pytest.raises(FencedError, match=words):
        journal.apply([good, send(1), bad, send(3)], epoch, [Event("with_the_batch")])
    assert (states_of(journal), journal.counts(), journal.events()) == (*before, [])
    journal.apply([send(0)], 1)  # and the journal is usable


def test_an_older_worker_changes_nothing_after_a_newer_epoch(journal):
    journal.apply([send(0)], 1)
    assert journal.raise_epoch([Event("newer")]) == journal.epoch == 2
    with pytest.raises(FencedError):
        journal.apply([Move(0, 1, DUMPED)], 1)
    with pytest.raises(FencedError):
        journal.touch(0, State.SENT, 1, strikes=1)
    with pytest.raises(FencedError):
        journal.take(0, State.SENT, 1)
    with pytest.raises(FencedError):
        journal.reopen(1)
    row = journal.rows_of([0])[0]
    assert (row["state"], row["strikes"], row["epoch"]) == ("sent", 0, 1)
    journal.apply([Move(0, 1, DUMPED)], 2)
    assert [(e.kind, e.epoch) for _, e in journal.events()] == [("newer", 2)]


def test_what_is_not_in_the_table_never_reaches_the_database(journal):
    with pytest.raises(ValueError, match="not in TRANSITIONS"):
        journal.apply([send(0), Move(1, 0, transition(State.PENDING, State.VERIFIED))], 1)
    assert states_of(journal)[0] == ("pending", 0)


def test_a_value_that_the_database_refuses_undoes_the_batch(journal):
    with pytest.raises(IntegrityError):
        journal.apply([send(0), Move(1, 0, transition(State.PENDING, State.FAILED), {"reason": None})], 1)
    assert states_of(journal)[0] == ("pending", 0)
    journal.apply([send(0)], 1)


@pytest.mark.parametrize("target", [State.PENDING, State.DUMPED, State.FAILED])
def test_a_row_that_goes_back_forgets_its_file(journal, target):
    put(journal, 1, State.WRITTEN, 1, source_xxh3="abc")
    assert journal.counts()[State.WRITTEN].nbytes == 100
    move = Transition(State.WRITTEN, target, Actor.RECONCILE, "")
    journal.apply([Move(1, 1, move, values_for(target))], 1)
    row = journal.rows_of([1])[0]
    forgotten = ("output_path", "output_xxh3", "source_xxh3", "verify_method", "verified_at", "released_at")
    assert (row["output_bytes"], [row[name] for name in forgotten]) == (0, [None] * 6)
    assert sum(c.nbytes for c in journal.counts().values()) == 0
    assert row["attempt"] == 1


def test_repair_forgets_the_damaged_file_too(journal):
    put(journal, 1, State.VERIFIED, 1, verified_at=1.5)
    journal.apply([Move(1, 1, Transition(State.VERIFIED, State.PENDING, Actor.REPAIR, ""))], 1)
    row = journal.rows_of([1])[0]
    assert (row["output_path"], row["output_bytes"], row["verified_at"]) == (None, 0, None)


def test_a_released_row_stays_verified_and_counted(journal):
    put(journal, 1, State.VERIFIED, 1)
    before = journal.counts()
    assert journal.release([0, 1, 99]) == [1], "a pending row, and one that is not there, have nothing to release"
    assert journal.release([1]) == []
    assert journal.released() == (1, 100)
    assert journal.counts() == before
    row = journal.rows_of([1])[0]
    assert (row["state"], row["output_bytes"]) == ("verified", 100)
    assert row["released_at"] > 0
    assert journal.row_of_id("s1") == row
    assert journal.row_of_id("nobody") is None
    journal.apply([Move(1, 1, Transition(State.VERIFIED, State.PENDING, Actor.REPAIR, ""))], 1)
    assert journal.rows_of([1])[0]["released_at"] is None
    assert journal.released() == (0, 0)
    with pytest.raises(IntegrityError, match="sample_released_only_if_verified"):
        journal.touch(1, State.PENDING, 1, released_at=1.0)


def test_touch_sets_counters_and_leaves_the_state_and_the_epoch(journal):
    journal.apply([send(0)], 1)
    journal.raise_epoch()
    journal.touch(0, State.SENT, 2, Event("suspect", 0), strikes=2, suspect=1, reason="why")
    row = journal.rows_of([0])[0]
    assert (row["state"], row["strikes"], row["suspect"], row["reason"], row["epoch"]) == ("sent", 2, 1, "why", 1)
    with pytest.raises(FencedError, match="no longer dumped"):
        journal.touch(0, State.DUMPED, 2, Event("never"), strikes=3)
    assert [e.kind for _, e in journal.events()] == ["suspect"]


def test_take_says_whose_row_it_is_now(journal):
    journal.apply([send(0)], 1)
    journal.raise_epoch()
    journal.take(0, State.SENT, 2)
    row = journal.rows_of([0])[0]
    assert (row["epoch"], row["state"], row["attempt"]) == (2, "sent", 1)
    with pytest.raises(FencedError):
        journal.take(0, State.DUMPED, 2)


# ingestion


def test_what_goes_in_comes_out(tmp_path):
    path = empty_journal(tmp_path)
    ids = array("I", [0, 1, 2**32 - 1, 163_839])
    with Journal(path) as journal:
        journal.start_ingest(RUN)
        journal.add_rows([NewRow(0, "ä/../\u2028\0id", "fichier é.jsonl", 7, ids, [0, 1, 3])])
        assert not journal.is_ingested
        journal.finish_ingest()
        assert (journal.is_ingested, journal.run_id) == (True, RUN)
    with Journal(path) as journal:
        (claim,) = journal.claimable(-1, 10)
        assert (claim.row, claim.sample_id, claim.num_tokens) == (0, "ä/../\u2028\0id", 4)
        assert (claim.attempt, claim.strikes) == (0, 0)
        assert (claim.input_ids, claim.loss_mask) == (ids, array("I", [0, 1, 3]))
        assert claim == journal.claim_of(0)
        row = journal.rows_of([0])[0]
        assert (row["source"], row["line"], row["loss_tokens"], row["actor"]) == ("fichier é.jsonl", 7, 1, "ingest")
        assert list(journal.all_prompts()) == [(0, ids.tobytes())]


def test_skipped_rows_keep_their_reason_and_have_no_prompt(tmp_path):
    path = empty_journal(tmp_path)
    fill(path, [4, 4, 4], {1: "no loss tokens"})
    with Journal(path) as journal:
        assert [c.row for c in journal.claimable(-1, 10)] == [0, 2]
        assert journal.rows_in(State.SKIPPED)[0]["reason"] == "no loss tokens"
        with pytest.raises(LookupError, match="row 1"):
            journal.claim_of(1)
        counts = journal.counts()
        assert (counts[State.SKIPPED].rows, counts[State.PENDING].rows, counts[State.PENDING].tokens) == (1, 2, 8)


def test_an_unfinished_ingestion_starts_over(tmp_path):
    path = empty_journal(tmp_path)
    with Journal(path) as journal:
        journal.start_ingest(RUN)
        journal.add_rows([new_row(0), new_row(1), new_row(2, skipped="bad")])
        journal.start_ingest("other111")
        assert (journal.run_id, list(journal.all_rows())) == ("other111", [])
        assert not any(c.rows for c in journal.counts().values())
        journal.add_rows([new_row(0)])
        journal.finish_ingest()
        journal.start_ingest(RUN)
        assert not journal.is_ingested
        assert journal.counts()[State.PENDING].rows == 0


def test_a_preparation_that_was_cut_short_keeps_its_run_id(tmp_path):
    path = empty_journal(tmp_path)
    with Journal(path) as journal:
        assert journal.name_run(RUN) == RUN
        assert journal.name_run("other111") == RUN
        assert not journal.is_ingested


def test_a_run_that_has_begun_does_not(journal):
    journal.raise_epoch()
    with pytest.raises(HsjournalError, match=r"already in.*resume"):
        journal.start_ingest("other111")
    assert (journal.run_id, journal.counts()[State.PENDING].rows) == (RUN, 4)


@pytest.mark.parametrize("twin", [new_row(3), NewRow(9, "s3", "f", 1, array("I", [1]), [0, 1])], ids=["number", "id"])
def test_what_stands_twice_is_refused_with_its_whole_batch(journal, twin):
    with pytest.raises(IntegrityError):
        journal.add_rows([new_row(7), twin])
    assert len(list(journal.all_rows())) == 4


# reads


def test_claims_ascend_from_a_row_on_and_stop_in_time(journal):
    assert [c.row for c in journal.claimable(-1, 2)] == [0, 1]
    assert [c.row for c in journal.claimable(1, 2)] == [2, 3]
    journal.apply([send(2)], 1)
    assert [c.row for c in journal.claimable(1, 5)] == [3]
    assert journal.claimable(3, 5) == []


def test_suspects_are_found_in_every_incomplete_state_and_in_no_other(journal):
    put(journal, 0, State.VERIFIED, 1, suspect=1)
    put(journal, 1, State.DUMPED, 1, suspect=1)
    put(journal, 2, State.FAILED, 1, suspect=1)
    journal.touch(3, State.PENDING, 1, suspect=1)
    assert [r["row"] for r in journal.suspects()] == [1, 3]
    assert [c.row for c in journal.claimable(-1, 9, suspects=True)] == [3]


def test_rows_in_pages(journal):
    journal.apply([send(0), send(1), send(3)], 1)
    assert [r["row"] for r in journal.rows_in(State.SENT)] == [0, 1, 3]
    assert [r["row"] for r in journal.rows_in(State.SENT, after=0, most=1)] == [1]
    assert set(journal.rows_in(State.SENT)[0]) == set(queries.SAMPLE_COLUMNS)
    assert [r["row"] for r in journal.rows_of([3, 77, 1])] == [3, 1]


def test_events_from_elsewhere_are_entered_once(journal):
    kept = [("a" * 32, Event("one", 1, {"x": [1]}, at=5.0, epoch=3)), ("b" * 32, Event("two"))]
    journal.add_events(kept)
    journal.add_events([*kept, ("c" * 32, Event("three"))])
    found = [event for _, event in journal.events()]
    assert [e.kind for e in found] == ["one", "two", "three"]
    assert found[0] == kept[0][1]
    assert [number for number, _ in journal.events(after=1)] == [2, 3]


def test_an_event_with_values_json_does_not_know_is_kept_in_words(journal, tmp_path):
    journal.apply([], 1, [Event("odd", None, {"path": tmp_path, "name": "\udcff"})])
    assert journal.events()[0][1].detail == {"path": str(tmp_path), "name": "\udcff"}


def test_the_run_can_be_finished_and_opened_again(journal, tmp_path):
    journal.finish()
    assert journal._read("SELECT finished_at FROM run")[0][0] > 1e9
    journal.reopen(1)
    assert journal._read("SELECT finished_at FROM run")[0][0] is None


def test_values_of_a_file_are_needed_for_written(journal):
    put(journal, 0, State.DUMPED, 1)
    with pytest.raises(IntegrityError):
        journal.apply([Move(0, 1, transition(State.DUMPED, State.WRITTEN), FILE | {"output_bytes": 0})], 1)
