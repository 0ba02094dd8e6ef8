"""Verdicts from made-up looks: pure, the clock in our hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hsjournal.errors import Trouble
from hsjournal.mirror import Phase
from hsjournal.watch.places import Places
from hsjournal.watch.proc import Process, Thread
from hsjournal.watch.verdict import Judge, Limits, Look, Row, Verdict

LIMITS = Limits(stall_timeout=10, ordinary_tokens=1000, kill_wait=2, start_wait=40)
ASLEEP = Thread(1, "main", "S", "do_epoll_wait")
STUCK = Thread(2, "sink_0", "D", "percpu_rwsem_wait")


def process(*threads: Thread) -> Process:
    return Process(100, 1.0, threads or (ASLEEP,), 1.0, 0, 0, 0, 0, 0)


def look(at: float, **changes: object) -> Look:
    base = Look(at, process(), {0: "sent"}, (Row(0, 1, 500, Phase.WAITING),), 0)
    return replace(base, **changes)  # type: ignore[arg-type]


def writing(at: float, nbytes: int, *threads: Thread) -> Look:
    return look(at, process=process(*threads), states={0: "dumped"}, rows=(Row(0, 1, 500, Phase.WRITING, nbytes),))


def test_rows_that_pass_their_marks_are_healthy() -> None:
    judge = Judge(LIMITS, 0.0)
    for second in range(100):
        assert judge.judge(look(second, done=second // 4)).verdict is Verdict.HEALTHY


def test_a_thread_stuck_in_the_kernel_behind_a_sleeping_main_thread_is_the_storage() -> None:
    judge = Judge(LIMITS, 0.0)
    findings = [judge.judge(writing(second, 4096, ASLEEP, STUCK)) for second in range(14)]
    assert [f.is_stall for f in findings] == [False] * 10 + [True] * 4  # the mark at 0 was progress
    last = findings[-1]
    assert last.verdict is Verdict.STORAGE_STALLED
    assert last.row == 0
    assert last.threads == ("sink_0: D percpu_rwsem_wait",)
    assert "percpu_rwsem_wait" in last.sentence
    assert "row 0, writing" in last.sentence


def test_one_look_at_a_thread_in_d_is_no_evidence() -> None:
    judge = Judge(LIMITS, 0.0)
    for second in range(15):
        finding = judge.judge(look(second, process=process(ASLEEP, *([STUCK] if second == 11 else []))))
        assert finding.verdict is not Verdict.STORAGE_STALLED
    assert finding.verdict is Verdict.SERVER_STALLED


def test_a_thread_that_hangs_only_just_is_looked_at_twice_more_before_it_is_named() -> None:
    judge = Judge(LIMITS, 0.0)
    seen = [judge.judge(writing(second, 1, ASLEEP, *([STUCK] if second >= 10 else []))) for second in range(14)]
    assert [f.is_stall for f in seen] == [False] * 12 + [True] * 2, "two polls later than without it, no more"
    assert seen[12].threads == ("sink_0: D percpu_rwsem_wait",)
    flickering = Judge(LIMITS, 0.0)
    for second in range(14):
        other = replace(STUCK, tid=second + 10)
        finding = flickering.judge(writing(second, 1, ASLEEP, other))
    assert finding.is_stall, "it does not wait for evidence for ever"


def test_a_worker_that_is_stopped_in_a_pause_is_stopped() -> None:
    judge = Judge(LIMITS, 0.0)
    pauses, stopped = {"output": "the output folder /out is full"}, process(replace(ASLEEP, state="T"))
    for second in range(5):
        assert not judge.judge(look(second, pauses=pauses)).is_stall
    found = [judge.judge(look(second, pauses=pauses, process=stopped)) for second in range(5, 20)]
    assert [f.is_stall for f in found].index(True) == 9  # ten seconds of it
    assert found[-1].verdict is Verdict.WORKER_STOPPED


def test_a_worker_that_is_stopped_between_two_rows_gets_no_more_time_than_any() -> None:
    judge = Judge(LIMITS, 0.0)
    stopped = process(replace(ASLEEP, state="T"))
    judge.judge(look(0, rows=(), states={}))
    found = [judge.judge(look(second, rows=(), states={}, process=stopped)) for second in range(1, 20)]
    assert [f.is_stall for f in found].index(True) == 9
    assert found[-1].verdict is Verdict.WORKER_STOPPED


def test_between_two_attempts_the_server_is_still_what_is_stalled_and_a_stuck_worker_is_named_in_the_end() -> None:
    """Attempts that time out go back and out again: for a moment their rows are elsewhere, or nowhere."""
    judge = Judge(LIMITS, 0.0)
    seen = [judge.judge(look(second)) for second in range(45)]
    assert seen[-1].verdict is Verdict.SERVER_STALLED
    for second, rows in ((45, (Row(0, 1, 500, Phase.COMMITTING, since=45.0),)), (46, ()), (47, ()), (48, ()), (49, ())):
        finding = judge.judge(look(second, rows=rows, states={}))
        assert finding.verdict is Verdict.SERVER_STALLED, second
    last = [judge.judge(look(second, rows=(), states={})) for second in range(50, 60)][-1]
    assert last.verdict is Verdict.WORKER_STUCK


def test_bytes_that_move_slowly_are_progress_for_ever() -> None:
    judge = Judge(LIMITS, 0.0)
    for second in range(600):
        assert not judge.judge(writing(second, 1000 + second // 9)).is_stall


def test_a_silent_worker_that_moves_bytes_slowly_is_never_a_stall_in_ten_minutes() -> None:
    """One byte in nine seconds, two looks a second, and not a word from the worker."""
    judge = Judge(LIMITS, 0.0)
    for half in range(1200):
        finding = judge.judge(writing(half / 2, 1 + half // 18, ASLEEP))
        assert not finding.overdue


def test_an_hour_that_nobody_watched_is_nobodys_silence() -> None:
    """The machine slept, or the supervisor was stopped; whatever clock jumps, by that alone no verdict changes."""
    judge = Judge(LIMITS, 0.0)
    times = [*range(8), 3608, 3609, 3610]
    findings = [judge.judge(look(float(at))) for at in times]
    assert [f.verdict for f in findings[6:]] == [
        Verdict.SLOW,
        Verdict.SLOW,
        Verdict.SLOW,
        Verdict.SLOW,
        Verdict.SLOW,
    ]
    assert judge.judge(look(3613.0)).is_stall  # 7 seconds before it, 5 after
    assert judge.judge(look(13.0)).is_stall  # and back


def test_rows_that_are_sent_and_refused_again_and_again_are_a_stall_that_says_so() -> None:
    judge = Judge(LIMITS, 0.0)
    states = ["sent", "pending"]
    for second in range(40):
        rows = (Row(0, 1 + second, 500, Phase.WAITING),)
        finding = judge.judge(look(second, states={0: states[second % 2]}, rows=rows))
    assert finding.is_stall
    assert finding.verdict is Verdict.SERVER_STALLED
    assert "refused again and again" in finding.sentence


def test_rows_that_are_refused_too_soon_to_be_seen_in_flight_are_counted_as_they_are_sent() -> None:
    """The snapshot comes twice a second; a row that is refused after a few milliseconds is seldom in one."""
    judge = Judge(LIMITS, 0.0)
    judge.judge(look(0, states={0: "dumped"}, rows=(Row(0, 1, 500, Phase.CHECKING),), sends=4))
    for second in range(1, 50):
        finding = judge.judge(look(second, states={}, rows=(), sends=4 + second))
    assert finding.is_stall
    assert finding.verdict is Verdict.SERVER_STALLED
    assert "refused again and again" in finding.sentence
    for second in range(50, 70):
        finding = judge.judge(look(second, states={}, rows=(), sends=53))
    assert finding.verdict is Verdict.WORKER_STUCK, "and nothing goes out any more"


def test_requests_of_the_time_before_somebody_looked_say_nothing() -> None:
    judge = Judge(LIMITS, 0.0)
    for second in range(50):
        finding = judge.judge(look(second, states={}, rows=(), sends=1000))
    assert finding.verdict is Verdict.WORKER_STUCK


def test_a_thread_that_waits_for_the_disk_again_and_again_is_not_stuck_there() -> None:
    """As one that commits all the time: at each look in uninterruptible sleep, and never in the same one."""
    again, long = Judge(LIMITS, 0.0), Judge(LIMITS, 0.0)
    for second in range(15):
        other = again.judge(look(second, process=process(ASLEEP, replace(STUCK, switches=second))))
        stuck = long.judge(look(second, process=process(ASLEEP, replace(STUCK, switches=7))))
    assert other.verdict is Verdict.SERVER_STALLED
    assert stuck.verdict is Verdict.STORAGE_STALLED
    throttled = Judge(LIMITS, 0.0)
    for second in range(15):
        held_up = replace(STUCK, wchan="balance_dirty_pages", switches=second)
        finding = throttled.judge(look(second, process=process(ASLEEP, held_up)))
    assert finding.verdict is Verdict.STORAGE_STALLED, "it wakes by itself to look, and sleeps on"


def test_rows_refused_again_and_again_are_known_when_none_was_in_flight_at_the_last_progress() -> None:
    judge = Judge(LIMITS, 0.0)
    judge.judge(look(0, states={0: "dumped"}, rows=()))  # refused a moment ago, and about to go out again
    for second in range(1, 40):
        rows = (Row(0, 1 + second, 500, Phase.CHECKING, since=float(second)),) if second % 2 else ()
        finding = judge.judge(look(second, states={0: "pending"}, rows=rows))
    assert finding.is_stall
    assert finding.verdict is Verdict.SERVER_STALLED
    assert "refused again and again" in finding.sentence
    assert "row 0 is at attempt 40" in finding.sentence


def test_an_engine_of_our_own_that_computes_is_no_stall_unless_the_storage_is() -> None:
    judge = Judge(LIMITS, 0.0)
    for second in range(40):
        assert not judge.judge(look(second, server_busy=True)).overdue
    for second in range(40, 44):
        stuck = process(ASLEEP, STUCK)
        finding = judge.judge(look(second, server_busy=True, process=stuck))
    assert finding.verdict is Verdict.STORAGE_STALLED
    idle = Judge(LIMITS, 0.0)
    for second in range(42):
        finding = idle.judge(look(second, server_busy=True, rows=()))
    assert finding.verdict is Verdict.WORKER_STUCK


def test_a_server_of_our_own_that_spins_is_called_after_a_few_times_its_patience() -> None:
    judge = Judge(LIMITS, 0.0)
    findings = [judge.judge(look(second, server_busy=True)) for second in range(53)]
    assert not any(finding.overdue for finding in findings[:50])
    assert findings[-1].verdict is Verdict.SERVER_STALLED
    assert findings[-1].overdue


def test_a_worker_may_take_its_time_to_begin() -> None:
    judge = Judge(LIMITS, 0.0)
    phases = (None, Phase.STARTING, Phase.PREFLIGHT, Phase.RECONCILING)
    stalls = [judge.judge(look(s, rows=(), states={}, phase=phases[s % 4])).is_stall for s in range(42)]
    assert stalls == [False] * 40 + [True] * 2


def test_a_sample_ten_times_longer_on_a_slow_server_gets_the_time_that_it_needs() -> None:
    """Nine seconds for 50 tokens, within the limit; for 500 tokens it needs ninety."""
    judge = Judge(LIMITS, 0.0)
    judge.judge(look(9, states={0: "dumped"}, rows=(Row(0, 1, 50, Phase.WRITING),), pace=9 / 50, longest_lately=50))
    long = (Row(1, 1, 500, Phase.WAITING),)
    for second in range(10, 188):
        finding = judge.judge(look(second, states={1: "sent"}, rows=long, pace=9 / 50, longest_lately=50))
        assert not finding.is_stall
    stalls = [
        judge.judge(look(s, states={1: "sent"}, rows=long, pace=9 / 50, longest_lately=50)).is_stall
        for s in range(188, 194)
    ]
    assert stalls[-1]


def test_short_samples_before_it_make_nobody_wait_longer_for_a_long_one() -> None:
    """On a quick server a sample a hundred times longer is still noticed in its time."""
    judge = Judge(LIMITS, 0.0)
    judge.judge(look(0, states={0: "dumped"}, rows=(Row(0, 1, 5, Phase.WRITING),), pace=0.002, longest_lately=5))
    stalls = [
        judge.judge(
            look(s, states={1: "sent"}, rows=(Row(1, 1, 900, Phase.WAITING),), pace=0.002, longest_lately=5)
        ).is_stall
        for s in range(1, 14)
    ]
    assert not any(stalls[:9])
    assert stalls[-1]


def test_the_pace_of_short_samples_says_little_of_one_that_is_far_longer() -> None:
    """Two seconds each for 20 tokens, nearly all of it the batch's: that makes no hundred minutes of 30,000."""
    limits = Limits(stall_timeout=300.0)
    long = (Row(1, 1, 30_000, Phase.WAITING),)
    by_length = limits.patience(long)
    assert 1000 < by_length < 1100
    assert limits.patience(long, pace=0.1, longest_lately=20) == 3 * by_length
    assert limits.patience(long, pace=0.05, longest_lately=15_000) == 2 * 0.05 * 30_000, "near what it was measured at"


