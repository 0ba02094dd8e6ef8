"""A failed row leaves no file under its final name: a trainer lists the folder, and would take it for a finished one.

A worker that dies after the link leaves one that nobody has read back, whatever becomes of the row later.
"""

from __future__ import annotations

from hsjournal.events import Event
from hsjournal.states import State
from hsjournal.worker.context import Context


async def clear_all(c: Context) -> None:
    """See :func:`clear`, for every failed row: those of the gate and of the plan, and what could not be moved before."""
    rows = await c.journal.call(lambda journal: journal.rows_in(State.FAILED))
    for row in rows:
        await clear(c, row["row"], row["sample_id"])


async def clear(c: Context, row: int, sample_id: str) -> None:
    """Set aside what lies under the final name of a failed row; what can't be moved waits for the next call.

    Raises:
        FencedError: when a newer worker owns the run.
    """
    try:
        moved = await c.in_pool(lambda: c.output.clear(row, sample_id))
    except OSError as error:
        c.record(Event("cleanup_failed", row, {"why": str(error)}))
        return
    for path, target in moved:
        c.record(Event("file_displaced", row, {"path": path, "to": str(target), "why": "its row failed"}))
