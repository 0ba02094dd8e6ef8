"""What a benchmark hands back, how rounds are taken, and how it is all shown."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sqlite3
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

from hsjournal.filesystems import file_system_type

ROUNDS = 5
PACKAGES = ("aiohttp", "numpy", "psutil", "sqlalchemy", "torch", "transformers", "xxhash")


@dataclass(frozen=True, slots=True)
class Bar:
    """One measured figure beside its goal.

    Args:
        name: as in the list of bars.
        value: the median.
        goal: None for a figure that only explains another one.
        better: which side of the goal is the good one.
        note: how it came about, for the table.
    """

    name: str
    value: float
    goal: float | None
    better: Literal["higher", "lower"]
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal


def medians(cases: Mapping[str, Callable[[], float]], rounds: int, say: Callable[[str], None]) -> dict[str, float]:
    """Take every case once in each round, in turn, so that a noisy minute falls on all of them; their medians."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds):
        for name, measure in cases.items():
            taken[name].append(measure())
        say(f"round {number + 1}/{rounds}: " + ", ".join(f"{n} {v[-1]:.4g}" for n, v in taken.items()))
    return {name: statistics.median(values) for name, values in taken.items()}


@contextmanager
def work_folder(where: Path | None, *, on_disk: bool) -> Iterator[Path]:
    """A folder for the measurement, removed at the end; refused in memory when a disk is what is measured."""
    folder = Path(tempfile.mkdtemp(prefix="hsjournal-bench-", dir=where))
    try:
        kind = file_system_type(folder)
        if on_disk and kind in ("tmpfs", "ramfs"):
            raise SystemExit(f"bench: {folder.parent} is {kind}: nothing is synced there. Name a disk with --folder.")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def machine(folder: Path) -> dict[str, Any]:
    """What it ran on."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().split("\n")
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "kernel": platform.release(),
        "file_system": file_system_type(folder),
        "load": [round(x, 2) for x in os.getloadavg()],
    }


def versions() -> dict[str, str]:
    """Of everything that takes part."""
    found = {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    for name in ("hsjournal", *PACKAGES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def table(bars: Sequence[Bar]) -> str:
    """For people."""
    rows = [("bar", "value", "goal", "", "")]
    for bar in bars:
        sign = ">=" if bar.better == "higher" else "<="
        goal = f"{sign} {bar.goal:g}" if bar.goal is not None else ""
        verdict = {True: "met", False: "MISSED", None: ""}[bar.met]
        rows.append(
            (bar.name, f"{bar.value:,.4g}" if bar.value < 1000 else f"{bar.value:,.0f}", goal, verdict, bar.note)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].ljust(widths[2]), row[3].ljust(widths[3]), row[4]]
        ).rstrip()
        for row in rows
    )


def as_json(bars: Sequence[Bar], folder: Path) -> str:
    """For scripts."""
    listed = [
        {"name": b.name, "value": b.value, "goal": b.goal, "better": b.better, "met": b.met}
        for b in bars
        if b.goal is not None
    ]
    told = {"machine": machine(folder), "versions": versions(), "bars": listed}
    return json.dumps(told | {"also": {b.name: b.value for b in bars if b.goal is None}}, indent=2)


def say(words: str) -> None:
    """Progress goes to standard error: standard output is the table's."""
    print(words, file=sys.stderr, flush=True)
