"""Deleting what others still write to, as ``rm -rf`` does."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path


def delete(folder: Path) -> None:
    """Delete a folder, also while others put something into it or take something from it; one made anew there stays."""
    one = folder.stat().st_ino
    with contextlib.suppress(FileNotFoundError):
        while folder.stat().st_ino == one:
            shutil.rmtree(folder, ignore_errors=True)
