"""Keeps the index, and what else lies beside the files, whole at every start and end of a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hsjournal.catalogue.beside import bring_up_to_date
from hsjournal.config import RunPaths
from hsjournal.errors import FencedError, UsageError
from hsjournal.events import Event
from hsjournal.journal.reading import JournalReader
from hsjournal.worker.context import Context


class Beside:
    """Writes on a thread of the sink, from reads of its own: no row waits for it.

    Args:
        context: of the worker.
        paths: of the run.
        fence: raises :class:`FencedError` when a newer worker owns the run.
    """

    def __init__(self, context: Context, paths: RunPaths, fence: Callable[[], None]) -> None:
        self._c, self._paths, self._fence = context, paths, fence
        self._lock = threading.Lock()
        """At the end, the thread of a start that was given up may still be writing."""

    async def write(self) -> None:
        """Bring everything up to date; what stands in the way is told, and never ends the run.

        Raises:
            NoRoomError: when the storage is in trouble past the pause limit.
            FencedError: when a newer worker owns the run.
        """
        c, place = self._c, f"what lies beside the output ({self._paths.run_dir}, {self._c.manifest.out_dir})"
        try:
            await c.pauses.insist("output", place, lambda: c.in_pool(self._write), c.settings.retry_pause)
        except FencedError:
            raise
        except UsageError as error:
            c.record(Event("beside_failed", None, {"why": str(error)}))

    def _write(self) -> None:
        with self._lock, JournalReader(self._paths.journal) as journal:
            bring_up_to_date(journal, self._c.manifest, self._paths, self._fence)
