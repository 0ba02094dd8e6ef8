from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hsjournal.capture.embedded.batching import next_batch

lengths = st.lists(st.integers(1, 5000), max_size=60)
limits = st.integers(1, 8192)


@given(lengths, limits)
def test_a_batch_fits_and_holds_the_oldest(waiting: list[int], limit: int) -> None:
    chosen = next_batch(waiting, limit)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(range(len(waiting)))
    if waiting:
        assert chosen[0] == 0
        assert len(chosen) == 1 or sum(waiting[i] for i in chosen) <= limit
    else:
        assert chosen == []


@given(lengths, limits)
def test_nothing_that_still_fits_is_left_behind(waiting: list[int], limit: int) -> None:
    chosen = next_batch(waiting, limit)
    room = limit - sum(waiting[i] for i in chosen)
    assert all(waiting[i] > room for i in range(len(waiting)) if i not in chosen)


@given(lengths, limits)
def test_every_request_is_served_once_in_the_end(waiting: list[int], limit: int) -> None:
    left = list(range(len(waiting)))
    served: list[int] = []
    while left:
        chosen = next_batch([waiting[i] for i in left], limit)
        served += [left[i] for i in chosen]
        left = [item for position, item in enumerate(left) if position not in chosen]
    assert sorted(served) == list(range(len(waiting)))
