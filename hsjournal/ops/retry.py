"""Failed rows are tried again, with all their strikes forgiven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hsjournal.config import RunPaths
from hsjournal.errors import UsageError
from hsjournal.events import Event
from hsjournal.journal.store import Journal, Move
from hsjournal.ops.custody import custody
from hsjournal.states import Actor, State, Transition

MOVES_PER_COMMIT = 256
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Retried:
    """Rows that are pending again."""

    rows: tuple[int, ...]


def retry(paths: RunPaths, rows: Sequence[int] | None, reason: str = "", *, dry_run: bool = False) -> Retried:
    """Put failed rows back to pending.

    Args:
        paths: of the run.
        rows: which; None for every failed one.
        reason: kept with the rows.
        dry_run: only find them.

    Raises:
        UsageError: when a named row is not there or not failed; nothing is changed then.
        NoJournalError: when there is no run.
        JournalLockedError: when the run is going on.
    """
    with custody(paths) as held:
        failed = held.journal.rows_in(State.FAILED) if rows is None else _named(held.journal, sorted(set(rows)))
        if failed and not dry_run:
            epoch = held.take_epoch("retry")
            held.journal.reopen(epoch)
            moves = [_move(row, reason) for row in failed]
            for start in range(0, len(moves), MOVES_PER_COMMIT):
                held.journal.apply(moves[start : start + MOVES_PER_COMMIT], epoch)
        return Retried(tuple(row["row"] for row in failed))


def _named(journal: Journal, rows: Sequence[int]) -> list[dict[str, Any]]:
    found = {row["row"]: row for row in journal.rows_of(rows)}
    absent = [row for row in rows if row not in found]
    if absent:
        raise UsageError(
            f"there is no row {_list(absent)}", remedy="Rows are counted from 0; `status` names the failed."
        )
    other = [f"{row} ({found[row]['state']})" for row in rows if found[row]["state"] != State.FAILED]
    if other:
        raise UsageError(f"not failed: row {_list(other)}", remedy="Only failed rows can be tried again.")
    return list(found.values())


def _move(row: dict[str, Any], reason: str) -> Move:
    values = {"strikes": 0, "suspect": 0, "reason": reason or "tried again on demand"}
    event = Event("retried", row["row"], {"failed_by": row["reason"], "strikes": row["strikes"], "reason": reason})
    return Move(row["row"], row["attempt"], Transition(State.FAILED, State.PENDING, Actor.OPERATOR, ""), values, event)


def _list(items: Sequence[object]) -> str:
    named = ", ".join(map(str, items[:_MOST_NAMED]))
    return named if len(items) <= _MOST_NAMED else f"{named} and {len(items) - _MOST_NAMED} more"
