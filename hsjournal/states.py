"""The state machine of a sample, as data.

``TRANSITIONS`` is the only place that says which changes exist. The SQL ``CHECK`` and triggers, the diagram in
the README and the property tests are generated from it (DESIGN: G2).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Where a sample is on its way from a prompt to a verified file."""

    PENDING = "pending"  # to be sent
    SENT = "sent"  # the request id is committed; the request is, or may be, at the server
    DUMPED = "dumped"  # a complete and checked dump lies in the hand-over root
    WRITTEN = "written"  # the file has its final name; data and directories are fsynced; digest in the journal
    VERIFIED = "verified"  # read back from the storage and equal
    FAILED = "failed"  # strikes used up
    SKIPPED = "skipped"  # refused input: never sent


DEFERRED = "deferred"
"""How a written row says that its file is to be read back later, by ``hsjournal verify``: its dump is released already."""

INCOMPLETE = (State.PENDING, State.SENT, State.DUMPED, State.WRITTEN)
TERMINAL = (State.VERIFIED, State.FAILED, State.SKIPPED)


class Actor(StrEnum):
    """Who may cause a change."""

    INGEST = "ingest"  # reads the prompts before the run
    WORKER = "worker"  # moves samples forward
    RECONCILE = "reconcile"  # compares the journal with what really lies on the disks
    REPAIR = "repair"  # `verify --repair`
    OPERATOR = "operator"  # `retry`
    ADOPT = "adopt"  # `adopt`: finished files or dumps of an earlier or foreign run


@dataclass(frozen=True, slots=True)
class Transition:
    """One permitted change of state and the actor that may cause it."""

    source: State
    target: State
    actor: Actor
    reason: str


_S, _A = State, Actor

TRANSITIONS: tuple[Transition, ...] = (
    # forward
    Transition(_S.PENDING, _S.SENT, _A.WORKER, "request sent"),
    Transition(_S.SENT, _S.DUMPED, _A.WORKER, "dump complete and checked"),
    Transition(_S.DUMPED, _S.WRITTEN, _A.WORKER, "file published and fsynced"),
    Transition(_S.WRITTEN, _S.VERIFIED, _A.WORKER, "read back and equal"),
    # forward, by finding that the step had already been done when its process died
    Transition(_S.SENT, _S.DUMPED, _A.RECONCILE, "complete dump found"),
    Transition(_S.DUMPED, _S.WRITTEN, _A.RECONCILE, "complete file found"),
    Transition(_S.PENDING, _S.WRITTEN, _A.ADOPT, "finished file of an earlier run"),
    Transition(_S.PENDING, _S.DUMPED, _A.ADOPT, "complete dump of an earlier run"),
    Transition(_S.WRITTEN, _S.VERIFIED, _A.ADOPT, "read back and equal"),
    Transition(_S.WRITTEN, _S.VERIFIED, _A.REPAIR, "read back later, on demand, and equal"),
    # back
    Transition(_S.SENT, _S.PENDING, _A.RECONCILE, "no usable dump"),
    Transition(_S.DUMPED, _S.PENDING, _A.RECONCILE, "dump rejected or gone"),
    Transition(_S.WRITTEN, _S.DUMPED, _A.RECONCILE, "file bad, dump still there"),
    Transition(_S.WRITTEN, _S.PENDING, _A.RECONCILE, "file bad, dump gone"),
    Transition(_S.WRITTEN, _S.PENDING, _A.REPAIR, "file bad, dump gone"),
    Transition(_S.VERIFIED, _S.PENDING, _A.REPAIR, "file damaged, to be made again"),
    Transition(_S.FAILED, _S.PENDING, _A.OPERATOR, "tried again on demand"),
    # off the path
    Transition(_S.PENDING, _S.SKIPPED, _A.INGEST, "refused input"),
    Transition(_S.PENDING, _S.FAILED, _A.WORKER, "strikes used up"),
    Transition(_S.SENT, _S.FAILED, _A.WORKER, "strikes used up"),
    Transition(_S.DUMPED, _S.FAILED, _A.WORKER, "strikes used up"),
    Transition(_S.WRITTEN, _S.FAILED, _A.WORKER, "strikes used up"),
    Transition(_S.PENDING, _S.FAILED, _A.RECONCILE, "strikes used up"),
    Transition(_S.SENT, _S.FAILED, _A.RECONCILE, "strikes used up"),
    Transition(_S.DUMPED, _S.FAILED, _A.RECONCILE, "strikes used up"),
    Transition(_S.WRITTEN, _S.FAILED, _A.RECONCILE, "strikes used up"),
)

INITIAL = (State.PENDING, State.SKIPPED)

_ALLOWED = frozenset((t.source, t.target, t.actor) for t in TRANSITIONS)


def is_allowed(source: State, target: State, actor: Actor) -> bool:
    """Whether ``actor`` may move a sample from ``source`` to ``target``."""
    return (source, target, actor) in _ALLOWED


