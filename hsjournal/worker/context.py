"""What every row of one worker needs, and how a row's run may end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

from hsjournal.config import Manifest, Settings
from hsjournal.events import Event
from hsjournal.journal.group import JournalThread
from hsjournal.server.client import ServerClient
from hsjournal.sink.output import Output
from hsjournal.sink.policy import ReadBackPolicy
from hsjournal.worker.blame import Blame
from hsjournal.worker.brake import Brake
from hsjournal.worker.canary import Canary
from hsjournal.worker.handover import Handover
from hsjournal.worker.outage import Outage
from hsjournal.worker.slots import Slots
from hsjournal.worker.tally import Tally
from hsjournal.worker.trouble import Pauses

T = TypeVar("T")


class Outcome(Enum):
    """How a row's run ended."""

    DONE = "done"  # verified, or written and to be read back later
    FAILED = "failed"  # strikes used up
    AGAIN = "again"  # pending, to be tried later
    HELD = "held"  # pending, for it can't be told from another request at a v1 server; to be tried ever more seldom


@dataclass(frozen=True, slots=True)
class Context:
    """The rooms that a row passes through."""

    manifest: Manifest
    settings: Settings
    rejects: Path
    journal: JournalThread
    client: ServerClient
    handover: Handover
    output: Output
    read_back: ReadBackPolicy
    pool: ThreadPoolExecutor
    readers: Mapping[Path, ThreadPoolExecutor]
    """Who reads back, for each output folder: one that hangs holds its own threads, and no others."""
    slots: Slots
    pauses: Pauses
    brake: Brake
    blame: Blame
    outage: Outage
    canary: Canary
    tally: Tally
    record: Callable[[Event], object]

    async def in_pool(self, step: Callable[[], T], pool: ThreadPoolExecutor | None = None) -> T:
        """Run what may block on a thread of the sink, or of ``pool``."""

        def run() -> T:
            try:
                return step()
            finally:
                self.slots.idle()

        return await asyncio.get_running_loop().run_in_executor(pool or self.pool, run)

    async def in_root(self, step: Callable[[], T]) -> T:
        """Read in the hand-over root: again and again while its storage answers with an error of its own.

        Raises:
            NoRoomError: past the pause limit.
        """
        place, pause = self.handover.place(), self.settings.retry_pause
        return await self.pauses.insist("dumps", place, lambda: self.in_pool(step), pause)
