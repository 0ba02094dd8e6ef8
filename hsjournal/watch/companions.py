"""Processes that go along with a run, such as the metrics' endpoint: what they say is shown, and that one died is told."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from hsjournal.events import Event
from hsjournal.watch.children import exit_words, start
from hsjournal.watch.desk import Desk
from hsjournal.watch.life import end_now


class Companions:
    """They may end or fail: the run goes on without them, and says so.

    Args:
        desk: shows and records.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._living: list[_Companion] = []

    def start(self, commands: Sequence[Sequence[str]], lifeline: int) -> None:
        """Start one process for each of our modules' command lines; they get ``--parent-fd`` and end with us."""
        self._living += [_Companion(command, lifeline) for command in commands]

    def look(self) -> None:
        """Take what they have said since the last look; never waits."""
        for companion in list(self._living):
            has_ended = companion.process.poll() is not None
            for line in companion.lines():
                self._desk.view.notes.append(line)
                self._desk.record(Event(f"{companion.name}_said", None, {"words": line}))
            if has_ended:
                self._living.remove(companion)
                self._ended(companion)

    def close(self) -> None:
        """End them."""
        for companion in self._living:
            end_now(companion.process)
            companion.close()
        self._living.clear()

    def _ended(self, companion: _Companion) -> None:
        code, last = companion.process.returncode, companion.last_word()
        companion.close()
        if code:
            self._desk.view.notes.append(
                f"{companion.name} ended with {exit_words(code)}: {last}; the run goes on without"
            )
            self._desk.record(Event(f"{companion.name}_died", None, {"how": exit_words(code), "why": last}))


class _Companion:
    """One process: whole lines of its standard output, and the last one of its standard error."""

    def __init__(self, command: Sequence[str], lifeline: int) -> None:
        self.name = command[2].rpartition(".")[2]
        self.process = start(
            [*command, "--parent-fd", str(lifeline)], lifeline=lifeline, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._out = self._err = b""
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    def lines(self) -> list[str]:
        """Those that came since the last call."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._err = (self._err + (self.process.stderr.read() or b""))[-_KEPT:]
        *whole, self._out = (self._out + (self.process.stdout.read() or b"")).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def last_word(self) -> str:
        """The last line of its standard error."""
        return (self._err.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]

    def close(self) -> None:
        """Close its pipes."""
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


_KEPT = 8192
"""Bytes of a standard error that are kept."""
