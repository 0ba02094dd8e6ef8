"""What the tests of fleets share: a tiny model, prompts as token ids, and a look into many journals."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from hsjournal.errors import HsjournalError
from hsjournal.watch.children import peek_at
from tests.helpers.tiny_models import make_tiny_model

ENGINE = ("--dtype", "float32", "--stall-timeout", "120")


def make_job(folder: Path, rows: int) -> list[str]:
    """The words of `hsjournal run` for so many rows of a tiny model."""
    model = make_tiny_model("llama", folder / "model")
    draw = random.Random(rows)
    lines = []
    for number in range(rows):
        ids = [draw.randrange(1, 250) for _ in range(draw.randint(8, 40))]
        lines.append(json.dumps({"id": f"s{number}", "input_ids": ids, "loss_mask": [0] * 4 + [1] * (len(ids) - 4)}))
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return ["--prompts", str(folder / "prompts.jsonl"), "--model", str(model), *ENGINE]


def verified(run_dir: Path) -> int:
    """Verified rows so far; 0 while there is no journal."""
    try:
        return int(peek_at(run_dir / "journal.db", 10.0)["counts"].get("verified", {}).get("rows", 0))
    except HsjournalError:
        return 0


def incarnation(run_dir: Path) -> int:
    """By the badge; 0 without one."""
    try:
        return int(json.loads((run_dir / "fleet.json").read_text())["incarnation"])
    except (OSError, ValueError):
        return 0


def supervisor_of(run_dir: Path) -> psutil.Process:
    """The process of `hsjournal run` there."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "hsjournal.cli.main" in words and "run" in words and str(run_dir) in words and "fleet" not in words:
            return process
    raise AssertionError(f"nobody runs {run_dir}")


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Wait until ``condition`` is true; its value."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds} s: {what}")


def index_of(path: Path) -> list[dict[str, Any]]:
    """The lines of an index."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def stamps(run_dir: Path) -> dict[str, tuple[int, int]]:
    """Each output file's inode and time of change: neither changes while nobody touches it."""
    return {str(p): (p.stat().st_ino, p.stat().st_mtime_ns) for p in (run_dir / "out").rglob("*.ckpt")}
