"""The worker's own count of every state follows the journal's, whatever way the rows go."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from hsjournal.journal.store import Journal, Move
from hsjournal.states import TRANSITIONS, Actor, State
from hsjournal.worker.tally import Tally
from tests.helpers.journals import empty_journal, fill, put, values_for

TOKENS = [3, 1, 4]
ACTORS = (Actor.WORKER, Actor.RECONCILE)  # whose changes a worker makes and tells its tally


def counts(journal: Journal) -> dict[State, tuple[int, int, int]]:
    return {state: (c.rows, c.tokens, c.nbytes) for state, c in journal.counts().items()}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([State.PENDING, State.SENT, State.DUMPED, State.WRITTEN]), min_size=3, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10)), max_size=30),
)
def test_it_adds_up_as_the_journal_does(begin, steps):
    with tempfile.TemporaryDirectory() as folder:
        path = empty_journal(Path(folder))
        epoch = fill(path, TOKENS)
        with Journal(path) as journal:
            for row, state in enumerate(begin):
                put(journal, row, state, epoch, **({"output_bytes": 100 + row} if state is State.WRITTEN else {}))
            tally = Tally(counts(journal))
            for written in journal.rows_in(State.WRITTEN):
                tally.holds(written["row"], written["output_bytes"])
            for row, choice in steps:
                now = journal.rows_of([row])[0]
                open_ = [t for t in TRANSITIONS if t.source == now["state"] and t.actor in ACTORS]
                if not open_:
                    continue
                step = open_[choice % len(open_)]
                values = values_for(step.target)
                nbytes = 0
                if step.target is State.SENT:
                    values["attempt"] = now["attempt"] + 1
                if step.target is State.WRITTEN:
                    nbytes = values["output_bytes"] = 10 * choice + 1
                if step.target is State.VERIFIED:
                    nbytes = now["output_bytes"]
                journal.apply([Move(row, now["attempt"], step, values)], epoch)
                tally.moved(row, step.source, step.target, TOKENS[row], nbytes)
                assert {s: tuple(c) for s, c in tally.counts.items()} == counts(journal)
