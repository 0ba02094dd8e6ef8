"""The table of transitions, and that the database itself holds it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest

from hsjournal import states
from hsjournal.journal.pragmas import connect
from hsjournal.journal.store import Journal
from hsjournal.states import INCOMPLETE, INITIAL, TERMINAL, TRANSITIONS, Actor, State, is_allowed
from tests.helpers.journals import FILE, empty_journal, fill, put, started

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.fixture
def raw(tmp_path):
    """A connection past the store, to a journal with a row in every state (row = the state's place in the enum)."""
    path = empty_journal(tmp_path)
    epoch = fill(path, [4] * len(State))
    with Journal(path) as journal:
        for row, state in enumerate(State):
            put(journal, row, state, epoch)
    with closing(connect(path)) as connection:
        yield connection


def row_of(state: State) -> int:
    return list(State).index(state)


def test_the_database_agrees_with_the_table_on_every_triple(raw):
    for source, target, actor in product(State, State, Actor):
        # Whatever a CHECK wants of the target is given: only the trigger can refuse.
        columns: dict[str, object] = {
            "output_path": None,
            "output_bytes": 0,
            "output_xxh3": None,
            "reason": "x",
            "verify_method": "direct",
        }
        if target in (State.WRITTEN, State.VERIFIED):
            columns |= FILE
        sets = ", ".join(f"{name} = :{name}" for name in columns)
        raw.execute("SAVEPOINT one")
        try:
            raw.execute(
                f"UPDATE sample SET state = :state, actor = :actor, {sets} WHERE row = :row",
                columns | {"state": target, "actor": actor, "row": row_of(source)},
            )
            passed, why = True, ""
        except sqlite3.IntegrityError as error:
            passed, why = False, str(error)
        raw.execute("ROLLBACK TO one")
        raw.execute("RELEASE one")
        assert passed == (source is target or is_allowed(source, target, actor)), (source, target, actor)
        assert passed or "transition not in the table" in why


def test_design_4_is_in_the_table_and_nothing_else():
    forward = {("pending", "sent"), ("sent", "dumped"), ("dumped", "written"), ("written", "verified")}
    back = {
        ("sent", "pending"), ("dumped", "pending"), ("written", "dumped"), ("written", "pending"),
        ("verified", "pending"), ("failed", "pending"),
    }  # fmt: skip
    off = {(s, "failed") for s in ("pending", "sent", "dumped", "written")} | {("pending", "skipped")}
    adopted = {("pending", "written"), ("pending", "dumped")}
    assert {(t.source, t.target) for t in TRANSITIONS} == forward | back | off | adopted
    assert {t.actor for t in TRANSITIONS if t.source is State.VERIFIED} == {Actor.REPAIR}
    assert {t.actor for t in TRANSITIONS if t.source is State.FAILED} == {Actor.OPERATOR}
    assert not [t for t in TRANSITIONS if t.source is State.SKIPPED]
    assert len({(t.source, t.target, t.actor) for t in TRANSITIONS}) == len(TRANSITIONS)
    assert set(INCOMPLETE) | set(TERMINAL) == set(State)


def test_an_attempt_never_falls(raw):
    raw.execute("UPDATE sample SET attempt = 5 WHERE row = 0")
    with pytest.raises(sqlite3.IntegrityError, match="attempt never falls"):
        raw.execute("UPDATE sample SET attempt = 4 WHERE row = 0")
    assert raw.execute("SELECT attempt FROM sample WHERE row = 0").fetchone() == (5,)


INSERT = (
    "INSERT {how} INTO sample (row, sample_id, source, line, num_tokens, loss_tokens, state, actor, reason, attempt,"
    " strikes, suspect, epoch, changed_at, output_bytes) VALUES (:row, :id, 'f', 1, 4, 3, :state, :actor, 'x', 0, 0, 0, 0, 0, 0)"
)


@pytest.mark.parametrize("state", State)
def test_a_row_starts_as_pending_or_skipped(raw, state):
    values = {"row": 100, "id": "new", "state": state, "actor": "ingest"}
    if state in INITIAL:
        raw.execute(INSERT.format(how=""), values)
    else:
        with pytest.raises(sqlite3.IntegrityError):
            raw.execute(INSERT.format(how=""), values)


@pytest.mark.parametrize("how", ["", "OR REPLACE", "OR IGNORE"])
@pytest.mark.parametrize(("row", "name"), [(row_of(State.VERIFIED), "new"), (100, f"s{row_of(State.VERIFIED)}")])
def test_a_row_can_not_be_replaced_past_the_triggers(raw, how, row, name):
    with pytest.raises(sqlite3.IntegrityError, match="stands twice"):
        raw.execute(INSERT.format(how=how), {"row": row, "id": name, "state": "pending", "actor": "ingest"})
    assert raw.execute("SELECT state FROM sample WHERE row = ?", (row_of(State.VERIFIED),)).fetchone() == ("verified",)


def test_two_skipped_rows_may_share_an_id(raw):
    for row in (100, 101):
        raw.execute(INSERT.format(how=""), {"row": row, "id": "twin", "state": "skipped", "actor": "ingest"})
    raw.execute(INSERT.format(how=""), {"row": 102, "id": "twin", "state": "pending", "actor": "ingest"})


@pytest.mark.parametrize("change", ["row = 99", "sample_id = 'other'"])
def test_a_row_keeps_its_number_and_its_id(raw, change):
    raw.execute("PRAGMA foreign_keys = OFF")
    with pytest.raises(sqlite3.IntegrityError, match="keeps its number"):
        raw.execute(f"UPDATE OR REPLACE sample SET {change} WHERE row = 0")


@pytest.mark.parametrize("state", State)
def test_only_what_was_never_worked_on_can_be_deleted(raw, state):
    raw.execute("PRAGMA foreign_keys = OFF")
    if state in INITIAL:
        raw.execute("DELETE FROM sample WHERE row = ?", (row_of(state),))
    else:
        with pytest.raises(sqlite3.IntegrityError, match="never deleted"):
            raw.execute("DELETE FROM sample WHERE row = ?", (row_of(state),))


def test_a_row_that_was_sent_once_stays_though_it_is_pending_again(raw):
    raw.execute("UPDATE sample SET state = 'pending', actor = 'reconcile' WHERE row = ?", (row_of(State.SENT),))
    raw.execute("PRAGMA foreign_keys = OFF")
    with pytest.raises(sqlite3.IntegrityError, match="never deleted"):
        raw.execute("DELETE FROM sample WHERE row = ?", (row_of(State.SENT),))


@pytest.mark.parametrize(
    "change",
    [
        "state = 'BOGUS'",
        "actor = 'somebody'",
        "num_tokens = 'not-an-int'",
        "num_tokens = 1.5",
        "num_tokens = -1",
        "strikes = -1",
        "suspect = 2",
        "changed_at = 'now'",
        "sample_id = NULL",
        "output_bytes = 7",  # of a row without a file
        "epoch = x'00'",
    ],
)
def test_bad_values_are_refused(raw, change):
    with pytest.raises(sqlite3.IntegrityError):
        raw.execute(f"UPDATE sample SET {change} WHERE row = {row_of(State.SENT)}")


@pytest.mark.parametrize(
    ("state", "change"),
    [
        (State.WRITTEN, "output_path = NULL"),
        (State.WRITTEN, "output_bytes = 0"),
        (State.VERIFIED, "output_xxh3 = NULL"),
        (State.VERIFIED, "verify_method = NULL"),
        (State.FAILED, "reason = NULL"),
        (State.SKIPPED, "reason = NULL"),
    ],
)
def test_a_state_needs_what_it_claims(raw, state, change):
    with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
        raw.execute(f"UPDATE sample SET {change} WHERE row = {row_of(state)}")


def test_only_one_run_in_a_journal(raw):
    with pytest.raises(sqlite3.IntegrityError):
        raw.execute("INSERT INTO run (id, run_id, epoch, created_at) VALUES (2, 'x', 0, 0)")


def test_every_state_can_be_reached_and_carries_its_counts(tmp_path):
    path, epoch = started(tmp_path, [3, 5, 7, 11, 13, 17, 19])
    with Journal(path) as journal:
        for row, state in enumerate(State):
            put(journal, row, state, epoch)
        counts = journal.counts()
        assert {s: (c.rows, c.tokens) for s, c in counts.items()} == {
            s: (1, t) for s, t in zip(State, [3, 5, 7, 11, 13, 17, 19], strict=True)
        }
        assert {s for s, c in counts.items() if c.nbytes} == {State.WRITTEN, State.VERIFIED}


def test_the_readme_shows_the_table():
    diagrams = README.read_text().split("```mermaid\n")[1:]
    assert [d.partition("\n```")[0] for d in diagrams] == [states.mermaid()]
