"""State machines: whatever happens in whatever order, the plan heals it, and the judge says neither too much nor too little."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hsjournal.dump.protocol import TMP_PREFIX, RequestId
from hsjournal.dump.reader import Entry
from hsjournal.errors import Reject
from hsjournal.mirror import Phase
from hsjournal.reconcile.plan import Plan, RowView, Situation, plan
from hsjournal.states import State, is_allowed
from hsjournal.watch.proc import Process, Thread
from hsjournal.watch.verdict import Finding, Judge, Limits, Look, Row

RUN, TOKENS, ROWS = "abcd1234", 5, 3
FILE = {"output_path": "p", "output_bytes": 1, "output_xxh3": "x", "source_xxh3": "y"}
FOREIGN = ("psm_x", "req_7", "hsj-other999-1-1-5")
row_numbers = st.integers(0, ROWS - 1)


@dataclass(slots=True)
class Kept:
    """What the test knows of a row."""

    view: RowView
    highest: int = 0
    verified: bool = False


class PlanMachine(RuleBasedStateMachine):
    """A worker, a server and a root that do what they may; now and then a crash, and a plan that is carried out."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = {n: Kept(RowView(n, State.PENDING, 0, TOKENS)) for n in range(ROWS)}
        self.root: dict[str, str] = {}
        self.foreign: set[str] = set()
        self.flights: set[str] = set()
        self.files: set[int] = set()
        self.boot = 1

    def _rid(self, number: int) -> str:
        return self.rows[number].view.rid(RUN)

    def _move(self, number: int, state: State, **values: Any) -> None:
        self.rows[number].view = replace(self.rows[number].view, state=state, **values)

    # a worker and a server at work

    @rule(number=row_numbers)
    def send(self, number: int) -> None:
        view = self.rows[number].view
        if view.state is State.PENDING:
            self._move(number, State.SENT, attempt=view.attempt + 1, boot_id=f"boot-{self.boot}", rejected=False)
            self.flights.add(self._rid(number))

    @rule(data=st.data(), how=st.sampled_from(["good", "good", "good", "bad", "failure", "partial"]))
    def publish(self, data: st.DataObject, how: str) -> None:
        if self.flights:
            rid = data.draw(st.sampled_from(sorted(self.flights)))
            self.flights.discard(rid)
            self.root.pop(f"{TMP_PREFIX}{rid}", None)
            self.root[rid] = how

    @rule(data=st.data())
    def begin_to_write(self, data: st.DataObject) -> None:
        if self.flights:
            self.root[f"{TMP_PREFIX}{data.draw(st.sampled_from(sorted(self.flights)))}"] = f"boot-{self.boot}"

    @rule(number=row_numbers)
    def take_dump(self, number: int) -> None:
        if self.rows[number].view.state is State.SENT and self.root.get(self._rid(number)) == "good":
            self._move(number, State.DUMPED)

    @rule(number=row_numbers)
    def reject_or_give_up(self, number: int) -> None:
        if self.rows[number].view.state is State.SENT:
            rejected = self.root.get(self._rid(number)) == "bad"
            self._move(number, State.PENDING, rejected=rejected)

    @rule(number=row_numbers, committed=st.booleans())
    def write(self, number: int, committed: bool) -> None:
        if self.rows[number].view.state is State.DUMPED and self.root.get(self._rid(number)) == "good":
            self.files.add(number)
            if committed:
                self._move(number, State.WRITTEN)

    @rule(number=row_numbers, deleted=st.booleans())
    def verify(self, number: int, deleted: bool) -> None:
        if self.rows[number].view.state is State.WRITTEN:
            self._move(number, State.VERIFIED)
            self.rows[number].verified = True
            if deleted:
                self.root.pop(self._rid(number), None)

    @rule(number=row_numbers, until=st.integers(1, 5), how=st.sampled_from(["good", "good", "bad", "failure"]))
    def go_forward(self, number: int, until: int, how: str) -> None:
        """Several steps of one row at a time, so that it gets far."""

        def answer() -> None:
            if (rid := self._rid(number)) in self.flights:
                self.flights.discard(rid)
                self.root[rid] = how

        steps: list[Callable[[], object]] = [
            lambda: self.send(number=number),
            answer,
            lambda: self.take_dump(number=number),
            lambda: self.write(number=number, committed=True),
            lambda: self.verify(number=number, deleted=True),
        ]
        for step in steps[:until]:
            step()

    @rule(number=row_numbers, how=st.sampled_from(["good", "good", "bad"]))
    def answer_late(self, number: int, how: str) -> None:
        """After the row was given up, or sent again."""
        self.reject_or_give_up(number=number)
        flying = sorted(rid for rid in self.flights if rid.split("-")[2] == str(number))
        if flying:
            self.flights.discard(flying[0])
            self.root[flying[0]] = how

    # what befalls them

    @rule()
    def restart_server(self) -> None:
        self.boot += 1
        self.flights.clear()

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        if self.root:
            del self.root[data.draw(st.sampled_from(sorted(self.root)))]

    @rule(name=st.sampled_from(FOREIGN))
    def foreign_comes(self, name: str) -> None:
        self.foreign.add(name)

    @rule(tells=st.booleans(), cut=st.one_of(st.none(), st.integers(0, 6)))
    def crash_and_reconcile(self, tells: bool, cut: int | None) -> None:
        made = plan(self._situation(tells=tells))
        self._check(made)
        steps = [*made.moves, *made.removals]
        for step in steps[: len(steps) if cut is None else cut]:
            self._carry_out(step)
        if cut is None or cut >= len(steps):
            again = plan(self._situation(tells=tells))
            assert again.is_empty, list(again.lines())
            self._check_healed(tells=tells)

    def _situation(self, *, tells: bool) -> Situation:
        entries = [Entry(name, "foreign", None, 0.0) for name in sorted(self.foreign)]
        verdicts: dict[str, tuple[Reject, str] | None] = {}
        for name, how in sorted(self.root.items()):
            rid = RequestId.parse(name.removeprefix(TMP_PREFIX))
            assert rid is not None
            assert rid.row is not None
            kind: Any = "tmp" if name.startswith(TMP_PREFIX) else {"good": "dump", "bad": "dump"}.get(how, how)
            entries.append(Entry(name, kind, rid, 0.0))
            view = self.rows[rid.row].view
            if kind == "dump" and view.rid(RUN) == name and view.may_have_dump and view.state is not State.WRITTEN:
                verdicts[name] = (Reject.WRONG_COUNT, "bad") if how == "bad" else None
        dumped = {n for n in self.files if self.rows[n].view.state is State.DUMPED and self._rid(n) not in self.root}
        return Situation(
            run_id=RUN,
            rows={n: kept.view for n, kept in self.rows.items()},
            entries=entries,
            verdicts=verdicts,
            finished=dict.fromkeys(dumped, FILE),
            abandoned=frozenset(
                n for n, how in self.root.items() if n.startswith(TMP_PREFIX) and how != f"boot-{self.boot}"
            ),
            lives={f"boot-{self.boot}": frozenset(self.flights) if tells else None},
            max_strikes=1000,
        )

    def _check(self, made: Plan) -> None:
        for move in made.moves:
            view = self.rows[move.row].view
            assert (move.attempt, move.transition.source) == (view.attempt, view.state)
            assert is_allowed(move.transition.source, move.transition.target, move.transition.actor)
        removed = {removal.name for removal in made.removals}
        assert not removed & self.foreign
        for number, kept in self.rows.items():
            if kept.view.may_have_dump and self.root.get(self._rid(number)) == "good":
                assert self._rid(number) not in removed, "a usable dump is never removed"
                assert number not in {m.row for m in made.moves if m.transition.target is State.PENDING}

    def _carry_out(self, step: Any) -> None:
        if hasattr(step, "transition"):
            rejected = "strikes" in step.values
            values = {k: v for k, v in step.values.items() if k == "strikes"}
            self._move(step.row, step.transition.target, **values, **({"rejected": True} if rejected else {}))
            return
        self.root.pop(step.name, None)

    def _check_healed(self, *, tells: bool) -> None:
        for number, kept in self.rows.items():
            view, lies = kept.view, self.root.get(self._rid(number))
            if view.state is State.PENDING:
                assert lies != "good" or not view.may_have_dump, "a row with a usable dump is never sent again"
            if view.state is State.SENT:
                living = view.boot_id == f"boot-{self.boot}"
                assert living
                assert not tells or self._rid(number) in self.flights, "only what the server works on is waited for"
            if view.state is State.DUMPED:
                assert lies == "good"
        for name in self.root:
            assert name.startswith(TMP_PREFIX) or self.root[name] == "good", f"{name} is of no use"

    @invariant()
    def nothing_falls_back(self) -> None:
        for kept in self.rows.values():
            assert kept.view.attempt >= kept.highest
            kept.highest = kept.view.attempt
            assert not kept.verified or kept.view.state is State.VERIFIED


