"""A quick look, from any thread, whether this worker still owns the run."""

from __future__ import annotations

import errno
import sqlite3
import threading
from pathlib import Path

from hsjournal.errors import FencedError, NoJournalError
from hsjournal.journal.pragmas import connect
from hsjournal.journal.queries import EPOCH
from hsjournal.journal.refusals import may_pass


class Fence:
    """Called before a final name is touched.

    Args:
        path: the journal.
        epoch: of this worker.
    """

    def __init__(self, path: Path, epoch: int) -> None:
        self._path, self._epoch = path, epoch
        self._local = threading.local()

    def __call__(self) -> None:
        """Return if the epoch is still the run's.

        Raises:
            FencedError: when it is not.
            OSError: when the journal's disk does not answer well; the step may be tried again.
        """
        connection = getattr(self._local, "connection", None)
        if connection is None:
            try:
                connection = self._local.connection = connect(self._path)
            except NoJournalError as error:  # the journal's own thread says what has become of it, and ends the worker
                raise OSError(errno.EIO, "the journal is gone", str(self._path)) from error
        try:
            ((epoch,),) = connection.execute(EPOCH).fetchall()
        except sqlite3.OperationalError as error:
            if not may_pass(error):
                raise
            raise OSError(errno.EIO, f"the journal can't be read ({error})", str(self._path)) from error
        if epoch != self._epoch:
            raise FencedError(f"epoch {self._epoch} is over (now {epoch}): a newer worker owns the run")
