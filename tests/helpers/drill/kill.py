"""The kill drill: campaigns against runs that are attached to an engine, and runs whose engine is their child."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hsjournal.faults import POINTS
from tests.helpers.drill.campaign import Campaign
from tests.helpers.drill.report import Report, say
from tests.helpers.drill.stage import Stage, random_prompts

LANES = 2
"""Campaigns on attached runs that go on side by side; one more has its engine as a child."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One campaign after the other until so many kills are done.

    Args:
        name: to tell it from the others.
        seed: of its choices.
        kills: how many.
        rows: prompts of its first run.
        points: the named points that must fire.
        embedded: whether the engine is the supervisor's child.
    """

    name: str
    seed: str
    kills: int
    rows: int
    points: Sequence[str]
    embedded: bool

    def run(self, model: Path, base: Path | None, *, keep: bool) -> Report:
        """Fire; what was done and found."""
        draw, report = random.Random(self.seed), Report(self.name)
        left, rows, points = self.kills, self.rows, list(self.points)
        draw.shuffle(points)
        while left > 0:
            stage = Stage.make(model, random_prompts(rows, draw), base)
            say(f"{self.name}: {left} kills, {rows} rows, in {stage.base} and {stage.shm}")
            try:
                campaign = Campaign(stage, draw, left, points, embedded=self.embedded, report=report)
                left, points = campaign.run(), campaign.wanted
            finally:
                stage.close(keep=keep or bool(report.findings.lines()))
            rows = max(40, 10 * left)  # they ran out first
        return report


def kill_drill(
    model: Path,
    kills: int,
    seed: int,
    rows: int | None = None,
    *,
    keep: bool = False,
    points: tuple[str, ...] = POINTS,
    base: Path | None = None,
) -> Report:
    """Most kills on runs that are attached to an engine, the rest on one whose engine is its child, all at once.

    Args:
        model: a tiny model's folder.
        kills: in all.
        seed: of every choice (what the machine makes of it differs from time to time).
        rows: of the attached runs together; by default so many that there is always work.
        keep: leave the folders.
        points: the named points that must fire.
        base: where the folders are made.
    """
    in_child = max(3, kills // 12)
    lanes = [Lane("embedded", f"{seed}-embedded", in_child, max(40, 12 * in_child), (), embedded=True)]
    for lane in range(LANES):
        share = (kills - in_child + lane) // LANES
        count = (rows or max(60, 5 * kills)) // LANES
        lanes.append(Lane(f"attached {lane}", f"{seed}-{lane}", share, count, points[lane::LANES], embedded=False))
    with ThreadPoolExecutor(len(lanes)) as pool:
        reports = [pool.submit(lane.run, model, base, keep=keep) for lane in lanes]
    return Report.of([report.result() for report in reports])
