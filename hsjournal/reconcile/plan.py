"""What brings journal and hand-over root together, after whatever happened: a pure function.

The plan is made from what was gathered (rows that are not pending, entries of the roots, what each dump's check said,
the servers' lives) and touches nothing; ``hsjournal reconcile --dry-run`` prints it. Applying it twice changes
nothing the second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hsjournal.dump.protocol import RequestId
from hsjournal.dump.reader import Entry
from hsjournal.errors import Reject
from hsjournal.events import Event
from hsjournal.journal.store import Move
from hsjournal.states import Actor, State, Transition


@dataclass(frozen=True, slots=True)
class RowView:
    """What the plan needs to know of a row.

    ``rejected``: the current attempt's dump was refused already. ``deferred``: the row is written, and is to be read back
    later, without its dump.
    """

    row: int
    state: State
    attempt: int
    num_tokens: int
    strikes: int = 0
    boot_id: str | None = None
    rejected: bool = False
    deferred: bool = False

    @property
    def may_have_dump(self) -> bool:
        """Whether a dump of the current attempt would be of use, or is a written row's, kept until it is verified.

        A pending row's too, when it came late: the server was lost or too slow, and the row was not sent again yet.
        """
        if self.state is State.PENDING:
            return self.attempt > 0 and not self.rejected
        return self.state in (State.SENT, State.DUMPED) or (self.state is State.WRITTEN and not self.deferred)

    def rid(self, run_id: str) -> str:
        """The request id of the row's current attempt."""
        return str(RequestId.sample(run_id, self.row, self.attempt, self.num_tokens))


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything the plan is made from.

    Args:
        run_id: of this run; other runs' dumps are foreign.
        rows: every row that is sent or dumped, every damaged one, and every row that an entry of the root names.
        entries: what lies in the hand-over root.
        verdicts: for each complete dump of a pending, sent or dumped row's current attempt: None when it is usable, else why not.
        finished: rows that are dumped, whose dump is gone, and whose whole file already lies under its final name.
        damaged: written rows whose file is gone or of another size, with what is wrong.
        abandoned: unpublished folders whose writer is gone.
        lives: boot ids of the servers that live now, with the request ids that each still works on (None when it does
            not tell).
        max_strikes: strikes that end a row; None ends none.
        temporaries: hidden temporaries of this run in the output folder, relative to it; no writer of it lives.
    """

    run_id: str
    rows: Mapping[int, RowView]
    entries: Sequence[Entry]
    verdicts: Mapping[str, tuple[Reject, str] | None]
    finished: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    damaged: Mapping[int, str] = field(default_factory=dict)
    abandoned: frozenset[str] = frozenset()
    lives: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    max_strikes: int | None = None
    temporaries: tuple[str, ...] = ()


class Why(StrEnum):
    """Why an entry of the root is removed."""

    VERIFIED = "its row is verified"
    RELEASED = "its row is written, to be read back later"
    SUPERSEDED = "an older attempt, or a row that is not under way"
    PROBE = "a probe"
    FAILURE = "the server's error report"
    REJECTED = "refused"
    PARTIAL = "a deletion that was cut short"
    DEAD_SERVER = "left half-written by a server that is gone"


@dataclass(frozen=True, slots=True)
class Removal:
    """One entry of the root to delete; ``keep`` sets its small files aside first."""

    name: str
    why: Why
    row: int | None = None
    detail: str = ""
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done. ``awaited`` rows stay sent: the living server still works on them."""

    moves: tuple[Move, ...]
    removals: tuple[Removal, ...]
    awaited: tuple[int, ...]
    kept: tuple[str, ...]
    foreign: tuple[str, ...]
    temporaries: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether applying it would change nothing."""
        return not self.moves and not self.removals and not self.temporaries

    def summary(self) -> dict[str, object]:
        """Counts, JSON-able."""
        return {
            "moves": len(self.moves),
            "removed": len(self.removals),
            "kept": len(self.kept),
            "awaited": len(self.awaited),
            "foreign": list(self.foreign[:20]),
            "temporaries": len(self.temporaries),
        }

    def lines(self) -> Iterable[str]:
        """The plan in words, one line an action."""
        for move in self.moves:
            yield f"row {move.row}: {move.transition.source} -> {move.transition.target} ({move.transition.reason})"
        for removal in self.removals:
            yield f"remove {removal.name}: {removal.why}{' (' + removal.detail + ')' if removal.detail else ''}"
        for path in self.temporaries:
            yield f"remove {path} from the output: left half-written by a writer that is gone"
        for row in self.awaited:
            yield f"row {row}: awaited, the server still works on it"
        for name in self.kept:
            yield f"keep {name}: a usable dump"
        for name in self.foreign:
            yield f"leave {name}: not ours"


def plan(s: Situation) -> Plan:
    """What brings journal and root together. Pure."""
    removals: list[Removal] = []
    kept: list[str] = []
    foreign: list[str] = []
    for entry in s.entries:
        if entry.rid is None or entry.rid.run != s.run_id:
            foreign.append(entry.name)
        elif (removal := _removal(entry, entry.rid, s)) is not None:
            removals.append(removal)
        elif entry.kind == "dump":
            kept.append(entry.name)
    present = frozenset(kept)
    moves: list[Move] = []
    awaited: list[int] = []
    settled = present | {removal.name for removal in removals if removal.why in (Why.FAILURE, Why.REJECTED)}
    for row in sorted(s.rows.values(), key=lambda view: view.row):
        name = row.rid(s.run_id)
        if row.state is State.SENT and name not in settled and _may_still_come(row, name, s):
            awaited.append(row.row)
        elif (move := _move_of(row, s, present=name in present)) is not None:
            moves.append(move)
    return Plan(tuple(moves), tuple(removals), tuple(awaited), tuple(kept), tuple(foreign), s.temporaries)


def _removal(entry: Entry, rid: RequestId, s: Situation) -> Removal | None:
    """Why an entry of this run is to go; None for one that stays: a usable dump, or a living writer's folder."""
    if entry.kind == "tmp":
        if entry.name not in s.abandoned:
            return None
        return Removal(entry.name, Why.PROBE if rid.row is None else Why.DEAD_SERVER, rid.row)
    if rid.row is None:
        return Removal(entry.name, Why.PROBE)
    row = s.rows.get(rid.row)
    if row is None or row.rid(s.run_id) != entry.name or not row.may_have_dump:
        return Removal(entry.name, _why_useless(row, entry.name, s.run_id), rid.row)
    if entry.kind != "dump":
        return Removal(entry.name, Why.FAILURE if entry.kind == "failure" else Why.PARTIAL, rid.row)
    verdict = s.verdicts.get(entry.name)
    if verdict is None or row.state is State.WRITTEN:
        return None
    return Removal(entry.name, Why.REJECTED, rid.row, f"{verdict[0]}: {verdict[1]}", keep=True)