def test_a_new_worker_keeps_the_pace_of_the_last_one() -> None:
    judge = Judge(LIMITS, 0.0)
    judge.judge(look(0, pace=0.1, longest_lately=50))
    judge.new_life(1.0)
    rows = (Row(1, 1, 500, Phase.WAITING),)
    stalls = [judge.judge(look(s, states={1: "sent"}, rows=rows, pace=0.0)).is_stall for s in range(1, 110)]
    assert not any(stalls[:98])
    assert stalls[-1]


def test_samples_like_those_before_them_get_no_more_than_the_time_out() -> None:
    """However slow they are: who waits longer for each of them says so with --stall-timeout."""
    judge = Judge(LIMITS, 0.0)
    rows = (Row(1, 1, 60, Phase.WAITING),)
    stalls = [
        judge.judge(look(s, states={1: "sent"}, rows=rows, pace=9 / 50, longest_lately=50)).is_stall for s in range(13)
    ]
    assert not any(stalls[:10])
    assert stalls[-1]


def test_replaying_the_same_bytes_is_none() -> None:
    judge = Judge(LIMITS, 0.0)
    verdicts = [judge.judge(writing(second, 1000 * (second % 5))).is_stall for second in range(40)]
    assert not any(verdicts[:10])
    assert all(verdicts[20:])


