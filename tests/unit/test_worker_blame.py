"""Whose fault it was: requests that break while others are being settled."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from hsjournal.events import Event
from hsjournal.worker.blame import Blame, Book


class NoJournal:
    """Takes what is to be kept; no row is struck here, and nothing is read."""

    async def call(self, _work: object) -> None:
        """Keep nothing."""


def blame_of(book: Book, recent: list[Event]) -> Blame:
    journal, tally = cast("Any", NoJournal()), cast("Any", None)
    return Blame(
        book, journal, 1, tally, most=5, max_strikes=3, recent=lambda: recent, record=lambda _event: None
    )  # fmt: skip


async def test_one_that_breaks_while_another_is_settled_is_settled_too() -> None:
    """Nobody would come back for it: a suspect that stays unsettled is waited for, and all others behind it."""
    book = Book()
    blame = blame_of(book, [])
    first = blame.broke(0, 1, 20, companions=1)
    settling = asyncio.create_task(blame.settle())
    await asyncio.sleep(0)
    second = blame.broke(1, 1, 20, companions=1)
    first.settled.set()
    second.settled.set()
    await asyncio.wait_for(settling, 10)
    assert not blame.is_unsettled(0)
    assert not blame.is_unsettled(1)


async def test_a_death_that_is_noticed_late_is_known_and_one_that_was_judged_is_not_taken_again() -> None:
    killed = Event("server_died", None, {"crash": False})
    blame = blame_of(Book(), [killed])
    assert blame._was_killed(killed.at + 5.0), "its connections broke after the supervisor had seen it"
    blame.broke(0, 1, 20, companions=1).settled.set()
    await blame.settle()
    assert not blame._was_killed(killed.at + 6.0)