def _why_useless(row: RowView | None, name: str, run_id: str) -> Why:
    if row is not None and row.state is State.VERIFIED:
        return Why.VERIFIED
    if row is not None and row.deferred and row.rid(run_id) == name:
        return Why.RELEASED
    return Why.SUPERSEDED


def _move_of(row: RowView, s: Situation, *, present: bool) -> Move | None:
    """Where a row belongs, given whether a usable dump of it is there; None when it is there already."""
    name = row.rid(s.run_id)
    if row.state is State.WRITTEN and row.row in s.damaged:
        values = {"reason": s.damaged[row.row]}
        if present:
            return _move(row, State.DUMPED, "file bad, dump still there", dump=name, values=values)
        return _move(row, State.PENDING, "file bad, dump gone", values=values)
    if present:
        if row.state is State.SENT:
            return _move(row, State.DUMPED, "complete dump found", dump=name)
        if row.state is State.PENDING:
            return _move(row, State.DUMPED, "complete dump found", actor=Actor.ADOPT, dump=name)
        return None
    if row.state is State.DUMPED and row.row in s.finished:
        return _move(row, State.WRITTEN, "complete file found", values=dict(s.finished[row.row]))
    return _back(row, s, name) if row.state in (State.SENT, State.DUMPED) else None


def _may_still_come(row: RowView, name: str, s: Situation) -> bool:
    if row.boot_id is None or row.boot_id not in s.lives:
        return False
    in_flight = s.lives[row.boot_id]
    return in_flight is None or name in in_flight


def _back(row: RowView, s: Situation, name: str) -> Move:
    verdict = s.verdicts.get(name)
    if verdict is None or verdict[0] in (Reject.VANISHED, Reject.STALE_BOOT):
        reason = "dump rejected or gone" if row.state is State.DUMPED else "no usable dump"
        return _move(row, State.PENDING, reason)
    detail = f"{verdict[0]}: {verdict[1]}"
    strikes = row.strikes + 1
    values: dict[str, object] = {"strikes": strikes, "reason": detail}
    if s.max_strikes is not None and strikes >= s.max_strikes:
        return _move(row, State.FAILED, "strikes used up", values=values)
    return _move(
        row, State.PENDING, "dump rejected or gone" if row.state is State.DUMPED else "no usable dump", values=values
    )


def _move(
    row: RowView,
    target: State,
    reason: str,
    *,
    actor: Actor = Actor.RECONCILE,
    dump: str | None = None,
    values: Mapping[str, object] | None = None,
) -> Move:
    transition = Transition(row.state, target, actor, reason)
    detail = {"from": row.state, "to": target, "why": reason} | ({"dump": dump} if dump else {})
    return Move(row.row, row.attempt, transition, dict(values or {}), Event("reconciled", row.row, detail))
