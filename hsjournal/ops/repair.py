"""What a check of the outputs changes: damaged ones go out of the way, and read-backs that were put off are made good."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hsjournal.dump.protocol import RequestId
from hsjournal.events import Event
from hsjournal.journal.store import Journal, Move
from hsjournal.ops.custody import Custody
from hsjournal.sink.output import Output
from hsjournal.sink.verify import Damage, DamageError
from hsjournal.states import DEFERRED, Actor, State, Transition


class Repair:
    """Mends one damaged row after another.

    Args:
        held: the run.
        epoch: of this command.
        output: fenced by it.
    """

    def __init__(self, held: Custody, epoch: int, output: Output) -> None:
        self._held, self._epoch, self._output = held, epoch, output
        self._reopened = False

    def mend(self, row: dict[str, Any], error: DamageError) -> bool:
        """Set the file aside, then let the row go back. False when the file can't be moved: nothing is changed then.

        In this order a kill in between leaves a row whose file is missing, which the next repair finds.

        Raises:
            FencedError: when something newer owns the run.
        """
        path = str(row["output_path"])
        detail: dict[str, Any] = {"path": path, "kind": error.kind.value, "detail": error.detail}
        if error.kind is not Damage.MISSING:
            try:
                aside = self._output.set_aside(path)
            except OSError as trouble:
                self._held.journal.apply([], self._epoch, [_not_repaired(row, detail, trouble)])
                return False
            detail["aside"] = str(aside) if aside is not None else None
        if not self._reopened:
            self._held.journal.reopen(self._epoch)
            self._reopened = True
        transition = self._way_back(row)
        values = {"reason": f"verify: {error}"}
        event = Event("repaired", row["row"], detail)
        self._held.journal.apply([Move(row["row"], row["attempt"], transition, values, event)], self._epoch)
        return True

    def _way_back(self, row: dict[str, Any]) -> Transition:
        """To the dump, if a row that was not yet verified still has it; else to the prompt."""
        if State(row["state"]) is State.VERIFIED:
            return Transition(State.VERIFIED, State.PENDING, Actor.REPAIR, "")
        manifest = self._held.manifest
        rid = RequestId.sample(manifest.run_id, row["row"], row["attempt"], row["num_tokens"])
        if any((Path(endpoint.handover_root) / str(rid)).is_dir() for endpoint in manifest.endpoints):
            return Transition(State.WRITTEN, State.DUMPED, Actor.RECONCILE, "")
        return Transition(State.WRITTEN, State.PENDING, Actor.REPAIR, "")


class Completion:
    """Verifies rows whose read-back was put off."""

    def __init__(self, journal: Journal, epoch: int) -> None:
        self._journal, self._epoch = journal, epoch

    def complete(self, row: dict[str, Any], method: str) -> bool:
        """The file of ``row`` was read back by ``method`` and is sound; whether that was still due.

        Raises:
            FencedError: when something newer owns the run.
        """
        if State(row["state"]) is not State.WRITTEN or row["verify_method"] != DEFERRED:
            return False
        values = {"verify_method": method, "verified_at": time.time()}
        transition = Transition(State.WRITTEN, State.VERIFIED, Actor.REPAIR, "")
        self._journal.apply([Move(row["row"], row["attempt"], transition, values)], self._epoch)
        return True


def _not_repaired(row: dict[str, Any], detail: dict[str, Any], trouble: OSError) -> Event:
    return Event("not_repaired", row["row"], detail | {"why": trouble.strerror or str(trouble)})
