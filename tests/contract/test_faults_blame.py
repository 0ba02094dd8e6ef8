"""Whose fault it was (DESIGN 4, 10, G10, G11): suspects, failures in a row, drains and what a killed worker left behind.

| case | test |
|---|---|
| a sample that the server dies of | test_a_sample_that_kills_the_server, test_one_sample_always_breaks_the_connection |
| nobody's strike | test_a_connection_that_breaks_once, test_a_server_killed_from_outside_is_nobodys_strike |
| E5, suspects of the last start | test_suspects_run_alone_at_the_next_start_too |
| failures in a row | test_failures_of_many_samples_in_a_row_slow_the_run_down, test_failures_in_a_row_past_the_pause_limit, test_a_few_bad_samples_in_a_row_are_failed_for_good |
| limits, ten times the latency | test_never_more_in_flight_than_asked, test_a_slow_server_is_no_fault |
| drain | test_drain_finishes_what_is_in_flight, test_drain_does_not_wait_for_a_lost_server |
| inherited requests | test_a_request_that_still_runs_is_awaited, test_a_request_that_never_came_is_sent_again_at_once, test_where_the_server_does_not_tell_an_old_request_is_aborted |
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from aiohttp import web

from hsjournal.dump.protocol import FailureReason
from hsjournal.errors import ExitCode
from hsjournal.events import Event
from hsjournal.mirror import Mirror
from tests.helpers.fake_server import Call, FakeServer, cut, good, hang, later, lethal, status, until
from tests.helpers.worker_runs import Run, collected  # noqa: F401

LENGTHS = (20, 33, 20, 64, 7, 41)
N = len(LENGTHS)


async def test_a_connection_that_breaks_once(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        together = asyncio.Barrier(2)  # one that breaks by itself is struck, and rightly

        async def both(call: Call) -> web.StreamResponse:
            await together.wait()
            return await cut(call)

        fake.on(both, row=(1, 2), attempt=1)
        fake.on(later(0.1), row=0)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    assert run.strikes() == [0] * N  # they were not alone: suspects at most
    assert {e.row for e in run.events("suspect")} == {1, 2}
    assert [row["suspect"] for row in run.rows()] == [0] * N
    run.assert_all_verified()


async def test_one_sample_always_breaks_the_connection(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    alone: list[int] = []

    async def note(call: Call) -> web.StreamResponse:
        alone.append(sum(c.rid.row is not None for c in call.server.current))
        return call.cut()

    async with FakeServer(run.root) as fake:
        fake.on(note, row=2)
        fake.on(later(0.1))
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.FAILED_SAMPLES
    assert alone[1:] == [1, 1, 1]  # a suspect runs alone
    assert run.row(2)["reason"] == "the connection to the server broke with this sample alone in flight"
    assert run.strikes() == [0, 0, 3, 0, 0, 0]
    assert len(run.events("server_death_strike", row=2)) == 3
    run.assert_all_verified(but=[2])


async def test_a_sample_that_kills_the_server(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        fake.on(lethal(), row=2)
        fake.on(later(0.1))
        end = await run.work(server_url=fake.url)
        assert len(fake.rids(2)) == 4  # once among others, then three times alone
    assert end.code == ExitCode.FAILED_SAMPLES
    assert run.strikes() == [0, 0, 3, 0, 0, 0]
    assert run.row(2)["state"] == "failed"
    assert len(run.events("server_rebooted")) == 4
    run.assert_all_verified(but=[2])


async def test_a_server_killed_from_outside_is_nobodys_strike(tmp_path: Path) -> None:
    run = Run(tmp_path, (20,))
    async with FakeServer(run.root) as fake:

        async def killed(call: Call) -> web.StreamResponse:
            mirror = Mirror(run.paths.mirror)
            mirror.record(Event("server_died", None, {"how": "SIGKILL", "crash": False}))  # as the supervisor says it
            return await lethal()(call)

        fake.on(killed, row=0, times=5)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    assert run.strikes() == [0]
    assert len(run.events("suspect_cleared", row=0)) == 5
    run.assert_all_verified()


async def test_suspects_run_alone_at_the_next_start_too(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    with run.journal() as journal:
        epoch = journal.raise_epoch()
        for row in (1, 4):
            journal.touch(row, "pending", epoch, suspect=1)  # type: ignore[arg-type]
    beside: dict[int, int] = {}

    async def note(call: Call) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        beside[call.rid.row or 0] = sum(c.rid.row is not None for c in call.server.current)
        return await good(call)

    async with FakeServer(run.root) as fake:
        fake.on(note)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    assert (beside[1], beside[4]) == (1, 1)
    assert max(beside.values()) > 1
    run.assert_all_verified()


async def test_failures_of_many_samples_in_a_row_slow_the_run_down(tmp_path: Path) -> None:
    run = Run(tmp_path, (20,) * 12, most_failures_in_a_row=4, retry_pause=0.1)
    async with FakeServer(run.root) as fake:
        bad = True

        async def refuse(call: Call) -> web.StreamResponse:
            return await (status(400) if bad else good)(call)

        fake.on(refuse, row=range(12))
        work = asyncio.create_task(run.work(server_url=fake.url))
        await until(lambda: bool(run.events("paused")))
        await asyncio.sleep(1.0)
        snapshot = Mirror(run.paths.mirror).read("snapshot.json")
        assert snapshot is not None
        assert "samples in a row failed, though the server does a probe" in snapshot["pauses"]["failures"]
        assert "the server answered 400" in snapshot["pauses"]["failures"]
        assert len(fake.calls) - fake.probes < 20  # not all of them three times
        assert "failed" not in run.states()
        assert fake.most_in_flight <= 4
        bad = False
        end = await work
    assert end.code == ExitCode.DONE, end.sentence
    assert sum(run.strikes()) < 12
    run.assert_all_verified()


async def test_failures_in_a_row_past_the_pause_limit(tmp_path: Path) -> None:
    run = Run(tmp_path, (20,) * 30, most_failures_in_a_row=4, retry_pause=0.2, pause_limit=1.0)
    async with FakeServer(run.root) as fake:
        fake.on(status(404, "no such endpoint"), row=range(30))
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.SERVER
    assert "paused for too long" in end.sentence
    assert "no such endpoint" in end.sentence
    assert "failed" not in run.states()


async def test_a_few_bad_samples_in_a_row_are_failed_for_good(tmp_path: Path) -> None:
    run = Run(tmp_path, (20,) * 10, most_failures_in_a_row=4, max_in_flight=1)
    bad = [2, 3, 4, 5, 6]
    async with FakeServer(run.root) as fake:
        fake.on(status(400), row=bad)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.FAILED_SAMPLES
    assert [run.row(row)["state"] for row in bad] == ["failed"] * 5
    run.assert_all_verified(but=bad)


async def test_a_slow_server_is_no_fault(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, sample_timeout=20.0, read_timeout=20.0)
    async with FakeServer(run.root) as fake:
        fake.on(later(1.0), row=range(N))
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    assert run.attempts() == [1] * N
    assert run.events("paused") == []


async def test_never_more_in_flight_than_asked(tmp_path: Path) -> None:
    run = Run(tmp_path, (20,) * 25, max_in_flight=3)
    async with FakeServer(run.root, max_in_flight=3) as fake:
        fake.on(later(0.3), row=range(25))
        fake.on(status(500), row=(4, 9), attempt=1)
        end = await run.work(server_url=fake.url)
        assert fake.most_in_flight == 3
    assert end.code == ExitCode.DONE, end.sentence
    run.assert_all_verified()


async def test_drain_finishes_what_is_in_flight(tmp_path: Path) -> None:
    run = Run(tmp_path, (20,) * 12, sample_timeout=20.0, read_timeout=20.0)
    async with FakeServer(run.root) as fake:
        go_on = asyncio.Event()

        async def held(call: Call) -> web.StreamResponse:
            await go_on.wait()
            return await good(call)

        def drains() -> bool:
            return bool((Mirror(run.paths.mirror).read("snapshot.json") or {}).get("draining"))

        fake.on(held, row=range(12))
        process = run.start_process(fake.url)
        try:
            await until(lambda: sum(c.rid.row is not None for c in fake.current) == 4)
            process.send_signal(signal.SIGTERM)
            await until(drains)
            go_on.set()
            output, _ = await asyncio.to_thread(process.communicate, timeout=60)
        finally:
            process.kill()
        assert process.returncode == ExitCode.INTERRUPTED, output
        assert len(fake.calls) == 2 + 4
        assert run.states() == ["verified"] * 4 + ["pending"] * 8
        assert run.in_root() == []
        fake.forget()
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE
    assert run.attempts() == [1] * 12
    run.assert_all_verified()


async def test_drain_does_not_wait_for_a_lost_server(tmp_path: Path) -> None:
    run = Run(tmp_path, (20,) * 12)
    async with FakeServer(run.root) as fake:
        fake.on(hang, row=range(12))
        process = run.start_process(fake.url)
        try:
            await until(lambda: sum(c.rid.row is not None for c in fake.current) == 4)
            await fake.die()
            await asyncio.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            output, _ = await asyncio.to_thread(process.communicate, timeout=60)
        finally:
            process.kill()
    assert process.returncode == ExitCode.INTERRUPTED, output
    assert run.states() == ["pending"] * 12
    assert run.strikes() == [0] * 12


async def test_a_request_that_still_runs_is_awaited(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, sample_timeout=5.0)
    async with FakeServer(run.root) as fake:
        rid = run.leave_sent(1, fake.boot_id)
        ghost = Call(fake, rid, run.ids[1], {}, None, 1)  # type: ignore[arg-type]
        fake.current.append(ghost)
        fake.soon(_finish(fake, ghost))
        end = await run.work(server_url=fake.url)
        assert fake.rids(1) == []  # it was never sent again
        assert fake.aborted == []
    assert end.code == ExitCode.DONE, end.sentence
    assert run.attempts() == [1] * N
    run.assert_all_verified()


async def _finish(fake: FakeServer, ghost: Call) -> None:
    await asyncio.sleep(0.8)
    ghost.publish()
    fake.current.remove(ghost)


async def test_a_request_that_never_came_is_sent_again_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, sample_timeout=30.0)
    async with FakeServer(run.root) as fake:
        run.leave_sent(1, fake.boot_id)
        end = await asyncio.wait_for(run.work(server_url=fake.url), 25)  # less than --sample-timeout
        assert fake.aborted == []
    assert end.code == ExitCode.DONE, end.sentence
    assert run.attempts() == [1, 2, 1, 1, 1, 1]
    assert run.strikes() == [0] * N
    run.assert_all_verified()


@pytest.mark.parametrize("outcome", ["dump", "nothing", "aborted"])
async def test_where_the_server_does_not_tell_an_old_request_is_aborted(tmp_path: Path, outcome: str) -> None:
    run = Run(tmp_path, LENGTHS, sample_timeout=30.0, dump_timeout=1.0)
    async with FakeServer(run.root, tells=False) as fake:
        rid = run.leave_sent(1, fake.boot_id)
        ghost = Call(fake, rid, run.ids[1], {}, None, 1)  # type: ignore[arg-type]

        async def react() -> None:
            await until(lambda: str(rid) in fake.aborted)
            if outcome == "dump":
                ghost.publish()
            elif outcome == "aborted":
                ghost.fail(FailureReason.ABORTED)

        fake.soon(react())
        end = await asyncio.wait_for(run.work(server_url=fake.url), 25)
        assert fake.aborted == [str(rid)]
    assert end.code == ExitCode.DONE, end.sentence
    assert run.attempts()[1] == (1 if outcome == "dump" else 2)
    assert run.strikes() == [0] * N
    run.assert_all_verified()