def state_check_sql(column: str = "state") -> str:
    """The body of the SQL ``CHECK`` that limits a column to the states."""
    return f"{column} IN ({_quoted(State)})"


def actor_check_sql(column: str = "actor") -> str:
    """The body of the SQL ``CHECK`` that limits a column to the actors."""
    return f"{column} IN ({_quoted(Actor)})"


def trigger_sql(table: str = "sample") -> dict[str, str]:
    """The triggers that make the database itself refuse what the table does not list, by trigger name.

    Only changes in ``TRANSITIONS`` by the actor named there pass; ``attempt`` never falls; a row starts as
    one of ``INITIAL``, keeps its number, and is never deleted or replaced once anything was sent for it; a table of
    counts per state follows each change.
    """
    allowed = " OR ".join(
        f"(OLD.state='{t.source}' AND NEW.state='{t.target}' AND NEW.actor='{t.actor}')" for t in TRANSITIONS
    )
    change = (
        "UPDATE state_count SET rows = rows - 1, tokens = tokens - OLD.num_tokens, bytes = bytes - OLD.output_bytes "
        "WHERE state = OLD.state; "
        "UPDATE state_count SET rows = rows + 1, tokens = tokens + NEW.num_tokens, bytes = bytes + NEW.output_bytes "
        "WHERE state = NEW.state;"
    )
    return {
        f"{table}_transition": (
            f"CREATE TRIGGER {table}_transition BEFORE UPDATE OF state ON {table} "
            f"WHEN OLD.state <> NEW.state AND NOT ({allowed}) "
            f"BEGIN SELECT RAISE(ABORT, 'transition not in the table'); END"
        ),
        f"{table}_attempt": (
            f"CREATE TRIGGER {table}_attempt BEFORE UPDATE OF attempt ON {table} WHEN NEW.attempt < OLD.attempt "
            f"BEGIN SELECT RAISE(ABORT, 'attempt never falls'); END"
        ),
        f"{table}_row": (
            f"CREATE TRIGGER {table}_row BEFORE UPDATE OF row, sample_id ON {table} "
            f"WHEN NEW.row <> OLD.row OR NEW.sample_id <> OLD.sample_id "
            f"BEGIN SELECT RAISE(ABORT, 'a row keeps its number and its id'); END"
        ),
        f"{table}_initial": (
            f"CREATE TRIGGER {table}_initial BEFORE INSERT ON {table} WHEN NEW.state NOT IN ({_quoted(INITIAL)}) "
            f"BEGIN SELECT RAISE(ABORT, 'a row starts as pending or skipped'); END"
        ),
        # INSERT OR REPLACE deletes without firing delete triggers: neither rules nor counts would see it.
        f"{table}_replace": (
            f"CREATE TRIGGER {table}_replace BEFORE INSERT ON {table} "
            f"WHEN EXISTS (SELECT 1 FROM {table} WHERE row = NEW.row) OR (NEW.state <> 'skipped' AND "
            f"EXISTS (SELECT 1 FROM {table} WHERE sample_id = NEW.sample_id AND state <> 'skipped')) "
            f"BEGIN SELECT RAISE(ABORT, 'a row number or a sample id stands twice'); END"
        ),
        f"{table}_keep": (
            f"CREATE TRIGGER {table}_keep BEFORE DELETE ON {table} "
            f"WHEN OLD.attempt > 0 OR OLD.state NOT IN ({_quoted(INITIAL)}) "
            f"BEGIN SELECT RAISE(ABORT, 'a row that was worked on is never deleted'); END"
        ),
        f"{table}_count_insert": (
            f"CREATE TRIGGER {table}_count_insert AFTER INSERT ON {table} BEGIN "
            "UPDATE state_count SET rows = rows + 1, tokens = tokens + NEW.num_tokens, "
            "bytes = bytes + NEW.output_bytes WHERE state = NEW.state; END"
        ),
        f"{table}_count_update": (
            f"CREATE TRIGGER {table}_count_update AFTER UPDATE OF state, num_tokens, output_bytes ON {table} "
            f"BEGIN {change} END"
        ),
        f"{table}_count_delete": (
            f"CREATE TRIGGER {table}_count_delete AFTER DELETE ON {table} BEGIN "
            "UPDATE state_count SET rows = rows - 1, tokens = tokens - OLD.num_tokens, "
            "bytes = bytes - OLD.output_bytes WHERE state = OLD.state; END"
        ),
    }


def mermaid() -> str:
    """The state diagram of the README, in Mermaid's notation."""
    edges: dict[tuple[State, State], list[str]] = {}
    for t in TRANSITIONS:
        edges.setdefault((t.source, t.target), []).append(f"{t.actor}: {t.reason}")
    lines = ["stateDiagram-v2", *(f"    [*] --> {state}" for state in INITIAL)]
    lines += [f"    {source} --> {target}: {', '.join(labels)}" for (source, target), labels in edges.items()]
    return "\n".join(lines)


def _quoted(values: Iterable[StrEnum]) -> str:
    return ", ".join(f"'{value.value}'" for value in values)
