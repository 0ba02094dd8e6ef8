"""Which row a foreign sample belongs to: told by its token ids, never by its name or its number alone."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from hsjournal.journal.reading import Reading
from hsjournal.ops.foreign import Foreign, ForeignError, Refused
from hsjournal.states import State


class Fate(StrEnum):
    """What becomes of a sample that was found."""

    TAKEN = "taken"  # a pending row wants it
    ALREADY = "already"  # its row was made from this very file
    NOT_NEEDED = "not_needed"  # every row of these token ids has its output from elsewhere
    UNMATCHED = "unmatched"  # no row has these token ids


@dataclass(slots=True)
class _Row:
    state: State
    attempt: int
    sample_id: str
    server: str | None
    taken: bool = False


class Rows:
    """The rows of a run by their token ids.

    Args:
        journal: of the run.
        path_of: where a row's output file lies, relative to the output folder.
    """

    def __init__(self, journal: Reading, path_of: Callable[[int, str], str]) -> None:
        self._path_of = path_of
        self._rows = {
            r["row"]: _Row(State(r["state"]), r["attempt"], r["sample_id"], r["server"]) for r in journal.all_rows()
        }
        self._by_ids: dict[bytes, list[int]] = defaultdict(list)
        for row, ids in journal.all_prompts():
            self._by_ids[_digest(np.frombuffer(ids, dtype="<u4"))].append(row)
        self._sources = {r.server: row for row, r in self._rows.items() if r.server and r.server.startswith("file:")}

    def attempt(self, row: int) -> int:
        """The row's current attempt."""
        return self._rows[row].attempt

    def give_back(self, row: int) -> None:
        """The sample that a row was given can't be used: another may be."""
        self._rows[row].taken = False

    def match(self, found: Foreign, place: str | None) -> tuple[Fate, int | None]:
        """What becomes of a sample; the row is taken from the list then, so that each file serves one row.

        Among rows of equal ids goes first the one whose place or id the file names, then the lowest.

        Args:
            found: the sample.
            place: where it lies in the output folder, if it is to stay there.

        Raises:
            ForeignError: when a row wants it and may not have it.
        """
        rows = self._by_ids.get(_digest(np.asarray(found.input_ids)), [])
        if not rows:
            return Fate.UNMATCHED, None
        before = self._sources.get(found.path.as_uri())
        if before in rows and self._rows[before].state in (State.WRITTEN, State.VERIFIED):
            return Fate.ALREADY, before
        free = [row for row in rows if self._rows[row].state is State.PENDING and not self._rows[row].taken]
        if place is not None:
            return self._in_place(rows, free, place)
        if not free:
            return self._unwanted(rows)
        row = next((row for row in free if self._is_named(row, found)), free[0])
        self._rows[row].taken = True
        return Fate.TAKEN, row

    def _in_place(self, rows: list[int], free: list[int], place: str) -> tuple[Fate, int | None]:
        at_home = [row for row in rows if self._path_of(row, self._rows[row].sample_id) == place]
        if at_home and at_home[0] in free:
            self._rows[at_home[0]].taken = True
            return Fate.TAKEN, at_home[0]
        if at_home or not free:
            return self._unwanted(at_home or rows)
        home = self._path_of(free[0], self._rows[free[0]].sample_id)
        raise ForeignError(
            Refused.WRONG_PLACE,
            f"row {free[0]} has these tokens, and its file must be {home}: adopt into another --out",
        )

    def _unwanted(self, rows: list[int]) -> tuple[Fate, int | None]:
        states = {row: self._rows[row].state for row in rows}
        for row, state in states.items():
            if state is State.FAILED:
                raise ForeignError(Refused.ROW_FAILED, f"row {row} is failed: first `hsjournal retry RUN_DIR {row}`")
        for row, state in states.items():
            if state in (State.SENT, State.DUMPED):
                raise ForeignError(Refused.UNDER_WAY, f"row {row} is {state}: `hsjournal resume` finishes it")
        return Fate.NOT_NEEDED, rows[0]

    def _is_named(self, row: int, found: Foreign) -> bool:
        said = found.said or {}
        sample_id = self._rows[row].sample_id
        return said.get("sample_id") == sample_id or found.path.name == self._path_of(row, sample_id).rsplit("/", 1)[-1]


def _digest(ids: np.ndarray[tuple[int], np.dtype[np.integer]]) -> bytes:
    return hashlib.sha256(ids.astype("<i8").tobytes()).digest()
