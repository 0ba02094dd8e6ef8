"""No hot query may scan the samples: what each one costs must not grow with the run."""

from __future__ import annotations

from contextlib import closing

import pytest

from hsjournal.journal import queries
from hsjournal.journal.pragmas import connect
from hsjournal.states import INCOMPLETE, TRANSITIONS, State
from tests.helpers.journals import started


@pytest.fixture(scope="module")
def connection(tmp_path_factory):
    path, _ = started(tmp_path_factory.mktemp("plans"), [4] * 50)
    with closing(connect(path)) as opened:
        yield opened


def plan_of(connection, statement: str) -> list[str]:
    # A parameter's value is not looked at when a plan is made, but each must be bound.
    names = {name: 1 for name in ALL_PARAMETERS if f":{name}" in statement}
    return [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", names)]


ALL_PARAMETERS = (
    *queries.SAMPLE_COLUMNS, "at_row", "at_attempt", "at_epoch", "after", "most", "input_ids", "loss_mask", "id", "key",
    "at", "kind", "detail",
)  # fmt: skip


CLAIMS = {
    queries.NEXT_PENDING: "SEARCH s USING INDEX sample_pending (row>?)",
    queries.NEXT_SUSPECT: "SEARCH s USING INDEX sample_suspect (row>?)",
    queries.ONE_ROW: "SEARCH s USING INTEGER PRIMARY KEY (rowid=?)",
}


@pytest.mark.parametrize("statement", CLAIMS, ids=["pending", "suspect", "one"])
def test_claims_use_their_partial_index_and_the_prompts_rowid(connection, statement):
    lines = plan_of(connection, statement)
    assert lines == [CLAIMS[statement], "SEARCH p USING INTEGER PRIMARY KEY (rowid=?)"]


@pytest.mark.parametrize("state", [*INCOMPLETE, State.FAILED])
def test_rows_in_a_state_use_its_partial_index(connection, state):
    assert plan_of(connection, queries.rows_in(state)) == [f"SEARCH sample USING INDEX sample_{state} (row>?)"]


@pytest.mark.parametrize("state", [State.VERIFIED, State.SKIPPED])
def test_rows_of_the_end_states_go_by_row_number(connection, state):
    """They have no index: they are most rows in the end, and are read from one row on."""
    assert plan_of(connection, queries.rows_in(state)) == ["SEARCH sample USING INTEGER PRIMARY KEY (rowid>?)"]


@pytest.mark.parametrize("statement", [queries.UNDER_WAY, queries.DEFERRED_TOTALS], ids=["under way", "deferred"])
def test_written_rows_are_told_apart_in_their_partial_index(connection, statement):
    (line,) = plan_of(connection, statement)
    assert line == "SCAN sample USING INDEX sample_written"  # of all that are written, and of nothing else


def test_suspects_use_their_partial_index(connection):
    lines = plan_of(connection, queries.SUSPECTS)
    assert lines == ["SCAN sample USING INDEX sample_suspect"]  # of all suspects, and of nothing else


@pytest.mark.parametrize("step", TRANSITIONS, ids=lambda t: f"{t.source}-{t.target}-{t.actor}")
def test_every_compare_and_set_goes_by_row_number(connection, step):
    extra = ("reason", "strikes")
    lines = plan_of(connection, queries.change(step, extra))
    assert lines[0] == "SEARCH sample USING INTEGER PRIMARY KEY (rowid=?)"
    # The run has one row: its epoch is read inside the statement.
    assert {line.strip() for line in lines[1:]} == {"SCALAR SUBQUERY 1", "SCAN run"}


@pytest.mark.parametrize("statement", [queries.touch(State.SENT, ("strikes",)), queries.take(State.SENT)])
def test_touching_goes_by_row_number(connection, statement):
    assert plan_of(connection, statement)[0] == "SEARCH sample USING INTEGER PRIMARY KEY (rowid=?)"


def test_the_epoch_stands_inside_the_statement():
    assert "(SELECT epoch FROM run) = :at_epoch" in queries.change(TRANSITIONS[0], ())


@pytest.mark.parametrize(
    "statement",
    [
        queries.NEXT_ROWS,
        queries.NEXT_PROMPTS,
        queries.NEXT_MASKS,
        queries.ROW_BY_NUMBER,
        queries.EVENTS,
        queries.EPOCH,
        queries.RAISE_EPOCH,
        queries.ROW_BY_ID,
        queries.RELEASE.replace(":row", ":at_row").replace(":now", ":at"),
    ],
)
def test_everything_else_is_a_search_too(connection, statement):
    lines = plan_of(connection, statement)
    assert lines
    assert all(line.startswith("SEARCH") for line in lines)


def test_counts_read_one_small_table(connection):
    assert plan_of(connection, queries.COUNTS) == ["SCAN state_count"]


def test_released_bytes_are_summed_in_their_own_index(connection):
    (line,) = plan_of(connection, queries.RELEASED)
    assert "USING COVERING INDEX sample_released" in line


def test_counting_by_trigger_goes_by_the_states_index(connection):
    lines = plan_of(connection, "UPDATE state_count SET rows = rows + 1 WHERE state = 'sent'")
    assert lines == ["SEARCH state_count USING INDEX sqlite_autoindex_state_count_1 (state=?)"]


def test_a_literal_predicate_is_what_makes_it_so(connection):
    """The same query with the state as a parameter would scan: this is why states stand in the text."""
    lines = plan_of(connection, queries.rows_in(State.SENT).replace("'sent'", ":kind"))
    assert lines == ["SEARCH sample USING INTEGER PRIMARY KEY (rowid>?)"]