def test_going_back_and_forth_between_the_same_states_is_none() -> None:
    judge = Judge(LIMITS, 0.0)
    states = ["pending", "sent", "dumped"]
    for second in range(40):
        finding = judge.judge(look(second, states={0: states[second % 3]}))
    assert finding.is_stall


def test_a_new_life_gets_its_time_but_keeps_the_marks() -> None:
    judge = Judge(LIMITS, 0.0)
    judge.judge(writing(0, 5000))
    judge.new_life(20.0)
    findings = [judge.judge(writing(20.0 + second, 100 * second)) for second in range(14)]
    assert not findings[5].is_stall
    assert findings[-1].is_stall  # it only wrote again what had been written before


def test_a_longer_sample_gets_more_time() -> None:
    ordinary, long = Judge(LIMITS, 0.0), Judge(LIMITS, 0.0)
    ten_times = (Row(0, 1, 10_000, Phase.WAITING),)
    for second in range(60):
        a = ordinary.judge(look(second))
        b = long.judge(look(second, rows=ten_times))
    assert a.is_stall
    assert not b.is_stall


def test_a_server_that_is_gone_and_one_that_only_looks_alive_are_told_apart() -> None:
    down, wedged = Judge(LIMITS, 0.0), Judge(LIMITS, 0.0)
    for second in range(12):
        a = down.judge(look(second, server="connection refused"))
        b = wedged.judge(look(second))
    assert a.verdict is Verdict.SERVER_DOWN
    assert b.verdict is Verdict.SERVER_STALLED


