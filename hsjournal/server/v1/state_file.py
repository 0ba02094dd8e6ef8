"""The one thing that outlives the gateway: which requests it sent and saw no end of."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from hsjournal.server.v1.counts import Counts
from hsjournal.server.v1.taking import open_requests


def load(path: Path) -> Counts:
    """Every request that an earlier gateway left open is barred; a file that is none, or missing, bars nothing."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        value = None
    return Counts.from_open(open_requests(value if isinstance(value, dict) else {}))


def save(path: Path, counts: Counts) -> None:
    """Before every send; a tmpfs that is full costs no request."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        fresh.write_text(counts.to_json())
        fresh.replace(path)
