"""A worker's start up to its first claim, without a server: what it imports, opens, reads and commits.

Prints when it was there (monotonic, comparable between processes) and how much of it the journal took.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time

from hsjournal.config import Manifest, RunPaths
from hsjournal.dump.reader import open_root
from hsjournal.journal.fence import Fence
from hsjournal.journal.group import JournalThread
from hsjournal.journal.store import Journal
from hsjournal.reconcile.gather import gather
from hsjournal.reconcile.plan import plan
from hsjournal.states import State

importlib.import_module("hsjournal.worker.__main__")  # everything that a worker imports


async def main(run_dir: str, epoch: int) -> None:
    """As ``hsjournal.worker.process`` and ``schedule`` do it, in their order."""
    paths = RunPaths.of(run_dir)
    begin = time.monotonic()
    manifest = Manifest.load(paths.manifest)
    root_fd = open_root(paths.run_dir / "root")
    thread = JournalThread(paths.journal, epoch, pause_limit=60, retry_pause=1)
    await thread.start()
    Fence(paths.journal, epoch)()

    def look(journal: Journal) -> None:
        journal.counts()
        plan(gather(journal, [root_fd], manifest))
        journal.suspects()
        for state in (State.WRITTEN, State.DUMPED, State.SENT):
            journal.rows_in(state)

    await thread.call(look)
    claims = await thread.call(lambda journal: journal.claimable(-1, 64))
    await thread.take(claims[0].row, State.PENDING)  # a commit, as the first claim's would be
    end = time.monotonic()
    await thread.stop()
    print(json.dumps({"at": end, "journal_s": end - begin}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
