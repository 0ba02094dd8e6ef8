"""Which rows a failed canary puts in doubt: kept as events, so that they outlive the worker that saw it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hsjournal.events import Event
from hsjournal.journal.reading import Reading
from hsjournal.states import State

GOOD = "canary"
"""Event: the probe prompt's states were as at the start; with when it was sent, and which rows were under way then."""
DOUBTED = "rows_doubted"
"""Event: all rows since the last good canary, as ranges."""
SETTLED = "doubt_settled"
"""Event: the rows of all earlier doubts were put back."""
_TAKEN = (State.SENT, State.DUMPED, State.WRITTEN, State.VERIFIED)


def rows_since_good(journal: Reading, url: str, boot_id: str) -> list[int]:
    """Rows that this life of the server got since the last good canary was sent to it, or had at that time."""
    since, under_way = 0.0, set[int]()
    for event in _events(journal):
        if event.kind == GOOD and event.detail.get("url") == url:
            since, under_way = float(event.detail["sent_at"]), set(event.detail["under_way"])
    return [
        row["row"]
        for row in journal.all_rows()
        if row["state"] in _TAKEN
        and (row["server"], row["boot_id"]) == (url, boot_id)
        and (row["row"] in under_way or (row["sent_at"] or 0.0) >= since)
    ]


def doubted_rows(journal: Reading) -> list[int]:
    """Rows named by a failed canary and not put back since, ascending."""
    found: set[int] = set()
    for event in _events(journal):
        if event.kind == SETTLED:
            found.clear()
        elif event.kind == DOUBTED:
            found.update(rows_in(str(event.detail["rows"])))
    return sorted(found)


def ranges(rows: Sequence[int]) -> str:
    """Ascending rows in few words: ``4-20, 23``."""
    parts: list[list[int]] = []
    for row in rows:
        if parts and parts[-1][-1] + 1 == row:
            parts[-1][1:] = [row]
        else:
            parts.append([row])
    return ", ".join("-".join(map(str, part)) for part in parts)


def rows_in(text: str) -> list[int]:
    """The rows that ``4-20, 23`` stands for."""
    found: list[int] = []
    for part in filter(None, text.replace(" ", "").split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def _events(journal: Reading) -> Iterator[Event]:
    after = 0
    while batch := journal.events(after):
        for number, event in batch:
            after = number
            yield event
