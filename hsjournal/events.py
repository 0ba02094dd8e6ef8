"""What happened, besides the forward steps of rows: kept in the mirror at once, in the journal when it can be."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Args:
        kind: a short name, such as ``worker_started`` or ``dump_rejected``.
        row: the sample concerned, if one is.
        detail: JSON-able facts, for people and scripts.
        at: seconds since 1970, UTC.
        epoch: of the worker concerned; 0 before the first.
    """

    kind: str
    row: int | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    at: float = field(default_factory=time.time)
    epoch: int = 0

    def to_json(self) -> str:
        """As one line of JSON."""
        body = {"at": self.at, "epoch": self.epoch, "kind": self.kind, "row": self.row, "detail": self.detail}
        return json.dumps(body, separators=(",", ":"), default=str)

    @classmethod
    def from_json(cls, line: str) -> Event:
        """The inverse of :meth:`to_json`."""
        return cls(**json.loads(line))
