"""Ending a stalled worker: TERM, then KILL, then the truth: unkillable."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from enum import Enum

from hsjournal.server.tree import descendants, send

TERM_WAIT_S = 5.0
KILL_WAIT_S = 5.0
AGAIN_S = 0.5
"""After so long the second TERM: "drain" was the first, "now" is the second for a worker that can hear it."""


class Step(Enum):
    """How far it is."""

    TERM = "SIGTERM"
    KILL = "SIGKILL"
    UNKILLABLE = "unkillable"


class Escalation:
    """Ends one process that we started; call :meth:`step` until the process is reaped, then :meth:`close`.

    A frozen disk's writer ignores even SIGKILL until the storage comes back: then it ends by itself, and all that is to
    be done meanwhile is to say so, and to start no second one beside it.

    Args:
        process: ours; signalled through its own handle, so a number that was given to another process is never hit.
        now: monotonic seconds.
        term_wait: seconds that it may take to end itself; none for one that can't hear.
        kill_wait: seconds after SIGKILL until it counts as unkillable.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        now: float,
        term_wait: float = TERM_WAIT_S,
        kill_wait: float = KILL_WAIT_S,
    ) -> None:
        self._process = process
        self._since = now
        self._term_wait, self._kill_wait = term_wait, kill_wait
        self._again = False
        self._kin = descendants(process.pid)  # of one that has ended nobody can tell any more whose child it was
        self.killed_at: float | None = None
        self.at = Step.TERM
        if term_wait > 0:
            self._signal_term()

    def step(self, now: float) -> Step:
        """Go on if it is time; how far it is."""
        if self.at is Step.TERM and now - self._since >= self._term_wait:
            self._kin |= descendants(self._process.pid)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self.killed_at, self.at = now, Step.KILL
        elif self.at is Step.TERM and not self._again and now - self._since >= AGAIN_S:
            self._again = True
            self._signal_term()
        elif self.at is Step.KILL and self.killed_at is not None and now - self.killed_at >= self._kill_wait:
            self.at = Step.UNKILLABLE
        return self.at

    def close(self) -> list[int]:
        """End what the process had started and left behind; their numbers."""
        kin, self._kin = sorted(self._kin), set()
        for one in kin:
            send(one, signal.SIGKILL)
        return [one.pid for one in kin]

    def _signal_term(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
