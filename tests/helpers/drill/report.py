"""What a drill says on its way, and what it found in the end."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.helpers.drill.truth import Findings


def say(line: str) -> None:
    """One line for whoever watches."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Report:
    """What a campaign did and found."""

    name: str = ""
    rows: int = 0
    kills: int = 0
    struck: int = 0
    """Rows with a strike: one that was alone at a server of somebody else's as that died, or alone at three kills in a row."""
    points: Counter[str] = field(default_factory=Counter)
    targets: Counter[str] = field(default_factory=Counter)
    by_lane: dict[str, Counter[str]] = field(default_factory=dict)
    """Targets by the lane's name: a server that the run is attached to is another target than the run's own."""
    findings: Findings = field(default_factory=Findings)

    @classmethod
    def of(cls, reports: Iterable[Report]) -> Report:
        """All of them together."""
        whole = cls()
        for report in reports:
            whole.rows += report.rows
            whole.kills += report.kills
            whole.struck += report.struck
            whole.points += report.points
            whole.targets += report.targets
            whole.by_lane[report.name] = report.targets
            whole.findings.add(report.findings)
        return whole
