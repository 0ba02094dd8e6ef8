"""Which disk a stall is about."""

from __future__ import annotations

import pytest

from hsjournal.mirror import Phase
from hsjournal.watch.places import Places, output_of

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


def test_of_several_outputs_those_that_hang_are_named() -> None:
    def volumes(*problems: str | None) -> list[dict[str, object]]:
        return [{"path": f"/disk{number}", "problem": problem} for number, problem in enumerate(problems)]

    assert output_of("/out", []) == output_of("/out", volumes("stuck")) == "/out"
    assert output_of("/disk0", volumes(None, None)) == "/disk0 or /disk1"
    assert output_of("/disk0", volumes(None, "stuck", "set aside")) == "/disk1"
    assert output_of("/disk0", volumes("stuck", "stuck", None)) == "/disk0 and /disk1"
