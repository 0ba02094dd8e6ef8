"""What befalls dumps in the hand-over root: each does it to the first that it finds, and names it; empty if there was none."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def cut_short(root: Path, run_id: str) -> str:
    """Take bytes from a dump that is not published yet."""
    for folder in root.glob(f".tmp-hsj-{run_id}-[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "meta.json").exists():
                os.truncate(folder / "final.bin", max(0, (folder / "final.bin").stat().st_size - 5))
                return folder.name
    return ""


def delete(root: Path, run_id: str) -> str:
    """Delete one that is complete."""
    for folder in root.glob(f"hsj-{run_id}-[0-9]*"):
        shutil.rmtree(folder, ignore_errors=True)
        return folder.name
    return ""
