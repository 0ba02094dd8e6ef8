"""How often a worker may die, and which deaths are crashes."""

from __future__ import annotations

import signal

import pytest

from hsjournal.errors import ExitCode
from hsjournal.watch import lives as module
from hsjournal.watch.lives import Lives, is_crash, is_final, oom_kill_count


def test_pauses_double_up_to_the_longest_and_then_it_gives_up():
    lives = Lives(most=10)
    assert [lives.died() for _ in range(11)] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60, None]
    assert lives.total == 11


def test_only_a_newly_verified_row_resets():
    lives = Lives(most=3)
    lives.progressed(100)  # what was verified before this supervisor is no progress
    for _ in range(3):
        assert lives.died() is not None
        lives.progressed(100)  # a good start, and snapshots that say the same
    lives.progressed(99)
    assert lives.died() is None
    lives.progressed(101)
    assert (lives.deaths, lives.total, lives.died()) == (0, 4, 0.5)


def test_a_first_snapshot_is_no_progress_however_high():
    lives = Lives()
    lives.died()
    lives.progressed(5000)
    assert lives.deaths == 1


def test_three_kills_of_the_same_lone_row_are_the_rows_doing():
    lives = Lives()
    assert [lives.lone_kill([7]) for _ in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("between", [[8], [], [7, 8]])
def test_anything_between_begins_the_count_anew(between):
    lives = Lives()
    lives.lone_kill([7])
    lives.lone_kill([7])
    assert not lives.lone_kill(between)
    assert [lives.lone_kill([7]) for _ in range(3)] == [False, False, True]


def test_several_rows_that_are_killed_again_and_again_are_suspected():
    lives, told = Lives(), []
    for _ in range(4):
        lives.died()
        told.append(lives.repeated_kill([3, 7]))
    assert told == [False, False, True, True]
    lives.progressed(0)
    lives.progressed(1)
    lives.died()
    assert not lives.repeated_kill([3, 7])


def test_progress_begins_the_count_anew():
    lives = Lives()
    lives.progressed(0)
    lives.lone_kill([7])
    lives.lone_kill([7])
    lives.progressed(1)
    assert not lives.lone_kill([7])


@pytest.mark.parametrize(
    ("returncode", "oom", "crash", "final"),
    [
        (0, 0, False, True),
        (ExitCode.FAILED_SAMPLES, 0, False, True),
        (ExitCode.NO_ROOM, 0, False, True),
        (ExitCode.SERVER, 0, False, True),
        (ExitCode.INTERRUPTED, 0, False, False),
        (module.FENCED, 0, False, True),
        (ExitCode.ERROR, 0, True, False),
        (70, 0, True, False),
        (-signal.SIGSEGV, 0, True, False),
        (-signal.SIGBUS, 0, True, False),
        (-signal.SIGABRT, 0, True, False),
        (-signal.SIGKILL, 0, False, False),
        (-signal.SIGKILL, 1, True, False),
        (-signal.SIGTERM, 0, False, False),
        (-signal.SIGINT, 1, False, False),
        (-signal.SIGHUP, 0, False, False),
    ],
)
def test_which_ends_are_crashes_and_which_are_final(returncode, oom, crash, final):
    assert is_crash(returncode, oom) is crash
    assert is_final(returncode) is final


def test_the_kernels_own_kills_are_counted():
    assert oom_kill_count() >= 0
