"""Which requests may be at a v1 server together."""

from __future__ import annotations

import json

import pytest

from hsjournal.server.v1.counts import Counts
from hsjournal.server.v1.taking import open_requests


def test_equal_counts_are_never_at_the_server_together() -> None:
    counts = Counts()
    counts.send(7, "hsj-test-1-1-7")
    assert not counts.may_send(7)
    assert counts.may_send(8)
    with pytest.raises(ValueError, match="7 tokens"):
        counts.send(7, "hsj-test-2-1-7")
    counts.answered(7)
    assert counts.may_send(7)


def test_after_a_time_out_the_count_is_barred_until_the_server_has_drained() -> None:
    counts = Counts()
    counts.send(7, "hsj-test-1-1-7")
    counts.send(8, "hsj-test-2-1-8")
    counts.give_up(7)
    assert not counts.may_send(7)
    counts.answered(8)
    assert not counts.may_send(7)
    counts.drained()
    assert counts.may_send(7)


def test_a_gateway_started_anew_knows_which_requests_have_no_end() -> None:
    counts = Counts()
    counts.send(7, "hsj-test-1-1-7")
    counts.send(8, "hsj-test-2-1-8")
    counts.give_up(8)
    again = Counts.from_open(open_requests(json.loads(counts.to_json())))
    assert not again.may_send(7)
    assert not again.may_send(8)
    again.drained()
    assert again.may_send(7)


@pytest.mark.parametrize("state", [{}, {"open": "x"}, {"open": ["nonsense", 5, "hsj-a-b-x"]}])
def test_a_state_file_that_is_none_bars_nothing_but_what_it_names(state: dict[str, object]) -> None:
    assert [count for count, _ in open_requests(state)] in ([], [5])


def test_a_server_that_does_not_tell_its_load_goes_on_with_other_counts() -> None:
    counts = Counts(tells_load=False)
    counts.send(7, "hsj-test-1-1-7")
    counts.give_up(7)
    assert counts.may_send(8)
    assert not counts.may_send(7)