def test_a_stopped_worker_is_named() -> None:
    judge = Judge(LIMITS, 0.0)
    for second in range(12):
        finding = judge.judge(look(second, process=process(replace(ASLEEP, state="T"))))
    assert finding.verdict is Verdict.WORKER_STOPPED


def test_a_worker_that_does_nothing_is_a_stall_whatever_it_says() -> None:
    judge = Judge(LIMITS, 0.0)
    for second in range(42):
        finding = judge.judge(look(second, rows=(), states={}))
    assert finding.verdict is Verdict.WORKER_STUCK


def test_a_pause_hides_no_thread_that_the_kernel_never_lets_go() -> None:
    """The output of one disk is full, and a thread hangs on another one: the pause would go on for ever."""
    places = Places("/run", "/a or /b", "/root")

    def full(at: float, *threads: Thread) -> Look:
        pauses, troubles = {"output /a": "the output folder /a is full"}, {"output /a": Trouble.FULL}
        return replace(writing(at, 1, *threads), pauses=pauses, troubles=troubles, places=places)

    judge = Judge(LIMITS, 0.0)
    seen = [judge.judge(full(second, ASLEEP, STUCK)) for second in range(12)]
    assert {finding.verdict for finding in seen[:10]} == {Verdict.DISK_FULL}
    assert seen[10].verdict is Verdict.STORAGE_STALLED
    assert seen[10].overdue
    assert seen[10].sentence == (
        "no progress for 10 s: the storage of /a or /b is stuck; 1 thread(s) of the worker in uninterruptible sleep, "
        "sink_0 at percpu_rwsem_wait (row 0, writing)"
    )
    flickering = Judge(LIMITS, 0.0)
    for second in range(60):
        threads = (ASLEEP, STUCK) if second % 5 else (ASLEEP,)
        finding = flickering.judge(full(second, *threads))
    assert finding.verdict is Verdict.DISK_FULL, "a slow disk is no stuck one"


