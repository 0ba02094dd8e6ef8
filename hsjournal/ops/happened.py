"""All events of a run as they were recorded: the journal's, read by a child, and those that only the mirror has yet.

``python -m hsjournal.ops.happened RUN_DIR`` is that child: one line an event, its key and its JSON.
"""

from __future__ import annotations

import contextlib
import os
import select
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from hsjournal.config import RunPaths
from hsjournal.errors import HsjournalError, NoJournalError
from hsjournal.events import Event
from hsjournal.journal.peek import read_only
from hsjournal.mirror import Mirror
from hsjournal.watch.children import KILL_GRACE, StuckError, module, start

DEADLINE = 5.0
"""Seconds of silence of the child after which its disk counts as stuck."""
FOLLOW_EVERY = 0.5


class Happened:
    """The events of one run, each once.

    Args:
        paths: of it.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._mirror = Mirror(paths.mirror)
        self._seen: set[str] = set()

    def so_far(self) -> Iterator[Event]:
        """Oldest first: the journal's, then those that it has not got yet.

        Raises:
            NoJournalError: when there is neither a journal nor a mirror.
            StuckError: when the journal's disk does not answer; the mirror's events have been given by then.
        """
        waiting = dict(self._mirror.events())
        stuck: StuckError | None = None
        try:
            for key, event in self._journal():
                if waiting.pop(key, None) is not None:
                    self._seen.add(key)
                yield event
        except StuckError as error:
            stuck = error
        for key, event in waiting.items():
            self._seen.add(key)
            yield event
        if stuck is not None:
            raise stuck

    def from_now_on(self) -> Iterator[Event | None]:
        """Those that come into the mirror, and None whenever nothing came for a while."""
        while True:
            fresh = [(key, event) for key, event in self._mirror.events() if key not in self._seen]
            for key, event in fresh:
                self._seen.add(key)
                yield event
            if not fresh:
                yield None
            time.sleep(FOLLOW_EVERY)

    def _journal(self) -> Iterator[tuple[str, Event]]:
        child = start(
            module("hsjournal.ops.happened", str(self._paths.run_dir)), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            for line in _lines(child):
                key, _, body = line.partition(" ")
                yield key, Event.from_json(body)
            if child.wait(DEADLINE):
                assert child.stderr is not None
                words = child.stderr.read().decode(errors="replace").strip()
                if not self._mirror.folder.is_dir():
                    raise NoJournalError(words or "the journal can't be read", remedy="Name a run directory.")
        finally:
            if child.poll() is None:
                child.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: left to it
                    child.wait(KILL_GRACE)
            for pipe in (child.stdout, child.stderr):
                assert pipe is not None
                pipe.close()


def _lines(child: subprocess.Popen[bytes]) -> Iterator[str]:
    assert child.stdout is not None
    fd, rest = child.stdout.fileno(), b""
    while True:
        if not select.select([fd], [], [], DEADLINE)[0]:
            raise StuckError(f"the journal does not answer within {DEADLINE:.0f} s: its storage hangs")
        data = os.read(fd, 1 << 16)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        yield from (line.decode() for line in whole)


def main(run_dir: str) -> int:
    """See the module."""
    journal = RunPaths.of(run_dir).journal
    try:
        if not Path(journal).exists():
            raise NoJournalError(f"{run_dir} holds no journal", remedy="Check the path of the run directory.")
        with closing(sqlite3.connect(read_only(str(journal)), uri=True, timeout=1.0)) as connection:
            last = 0
            while True:  # short reads: a long one would keep the write-ahead log from being taken in
                rows = connection.execute(
                    "SELECT id, key, at, epoch, kind, row, detail FROM event WHERE id > ? ORDER BY id LIMIT 2000",
                    (last,),
                ).fetchall()
                for number, key, at, epoch, kind, row, detail in rows:
                    body = f'{{"at":{at!r},"epoch":{epoch},"kind":"{kind}","row":{"null" if row is None else row},"detail":{detail}}}'
                    sys.stdout.write(f"{key} {body}\n")
                    last = number
                if not rows:
                    return 0
    except (HsjournalError, sqlite3.Error) as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
