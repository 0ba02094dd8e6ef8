"""The plan of reconciliation on random situations, held against what it must never do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from hsjournal.dump.protocol import TMP_PREFIX, RequestId
from hsjournal.dump.reader import Entry
from hsjournal.errors import Reject
from hsjournal.reconcile.plan import Plan, RowView, Situation, Why, plan
from hsjournal.states import Actor, State, is_allowed

RUN, OTHER = "abcd1234", "other999"
TOKENS = 5
BOOT, SECOND = "boot-1", "boot-2"
UNDER_WAY = (State.SENT, State.DUMPED)
FILE = {"output_path": "p", "output_bytes": 1, "output_xxh3": "x", "source_xxh3": "y"}

rows = st.builds(
    RowView,
    row=st.integers(0, 5),
    state=st.sampled_from(State),
    attempt=st.integers(0, 3),
    num_tokens=st.just(TOKENS),
    strikes=st.integers(0, 2),
    boot_id=st.sampled_from([None, BOOT, SECOND, "boot-0"]),
    rejected=st.booleans(),
)
rids = st.one_of(
    st.builds(
        RequestId.sample, st.just(RUN), st.integers(0, 6), st.integers(0, 3), st.sampled_from([TOKENS, TOKENS, 9])
    ),
    st.builds(RequestId.for_probe, st.just(RUN), st.integers(0, 3), st.just(TOKENS)),
    st.builds(RequestId.sample, st.just(OTHER), st.integers(0, 6), st.integers(0, 3), st.just(TOKENS)),
)
foreign = st.sampled_from(["psm_x", "vllm_x", "req_7", "hsj-not-ours", ".tmp-", "..", "ä\n"]).map(
    lambda name: Entry(name, "foreign", None, 0.0)
)
published = st.builds(
    lambda rid, kind: Entry(str(rid), kind, rid, 0.0),
    rids,
    st.sampled_from(["dump", "dump", "dump", "failure", "partial"]),
)
unpublished = st.builds(lambda rid: Entry(f"{TMP_PREFIX}{rid}", "tmp", rid, 0.0), rids)
verdicts = st.one_of(st.none(), st.none(), st.tuples(st.sampled_from(Reject), st.just("detail")))


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    views = {view.row: view for view in draw(st.lists(rows, max_size=6))}
    entries = {e.name: e for e in draw(st.lists(st.one_of(published, published, unpublished, foreign), max_size=14))}
    # What gather does: every dump of a row that has a use for it was checked.
    checked = {}
    for entry in entries.values():
        view = views.get(entry.rid.row) if entry.rid is not None and entry.rid.row is not None else None
        if view is None or entry.kind != "dump" or view.rid(RUN) != entry.name:
            continue
        if view.may_have_dump and view.state is not State.WRITTEN:
            checked[entry.name] = draw(verdicts)
    tmp = [e.name for e in entries.values() if e.kind == "tmp"]
    in_flight = draw(st.sets(st.sampled_from([v.rid(RUN) for v in views.values()] or ["x"])))
    finished = {row for row in views if draw(st.booleans())}
    return Situation(
        run_id=RUN,
        rows=views,
        entries=list(entries.values()),
        verdicts=checked,
        finished=dict.fromkeys(finished, FILE),
        damaged={row: "it is gone" for row in views.keys() - finished if draw(st.booleans())},
        abandoned=frozenset(draw(st.sets(st.sampled_from(tmp)))) if tmp else frozenset(),
        lives=draw(
            st.dictionaries(
                st.sampled_from([BOOT, SECOND]), st.sampled_from([None, frozenset(in_flight or ())]), max_size=2
            )
        ),
        max_strikes=3,
        temporaries=tuple(draw(st.lists(st.sampled_from(["rows_0-2000/.a", ".b"]), unique=True))),
    )


def usable(s: Situation) -> Mapping[int, str]:
    """By row: the name of the complete dump of its current attempt that passed its check."""
    found = {}
    for entry in s.entries:
        view = s.rows.get(entry.rid.row) if entry.rid is not None and entry.rid.row is not None else None
        passed = entry.kind == "dump" and s.verdicts.get(entry.name) is None
        if passed and view is not None and entry.name == view.rid(RUN):
            found[view.row] = entry.name
    return found


@settings(max_examples=1500, deadline=None)
@given(situations())
def test_what_a_plan_must_and_must_never_do(s):
    made = plan(s)
    removed = {r.name for r in made.removals}
    names = {e.name for e in s.entries}
    moved = {m.row: m for m in made.moves}
    good = usable(s)

    # Nothing is touched twice, nothing that isn't there, and every entry has one fate.
    assert len(removed) == len(made.removals)
    assert len(moved) == len(made.moves)
    assert removed <= names
    living = {e.name for e in s.entries if e.kind == "tmp" and e.rid and e.rid.run == RUN} - s.abandoned
    fates = [*removed, *made.kept, *made.foreign, *living]
    assert sorted(fates) == sorted(names)

    # Foreign names, other runs, and folders that a living writer fills stay.
    theirs = {e.name for e in s.entries if e.rid is None or e.rid.run != RUN}
    assert set(made.foreign) == theirs
    assert not removed & (theirs | living)

    for row, view in s.rows.items():
        usable_dump = good.get(row)
        # A usable dump of work that is not verified is never removed.
        if usable_dump is not None and view.may_have_dump:
            assert usable_dump in made.kept
        # Every row under way ends in exactly one of: moved, awaited, kept.
        if view.state in UNDER_WAY:
            kept = view.state is State.DUMPED and view.rid(RUN) in made.kept
            assert [row in moved, row in made.awaited, kept].count(True) == 1
        if view.state is State.WRITTEN:
            assert (row in moved) == (row in s.damaged)
        if row in made.awaited:
            assert view.state is State.SENT
            assert view.boot_id in s.lives
            living = s.lives[str(view.boot_id)]
            assert living is None or view.rid(RUN) in living
            assert usable_dump is None
        move = moved.get(row)
        if move is not None:
            t = move.transition
            assert t.source is view.state
            assert is_allowed(t.source, t.target, t.actor)
            assert move.attempt == view.attempt
            if t.target is State.DUMPED:
                assert usable_dump is not None
            if t.target is State.WRITTEN:
                assert usable_dump is None
                assert dict(move.values) == FILE
            if t.target is State.PENDING:
                assert usable_dump is None, "never sent again with a usable dump at hand (G10)"
            if t.target is State.FAILED:
                assert move.values["strikes"] == view.strikes + 1 >= s.max_strikes
            if t.actor is Actor.ADOPT:
                assert view.state is State.PENDING
        elif view.state not in UNDER_WAY:
            assert row not in made.awaited
    # A strike costs only what the dump itself did wrong.
    for move in made.moves:
        verdict = s.verdicts.get(s.rows[move.row].rid(RUN))
        blamed = verdict is not None and verdict[0] not in (Reject.VANISHED, Reject.STALE_BOOT)
        blamed = blamed and move.transition.target is not State.WRITTEN  # its file is there already
        assert ("strikes" in move.values) == blamed
    # The last few rejects are kept aside, and only they.
    assert all(r.keep == (r.why is Why.REJECTED) for r in made.removals)
    assert made.is_empty == (not made.moves and not made.removals and not made.temporaries)
    assert len(list(made.lines())) >= len(made.moves) + len(made.removals) + len(made.temporaries)


def carried_out(s: Situation, made: Plan) -> Situation:
    """The situation after the plan: a model of ``apply``, of the journal and of the root."""
    views = dict(s.rows)
    for move in made.moves:
        view = views[move.row]
        views[move.row] = replace(
            view,
            state=move.transition.target,
            strikes=int(str(move.values.get("strikes", view.strikes))),
            rejected="reason" in move.values or view.rejected,
        )
    gone = {r.name for r in made.removals}
    return replace(
        s,
        rows=views,
        entries=[e for e in s.entries if e.name not in gone],
        verdicts={name: v for name, v in s.verdicts.items() if name not in gone},
        temporaries=(),
    )


@settings(max_examples=1000, deadline=None)
@given(situations())
def test_planning_again_after_carrying_it_out_finds_nothing_to_do(s):
    made = plan(s)
    again = plan(carried_out(s, made))
    assert again.is_empty
    assert (again.foreign, again.awaited) == (made.foreign, made.awaited)
    assert set(again.kept) == set(made.kept)


@settings(max_examples=500, deadline=None)
@given(situations(), st.data())
def test_cut_short_anywhere_the_next_plan_goes_on(s, data):
    """Moves come first, in their order, then removals in theirs; a death may fall between any two."""
    made = plan(s)
    cut = data.draw(st.integers(0, len(made.moves) + len(made.removals)))
    part = replace(made, moves=made.moves[:cut], removals=made.removals[: max(0, cut - len(made.moves))])
    halfway = carried_out(s, part)
    rest = plan(halfway)
    for row, name in usable(s).items():
        if s.rows[row].may_have_dump:
            assert name in rest.kept
    assert plan(carried_out(halfway, rest)).is_empty
    done, straight = carried_out(halfway, rest), carried_out(s, made)
    assert {r: v.state for r, v in done.rows.items()} == {r: v.state for r, v in straight.rows.items()}
    assert {e.name for e in done.entries} == {e.name for e in straight.entries}


def test_every_reason_to_remove_has_words():
    assert len({str(why) for why in Why}) == len(Why)