@pytest.mark.parametrize(
    ("thread", "phase", "place"),
    [
        ("sink_0", Phase.WRITING, "/out"),
        ("sink_0", Phase.CHECKING, "/root"),
        ("sink_0", Phase.DELETING, "/root"),
        ("journal", Phase.COMMITTING, "/run"),
        ("journal", Phase.WAITING, "/run"),
    ],
)
def test_a_stuck_storage_is_named_by_its_path_also_for_the_rest_of_the_night(
    thread: str, phase: Phase, place: str
) -> None:
    judge = Judge(LIMITS, 0.0)
    rows = (Row(7, 1, 500, phase),)
    stuck = replace(STUCK, name=thread)
    looks = [
        look(s, process=process(ASLEEP, stuck), rows=rows, states={7: "sent"}, places=Places("/run", "/out", "/root"))
        for s in range(15)
    ]
    stalled = [judge.judge(one) for one in looks][-1]
    assert f"the storage of {place} is stuck" in stalled.sentence
    last = judge.judge(replace(looks[-1], at=16.0, killed_at=13.0))
    assert last.verdict is Verdict.UNKILLABLE
    assert f"it waits in the kernel for the storage of {place} ({thread}: D percpu_rwsem_wait" in last.sentence
    at_storage = phase is not Phase.WAITING
    assert last.row == stalled.row == (7 if at_storage else None)
    assert (f"; row 7, {phase.name.lower()})" in last.sentence) is at_storage


