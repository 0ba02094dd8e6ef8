"""Rows that were taken since the last good canary are made again: their files set aside, themselves pending."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from hsjournal.config import RunPaths
from hsjournal.events import Event
from hsjournal.journal.doubt import SETTLED, doubted_rows
from hsjournal.journal.fence import Fence
from hsjournal.journal.store import Move
from hsjournal.ops.custody import Custody, custody, need_output
from hsjournal.ops.retry import Retried
from hsjournal.sink.output import Output
from hsjournal.states import Actor, State, Transition

_WAYS_BACK = {
    State.SENT: Transition(State.SENT, State.PENDING, Actor.RECONCILE, ""),
    State.DUMPED: Transition(State.DUMPED, State.PENDING, Actor.RECONCILE, ""),
    State.WRITTEN: Transition(State.WRITTEN, State.PENDING, Actor.REPAIR, ""),
    State.VERIFIED: Transition(State.VERIFIED, State.PENDING, Actor.REPAIR, ""),
}
_REASON = "in doubt: taken since the last good canary"


def make_again(paths: RunPaths, *, dry_run: bool = False) -> Retried:
    """Put every row in doubt back to pending; its file, if it has one, goes to the run's ``rejects``.

    A file goes first, so that a kill in between leaves a row whose file is missing; calling again goes on. A dry run
    only finds the rows.

    Raises:
        NoJournalError: when there is no run.
        JournalLockedError: when the run is going on.
        HsjournalError: when the output folder is not there.
    """
    with custody(paths) as held:
        rows = held.journal.rows_of(doubted_rows(held.journal))
        back = [row for row in rows if State(row["state"]) in _WAYS_BACK]
        if back and not dry_run:
            need_output(held.out_dir)
            epoch = held.take_epoch("retry --doubted")
            held.journal.reopen(epoch)
            with closing(Output(held.manifest, paths.rejects, Fence(paths.journal, epoch))) as output:
                for row in back:
                    _put_back(held, epoch, output, row)
            held.journal.apply([], epoch, [Event(SETTLED, None, {"rows": len(back)})])
        return Retried(tuple(row["row"] for row in back))


def _put_back(held: Custody, epoch: int, output: Output, row: dict[str, Any]) -> None:
    detail: dict[str, Any] = {"was": row["state"], "boot_id": row["boot_id"]}
    if row["output_path"] and State(row["state"]) in (State.WRITTEN, State.VERIFIED):
        aside = output.set_aside(str(row["output_path"]))
        detail["aside"] = str(aside) if aside is not None else None
    event = Event("doubted_again", row["row"], detail)
    # A dump of this attempt may lie in the hand-over root, or come there yet: it is in doubt as well, and no longer the row's.
    values = {"reason": _REASON, "attempt": row["attempt"] + 1}
    move = Move(row["row"], row["attempt"], _WAYS_BACK[State(row["state"])], values, event)
    held.journal.apply([move], epoch)
