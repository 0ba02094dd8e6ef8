"""Carry a plan out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hsjournal import faults
from hsjournal.dump.reap import remove_dump, set_aside
from hsjournal.events import Event
from hsjournal.journal.store import Journal
from hsjournal.reconcile.gather import root_of
from hsjournal.reconcile.plan import Plan

MOVES_PER_COMMIT = 256


def apply(
    the_plan: Plan,
    journal: Journal,
    epoch: int,
    roots: Sequence[int],
    rejects: Path,
    out_dir: Path,
    record: Callable[[Event], object] = lambda _event: None,
) -> int:
    """Do what the plan says: journal first, then the root, so that a dump is never deleted before its row lets go.

    The output's temporaries come last. The epoch is looked at before each removal too: a plan made by a worker that
    then slept for hours would take its successor's dumps for nobody's. What can't be removed is left for the next time: it must not stop the run.

    Returns:
        Bytes freed in the hand-over root.

    Raises:
        FencedError: when a newer worker owns the run.
    """
    for start in range(0, len(the_plan.moves), MOVES_PER_COMMIT):
        journal.apply(the_plan.moves[start : start + MOVES_PER_COMMIT], epoch)
        faults.point("reconcile.applying")
    freed = 0
    for removal in the_plan.removals:
        journal.require(epoch)
        root_fd = root_of(roots, removal.name)
        try:
            if removal.keep:
                freed += set_aside(root_fd, removal.name, rejects, why=removal.detail).freed
            else:
                freed += remove_dump(root_fd, removal.name)
        except OSError as error:
            record(Event("cleanup_failed", removal.row, {"name": removal.name, "why": str(error)}, epoch=epoch))
            continue
        detail = {"name": removal.name, "why": removal.why, "detail": removal.detail}
        record(Event("dump_removed", removal.row, detail, epoch=epoch))
        faults.point("reconcile.applying")
    for path in the_plan.temporaries:
        journal.require(epoch)
        try:
            (out_dir / path).unlink(missing_ok=True)
        except OSError as error:
            record(Event("cleanup_failed", None, {"path": path, "why": str(error)}, epoch=epoch))
    return freed
