"""Runs of this user that left something in shared memory: living, or dead and only taking room."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from hsjournal.birth import lives
from hsjournal.config import SHM_VARIABLE
from hsjournal.mirror import SUPERVISOR, Mirror
from hsjournal.ops.doctor.lines import Line, ok, warn
from hsjournal.ui.words import duration, printable, size

MOST = 10


def examine(shm: Path | None = None) -> Iterator[Line]:
    """A line for each run that has a folder under ``shm`` (default: where runs of this user keep theirs)."""
    base = shm or Path(os.environ.get(SHM_VARIABLE, "/dev/shm")) / f"hsjournal-{os.getuid()}"  # noqa: S108
    try:
        folders = sorted(entry for entry in base.iterdir() if (entry / "mirror").is_dir())
    except OSError:
        folders = []
    if not folders:
        yield ok("runs", "no other run has anything in shared memory")
    for folder in folders[:MOST]:
        yield _line(folder)
    if len(folders) > MOST:
        yield ok("runs", f"and {len(folders) - MOST:,} more under {base}")


def _line(folder: Path) -> Line:
    record = Mirror(folder / "mirror").read(SUPERVISOR) or {}
    name = printable(str(record.get("run_dir") or folder))
    held = size(_bytes(folder))
    if "pid" in record and lives(int(record["pid"]), float(record["create_time"])):
        return ok("runs", f"{name}: running (supervisor {record['pid']}), {held} in shared memory")
    try:
        age = duration(time.time() - (folder / "mirror").stat().st_mtime)
    except OSError:
        age = "unknown time"
    return warn(
        "runs", f"{name}: not running for {age}, and holds {held} of shared memory",
        f"Finish it with `hsjournal resume {name}`, or if it is given up, delete {folder}.",
    )  # fmt: skip


def _bytes(folder: Path) -> int:
    total = 0
    for where, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(where, file), follow_symlinks=False).st_blocks * 512
            except OSError:
                continue
    return total
