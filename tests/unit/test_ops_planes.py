"""Samples on their way from one format to another are held in memory, and not too many of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from hsjournal.dump.protocol import RequestId
from hsjournal.ops import planes
from hsjournal.ops.foreign import Foreign, read_foreign
from hsjournal.sink.formats import LAYOUTS
from hsjournal.sink.stream import Sink
from tests.helpers.sinks import Place, ignore

TOKENS, HIDDEN, STATES = 37, 40, 4
NBYTES = TOKENS * HIDDEN * STATES * 2


@pytest.fixture
def found(tmp_path: Path) -> Foreign:
    place = Place(tmp_path)
    made = place.make(num_tokens=TOKENS, hidden=HIDDEN)
    with closing(Sink(place.out, LAYOUTS["specforge"], place.rejects)) as sink, made.opened() as dump:
        return read_foreign(place.out / sink.write(dump, made.sample, ignore).path)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def held(found: Foreign) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(planes.as_dump(found, RequestId.sample("0123456789ab", 0, 1, TOKENS), (1, 3, 5), "post"))
    return stack


def waits(future: Future[ExitStack]) -> bool:
    time.sleep(0.2)
    return not future.done()


@pytest.mark.parametrize(("most", "at_once"), [(2 * NBYTES, 2), (2 * NBYTES - 1, 1), (1, 1)])
def test_a_sample_waits_until_others_have_left_room_and_a_large_one_goes_alone(
    found: Foreign, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, most: int, at_once: int
) -> None:
    monkeypatch.setattr(planes, "ROOM", planes.Room(most))
    inside = [held(found) for _ in range(at_once)]
    next_one = pool.submit(held, found)
    assert waits(next_one)
    inside.pop().close()
    next_one.result(timeout=10).close()
    for stack in inside:
        stack.close()
