"""A run in the hands of a command that changes its journal: nobody else may, while it lasts."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from hsjournal.config import Manifest, RunPaths
from hsjournal.errors import HsjournalError, JournalLockedError
from hsjournal.events import Event
from hsjournal.journal.locks import Lock, is_held
from hsjournal.journal.refusals import refusal
from hsjournal.journal.schema import bring_up_to_date
from hsjournal.journal.store import Journal
from hsjournal.mirror import Mirror


class Custody:
    """A run whose supervisor's lock this process holds, and of which no worker lives.

    Args:
        paths: of the run.
        manifest: of the run.
        journal: open.
    """

    def __init__(self, paths: RunPaths, manifest: Manifest, journal: Journal) -> None:
        self.paths, self.manifest, self.journal = paths, manifest, journal

    @property
    def out_dir(self) -> Path:
        """The output folder."""
        return Path(self.manifest.out_dir)

    def take_epoch(self, command: str) -> int:
        """Fence every earlier worker, and enter what the mirror still keeps. Returns the new epoch."""
        self.journal.add_events(Mirror(self.paths.mirror).events())
        return self.journal.raise_epoch([Event("operator", None, {"command": command})])


@contextlib.contextmanager
def custody(paths: RunPaths, lock: Lock | None = None) -> Iterator[Custody]:
    """Take a run over for a while.

    Args:
        paths: of the run.
        lock: the supervisor's lock, if this process holds it already; it is kept then.

    Raises:
        NoJournalError: when there is no run.
        JournalLockedError: when a supervisor, another command or a worker has it.
        NoRoomError, SchemaError: when the journal can't be used, or not any more.
    """
    manifest = Manifest.load(paths.manifest)
    mine = Lock(paths.supervisor_lock)
    if lock is None:
        mine.acquire()
    try:
        refuse_living_worker(paths)
        bring_up_to_date(paths.journal)
        with Journal(paths.journal) as journal:
            yield Custody(paths, manifest, journal)
    except sqlite3.Error as error:
        raise refusal(error, paths.journal) from error
    finally:
        mine.release()


def refuse_living_worker(paths: RunPaths) -> None:
    """Refuse while a worker lives: one that is stuck in the kernel outlives its supervisor.

    Raises:
        JournalLockedError: when one does.
    """
    if is_held(paths.worker_lock):
        raise JournalLockedError(
            f"a worker of {paths.run_dir} still lives (it holds {paths.worker_lock.name})",
            remedy="If its storage is stuck it can't be killed; it ends when the storage comes back.",
        )


def need_output(out_dir: Path) -> None:
    """Refuse to judge an output folder that is not there: it may be a disk that is not mounted.

    Raises:
        HsjournalError: naming it.
    """
    if not out_dir.is_dir():
        raise HsjournalError(f"the output folder {out_dir} is not there", remedy="Mount its disk, or bring it back.")
