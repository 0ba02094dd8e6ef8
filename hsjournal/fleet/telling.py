"""What a start of a shard tells of itself, to whoever watches the fleet."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hsjournal.errors import ExitCode
from hsjournal.states import State

GOOD = (ExitCode.DONE, ExitCode.FAILED_SAMPLES)
STOPPED = (ExitCode.INTERRUPTED, ExitCode.TERMINATED)


@dataclass(frozen=True, slots=True)
class Telling:
    """How a shard stands.

    Args:
        shard: ``i/n``.
        incarnation: 0 before the first start.
        host: the node's name.
        run_dir: on that node.
        sentence: what is going on.
        counts: rows by state.
        rate: samples a second.
        code: the exit code once it has ended, else None.
    """

    shard: str
    incarnation: int = 0
    host: str = ""
    run_dir: str = ""
    sentence: str = "waits for a node"
    counts: dict[str, int] = field(default_factory=dict)
    rate: float = 0.0
    code: int | None = None

    @property
    def rows(self) -> int:
        """All rows of the shard, as far as they are known."""
        return sum(self.counts.values())

    def count(self, state: State) -> int:
        """Rows in ``state``."""
        return self.counts.get(str(state), 0)

    def to_json(self) -> dict[str, Any]:
        """JSON-able; ``Telling(**…)`` is the inverse."""
        return asdict(self)


def fleet_code(tellings: list[Telling]) -> ExitCode:
    """The exit code of a fleet whose shards have all ended: 4 when one gave up, 143 when one was stopped, 3 or 0."""
    codes = {telling.code for telling in tellings}
    if codes - {*GOOD, *STOPPED}:
        return ExitCode.GAVE_UP
    if codes & {*STOPPED}:
        return ExitCode.TERMINATED
    return ExitCode.FAILED_SAMPLES if ExitCode.FAILED_SAMPLES in codes else ExitCode.DONE
