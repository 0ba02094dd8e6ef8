"""Files that arm faults in the engine and in the worker of a run while they are there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PACE_S, LATE_S = 0.2, 6.0
STORAGE = {"EIO": "sink.written", "ENOSPC": "sink.writing", "EDQUOT": "sink.opened", "EROFS": "sink.linking"}


@dataclass(frozen=True, slots=True)
class Knobs:
    """Files that make the engine slow while they are there.

    Args:
        pace: each dump takes a while, so that there is work under way.
        late: each dump takes longer than a request may.
    """

    pace: Path
    late: Path

    @property
    def faults(self) -> str:
        """To arm an engine with."""
        point = "capture.publishing=delay"
        return f"{point}:{PACE_S},while:{self.pace}; {point}:{LATE_S},while:{self.late}"


class WorkerKnobs:
    """Files that turn the worker's storage bad.

    Args:
        folder: where they are made.
    """

    def __init__(self, folder: Path) -> None:
        self.broken = {name: folder / f"broken-{name}" for name in STORAGE}
        """By the error that every write gets while the file is there."""
        self.slow = folder / "slow"
        """Every write takes long while it is there."""
        self.stuck = folder / "stuck"
        """The next write waits in the kernel, D, until the worker is killed; the file goes when it does."""
        self._fifo = folder / "fifo"
        os.mkfifo(self._fifo)

    @property
    def faults(self) -> str:
        """To arm a worker with."""
        faults = [f"{point}=errno:{name},while:{self.broken[name]}" for name, point in STORAGE.items()]
        faults.append(f"sink.writing=delay:0.7,while:{self.slow}")
        faults.append(f"sink.writing=stuck:{self._fifo},once:{self.stuck}")
        return "; ".join(faults)
