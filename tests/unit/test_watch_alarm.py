"""One alarm for a stall, one line for its end; over lives, over verdicts that change, over looks without number."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hsjournal.mirror import SUPERVISOR, Mirror
from hsjournal.watch.alarm import Alarm
from hsjournal.watch.desk import Desk
from hsjournal.watch.notify import Addressees, Notifier
from hsjournal.watch.verdict import Finding, Verdict
from hsjournal.watch.view import View


class Told(Notifier):
    """Remembers instead of telling."""

    def __init__(self) -> None:
        super().__init__(Addressees(), lambda _event: None, {})
        self.got: list[tuple[str, Any]] = []

    def tell(self, kind: str, **fields: Any) -> None:
        self.got.append((kind, fields.get("verdict")))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    mirror = Mirror(tmp_path / "a" / "b" / "mirror")
    mirror.folder.parent.mkdir(parents=True)
    mirror.create()
    return Desk(mirror, View(), lambda _view: None)


def finding(verdict: Verdict, *, overdue: bool = False) -> Finding:
    return Finding(verdict, f"it is {verdict}", 9.0, 5, ("sink-1: D percpu_rwsem_wait",), overdue=overdue)


def kinds(desk: Desk) -> list[str]:
    return [event.kind for _, event in desk.mirror.events()]


def test_a_stall_is_told_once_though_its_verdict_changes(
    desk: Desk, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    alarm = Alarm(desk, told)
    for _ in range(3):
        alarm.see(finding(Verdict.HEALTHY), 90.0, 3)
    seen = [alarm.is_on]
    for _ in range(20):
        alarm.see(finding(Verdict.STORAGE_STALLED, overdue=True), 90.0, 3)
    for _ in range(20):
        alarm.see(finding(Verdict.UNKILLABLE, overdue=True), 90.0, 3)
    seen.append(alarm.is_on)
    assert told.got == [("stall", "storage_stalled")]
    assert kinds(desk) == ["stall", "stall_verdict"]
    clock[0] = 110.0
    alarm.see(finding(Verdict.HEALTHY), 90.0, 4)
    seen.append(alarm.is_on)
    assert seen == [False, True, True], "a new worker that is only patient is no recovery"
    alarm.see(finding(Verdict.HEALTHY), 105.0, 4)
    alarm.see(finding(Verdict.HEALTHY), 106.0, 4)
    assert told.got == [("stall", "storage_stalled"), ("recovery", "unkillable")]
    (event,) = [event for _, event in desk.mirror.events() if event.kind == "recovered"]
    assert event.detail["after_s"] == 10.0


def test_a_supervisor_that_is_started_anew_does_not_tell_the_same_stall_again(desk: Desk, told: Told) -> None:
    first = Alarm(desk, told)
    first.see(finding(Verdict.STORAGE_STALLED, overdue=True), 0.0, 3)
    first.see(finding(Verdict.UNKILLABLE, overdue=True), 0.0, 3)
    started = time.monotonic()
    second = Alarm(desk, told)
    second.take_over()
    second.see(finding(Verdict.UNKILLABLE, overdue=True), 0.0, 0)
    second.see(finding(Verdict.HEALTHY), started, 4)
    assert second.is_on, "the start is no progress"
    assert told.got == [("stall", "storage_stalled")]
    assert kinds(desk) == ["stall", "stall_verdict"]
    second.see(finding(Verdict.HEALTHY), time.monotonic(), 4)
    assert told.got == [("stall", "storage_stalled"), ("recovery", "unkillable")]
    third = Alarm(desk, told)
    third.take_over()
    assert not third.is_on, "it was over"
    third.see(finding(Verdict.SERVER_DOWN, overdue=True), 0.0, 5)
    third.forget()
    fourth = Alarm(desk, told)
    fourth.take_over()
    assert not fourth.is_on, "the end was told: the next start begins anew"


def test_the_alarm_of_a_run_that_is_not_ours_is_left_alone(desk: Desk, told: Told) -> None:
    Alarm(desk, told).see(finding(Verdict.UNKILLABLE, overdue=True), 0.0, 3)
    desk.owns_run = False
    waits_for_the_lock = Alarm(desk, told)
    waits_for_the_lock.see(finding(Verdict.STORAGE_STALLED, overdue=True), 0.0, 0)
    waits_for_the_lock.finish("its storage answers")
    desk.owns_run = True
    waits_for_the_lock.take_over()
    assert waits_for_the_lock.is_on


def test_the_next_stall_is_told_again(desk: Desk, told: Told) -> None:
    alarm = Alarm(desk, told)
    for _ in range(2):
        alarm.see(finding(Verdict.SERVER_DOWN, overdue=True), 0.0, 1)
        alarm.see(finding(Verdict.HEALTHY), 1e12, 1)
    assert [kind for kind, _ in told.got] == ["stall", "recovery", "stall", "recovery"]


def test_a_good_end_ends_it_and_no_end_is_told_without_a_stall(desk: Desk, told: Told) -> None:
    alarm = Alarm(desk, told)
    alarm.finish("every row has ended")
    assert told.got == []
    alarm.see(finding(Verdict.DISK_FULL, overdue=True), 0.0, 1)
    alarm.finish("every row has ended")
    assert told.got == [("stall", "disk_full"), ("recovery", "disk_full")]


def test_everybody_sees_who_why_and_the_way_out(desk: Desk, told: Told) -> None:
    Alarm(desk, told).see(finding(Verdict.STORAGE_STALLED, overdue=True), 0.0, 7)
    desk.draw()
    seen = (desk.mirror.read(SUPERVISOR) or {})["verdict"]
    assert (seen["verdict"], seen["row"], seen["overdue"]) == ("storage_stalled", 5, True)
    assert seen["threads"] == ["sink-1: D percpu_rwsem_wait"]
    assert "mend the disk" in seen["way_out"]
    ((_, event),) = desk.mirror.events()
    assert (event.kind, event.row, event.epoch, event.detail["silent_s"]) == ("stall", 5, 7, 9.0)