def test_a_pause_has_its_own_limit_and_is_no_stall_but_somebody_is_told_when_it_lasts() -> None:
    judge = Judge(LIMITS, 0.0)
    overdue = []
    for second in range(100):
        full = {"output": "the output folder /o is full"}
        finding = judge.judge(look(second, pauses=full, troubles={"output": "full"}))
        assert finding.verdict is Verdict.DISK_FULL
        assert not finding.is_stall
        overdue.append(finding.overdue)
    assert overdue == [False] * 10 + [True] * 90
    assert judge.judge(look(105)).verdict is Verdict.SLOW  # its time was no silence


@pytest.mark.parametrize(
    ("name", "trouble", "server", "verdict"),
    [
        ("output", Trouble.FULL, None, Verdict.DISK_FULL),
        ("output /disk2", Trouble.FULL, None, Verdict.DISK_FULL),
        ("output", Trouble.FAILING, None, Verdict.DISK_FAILING),
        ("output /disk2", Trouble.FAILING, None, Verdict.DISK_FAILING),
        ("journal", Trouble.FULL, None, Verdict.DISK_FULL),
        ("journal", Trouble.FAILING, None, Verdict.DISK_FAILING),
        ("journal", Trouble.BUSY, None, Verdict.WAITING),
        ("handover", None, None, Verdict.SHM_FULL),
        ("no_room", None, None, Verdict.SHM_FULL),
        ("root", None, None, Verdict.ROOT_GONE),
        ("dumps", Trouble.FAILING, None, Verdict.ROOT_GONE),
        ("server", None, "refused", Verdict.SERVER_DOWN),
        ("server", None, None, Verdict.SERVER_STALLED),
        ("server http://b:1", None, "refused", Verdict.SERVER_DOWN),
        ("failures", None, None, Verdict.FAILURES),
        ("something new", None, None, Verdict.WAITING),
    ],
)
def test_each_pause_has_its_verdict(name: str, trouble: Trouble | None, server: str | None, verdict: Verdict) -> None:
    sentence = "/mnt/quota/full/No space answers with I/O errors"  # a path of the user's, and no word in it counts
    troubles = {name: trouble} if trouble else {}
    finding = Judge(LIMITS, 0.0).judge(look(1, pauses={name: sentence}, troubles=troubles, server=server))
    assert (finding.verdict, finding.sentence, finding.overdue) == (verdict, sentence, False)


def test_a_server_that_was_not_asked_yet_does_not_answer() -> None:
    paused = look(1, pauses={"server": "connection refused"}, asked=False)
    assert Judge(LIMITS, 0.0).judge(paused).verdict is Verdict.SERVER_DOWN
    judge = Judge(LIMITS, 0.0)
    rows = (Row(0, 1, 500, Phase.WAITING, server="http://b:1"),)
    finding = [judge.judge(look(second, rows=rows, asked=False)) for second in range(13)][-1]
    assert finding.verdict is Verdict.SERVER_STALLED
    assert finding.sentence.endswith("1 request(s) at http://b:1, which sends no dump")


def test_pauses_that_come_and_go_hide_no_silence() -> None:
    """A deadline that each retry arms anew never fires: the time between the pauses adds up."""
    judge = Judge(LIMITS, 0.0)
    server = {"server": "connection refused"}
    findings = [judge.judge(look(second, pauses=server if second % 2 else {})) for second in range(40)]
    assert not any(f.overdue for f in findings[:19])
    assert any(f.is_stall for f in findings[19:])


def test_what_does_not_die_of_sigkill_is_unkillable() -> None:
    judge = Judge(LIMITS, 0.0)
    assert judge.judge(writing(20, 1, STUCK)).verdict is not Verdict.UNKILLABLE
    assert judge.judge(replace(writing(21, 1, STUCK), killed_at=20.0)).verdict is not Verdict.UNKILLABLE
    finding = judge.judge(replace(writing(23, 1, STUCK), killed_at=20.0))
    assert finding.verdict is Verdict.UNKILLABLE
    assert "percpu_rwsem_wait" in finding.sentence
    assert judge.judge(replace(look(24), process=None, killed_at=20.0)).verdict is Verdict.WORKER_DEAD
