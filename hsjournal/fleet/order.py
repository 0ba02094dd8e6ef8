"""What every shard of a fleet is told, wherever it starts."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from hsjournal.errors import UsageError
from hsjournal.fleet.look import shard_name


@dataclass(frozen=True, slots=True)
class Order:
    """What every shard of a fleet is told; travels to the nodes.

    Args:
        fleet: its name, the same at every start.
        of: shards in all.
        base: folder on the node for run directories; may name environment variables of the node.
        words: arguments of ``hsjournal run``.
        out: shared folder for the outputs, each start's apart from the others; None: inside the run directories.
        adopt_from: folders with outputs of earlier starts; what of them can be reached is taken over.
        cwd: where the words' relative paths begin, if the node has that folder.
        store: folder of :class:`~.numbers.LinkedNumbers`; empty with Ray.
    """

    fleet: str
    of: int
    base: str
    words: tuple[str, ...]
    out: str | None = None
    adopt_from: tuple[str, ...] = ()
    cwd: str = ""
    store: str = ""

    def shard(self, number: int) -> str:
        """``number/of``."""
        return f"{number}/{self.of}"

    def run_dir(self, number: int) -> Path:
        """Where a shard's run directory lies on this node.

        Raises:
            UsageError: when the node lacks a variable of ``base``.
        """
        return expanded(self.base) / self.fleet / shard_name(self.shard(number))


def expanded(folder: str) -> Path:
    """A folder with this node's variables put in, absolute.

    Raises:
        UsageError: when the node lacks one.
    """
    found = os.path.expanduser(os.path.expandvars(folder))
    if missing := re.search(r"\$\{?(\w+)", found):
        raise UsageError(
            f"the node {socket.gethostname()} has no variable {missing[1]}, which {folder} names",
            remedy="Set it where the node's daemon is started.",
        )
    return Path(os.path.abspath(found))
