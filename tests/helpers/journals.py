"""Real journals for tests: made by the real migration, filled by the real ingestion, moved by real moves."""

from __future__ import annotations

import shutil
import tempfile
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hsjournal.journal.migrate import migrate
from hsjournal.journal.store import Journal, Move, NewRow
from hsjournal.states import TRANSITIONS, Actor, State, Transition

RUN = "abcd1234"
FILE: dict[str, Any] = {"output_path": "rows_0-2000/data_0.ckpt", "output_bytes": 100, "output_xxh3": "0" * 32}


@cache
def _template() -> bytes:
    """A migrated, empty journal; closed, so that its one file is all of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.db"
        migrate(path)
        return path.read_bytes()


def empty_journal(folder: Path) -> Path:
    """A migrated journal without a run."""
    path = folder / "journal.db"
    path.write_bytes(_template())
    return path


def new_row(row: int, tokens: int = 4, skipped: str | None = None) -> NewRow:
    """Row ``row``, its ids made from its number, the first token without loss."""
    ids = array("I", [] if skipped else [row % 1000 + i for i in range(tokens)])
    return NewRow(row, f"s{row}", "prompts.jsonl", row + 1, ids, [] if skipped else [1, tokens - 1], skipped)


def fill(path: Path, tokens: Sequence[int], skipped: Mapping[int, str] | None = None) -> int:
    """Enter one row for each number of tokens, and begin the run; returns its first epoch."""
    with Journal(path) as journal:
        journal.start_ingest(RUN)
        journal.add_rows([new_row(row, n, (skipped or {}).get(row)) for row, n in enumerate(tokens)])
        journal.finish_ingest()
        return journal.raise_epoch()


def started(folder: Path, tokens: Sequence[int] = (4, 5, 6)) -> tuple[Path, int]:
    """A journal with pending rows, and its epoch."""
    path = empty_journal(folder)
    return path, fill(path, tokens)


def values_for(target: State) -> dict[str, Any]:
    """Columns that a row must have in ``target``."""
    needed: dict[State, dict[str, Any]] = {
        State.WRITTEN: dict(FILE),
        State.VERIFIED: {"verify_method": "direct"},
        State.FAILED: {"reason": "a test"},
        State.SKIPPED: {"reason": "a test"},
    }
    return needed.get(target, {})


def transition(source: State, target: State, actor: Actor = Actor.WORKER) -> Transition:
    return Transition(source, target, actor, "")


def path_to(target: State) -> list[Transition]:
    """The shortest way from pending to ``target`` by the table."""
    ways: deque[tuple[State, list[Transition]]] = deque([(State.PENDING, [])])
    seen = {State.PENDING}
    while ways:
        state, way = ways.popleft()
        if state is target:
            return way
        for t in TRANSITIONS:
            if t.source is state and t.target not in seen and t.actor in (Actor.WORKER, Actor.INGEST):
                seen.add(t.target)
                ways.append((t.target, [*way, t]))
    raise AssertionError(target)


def put(journal: Journal, row: int, target: State, epoch: int, **columns: Any) -> None:
    """Move a pending row to ``target``; ``columns`` are set with the last move."""
    attempt = journal.rows_of([row])[0]["attempt"]
    way = path_to(target)
    for number, t in enumerate(way):
        values = values_for(t.target)
        at, attempt = attempt, attempt + (t.target is State.SENT)
        if t.target is State.SENT:
            values["attempt"] = attempt
        if number == len(way) - 1:
            values |= columns
        journal.apply([Move(row, at, t, values)], epoch)


def copy(path: Path, folder: Path) -> Path:
    """A closed journal's copy."""
    return Path(shutil.copy(path, folder / "journal.db"))
