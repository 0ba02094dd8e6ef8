"""The verdict of ``diagnose``, from facts alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hsjournal.errors import ExitCode
from hsjournal.mirror import Phase
from hsjournal.ops.diagnose.conclude import COMPLETE, PREPARING, Conclusion, Facts, conclude
from hsjournal.ops.diagnose.foreign import Pipeline, Seen, conclude_foreign
from hsjournal.ops.diagnose.rows import directories, next_request, requests
from hsjournal.watch.places import Places
from hsjournal.watch.presence import Ending
from hsjournal.watch.proc import Process, Thread
from hsjournal.watch.verdict import Finding, Limits, Look, Row, Verdict

STUCK = Thread(12, "sink", "D", "folio_wait_writeback")
IDLE = Thread(11, "main", "S", "ep_poll")


def process(*threads: Thread) -> Process:
    return Process(11, 1.0, threads or (IDLE,), 1.0, 0, 0, 0, 0, 1 << 20)


def looks(*threads: Thread, phase: Phase = Phase.WRITING, **more: object) -> list[Look]:
    row = Row(7, 1, 100, phase, 4096)
    return [Look(100 + i / 10, process(*threads), {7: "dumped"}, (row,), 5, **more) for i in range(6)]  # type: ignore[arg-type]


def verdict(**facts: object) -> Conclusion:
    return conclude(Facts("RUN", **facts))  # type: ignore[arg-type]


def test_a_run_that_moves_is_healthy() -> None:
    found = verdict(looks=looks(), progress_at=99.0, supervisor="alive")
    assert (found.verdict, found.exit_code) == (Verdict.HEALTHY, ExitCode.DONE)


def test_the_incident_is_a_storage_stall_with_thread_place_and_row() -> None:
    found = verdict(looks=looks(IDLE, STUCK), progress_at=100.0 - 3600, supervisor="alive", dumps=2)
    assert (found.verdict, found.exit_code, found.row) == (Verdict.STORAGE_STALLED, ExitCode.ERROR, 7)
    assert "folio_wait_writeback" in found.sentence
    assert found.threads == ("sink: D folio_wait_writeback",)
    assert "2 complete dump(s)" in found.next_step
    assert "not sent again" in found.next_step


def test_a_stuck_thread_is_named_long_before_it_is_a_stall() -> None:
    found = verdict(looks=looks(IDLE, STUCK), progress_at=80.0, supervisor="alive", limits=Limits(300))
    assert found.exit_code is ExitCode.DONE
    assert "folio_wait_writeback" in found.sentence


def test_one_look_in_d_says_nothing() -> None:
    seen = looks()
    seen[3] = looks(IDLE, STUCK)[3]
    found = verdict(looks=seen, progress_at=80.0, supervisor="alive")
    assert "kernel" not in found.sentence


def test_sigkill_without_effect_is_unkillable() -> None:
    found = verdict(looks=looks(IDLE, STUCK, killed_at=90.0), progress_at=50.0, supervisor="alive")
    assert found.verdict is Verdict.UNKILLABLE
    assert "no second" in found.next_step.lower()


def test_a_stopped_worker_is_seen_at_once() -> None:
    found = verdict(looks=looks(Thread(11, "main", "T", "do_signal_stop")), progress_at=99.5, supervisor="alive")
    assert (found.verdict, found.next_step) == (Verdict.WORKER_STOPPED, "kill -CONT 11")


def test_a_refused_connection_is_a_server_that_is_down() -> None:
    found = verdict(looks=looks(phase=Phase.WAITING), progress_at=99.0, supervisor="alive", refused="refused")
    assert (found.verdict, found.exit_code) == (Verdict.SERVER_DOWN, ExitCode.SERVER)


def test_a_server_that_answers_and_sends_nothing() -> None:
    found = verdict(looks=looks(phase=Phase.WAITING), progress_at=-900.0, supervisor="alive")
    assert (found.verdict, found.exit_code) == (Verdict.SERVER_STALLED, ExitCode.SERVER)


def test_a_pause_is_named_by_the_worker_itself() -> None:
    found = verdict(
        looks=looks(pauses={"output": "the output folder is full"}, troubles={"output": "full"}),
        progress_at=90.0,
        supervisor="alive",
    )
    assert (found.verdict, found.exit_code) == (Verdict.DISK_FULL, ExitCode.NO_ROOM)


def test_rows_that_move_while_one_looks_are_progress() -> None:
    seen = looks()
    row = Row(7, 1, 100, Phase.WRITING, 8192)
    seen[4] = Look(100.4, process(), {7: "dumped"}, (row,), 5)
    found = verdict(looks=seen, progress_at=-3600.0, supervisor="alive")
    assert found.verdict is Verdict.HEALTHY


def test_the_supervisor_has_watched_for_longer() -> None:
    told = Finding(Verdict.SERVER_STALLED, "what the server sends is refused again and again", 400.0, 7)
    found = verdict(looks=looks(phase=Phase.WAITING), progress_at=99.0, supervisor="alive", told=told)
    assert (found.verdict, found.sentence, found.row) == (Verdict.SERVER_STALLED, told.sentence, 7)
    full = Finding(Verdict.DISK_FULL, "the output is full", 5.0)
    assert verdict(supervisor="alive", stage="waiting", told=full).exit_code is ExitCode.NO_ROOM


def test_a_silence_alone_is_what_the_supervisor_says_it_is() -> None:
    """A long sample, or a pause that has just ended: it has watched, and knows its own patience."""
    calm = Finding(Verdict.HEALTHY, "last progress 400 s ago", 400.0)
    for phase in (Phase.WAITING, Phase.WRITING):
        facts = {"looks": looks(phase=phase), "progress_at": -900.0, "supervisor": "alive"}
        assert verdict(**facts).exit_code is not ExitCode.DONE
        assert verdict(**facts, told=calm).verdict is Verdict.HEALTHY
    stuck = verdict(looks=looks(IDLE, STUCK), progress_at=-900.0, supervisor="alive", told=calm)
    assert stuck.verdict is Verdict.STORAGE_STALLED
    down = verdict(looks=looks(), progress_at=-900.0, supervisor="alive", told=calm, refused="refused")
    assert down.verdict is Verdict.SERVER_DOWN


def test_the_pace_of_the_samples_before_gives_a_long_one_its_time() -> None:
    """As the supervisor: 6,000 tokens after short ones that took 0.15 s each, silent for 400 s."""
    row = Row(7, 1, 6000, Phase.WAITING)
    seen = [
        Look(1000 + i / 10, process(), {7: "sent"}, (row,), 5, pace=0.15, longest_lately=40, phase=Phase.RUNNING)
        for i in range(6)
    ]
    assert verdict(looks=seen, progress_at=600.0, supervisor="alive").verdict in (Verdict.HEALTHY, Verdict.SLOW)
    seen = [replace(look, pace=0.0) for look in seen]
    assert verdict(looks=seen, progress_at=600.0, supervisor="alive").verdict is Verdict.SERVER_STALLED


@pytest.mark.parametrize(
    ("thread", "phase", "place"),
    [("sink-0", Phase.WRITING, "OUT"), ("journal", Phase.WRITING, "RUN"), ("sink-0", Phase.CHECKING, "ROOT")],
)
def test_the_next_step_names_the_disk_that_hangs(thread: str, phase: Phase, place: str) -> None:
    seen = looks(IDLE, Thread(12, thread, "D", "wb_wait"), phase=phase)
    found = verdict(looks=seen, progress_at=-900.0, supervisor="alive", places=Places("RUN", "OUT", "ROOT"))
    assert found.next_step.startswith(f"Look at {place} (")


def test_a_full_disk_is_the_one_that_the_pause_names() -> None:
    for pause, place in (("output", "OUT"), ("journal", "RUN")):
        seen = looks(pauses={pause: "the folder is full"}, troubles={pause: "full"})
        found = verdict(looks=seen, progress_at=90.0, supervisor="alive", places=Places("RUN", "OUT", "ROOT"))
        assert found.next_step.startswith(f"Make room on {place};")


def test_a_supervisor_that_does_not_run_is_named_beside_a_worker_that_does() -> None:
    found = verdict(looks=looks(), progress_at=99.0, supervisor="stuck", silence="no sign of life")
    assert (found.verdict, found.exit_code) == (Verdict.SUPERVISOR_STUCK, ExitCode.ERROR)
    assert "the worker lives" in found.sentence


@pytest.mark.parametrize(
    ("code", "expected"),
    [(4, ExitCode.ERROR), (5, ExitCode.NO_ROOM), (13, ExitCode.SERVER), (130, ExitCode.ERROR)],
)
def test_a_run_that_ended_by_itself_says_when_how_and_why(code: int, expected: ExitCode) -> None:
    ending = Ending(0.0, code, "the reason", "the remedy")
    found = verdict(open_rows=3, supervisor="ended", ending=ending)
    assert (found.verdict, found.exit_code, found.next_step) == (Verdict.NOT_RUNNING, expected, "the remedy")
    assert f"ended at 1970-01-01 00:00:00 UTC with exit {code}: the reason" in found.sentence
    assert "3 rows are left" in found.sentence


@pytest.mark.parametrize(
    ("facts", "expected", "code"),
    [
        ({"complete": True}, COMPLETE, ExitCode.DONE),
        ({"complete": True, "failed": 2}, COMPLETE, ExitCode.FAILED_SAMPLES),
        ({"open_rows": 3}, Verdict.NOT_RUNNING, ExitCode.ERROR),
        ({"open_rows": 3, "supervisor": "dead"}, Verdict.SUPERVISOR_DEAD, ExitCode.ERROR),
        ({"supervisor": "dead", "hangs": ("the journal",)}, Verdict.STORAGE_STALLED, ExitCode.ERROR),
        ({"supervisor": "alive", "stage": "preparing"}, PREPARING, ExitCode.DONE),
        ({"supervisor": "alive", "stage": "waiting"}, Verdict.WAITING, ExitCode.DONE),
        ({"supervisor": "stuck"}, Verdict.SUPERVISOR_STUCK, ExitCode.ERROR),
        ({"supervisor": "alive", "stage": "waiting", "hangs": ("OUT",)}, Verdict.STORAGE_STALLED, ExitCode.ERROR),
    ],
)
def test_without_a_worker(facts: dict[str, object], expected: str, code: ExitCode) -> None:
    found = verdict(**facts)
    assert (found.verdict, found.exit_code) == (expected, code)


ASLEEP = {"tid": 5, "name": "python", "state": "S", "wchan": "x", "stuck": False, "moved": False, "idle_s": 900.0}


def client(**changes: object) -> dict[str, object]:
    thread = {
        "tid": 5,
        "name": "python",
        "state": "D",
        "wchan": "wb_wait",
        "stuck": True,
        "moved": False,
        "idle_s": 7200,
    }
    base = {"alive": True, "pid": 5, "stopped": False, "kill_pending": False, "io_bytes_moved": 0, "cpu_percent": 0.0}
    return base | {"threads": [thread]} | changes


def foreign(seen_client: dict[str, object], **more: object) -> Conclusion:
    from pathlib import Path

    return conclude_foreign(Seen(Pipeline(5, Path("log"), Path("/root-of-dumps")), seen_client, still=True, **more))  # type: ignore[arg-type]


def test_the_incident_as_it_was_seen_from_outside() -> None:
    unread = ({"name": "req_22391"}, {"name": "req_22392"})
    found = foreign(client(), log_age_s=7200.0, removed_age_s=7100.0, unread=unread)
    assert (found.verdict, found.exit_code) == (Verdict.STORAGE_STALLED, ExitCode.ERROR)
    assert "wb_wait" in found.sentence
    assert "2 complete dump(s) lie unread" in found.sentence
    assert "adopt" in found.next_step


@pytest.mark.parametrize(
    ("seen", "more", "expected"),
    [
        ({"alive": False, "threads": []}, {"log_age_s": 5.0}, Verdict.WORKER_DEAD),
        ({"kill_pending": True}, {"log_age_s": 5.0}, Verdict.UNKILLABLE),
        ({"stopped": True}, {"log_age_s": 5.0}, Verdict.WORKER_STOPPED),
        ({"threads": []}, {"log_age_s": 5.0}, Verdict.HEALTHY),
        ({"threads": []}, {"log_age_s": 5000.0}, Verdict.SERVER_STALLED),
        ({"threads": []}, {"log_age_s": 5000.0, "unread": ({},)}, Verdict.WORKER_STUCK),
        ({"threads": [], "cpu_percent": 80.0}, {"log_age_s": 5000.0, "unread": ({},)}, Verdict.SLOW),
        ({"threads": []}, {"log_age_s": 5000.0, "server": "refused"}, Verdict.SERVER_DOWN),
        ({"threads": []}, {"log_age_s": 5000.0, "removed_age_s": 3.0, "unread": ({},)}, Verdict.HEALTHY),
        ({"threads": []}, {"unread": ({"age_s": 5000.0},)}, Verdict.WORKER_STUCK),
        ({"threads": []}, {"unread": ({"age_s": 5.0},)}, Verdict.HEALTHY),
        ({"threads": []}, {}, Verdict.SLOW),
        ({"threads": [ASLEEP]}, {"log_age_s": 5.0, "unread": ({},)}, Verdict.WORKER_STUCK),
    ],
)
def test_other_ends_of_a_foreign_pipeline(seen: dict[str, object], more: dict[str, object], expected: Verdict) -> None:
    assert foreign(client(**seen), **more).verdict is expected


def test_whose_each_directory_is() -> None:
    listing = {
        "entries": [
            {"name": "hsj-test-7-1-100", "kind": "directory", "files": {"done": 0}, "mtime": 90.0, "bytes": 10},
            {"name": "hsj-test-7-2-100", "kind": "directory", "files": {"done": 0}, "mtime": 95.0, "bytes": 10},
            {"name": ".tmp-hsj-test-8-1-9", "kind": "directory", "files": {}, "mtime": 95.0, "bytes": 10},
            {"name": "hsj-test-p5-9", "kind": "directory", "files": {"error": 3}, "mtime": 95.0, "bytes": 10},
            {"name": "psm_x", "kind": "other", "mtime": 1.0, "bytes": 10},
            {"name": "hsj-0ther-7-2-100", "kind": "directory", "files": {"done": 0}, "mtime": 95.0, "bytes": 10},
        ]
    }
    rows = {"7": {"attempt": 2, "state": "sent"}, "8": {"attempt": 1, "state": "sent"}}
    found = directories(listing, "test", rows, 100.0)
    assert [d["kind"] for d in found] == ["dump", "dump", "unfinished", "failure", "foreign", "foreign"]
    assert "superseded" in found[0]["owner"]
    assert found[1]["owner"] == "row 7's, which is sent: waited for"
    assert requests(found) == 1


def test_the_next_request() -> None:
    row = {"row": 9, "attempt": 1, "num_tokens": 33, "sample_id": "x", "strikes": 1}
    assert (next_request({"next": row}, "test") or {})["rid"] == "hsj-test-9-2-33"
    assert next_request({}, "test") is None
