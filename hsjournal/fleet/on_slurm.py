"""A fleet on Slurm: an array job by submitit, one shard a task; a task that is pre-empted drains and is queued again."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hsjournal.errors import ExitCode, ServerError, UsageError
from hsjournal.fleet.handed import Handed, Queue
from hsjournal.fleet.look import highest
from hsjournal.fleet.numbers import LinkedNumbers
from hsjournal.fleet.order import Order
from hsjournal.fleet.start import Start
from hsjournal.fleet.telling import Telling

DRAIN_BEFORE = 300
"""Seconds between Slurm's signal and the end of a task's time."""
DRAIN_PATIENCE = 240.0
LOOK_EVERY = 1.0
TELLING = "told-"


@dataclass(frozen=True, slots=True)
class Array:
    """How the array job is to be.

    Args:
        executor: ``slurm``, or ``local`` for processes of this machine.
        minutes: of one task, before it is queued again.
        at_once: tasks at a time; 0 for all.
        sbatch: further options of sbatch, as ``{"partition": "gpu"}``.
    """

    executor: str = "slurm"
    minutes: int = 1440
    at_once: int = 0
    sbatch: dict[str, str] = field(default_factory=dict)


class Task:
    """What a task runs; travels as a pickle, and again when it is queued anew."""

    def __init__(self, order: Order, number: int) -> None:
        self.order, self.number = order, number
        self._start: Start | None = None

    @property
    def _numbers(self) -> LinkedNumbers:
        return LinkedNumbers(Path(self.order.store), self.order.fleet)

    @property
    def _folder(self) -> Path:
        return self._numbers.of(self.order.shard(self.number))

    def __getstate__(self) -> dict[str, Any]:
        return {"order": self.order, "number": self.number, "_start": None}

    def __call__(self) -> dict[str, Any]:
        """The shard, to its end."""
        numbers = self._numbers
        self._start = Start(self.order, self.number, numbers, lambda telling: keep(self._folder, telling))
        return self._start.run().to_json()

    def checkpoint(self) -> Any:
        """Called in the signal handler of submitit: have the run drain, and be queued again."""
        import submitit

        if self._start is not None:  # whose own end is cut off: submitit leaves by this handler
            drained = self._start.stop_and_wait(DRAIN_PATIENCE)
            sentence = "drained; queued again" if drained else "stopped; queued again"
            keep(self._folder, replace(self._start.look(), sentence=sentence, rate=0.0))
        return submitit.helpers.DelayedSubmission(Task(self.order, self.number))


def keep(folder: Path, telling: Telling) -> None:
    """Leave a telling in the store, where whoever watches reads it; not for ever, so it need not be durable."""
    if not telling.incarnation:
        return
    path = folder / f"{TELLING}{telling.incarnation:06d}.json"
    with contextlib.suppress(OSError):
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_text(json.dumps(telling.to_json()))
        fresh.replace(path)


def last_told(folder: Path, above: int) -> Telling | None:
    """What the newest start above that number has left there."""
    number = highest(str(folder)) or 0
    if number <= above:
        return None
    try:
        return Telling(**json.loads((folder / f"{TELLING}{number:06d}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class Submission:
    """The tasks of a fleet.

    Args:
        handed: their numbers.
        jobs: submitit's, by shard.
        queue: says which of them are over, where an earlier call submitted them; None: submitit does.
    """

    handed: Handed
    jobs: dict[int, Any]
    queue: Queue | None

    def words(self) -> str:
        """What became of the command."""
        return f"{'submitted' if self.queue is None else 'under way already'}: {self.handed.words()}"

    def is_over(self, number: int) -> bool:
        """Whether a shard's task has ended."""
        job = self.jobs[number]
        try:
            if self.queue is None:
                return bool(job.done())
            return job.paths.result_pickle.exists() or self.queue.has_left(number)
        except (OSError, RuntimeError):
            return False  # Slurm does not answer now


def run(
    order: Order, submission: Submission, show: Callable[[list[Telling]], None], stops: Callable[[], int]
) -> list[Telling]:
    """Watch the tasks to their ends.

    Args:
        order: the fleet's, with a store.
        submission: of :func:`submit`.
        show: draws how all shards stand.
        stops: how many times we were asked to stop; then the jobs are left to themselves.
    """
    numbers = LinkedNumbers(Path(order.store), order.fleet)
    jobs, before = submission.jobs, submission.handed.before
    folders = {number: numbers.of(order.shard(number)) for number in jobs}
    tellings = {number: Telling(order.shard(number)) for number in jobs}
    while any(telling.code is None for telling in tellings.values()) and not stops():
        for number, job in jobs.items():
            if tellings[number].code is not None:
                continue
            is_over = submission.is_over(number)  # asked first: what it tells last is there by then
            tellings[number] = last_told(folders[number], before[number]) or tellings[number]
            if is_over and tellings[number].code is None:
                code = int(ExitCode.GAVE_UP)
                tellings[number] = replace(
                    tellings[number], code=code, sentence=f"ended without a word; see {job.paths.stderr}"
                )
        show(list(tellings.values()))
        time.sleep(LOOK_EVERY)
    return list(tellings.values())


def submit(order: Order, array: Array) -> Submission:
    """Hand the array to Slurm, unless tasks of an earlier call wait or run there: then those are the fleet's.

    Raises:
        UsageError: when submitit isn't installed, or the tasks that run were told something else.
        ServerError: when there is no Slurm here, or it refuses the job.
        HsjournalError: when the store can't be written.
    """
    try:
        import submitit
    except ImportError:
        raise UsageError("a fleet on Slurm needs submitit", remedy="Install hsjournal[slurm].") from None
    numbers = LinkedNumbers(Path(order.store), order.fleet)
    folder = numbers.folder / "jobs"
    logging.getLogger("submitit").setLevel(logging.ERROR)  # it warns at every look where Slurm keeps no accounts
    handed = Handed.of(numbers.folder)
    if handed is not None and handed.alive(numbers.folder):
        handed.refuse_other(order)
        kind = submitit.SlurmJob if handed.executor == "slurm" else submitit.LocalJob
        found = {number: kind(folder=folder, job_id=task, tasks=[0]) for number, task in handed.ids.items()}
        return Submission(handed, found, Queue(handed, numbers.folder))
    shards = range(1, order.of + 1)
    before = {number: highest(str(numbers.of(order.shard(number)))) or 0 for number in shards}
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=array.executor, slurm_max_num_timeout=1_000_000)
        wanted: dict[str, Any] = {"name": f"hsjournal-{order.fleet}", "timeout_min": array.minutes}
        if array.executor == "slurm":
            wanted |= {
                "nodes": 1, "tasks_per_node": 1, "slurm_array_parallelism": array.at_once or order.of,
                "slurm_signal_delay_s": min(DRAIN_BEFORE, array.minutes * 30), "slurm_additional_parameters": dict(array.sbatch),
            }  # fmt: skip
        executor.update_parameters(**wanted)
        jobs = dict(zip(shards, _submitted(executor, order, shards), strict=True))
    except (RuntimeError, submitit.core.utils.FailedJobError) as error:
        raise ServerError(f"the array job can't be submitted: {error}", remedy="Does `sbatch` work here?") from None
    handed = Handed.new(array.executor, order, {number: str(job.job_id) for number, job in jobs.items()}, before)
    handed.keep(numbers.folder)
    return Submission(handed, jobs, None)


def _submitted(executor: Any, order: Order, shards: range) -> list[Any]:
    with executor.batch():  # one array of them all
        return [executor.submit(Task(order, number)) for number in shards]
