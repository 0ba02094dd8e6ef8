"""Which disk a stall is about."""

from __future__ import annotations

import pytest

from hsjournal.mirror import Phase
from hsjournal.watch.places import Places

PLACES = Places("RUN", "OUT", "ROOT")


@pytest.mark.parametrize(
    ("phase", "threads", "place"),
    [
        (Phase.WRITING, (), "OUT"),
        (Phase.VERIFYING, (), "OUT"),
        (Phase.COMMITTING, (), "RUN"),
        (Phase.CHECKING, (), "ROOT"),
        (Phase.DELETING, (), "ROOT"),
        (None, (), "OUT"),
        (Phase.WRITING, ("journal: D wb_wait",), "RUN"),
        (Phase.COMMITTING, ("journal",), "RUN"),
        (Phase.CHECKING, ("sink-0_1: D wb_wait",), "ROOT"),
        (Phase.CHECKING, ("block-writer-0",), "OUT"),
        (Phase.WRITING, ("sink-0_1: D x", "journal: D x", "sink-0_2: D x"), "OUT and RUN"),
    ],
)
def test_the_place_is_that_of_the_thread_else_of_the_step(
    phase: Phase | None, threads: tuple[str, ...], place: str
) -> None:
    assert PLACES.of(phase, threads) == place


def test_a_place_that_is_not_known_is_not_made_up() -> None:
    assert Places().of(Phase.WRITING, ("sink-0",)) == ""
