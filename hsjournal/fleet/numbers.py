"""Incarnations: every start of a shard gets a higher number than all starts before it, whoever else starts meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from pathlib import Path
from typing import Protocol

from hsjournal.catalogue.whole import sync_folder
from hsjournal.errors import HsjournalError
from hsjournal.fleet.look import CLAIM, STARTS, highest, shard_name


class Numbers(Protocol):
    """A store outside the nodes."""

    place: str
    """Where it is, as a badge says it."""

    def claim(self, shard: str, above: int) -> int:
        """A number of the shard ``i/n`` that nobody has, higher than ``above`` and than all that were claimed.

        Raises:
            HsjournalError: when the store does not answer.
        """

    def highest(self, shard: str) -> int:
        """The highest number that was claimed; 0 for none.

        Raises:
            HsjournalError: when the store does not answer.
        """


class LinkedNumbers:
    """Numbers as files in a folder that all nodes see: link(2) makes a name once, also on NFS.

    Args:
        folder: shared; made if it is missing.
        fleet: the fleet's name.
    """

    def __init__(self, folder: Path, fleet: str) -> None:
        self.place = str(folder)
        self.folder = folder / STARTS / fleet

    def of(self, shard: str) -> Path:
        """The folder of a shard, which also takes what its starts tell of themselves."""
        return self.folder / shard_name(shard)

    def claim(self, shard: str, above: int) -> int:
        """As :meth:`Numbers.claim`."""
        folder = self.of(shard)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return self._claim(folder, above)
        except OSError as error:
            raise HsjournalError(
                f"no incarnation can be claimed in {folder}: {error.strerror}",
                remedy="--store must name a folder that every node may write to.",
            ) from None

    def highest(self, shard: str) -> int:
        """As :meth:`Numbers.highest`."""
        found = highest(str(self.of(shard)))
        if found is None:
            raise HsjournalError(f"{self.of(shard)} can't be read", remedy="Is the shared folder mounted?")
        return found

    def _claim(self, folder: Path, above: int) -> int:
        mine = folder / f".{uuid.uuid4().hex}"
        who = {"host": socket.gethostname(), "pid": os.getpid(), "at": time.time()}
        with mine.open("x") as file:
            file.write(json.dumps(who))
            file.flush()
            os.fsync(file.fileno())
        try:
            number = max(above, highest(str(folder)) or 0)
            while True:
                number += 1
                if _links(mine, folder / f"{CLAIM}{number:06d}"):
                    sync_folder(folder)
                    return number
        finally:
            with contextlib.suppress(OSError):
                mine.unlink()


def _links(mine: Path, name: Path) -> bool:
    """Whether ``name`` is ours now. An NFS server may make the link and lose the answer: the count of links tells."""
    try:
        os.link(mine, name)
    except OSError:
        if mine.stat().st_nlink == 2:
            return True
        if not name.exists():
            raise
        return False
    return True
