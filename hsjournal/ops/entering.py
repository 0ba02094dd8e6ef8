"""Files into the output and their rows through the journal: pending → written → verified, by ``adopt``."""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from hsjournal.errors import HsjournalError, NoRoomError
from hsjournal.events import Event
from hsjournal.journal.store import Move
from hsjournal.ops.custody import Custody
from hsjournal.ops.finding import Refusal, Task
from hsjournal.ops.foreign import ForeignError, Refused
from hsjournal.ops.takein import How, TakeIn
from hsjournal.sink.output import Output
from hsjournal.sink.readback import Method
from hsjournal.sink.sample import AS_FOUND, CONVERTED, Written
from hsjournal.sink.verify import DamageError
from hsjournal.states import Actor, State, Transition
from hsjournal.worker.recover import sample_of, written_of

THREADS = 3
_WAIT = 0.5
_TO_WRITTEN = Transition(State.PENDING, State.WRITTEN, Actor.ADOPT, "")
_TO_VERIFIED = Transition(State.WRITTEN, State.VERIFIED, Actor.ADOPT, "")
_BACK = Transition(State.WRITTEN, State.PENDING, Actor.REPAIR, "")


@dataclass(slots=True)
class Taken:
    """What was taken over.

    Args:
        how: rows, by how their files came into the output.
        finished_before: rows that an adoption that was broken off had written, and that are verified now.
        tokens: of the rows.
        nbytes: of the files.
    """

    how: Counter[How] = field(default_factory=Counter)
    finished_before: int = 0
    tokens: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class _Written:
    """A row whose file is published: to be read back. ``how`` None for one of an earlier call."""

    row: int
    attempt: int
    num_tokens: int
    written: Written
    source: str
    how: How | None


class Entering:
    """Does the tasks of one adoption.

    Files are checked, published and read back on a few threads; the journal is written here, in batches. A kill leaves at
    worst a published file that the journal does not know: the next adoption finds the very same bytes in its place.

    Args:
        held: the run.
        epoch: of this command.
        output: fenced by it.
        take_in: publishes a file.
        taken: counts.
        refused: gets the files that turn out unusable.
        in_place: the sources lie in the output; one that is refused stays where it is.
    """

    def __init__(
        self,
        held: Custody,
        epoch: int,
        output: Output,
        take_in: TakeIn,
        taken: Taken,
        refused: list[Refusal],
        *,
        in_place: bool,
    ) -> None:
        self._held, self._epoch, self._output, self._take_in = held, epoch, output, take_in
        self._taken, self._refused, self._in_place = taken, refused, in_place
        self._taking: dict[Future[tuple[Written, How]], Task] = {}
        self._reading: dict[Future[Method], _Written] = {}

    def run(self, tasks: Sequence[Task], tell: Callable[[int, int], None]) -> None:
        """Do all tasks, after those that an adoption that was broken off left half done.

        Raises:
            FencedError: when something newer owns the run.
            NoRoomError: when the output's disk is full.
            HsjournalError: when its storage fails otherwise.
        """
        with ThreadPoolExecutor(THREADS, thread_name_prefix="adopt") as pool:
            try:
                for row in self._held.journal.rows_in(State.WRITTEN):
                    if row["boot_id"] in (AS_FOUND, CONVERTED):
                        self._read_back(pool, self._left_over(row))
                self._work(pool, tasks, tell)
            except OSError as error:
                raise self._storage_failed(error) from error
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _work(self, pool: ThreadPoolExecutor, tasks: Sequence[Task], tell: Callable[[int, int], None]) -> None:
        todo, total = iter(tasks), len(tasks)
        while True:
            for task in _next(todo, 2 * THREADS - len(self._taking) - len(self._reading)):
                (row,) = self._held.journal.rows_of([task.row])
                sample = sample_of(self._held.journal, row, self._held.manifest)
                self._taking[pool.submit(self._take_in.take, task.path, sample)] = task
            if not self._taking and not self._reading:
                tell(total, total)
                return
            under_way: list[Future[Any]] = [*self._taking, *self._reading]
            done = wait(under_way, timeout=_WAIT, return_when=FIRST_COMPLETED).done
            moves = [move for future in done if future in self._reading for move in self._judge(future)]
            published = [new for future in done if future in self._taking for new in self._published(future)]
            moves += [self._enter(new) for new in published]
            if moves:
                self._held.journal.apply(moves, self._epoch)
            for new in published:
                self._read_back(pool, new)
            tell(sum(self._taken.how.values()) + len(self._refused), total)

    def _published(self, future: Future[Any]) -> Iterator[_Written]:
        task = self._taking.pop(future)
        try:
            written, how = future.result()
        except ForeignError as error:
            self._refused.append(Refusal(str(task.path), error.reason.value, error.detail))
            return
        yield _Written(task.row, task.attempt, task.num_tokens, written, task.path.as_uri(), how)

    def _enter(self, new: _Written) -> Move:
        written = new.written
        values = {
            "output_path": written.path,
            "output_bytes": written.nbytes,
            "output_xxh3": written.output_xxh3,
            "source_xxh3": written.source_xxh3,
            "server": new.source,
            "boot_id": AS_FOUND if written.as_found else CONVERTED,
            "reason": None,
        }
        detail = {"source": new.source, "how": new.how, "displaced": written.displaced}
        return Move(new.row, new.attempt, _TO_WRITTEN, values, Event("adopted", new.row, detail))

    def _read_back(self, pool: ThreadPoolExecutor, new: _Written) -> None:
        (row,) = self._held.journal.rows_of([new.row])
        sample = sample_of(self._held.journal, row, self._held.manifest)
        future = pool.submit(self._output.verify, sample, new.written, lambda _phase, _nbytes: None)
        self._reading[future] = new

    def _judge(self, future: Future[Any]) -> Iterator[Move]:
        new = self._reading.pop(future)
        try:
            method = future.result()
        except DamageError as error:
            if not self._in_place:
                self._output.set_aside(new.written.path)
            self._refused.append(Refusal(new.source, Refused.DAMAGED.value, error.detail))
            event = Event("file_damaged", new.row, {"path": new.written.path, "why": str(error)})
            yield Move(new.row, new.attempt, _BACK, {"reason": f"adopt: {error}"}, event)
            return
        if new.how is None:
            self._taken.finished_before += 1
        else:
            self._taken.how[new.how] += 1
        self._taken.tokens += new.num_tokens
        self._taken.nbytes += new.written.nbytes
        values = {"verify_method": str(method), "verified_at": time.time(), "suspect": 0}
        yield Move(new.row, new.attempt, _TO_VERIFIED, values)

    def _left_over(self, row: dict[str, Any]) -> _Written:
        return _Written(row["row"], row["attempt"], row["num_tokens"], written_of(row), str(row["server"]), None)

    def _storage_failed(self, error: OSError) -> HsjournalError:
        place = f"the output folder {self._output.folder}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return NoRoomError(
                f"{place} is full: {error.strerror}",
                remedy="Make room, or share the bytes with --link, and adopt again: it goes on where it is.",
            )
        return HsjournalError(
            f"{place} does not work: {error.strerror or error}",
            remedy="Mend it and adopt again: it goes on where it is.",
        )


def _next(tasks: Iterator[Task], most: int) -> Iterator[Task]:
    for _ in range(most):
        task = next(tasks, None)
        if task is None:
            return
        yield task
