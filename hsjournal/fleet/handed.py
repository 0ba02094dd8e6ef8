"""What was handed to Slurm, kept in the store: the same command finds its tasks again instead of starting them twice."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from hsjournal.errors import HsjournalError, ServerError, UsageError
from hsjournal.fleet.order import Order

FILE = "array.json"
ASK_EVERY = 10.0
DEADLINE = 30.0


@dataclass(frozen=True, slots=True)
class Handed:
    """An array of tasks, one a shard.

    Args:
        executor: ``slurm`` or ``local``.
        order: what all shards are told, as far as it must be the same.
        ids: of the tasks by shard, as the executor numbers them.
        before: the highest number that was claimed for a shard before.
    """

    executor: str
    order: dict[str, Any]
    ids: dict[int, str]
    before: dict[int, int]

    @classmethod
    def new(cls, executor: str, order: Order, ids: dict[int, str], before: dict[int, int]) -> Self:
        """One that was just handed over."""
        return cls(executor, _same(order), ids, before)

    def keep(self, folder: Path) -> None:
        """Write it into the store's folder of the fleet.

        Raises:
            HsjournalError: when that can't be written.
        """
        fresh = folder / f".{FILE}.{os.getpid()}"
        try:
            fresh.write_text(json.dumps(asdict(self)))
            fresh.replace(folder / FILE)
        except OSError as error:
            raise HsjournalError(
                f"the tasks {self.words()} were submitted, and {folder} can't keep their numbers: {error.strerror}",
                remedy="Make room in --store; till these tasks have ended, the same command would start them again.",
            ) from None

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """The last one; None when there is none that can be read."""
        try:
            found = json.loads((folder / FILE).read_text())
            ids = {int(number): str(task) for number, task in found["ids"].items()}
            before = {int(number): int(highest) for number, highest in found["before"].items()}
            return cls(str(found["executor"]), dict(found["order"]), ids, before)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def words(self) -> str:
        """The tasks' numbers, first and last."""
        first, *_ = ids = list(self.ids.values())
        return first if len(ids) == 1 else f"{first} to {ids[-1]}"

    def refuse_other(self, order: Order) -> None:
        """Refuse to take another order's tasks for those of ``order``.

        Raises:
            UsageError: naming what is different.
        """
        asked = _same(order)
        if different := [name for name, value in asked.items() if self.order.get(name) != value]:
            told = "; ".join(f"{name}: {self.order.get(name)}, not {asked[name]}" for name in different)
            raise UsageError(
                f"the fleet {order.fleet} is under way with other options (tasks {self.words()}; {told})",
                remedy="Give the same command to watch it, end its tasks first, or name another fleet with --name.",
            )

    def alive(self, folder: Path) -> set[int]:
        """The shards whose tasks wait or run.

        Args:
            folder: the fleet's, in the store.

        Raises:
            ServerError: when Slurm does not answer.
        """
        found = _in_squeue(self.ids.values()) if self.executor == "slurm" else _processes(self.ids.values(), folder)
        return {number for number, task in self.ids.items() if task in found}


class Queue:
    """Tells which tasks of an earlier call have left the queue; asks at most every ten seconds.

    Args:
        handed: its tasks.
        folder: the fleet's, in the store.
    """

    def __init__(self, handed: Handed, folder: Path) -> None:
        self._handed, self._folder = handed, folder
        self._missing = dict.fromkeys(handed.ids, 0)
        self._asked = float("-inf")

    def has_left(self, number: int) -> bool:
        """Whether a shard's task was missing twice: what it told last had time to get here."""
        if time.monotonic() - self._asked >= ASK_EVERY:
            self._asked = time.monotonic()
            try:
                alive = self._handed.alive(self._folder)
            except ServerError:
                return False  # Slurm does not answer now
            self._missing = {n: 0 if n in alive else missing + 1 for n, missing in self._missing.items()}
        return self._missing[number] >= 2


def _same(order: Order) -> dict[str, Any]:
    """As JSON gives it back; where the command is given does not matter."""
    return {
        "shards": order.of, "--base": order.base, "--out": order.out, "--adopt-from": list(order.adopt_from),
        "run": list(order.words),
    }  # fmt: skip


def _in_squeue(tasks: Any) -> set[str]:
    jobs = {task.partition("_")[0] for task in tasks}
    command = ["squeue", "--noheader", "--array", "--format=%i", f"--jobs={','.join(sorted(jobs))}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"squeue does not answer: {error}", remedy="Does `squeue` work here?") from None
    if done.returncode and "Invalid job id" not in done.stderr:  # a job that ended long ago is unknown
        raise ServerError(f"squeue does not answer: {done.stderr.strip()}", remedy="Does `squeue` work here?")
    return set(done.stdout.split())


def _processes(tasks: Any, folder: Path) -> set[str]:
    """Of this machine; a number that somebody else wears by now does not name the folder."""
    found = set()
    for task in tasks:
        try:
            if str(folder) in " ".join(psutil.Process(int(task)).cmdline()):
                found.add(task)
        except (psutil.Error, ValueError):
            continue
    return found
