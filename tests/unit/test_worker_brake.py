from __future__ import annotations

import time

import pytest

from hsjournal.errors import NoRoomError, ServerError
from hsjournal.events import Event
from hsjournal.worker.brake import FAILURES, FULL, LONGEST, Brake
from hsjournal.worker.trouble import Pauses


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def brake(clock, events) -> Brake:
    return Brake(Pauses(100.0, events.append), 1.0)


def test_nothing_is_held_until_it_is_pressed(brake):
    assert not brake.is_pressed
    assert brake.allows(31)


def test_one_row_at_a_time_after_a_pause_that_grows(brake, clock):
    waits = []
    for _ in range(7):
        brake.press(FULL, "full")
        began = clock[0]
        while not brake.allows(0):
            clock[0] += 0.5
        assert not brake.allows(1)
        waits.append(clock[0] - began)
        if clock[0] > 1090:
            break
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST, LONGEST][: len(waits)]


def test_rows_that_fail_together_lengthen_the_pause_once(brake, clock):
    for _ in range(32):
        brake.press(FULL, "full")
    clock[0] += 1.0
    assert brake.allows(0)


def test_a_dump_that_is_taken_lets_go_of_everything(brake, clock, events):
    brake.press(FULL, "full")
    brake.press(FAILURES, "they fail")
    brake.release()
    assert not brake.is_pressed
    assert brake.allows(31)
    assert [event.kind for event in events] == ["paused", "paused", "resumed", "resumed"]
    brake.press(FULL, "full again")
    clock[0] += 1.0  # from the beginning
    assert brake.allows(0)


@pytest.mark.parametrize(("name", "error"), [(FULL, NoRoomError), (FAILURES, ServerError)])
def test_past_the_pause_limit_it_is_the_end(brake, clock, name, error):
    brake.press(name, "why it waits")
    clock[0] += 101.0
    with pytest.raises(error, match="paused for too long: why it waits"):
        brake.allows(0)
