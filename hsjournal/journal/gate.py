"""The gate before a new worker: a throw-away child proves the storage, then fences all earlier workers.

``python -m hsjournal.journal.gate RUN_DIR OUT_DIR --after crash|end``. If the storage is stuck, this child is what
hangs, not the supervisor. It ends with its supervisor: else one that hung would, when the storage comes back, fence
the worker of the supervisor's successor. It prints JSON lines: ``{"step": …}`` before each step that may hang, then
``{"epoch": N, "in_flight": [rows of the last worker], "blamed": {row: strikes}}`` or ``{"error": …, "exit_code": …}``,
for a worker that still lives with its ``holder``, for a disk that answers with errors with its ``trouble``.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hsjournal.config import Manifest, RunPaths
from hsjournal.errors import HsjournalError, JournalLockedError, NoRoomError, Trouble
from hsjournal.events import Event
from hsjournal.journal.locks import is_held, read_holder
from hsjournal.journal.refusals import refusal
from hsjournal.journal.schema import bring_up_to_date
from hsjournal.journal.store import Journal, Move
from hsjournal.lifeline import end_with_parent
from hsjournal.mirror import Mirror
from hsjournal.states import Actor, State, Transition

TEST_FILE = ".hsjournal-gate"
IN_FLIGHT = (State.SENT, State.DUMPED)  # and those written, unless their read-back is deferred


def prove_storage(folder: Path) -> None:
    """Write, fsync and read back a fresh file in ``folder``, which is not made if it is missing: it may be a mount.

    Raises:
        NoRoomError: when the storage answers with an error; when it does not answer, this call never returns.
    """
    path = folder / TEST_FILE
    body = os.urandom(4096)
    try:
        path.unlink(missing_ok=True)  # of a gate that was killed in here
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, body, 0)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if os.pread(fd, len(body), 0) != body:
                raise NoRoomError(f"{folder} gives back other bytes than were written", remedy="Check the disk.")
        finally:
            os.close(fd)
            path.unlink(missing_ok=True)
    except OSError as error:
        raise NoRoomError(
            f"{folder} can't be written: {error.strerror}",
            remedy="Make room or mend the disk, then resume.",
            trouble=Trouble.of(error.errno),
        ) from None


def in_flight(journal: Journal, epoch: int) -> list[dict[str, Any]]:
    """The rows that the worker of ``epoch`` moved last and left in flight."""
    rows = [r for state in IN_FLIGHT for r in journal.rows_in(state)] + journal.being_written()
    return [r for r in rows if r["epoch"] == epoch]


def blame(journal: Journal, rows: list[dict[str, Any]], epoch: int, max_strikes: int) -> dict[int, int]:
    """After a crash: rows that the crashed worker had in flight become suspects; one that was alone gets a strike.

    Returns:
        The strikes of each row now.
    """
    blamed = {}
    alone = len(rows) == 1
    for row in rows:
        strikes = blamed[row["row"]] = row["strikes"] + alone
        reason = "the worker crashed with this sample alone in flight" if alone else "in flight when the worker crashed"
        event = Event("crash_strike" if alone else "suspect", row["row"], {"strikes": strikes})
        if strikes >= max_strikes:
            move = Transition(State(row["state"]), State.FAILED, Actor.RECONCILE, "")
            values: dict[str, Any] = {"strikes": strikes, "reason": reason, "suspect": 0}
            journal.apply([Move(row["row"], row["attempt"], move, values, event)], epoch)
        else:
            journal.touch(row["row"], State(row["state"]), epoch, event, strikes=strikes, suspect=1, reason=reason)
    return blamed


class WorkerLivesError(JournalLockedError):
    """A worker of an earlier life still holds its lock; ``holder`` is who, by its own word."""

    def __init__(self, message: str, remedy: str, holder: dict[str, Any] | None) -> None:
        super().__init__(message, remedy=remedy)
        self.holder = holder


def pass_gate(
    paths: RunPaths,
    out_dir: Path,
    *,
    crashed: bool,
    max_strikes: int,
    say: Callable[[str], None] = lambda _step: None,
) -> dict[str, Any]:
    """Prove the storage, migrate an older journal, enter the mirror's events, raise the epoch, blame a crash.

    Args:
        paths: of the run.
        out_dir: the output folder.
        crashed: whether the last worker crashed.
        max_strikes: strikes that end a row.
        say: told of each step that may hang, before it is done.

    Raises:
        WorkerLivesError: when a worker still lives, however stuck.
        NoRoomError: when a disk answers with errors.
        NoJournalError, SchemaError: when there is no journal, or one that this version can't use.
    """
    say(f"looking at {paths.worker_lock}")
    if is_held(paths.worker_lock):
        raise WorkerLivesError(
            f"a worker of {paths.run_dir} still lives (it holds {paths.worker_lock.name})",
            "If its storage is stuck it can't be killed; it ends when the storage comes back.",
            read_holder(paths.worker_lock),
        )
    say(f"writing a test file in {paths.run_dir}")
    prove_storage(paths.run_dir)
    _prove_outputs((out_dir, *_further_outputs(paths)), say)
    say(f"writing to {paths.journal}")
    bring_up_to_date(paths.journal)
    with Journal(paths.journal) as journal:
        journal.add_events(Mirror(paths.mirror).events())
        left = in_flight(journal, journal.epoch)
        epoch = journal.raise_epoch()
        blamed = blame(journal, left, epoch, max_strikes) if crashed else {}
    return {"epoch": epoch, "in_flight": [r["row"] for r in left], "blamed": blamed}


def _further_outputs(paths: RunPaths) -> tuple[Path, ...]:
    if not paths.manifest.exists():
        return ()
    return tuple(Path(folder) for folder in Manifest.load(paths.manifest).out_dirs[1:])


def _prove_outputs(folders: Sequence[Path], say: Callable[[str], None]) -> None:
    """Each must answer, and one at least must take a file; the worker leaves those alone that don't.

    Raises:
        NoRoomError: of the first, when all answer with errors.
    """
    errors = []
    for folder in folders:
        say(f"writing a test file in {folder}")
        try:
            prove_storage(folder)
        except NoRoomError as error:
            errors.append(error)
    if len(errors) == len(folders):
        raise errors[0]


def _answer(error: HsjournalError) -> dict[str, Any]:
    answer: dict[str, Any] = {"error": error.message, "remedy": error.remedy, "exit_code": int(error.exit_code)}
    if isinstance(error, WorkerLivesError):
        answer["holder"] = error.holder
    if isinstance(error, NoRoomError):
        answer["trouble"] = error.trouble
    return answer


def _say(step: str) -> None:
    sys.stdout.write(json.dumps({"step": step}) + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="hsjournal-gate")
    parser.add_argument("run_dir")
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--after", choices=("crash", "end"), default="end")
    parser.add_argument("--max-strikes", type=int, default=3)
    parser.add_argument("--events-only", action="store_true", help="enter the mirror's events and end")
    parser.add_argument("--parent-fd", type=int, default=-1)
    options = parser.parse_args(arguments)
    if options.parent_fd >= 0:
        end_with_parent(options.parent_fd)
    paths = RunPaths.of(options.run_dir)
    try:
        if options.events_only:
            answer: dict[str, Any] = {}
            with Journal(paths.journal) as journal:
                journal.add_events(Mirror(paths.mirror).events())
        else:
            answer = pass_gate(
                paths, options.out_dir, crashed=options.after == "crash", max_strikes=options.max_strikes, say=_say
            )
    except HsjournalError as error:
        answer = _answer(error)
    except sqlite3.Error as error:
        answer = _answer(refusal(error, paths.journal))
    except Exception as error:  # noqa: BLE001 - the parent gets it as the typed last line
        answer = {"error": f"{type(error).__name__}: {error}", "remedy": None, "exit_code": 1}
    sys.stdout.write(json.dumps(answer) + "\n")
    return int(answer.get("exit_code", 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
