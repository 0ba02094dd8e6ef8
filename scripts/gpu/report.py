"""What a check found: a table for people, JSON for programs."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Bar:
    """A number and what it must reach."""

    name: str
    value: float
    goal: float
    better: Literal["higher", "lower"]

    @property
    def met(self) -> bool:
        """Whether it does."""
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal


@dataclass(slots=True)
class Report:
    """One sub-check's result.

    Args:
        name: of the sub-check.
        rows: of its table, all with the same keys.
        bars: what was asked for.
        problems: whatever else went wrong; none, if it is to count.
        details: for the JSON file only.
    """

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether every bar was met and nothing went wrong."""
        return not self.problems and bool(self.bars) and all(bar.met for bar in self.bars)

    def write(self, out: Path) -> None:
        """Print the table and write ``NAME.json`` into ``out``."""
        print_table(self.rows)
        print_table(
            [{"bar": b.name, "value": b.value, "goal": b.goal, "met": "yes" if b.met else "NO"} for b in self.bars]
        )
        for problem in self.problems:
            print(f"PROBLEM {self.name}: {problem}")
        print(f"{self.name}: {'good' if self.good else 'NOT GOOD'}", flush=True)
        out.mkdir(parents=True, exist_ok=True)
        body = {
            "check": self.name,
            "good": self.good,
            "command": shlex.join(["scripts/gpu-check", *sys.argv[1:]]),
            "machine": machine(),
            "versions": versions(),
            "bars": [asdict(bar) | {"met": bar.met} for bar in self.bars],
            "problems": self.problems,
            "rows": self.rows,
            "details": self.details,
        }
        (out / f"{self.name}.json").write_text(json.dumps(body, indent=1) + "\n")


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Aligned columns, one row a line."""
    if not rows:
        return
    lines = [[str(key) for key in rows[0]]] + [[_show(value) for value in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def machine() -> dict[str, Any]:
    """GPUs, driver and kernel."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.split("\n")
    except OSError:
        found = []
    return {"gpus": [line for line in found if line], "kernel": platform.release(), "cpu": platform.machine()}


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    found = {"python": platform.python_version()}
    for name in ("torch", "sglang", "sglang-kernel", "transformers", "triton", "flashinfer-python"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
