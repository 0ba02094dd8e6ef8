"""One run in process and what is to befall it, with a scripted server that keeps the drill's own record."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hsjournal.dump.protocol import RequestId
from tests.helpers.drill.injector import Injector
from tests.helpers.drill.truth import Findings
from tests.helpers.dumps import FabricatedDump
from tests.helpers.fake_server import Call, Edit, FakeServer
from tests.helpers.worker_runs import Run

ROWS = 12
FOREIGN = ("psm_x", "req_7", "hsj-0therrun-3-1-20")
"""What lies in the hand-over root and is not ours."""


class Server(FakeServer):
    """Keeps the drill's own record of what it was asked for and what it handed over."""

    def __init__(self, root: Path, findings: Findings) -> None:
        super().__init__(root, max_in_flight=64, max_probes=16)
        self.usable: dict[int, str] = {}
        self._findings = findings

    def publish(
        self, ids: array[int], rid: RequestId | str, *, edit: Edit | None = None, noise: int = 0, **meta: Any
    ) -> FabricatedDump:
        made = super().publish(ids, rid, edit=edit, noise=noise, **meta)
        asked = RequestId.parse(str(rid))
        latest = [c.rid for c in self.calls if asked is not None and c.rid.row == asked.row][-1:]
        is_whole = edit is None and not noise and not meta and self._is_heard(asked)
        if is_whole and asked is not None and asked.row is not None and latest == [asked]:
            self.usable[asked.row] = str(rid)
        return made

    def _is_heard(self, rid: RequestId | None) -> bool:
        """Whether somebody is still connected for it: what comes after a broken connection is too late."""
        transports = [c.request.transport for c in self.current if c.rid == rid]
        return any(t is not None and not t.is_closing() for t in transports)

    def spoiled(self, row: int | None = None) -> None:
        """A fault took a dump away: to send again is right."""
        if row is None:
            self.usable.clear()
        else:
            self.usable.pop(row, None)

    def _inspect(self, call: Call) -> None:
        super()._inspect(call)
        row = call.rid.row
        if row is not None and row in self.usable:
            self._findings.resent_needlessly.append(f"{call.rid} was sent though {self.usable[row]} was usable")


@dataclass(slots=True)
class Scene:
    """One run and what is to befall it."""

    run: Run
    server: Server
    inject: Injector
    draw: random.Random
    poison: set[int] = field(default_factory=set)
    struck: set[int] = field(default_factory=set)
    kinds: Counter[str] = field(default_factory=Counter)

    def a_row(self, *, striking: bool = False) -> int:
        """A row; one that has no striking fault yet where it costs a strike."""
        rows = [r for r in range(ROWS) if r not in self.poison and not (striking and r in self.struck)]
        row = self.draw.choice(rows or [0])
        if striking:
            self.struck.add(row)
        return row
