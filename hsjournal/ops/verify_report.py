"""What a check of the outputs found: damages, what could not be judged, and the whole as a report."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from hsjournal.errors import ExitCode
from hsjournal.ops.strangers import Strangers
from hsjournal.states import State

WITH_FILE = (State.WRITTEN, State.VERIFIED)


def has_file(row: dict[str, Any]) -> bool:
    """Whether the row's output is due to be there: written, and not released since."""
    return State(row["state"]) in WITH_FILE and row.get("released_at") is None


@dataclass(frozen=True, slots=True)
class Damaged:
    """One damaged output. ``kind`` is a value of :class:`hsjournal.sink.verify.Damage`."""

    row: int
    sample_id: str
    path: str
    kind: str
    detail: str
    repaired: bool = False


@dataclass(frozen=True, slots=True)
class Unchecked:
    """An output that could not be judged: the storage refused to answer."""

    row: int
    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the check is."""

    rows: int
    total_rows: int
    nbytes: int
    total_bytes: int
    damaged: int


@dataclass(slots=True)
class Report:
    """What was found.

    Args:
        checked: files read.
        nbytes: their size.
        methods: how they were read back, and how many each way.
        completed: rows whose read-back had been put off, and are verified now.
        seed: of the draw, where one was made.
        live: whether the run was going on meanwhile.
    """

    seed: int
    live: bool = False
    checked: int = 0
    completed: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    methods: Counter[str] = field(default_factory=Counter)
    damaged: list[Damaged] = field(default_factory=list)
    unchecked: list[Unchecked] = field(default_factory=list)
    strangers: Strangers = field(default_factory=lambda: Strangers((), 0))

    @property
    def exit_code(self) -> ExitCode:
        """3 for damage, 1 when something could not be judged, else 0."""
        if self.damaged:
            return ExitCode.FAILED_SAMPLES
        return ExitCode.ERROR if self.unchecked else ExitCode.DONE

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "checked": self.checked,
            "completed": self.completed,
            "bytes": self.nbytes,
            "seconds": round(self.seconds, 2),
            "methods": dict(self.methods),
            "seed": self.seed,
            "live": self.live,
            "damaged": [asdict(d) for d in self.damaged],
            "repaired": sum(d.repaired for d in self.damaged),
            "unchecked": [asdict(u) for u in self.unchecked],
            "unowned": {"count": self.strangers.count, "paths": list(self.strangers.paths)},
        }
