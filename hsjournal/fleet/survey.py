"""How a fleet stands, and whether its files are sound: the same questions as for one run, asked of every shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hsjournal.config import RunPaths
from hsjournal.errors import ExitCode, HsjournalError
from hsjournal.fleet.members import AT_ONCE, Member, agreeing, counting, find, need, superseded
from hsjournal.ops.subset import Subset
from hsjournal.ops.verify import verify
from hsjournal.ops.verify_report import Progress, Report
from hsjournal.states import State
from hsjournal.watch.status import status

VERSION = 1
"""Of the JSON form of :func:`survey`; fields are only ever added."""
LOOK_DEADLINE = 3.0


def survey(folders: Sequence[Path]) -> dict[str, Any]:
    """How every shard stands, JSON-able; changes nothing, and answers also while some of the disks are stuck."""
    members, problems = find(folders, LOOK_DEADLINE)
    unclear = ""
    best: list[Member] = []
    try:
        best = counting(members)
    except HsjournalError as error:
        unclear = str(error)
    counted = {member.run_dir for member in best} if best else _highest(members)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        shards = list(pool.map(lambda member: _one(member, counts=member.run_dir in counted), members))
    totals = {str(state): 0 for state in State}
    for shard in shards:
        for state, count in shard["counts"].items() if shard["counts_here"] else ():
            totals[state] += count
    return {
        "version": VERSION,
        "fleet": next((member.fleet for member in members), ""),
        "rows": sum(totals.values()),
        "counts": totals,
        "complete": bool(best) and not problems and all(s["complete"] for s in shards if s["counts_here"]),
        "unclear": unclear or None,
        "unreadable": problems,
        "shards": shards,
    }


def _highest(members: Sequence[Member]) -> set[Path]:
    """What counts as far as it can be told."""
    best: dict[str, Member] = {}
    for member in members:
        if member.shard not in best or member.incarnation > best[member.shard].incarnation:
            best[member.shard] = member
    return {member.run_dir for member in best.values()}


def _one(member: Member, *, counts: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    problem = member.problem
    try:
        found = status(RunPaths.of(member.run_dir))
        problem = problem or found.get("problem")
    except HsjournalError as error:
        problem = problem or error.message
    supervisor = found.get("supervisor", {})
    return {
        "shard": member.shard,
        "incarnation": member.incarnation,
        "host": member.host,
        "run_dir": str(member.run_dir),
        "counts_here": counts,
        "counts": {state: value["rows"] for state, value in found.get("counts", {}).items()},
        "complete": bool(found.get("complete")),
        "alive": bool(supervisor.get("alive")),
        "sentence": str(supervisor.get("sentence") or "") if supervisor.get("alive") else "",
        "samples_per_s": float((found.get("rates") or {}).get("samples_per_s", 0.0)),
        "problem": problem,
    }


@dataclass(frozen=True, slots=True)
class Checked:
    """What ``verify`` found in every shard that counts."""

    reports: tuple[tuple[Member, Report], ...]
    passed_over: tuple[Member, ...]

    @property
    def exit_code(self) -> ExitCode:
        """The worst of them."""
        codes = {report.exit_code for _, report in self.reports}
        return ExitCode.FAILED_SAMPLES if ExitCode.FAILED_SAMPLES in codes else max(codes)

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "checked": sum(report.checked for _, report in self.reports),
            "bytes": sum(report.nbytes for _, report in self.reports),
            "damaged": sum(len(report.damaged) for _, report in self.reports),
            "unchecked": sum(len(report.unchecked) for _, report in self.reports),
            "passed_over": [str(member.run_dir) for member in self.passed_over],
            "shards": [
                {"shard": member.shard, "incarnation": member.incarnation, "run_dir": str(member.run_dir)}
                | report.to_json()
                for member, report in self.reports
            ],
        }


def check(folders: Sequence[Path], subset: Subset, seed: int, tell: Callable[[Member, Progress], None]) -> Checked:
    """Read the files of all shards that count back, one shard after the other.

    Raises:
        NoJournalError, UsageError: as :func:`hsjournal.fleet.merge.merge`.
        HsjournalError: when an output folder is not there.
    """
    members = need(folders)
    best = counting(members)
    agreeing(best)
    reports = tuple((m, verify(RunPaths.of(m.run_dir), subset, seed=seed, tell=partial(tell, m))) for m in best)
    return Checked(reports, tuple(superseded(members, best)))
