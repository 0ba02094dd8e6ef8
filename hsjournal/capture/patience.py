"""How the writer of dumps meets a full root: it waits, bounded, and then gives the dump up."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, TypeVar

from hsjournal.dump.protocol import FailureReason
from hsjournal.errors import HsjournalError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")

_POLL_S = 0.05
_NEW_SHORTAGE_S = 1.0


class CaptureError(HsjournalError):
    """A dump can't be finished; ``reason`` and ``detail`` go into its ``error`` file."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail


class Patience:
    """Repeats a step while the root is full, for at most ``limit_s`` without a success in between.

    Shared by all dumps of a writer: when the root stays full, they fail together instead of one after the other.
    """

    def __init__(self, root: Path, limit_s: float) -> None:
        self._root = root
        self._limit_s = limit_s
        self._full_since: float | None = None
        self._full_last = 0.0

    def call(self, step: Callable[[], T]) -> T:
        """The step's result.

        Raises:
            CaptureError: ``no_room`` when the patience is used up, ``internal`` for any other OSError.
        """
        while True:
            try:
                result = step()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise CaptureError(FailureReason.INTERNAL, f"writing to {self._root} failed: {error}") from error
                self._wait()
            else:
                self._full_since = None
                return result

    def _wait(self) -> None:
        now = time.monotonic()
        since = self._full_since
        if since is None or now - self._full_last > _NEW_SHORTAGE_S:
            self._full_since = since = now
        self._full_last = now
        if now - since >= self._limit_s:
            raise CaptureError(FailureReason.NO_ROOM, f"{self._root} stayed full for {self._limit_s:g} s")
        time.sleep(_POLL_S)
