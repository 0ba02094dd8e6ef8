"""The journal before the run: prompts come in."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

from hsjournal.errors import HsjournalError
from hsjournal.journal import queries
from hsjournal.journal.base import OpenJournal
from hsjournal.journal.rows import NewRow
from hsjournal.states import Actor, State


class Intake(OpenJournal):
    """The side of the journal that ingestion sees."""

    def name_run(self, run_id: str) -> str:
        """Enter ``run_id`` before anything is sent under it; an earlier preparation that was cut short keeps its own.

        Returns:
            The run's id: by it, what that preparation left in the hand-over root is still known to be ours.
        """
        with self._writing() as connection:
            row = connection.execute("SELECT run_id FROM run WHERE id = 1").fetchone()
            if row is not None:
                return str(row[0])
            self._enter(run_id)
        return run_id

    def start_ingest(self, run_id: str) -> None:
        """Make the run's row, or start an ingestion over that no worker has seen: nothing of it was frozen yet.

        Raises:
            HsjournalError: when the run has begun.
        """
        with self._writing() as connection:
            row = connection.execute("SELECT epoch FROM run WHERE id = 1").fetchone()
            if row is not None and row[0] > 0:
                raise HsjournalError(f"the prompts of {self.path} are already in", remedy="Use `hsjournal resume`.")
            for name in ("prompt", "sample", "run"):
                connection.execute(f"DELETE FROM {name}")
            self._enter(run_id)

    def add_rows(self, rows: Sequence[NewRow]) -> None:
        """Enter prompts, in one transaction.

        Raises:
            IntegrityError: when a row number or an id stands twice; none of them is entered.
        """
        now = time.time()
        samples, prompts = [], []
        for r in rows:
            mask = array("I", r.loss_mask)
            samples.append(
                {
                    "row": r.row,
                    "sample_id": r.sample_id,
                    "source": r.source,
                    "line": r.line,
                    "num_tokens": len(r.input_ids),
                    "loss_tokens": sum(mask[1::2]),
                    "state": (State.PENDING if r.skipped is None else State.SKIPPED).value,
                    "actor": Actor.INGEST.value,
                    "reason": r.skipped,
                    "changed_at": now,
                    "mask_method": r.mask_method,
                    "cut_from": r.cut_from,
                }
            )
            if r.skipped is None:
                prompts.append({"row": r.row, "input_ids": r.input_ids.tobytes(), "loss_mask": mask.tobytes()})
        with self._writing() as connection:
            connection.executemany(queries.ADD_SAMPLES, samples)
            connection.executemany(queries.ADD_PROMPTS, prompts)

    def finish_ingest(self, found: str | None = None) -> None:
        """All prompts are in: the run may start. ``found`` is what ingestion has to tell, a JSON object."""
        with self._writing() as connection:
            statement = "UPDATE run SET ingested_at = :now, intake = :found WHERE id = 1"
            connection.execute(statement, {"now": time.time(), "found": found})

    def _enter(self, run_id: str) -> None:
        self._connection.execute(
            "INSERT INTO run (id, run_id, epoch, created_at) VALUES (1, :run_id, 0, :now)",
            {"run_id": run_id, "now": time.time()},
        )
