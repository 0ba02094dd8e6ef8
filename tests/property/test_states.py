"""Whatever is tried on the journal, it stays what a model kept outside it says (G1, G2)."""

from __future__ import annotations

import sqlite3
import tempfile
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from hsjournal.errors import FencedError
from hsjournal.journal.pragmas import connect
from hsjournal.journal.store import Journal, Move
from hsjournal.states import TRANSITIONS, Actor, State, Transition, is_allowed
from tests.helpers.journals import empty_journal, fill, values_for

ROWS = 5
TOKENS = [3, 1, 4, 1, 5]
WITH_FILE = (State.WRITTEN, State.VERIFIED)


@dataclass
class ModelRow:
    state: State = State.PENDING
    attempt: int = 0
    nbytes: int = 0


def recount(connection: sqlite3.Connection) -> dict[str, tuple[int, int, int]]:
    found = connection.execute("SELECT state, count(*), sum(num_tokens), sum(output_bytes) FROM sample GROUP BY state")
    return {state: (rows, tokens, nbytes) for state, rows, tokens, nbytes in found}


def kept(connection: sqlite3.Connection) -> dict[str, tuple[int, int, int]]:
    found = connection.execute("SELECT state, rows, tokens, bytes FROM state_count")
    return {state: (rows, tokens, nbytes) for state, rows, tokens, nbytes in found if rows or tokens or nbytes}


def expected(model: list[ModelRow]) -> dict[str, tuple[int, int, int]]:
    totals: dict[str, Counter[str]] = {}
    for tokens, row in zip(TOKENS, model, strict=True):
        totals.setdefault(row.state.value, Counter()).update(rows=1, tokens=tokens, nbytes=row.nbytes)
    return {state: (c["rows"], c["tokens"], c["nbytes"]) for state, c in totals.items()}


RAW = st.tuples(
    st.just("raw"), st.integers(0, ROWS - 1), st.sampled_from(State), st.sampled_from(Actor), st.integers(-1, 1)
)
MOVE = st.tuples(
    st.just("move"),
    st.integers(0, ROWS - 1),
    st.sampled_from(TRANSITIONS),
    st.integers(-1, 1),  # how far the expected attempt is off
    st.sampled_from([0, 0, 0, -1, 1]),  # how far the epoch is off
)
# Mostly steps that are open to the row just then: else few runs would get far.
WALK = st.tuples(st.just("walk"), st.integers(0, ROWS - 1), st.integers(0, 10), st.just(0), st.just(0))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(WALK, WALK, WALK, MOVE, RAW), max_size=40))
def test_counts_and_states_follow_the_model(steps):
    with tempfile.TemporaryDirectory() as folder:
        path = empty_journal(Path(folder))
        epoch = fill(path, TOKENS)
        model = [ModelRow() for _ in range(ROWS)]
        with Journal(path) as journal, closing(connect(path)) as raw:
            for kind, row, *rest in steps:
                if kind == "raw":
                    _raw(raw, model[row], row, *rest)
                elif kind == "move":
                    _move(journal, model[row], row, rest[0], rest[1], epoch, rest[2])
                else:
                    open_ = [t for t in TRANSITIONS if t.source is model[row].state]
                    if open_:
                        _move(journal, model[row], row, open_[rest[0] % len(open_)], 0, epoch, 0)
                assert kept(raw) == expected(model) == recount(raw)
            told = [(r["state"], r["attempt"], r["output_bytes"]) for r in journal.all_rows()]
            assert told == [(m.state, m.attempt, m.nbytes) for m in model]


def _move(
    journal: Journal, model: ModelRow, row: int, step: Transition, attempt_off: int, epoch: int, epoch_off: int
) -> None:
    values = values_for(step.target)
    if step.target is State.SENT:
        values["attempt"] = model.attempt + 1
    if step.target is State.VERIFIED and step.source is not State.WRITTEN:
        raise AssertionError("the table lets only written rows be verified")
    fits = step.source is model.state and not attempt_off and not epoch_off
    try:
        journal.apply([Move(row, model.attempt + attempt_off, step, values)], epoch + epoch_off)
    except FencedError:
        assert not fits
        return
    assert fits
    model.state = step.target
    model.attempt += step.target is State.SENT
    if step.target is State.WRITTEN:
        model.nbytes = 100
    elif step.target not in WITH_FILE:
        model.nbytes = 0


def _raw(raw: sqlite3.Connection, model: ModelRow, row: int, target: State, actor: Actor, attempt_by: int) -> None:
    """A program that knows nothing of the rules writes straight into the table."""
    columns = {"output_path": "p", "output_xxh3": "x", "reason": "r", "verify_method": "m"}
    columns |= {"state": target, "actor": actor}
    numbers = {"output_bytes": 9 if target in WITH_FILE else 0, "attempt": model.attempt + attempt_by}
    sets = ", ".join(f"{name} = :{name}" for name in [*columns, *numbers])
    try:
        raw.execute(f"UPDATE sample SET {sets} WHERE row = :row", columns | numbers | {"row": row})
    except sqlite3.IntegrityError:
        assert attempt_by < 0 or not (target is model.state or is_allowed(model.state, target, actor))
        return
    assert attempt_by >= 0
    assert target is model.state or is_allowed(model.state, target, actor)
    model.state, model.attempt, model.nbytes = target, model.attempt + attempt_by, numbers["output_bytes"]
