"""Rows that a trainer has consumed: marked in the journal, then their files freed. They stay verified and counted.

May be done beside a live run. The mark is committed before the file goes: a kill in between leaves a file that no row
needs, which the next release of the same rows frees, and never a row whose file is missing without a reason.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hsjournal import faults
from hsjournal.catalogue.beside import bring_up_to_date
from hsjournal.config import Manifest, RunPaths
from hsjournal.errors import JournalLockedError, UsageError
from hsjournal.events import Event
from hsjournal.journal.locks import is_held
from hsjournal.journal.refusals import refusal
from hsjournal.journal.store import Journal
from hsjournal.ops.custody import custody, need_output
from hsjournal.sink.output import Output
from hsjournal.states import State

BATCH = 256
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Named:
    """What is asked to be released: a sample id, a row number, or both, which must belong together then."""

    sample_id: str | None = None
    row: int | None = None

    def __str__(self) -> str:
        return repr(self.sample_id) if self.sample_id is not None else f"row {self.row}"


@dataclass(frozen=True, slots=True)
class Released:
    """What was done.

    Args:
        rows: marked now.
        before: had been marked already.
        nbytes: freed on the storage.
        other: files that were not as the journal has them, and were left.
        released_rows: marked in all.
        released_bytes: that those files had.
    """

    rows: int
    before: int
    nbytes: int
    other: tuple[str, ...]
    released_rows: int
    released_bytes: int

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def names_of_lines(lines: Iterable[str]) -> list[Named]:
    """One sample id a line; empty lines are left out."""
    return [Named(sample_id=line) for line in (line.rstrip("\r\n") for line in lines) if line]


def names_of_index(lines: Iterable[str], place: str) -> list[Named]:
    """The rows of an index as ``hsjournal index`` writes it, or of some of its lines.

    Raises:
        UsageError: naming the line that is none of it.
    """
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            row, sample_id = entry["row"], entry["id"]
        except (ValueError, KeyError, TypeError):
            row = sample_id = None
        if type(row) is not int or not isinstance(sample_id, str):
            raise UsageError(
                f"line {number} of {place} is no line of an index", remedy='It looks like {"row": 7, "id": "a", …}.'
            )
        found.append(Named(sample_id, row))
    return found


def release(paths: RunPaths, wanted: Sequence[Named]) -> Released:
    """Mark rows as consumed and free their files.

    Raises:
        UsageError: when one is unknown or not verified; nothing is changed then.
        NoJournalError: when there is no run.
        HsjournalError: when the output folder is not there, or the journal can't be written.
        OSError: as the output's storage answers; what was marked is freed by the same call again.
    """
    manifest = Manifest.load(paths.manifest)
    for folder in manifest.out_dirs:
        need_output(Path(folder))
    try:
        with _journal(paths) as journal:
            return _release(journal, manifest, paths, _found(journal, wanted))
    except sqlite3.Error as error:
        raise refusal(error, paths.journal) from error


@contextlib.contextmanager
def _journal(paths: RunPaths) -> Iterator[Journal]:
    """The journal, beside a live run or alone; brought up to date in the latter case."""
    if not is_held(paths.supervisor_lock):
        with contextlib.ExitStack() as stack:
            try:
                held = stack.enter_context(custody(paths))
            except JournalLockedError:
                pass  # a run has begun just now, or an old worker lives
            else:
                yield held.journal
                return
    with Journal(paths.journal) as journal:
        yield journal


def _found(journal: Journal, wanted: Sequence[Named]) -> list[dict[str, Any]]:
    rows: dict[int, dict[str, Any]] = {}
    absent, unfit = [], []
    for named in wanted:
        row = _look_up(journal, named)
        if row is None:
            absent.append(str(named))
        elif State(row["state"]) is not State.VERIFIED:
            unfit.append(f"{named} ({row['state']})")
        else:
            rows[row["row"]] = row
    if absent:
        raise UsageError(f"no sample of this run: {_list(absent)}", remedy="Nothing was released.")
    if unfit:
        raise UsageError(f"not verified, so not to be released: {_list(unfit)}", remedy="Nothing was released.")
    return [rows[number] for number in sorted(rows)]


def _look_up(journal: Journal, named: Named) -> dict[str, Any] | None:
    if named.row is None:
        return journal.row_of_id(str(named.sample_id))
    row = next(iter(journal.rows_of([named.row])), None)
    return row if row is not None and named.sample_id in (None, row["sample_id"]) else None


def _release(journal: Journal, manifest: Manifest, paths: RunPaths, rows: Sequence[dict[str, Any]]) -> Released:
    marked, freed, other = 0, 0, []
    for start in range(0, len(rows), BATCH):
        marked += len(journal.release([row["row"] for row in rows[start : start + BATCH]]))
    bring_up_to_date(journal, manifest, paths)  # some trainers refuse a list of files that are not there
    with closing(Output(manifest, paths.rejects)) as output:
        for row in rows:
            faults.point("reap.deleting", row["row"])
            nbytes = output.free(row["output_path"], row["output_bytes"])
            freed += nbytes or 0
            if nbytes is None:
                other.append(row["output_path"])
    if marked:
        journal.add_events([(uuid.uuid4().hex, Event("released", None, {"rows": marked, "bytes": freed}))])
    total = journal.released()
    return Released(marked, len(rows) - marked, freed, tuple(other), *total)


def _list(items: Sequence[str]) -> str:
    named = ", ".join(items[:_MOST_NAMED])
    return named if len(items) <= _MOST_NAMED else f"{named} and {len(items) - _MOST_NAMED:,} more"