IDLE, STUCK = Thread(1, "main", "S", "ep_poll"), Thread(2, "sink", "D", "folio_wait")
STOPPED = Thread(1, "main", "T", "do_signal_stop")
STATES = ("sent", "dumped", "written", "verified")
POLL = 2.0


@dataclass(slots=True)
class Told:
    """What the judge was shown so far."""

    silent: float = 0.0
    polls_late: int = 0
    paused: bool = False
    finding: Finding | None = None
    row: int = 10
    rank: int = 0
    nbytes: int = 0
    attempt: int = 1
    done: int = 3
    history: list[str] = field(default_factory=list)


class JudgeMachine(RuleBasedStateMachine):
    """Looks of all kinds; the test counts the silence itself."""

    @initialize(timeout=st.sampled_from([10.0, 60.0]))
    def begin(self, timeout: float) -> None:
        self.now = 1000.0
        self.limits = Limits(stall_timeout=timeout)
        self.judge = Judge(self.limits, self.now)
        self.t = Told()
        self._look(0.0)

    def _look(self, seconds: float, *threads: Thread, paused: bool = False, moved: bool = False) -> None:
        t = self.t
        self.now += seconds
        row = Row(t.row, t.attempt, 100, Phase.WRITING if t.rank == 1 else Phase.WAITING, t.nbytes)
        states = {t.row: STATES[t.rank]}
        process = Process(1, 1.0, threads or (IDLE,), 1.0, 0, 0, 0, 0, 1)
        pauses = {"output": "the output folder is full"} if paused else {}
        t.finding = self.judge.judge(Look(self.now, process, states, (row,), t.done, pauses))
        t.paused = paused
        if moved:
            t.silent = 0.0
        elif seconds <= self.limits.longest_gap and not paused:
            t.silent += seconds

    @rule()
    def a_row_passes_its_mark(self) -> None:
        t = self.t
        if t.rank == 1 and t.nbytes < 1 << 20:
            t.nbytes += 4096
        elif t.rank < len(STATES) - 2:
            t.rank += 1
        else:
            t.row, t.rank, t.nbytes, t.attempt, t.done = t.row + 1, 0, 0, 1, t.done + 1
        self._look(POLL, moved=True)

    @rule(how=st.sampled_from(["idle", "stuck", "stopped"]), count=st.integers(1, 12))
    def nothing_moves(self, how: str, count: int) -> None:
        threads = {"idle": (IDLE,), "stuck": (IDLE, STUCK), "stopped": (STOPPED,)}[how]
        for _ in range(count):
            self._look(POLL, *threads)

    @precondition(lambda self: self.t.rank > 0)
    @rule()
    def a_replay_is_no_progress(self) -> None:
        """Back to where the row was before, at a higher attempt, and up again."""
        t = self.t
        rank, nbytes = t.rank, t.nbytes
        t.rank, t.nbytes, t.attempt = 0, 0, t.attempt + 1
        self._look(POLL)
        t.rank, t.nbytes = rank, nbytes
        self._look(POLL)

    @rule(count=st.integers(1, 5))
    def the_worker_says_that_it_waits(self, count: int) -> None:
        for _ in range(count):
            self._look(POLL, paused=True)

    @rule(hours=st.floats(0.02, 5))
    def nobody_looks_for_long(self, hours: float) -> None:
        self._look(hours * 3600)

    @invariant()
    def it_says_neither_too_much_nor_too_little(self) -> None:
        t = self.t
        if t.finding is None or t.paused:
            assert t.finding is None or not t.finding.is_stall, "a pause that is explained is no stall"
            return
        if t.finding.is_stall:
            assert t.silent >= self.limits.stall_timeout, f"called after {t.silent} s: {t.finding.sentence}"
        elif t.silent >= self.limits.stall_timeout + 2 * POLL:
            raise AssertionError(f"{t.silent} s of silence, and it is {t.finding}")


TestPlan = PlanMachine.TestCase
TestPlan.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestJudge = JudgeMachine.TestCase
TestJudge.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
