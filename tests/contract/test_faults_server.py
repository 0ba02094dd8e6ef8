"""FAULTS.md group B: the server's life, and HTTP. The real worker against a scripted server.

| fault | test |
|---|---|
| B1, B5 | test_generate_is_dead_behind_a_live_front, test_a_stalled_server_that_comes_round, test_one_sample_is_never_answered |
| B2, B3 | test_health_is_never_asked (and in every test: never two probes at a time) |
| B4 | test_a_slow_look_at_the_server |
| B6 | in every test: the scripted server refuses a body that asks for more than one token |
| B7 | test_a_late_dump_of_an_earlier_attempt, test_a_late_dump_of_a_verified_sample |
| B12 | test_another_model_on_resume, test_another_model_after_a_restart |
| B14 | test_no_server_past_the_pause_limit |
| B16 | test_an_outage_costs_no_strike |
| also | answers: test_faults_answers.py; poison, suspects, failures in a row, drain: test_faults_blame.py |

Not here: B13 (tests/integration/test_server_own.py); B15 (tests/drills/test_poison.py); protocol v1
(tests/integration/test_v1_job.py).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiohttp import web

from hsjournal.errors import ExitCode
from hsjournal.mirror import Mirror
from tests.helpers.fake_server import Call, FakeServer, good, hang, later, lethal, status, until
from tests.helpers.worker_runs import Run, collected  # noqa: F401

LENGTHS = (20, 33, 20, 64, 7, 41)
N = len(LENGTHS)


async def test_generate_is_dead_behind_a_live_front(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, sample_timeout=1.0, pause_limit=2.5)
    async with FakeServer(run.root) as fake:
        fake.on(good, probes=True, times=2)
        fake.on(hang, probes=True)
        end = await run.work(server_url=fake.url)
        asked = len(fake.calls)
    assert end.code == ExitCode.SERVER
    assert "no usable server for 2 s" in end.sentence
    assert "is up, but did not answer a probe within 1 s" in end.sentence
    assert run.strikes() == [0] * N
    assert max(run.attempts()) == 1  # held back, not tried again and again
    assert asked < 20
    (paused,) = run.events("paused")
    assert paused.detail["what"] == "server"
    assert "the server does not do a probe either" in paused.detail["why"]


async def test_a_stalled_server_that_comes_round(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, sample_timeout=1.0)
    async with FakeServer(run.root) as fake:
        fake.on(good, probes=True, times=2)
        fake.on(hang, probes=True, times=8)
        end = await run.work(server_url=fake.url)
        assert fake.aborted  # what timed out is no longer wanted
    assert end.code == ExitCode.DONE, end.sentence
    assert run.strikes() == [0] * N
    assert run.events("paused")
    assert run.events("resumed")
    run.assert_all_verified()


async def test_one_sample_is_never_answered(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, sample_timeout=1.5)
    async with FakeServer(run.root) as fake:
        fake.on(hang, row=2)
        end = await run.work(server_url=fake.url)
        assert fake.aborted == fake.rids(2)
        assert len(fake.rids(2)) == 3
    assert end.code == ExitCode.FAILED_SAMPLES
    assert run.row(2)["reason"] == "neither an answer nor a dump within 1.5 s"
    assert run.strikes() == [0, 0, 3, 0, 0, 0]
    run.assert_all_verified(but=[2])


async def test_health_is_never_asked(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        end = await run.work(server_url=fake.url)
        assert set(fake.looks) == {"/server_info"}
        assert fake.probes == 2
    assert end.code == ExitCode.DONE


async def test_a_slow_look_at_the_server(tmp_path: Path) -> None:
    run = Run(tmp_path, (20,))
    async with FakeServer(run.root) as fake:
        fake.look_delay = 1.2
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    assert run.events("paused") == []


async def test_a_late_dump_of_an_earlier_attempt(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, sample_timeout=1.5, read_timeout=5.0)
    second = asyncio.Event()

    async def late(call: Call) -> web.StreamResponse:
        await second.wait()
        call.publish(noise=5)  # were it taken, the file would hold it
        return call.reply()

    async def slow(call: Call) -> web.StreamResponse:
        second.set()
        await asyncio.sleep(0.3)
        return await good(call)

    async with FakeServer(run.root, max_in_flight=6) as fake:
        fake.on(late, row=1, attempt=1)
        fake.on(slow, row=1, attempt=2)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    assert run.attempts()[1] == 2
    run.assert_all_verified()
    (event,) = run.events("dump_removed")
    assert (event.row, event.detail["name"]) == (1, "hsj-fa017run-1-1-33")


async def test_a_late_dump_of_a_verified_sample(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, sample_timeout=1.0, read_timeout=5.0, max_strikes=20)
    (done := asyncio.Event()).clear()

    async def late(call: Call) -> web.StreamResponse:
        await done.wait()
        call.publish(noise=5)
        return call.reply()

    async def last(call: Call) -> web.StreamResponse:
        await until(lambda: run.row(1)["state"] == "verified")
        done.set()
        await asyncio.sleep(0.1)
        return await good(call)

    async with FakeServer(run.root, max_in_flight=6) as fake:
        fake.on(late, row=1, attempt=1)
        fake.on(last, row=5)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    run.assert_all_verified()


async def test_another_model_on_resume(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, manifest={"options": {"model_path": "/models/fake"}})
    async with FakeServer(run.root) as fake:
        fake.on(status(500), row=(1, 2, 3, 4, 5))
        await run.work(server_url=fake.url)
        before = run.attempts()
        fake.info["model_path"] = "/models/other"
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.SERVER
    assert "model is /models/other, the run was made with /models/fake" in end.sentence
    assert run.attempts() == before  # stopped before the first send


async def test_a_restarted_server_with_the_same_model(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)

    async def bounce(call: Call) -> web.StreamResponse:
        call.server.soon(call.server.bounce("life-2"))
        return await good(call)  # the dump is whole: the answer gets lost

    async with FakeServer(run.root) as fake:
        fake.on(bounce, row=1, times=1)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    (event,) = run.events("server_rebooted")
    assert event.detail == {"from": "life-1", "to": "life-2"}
    assert run.strikes() == [0] * N
    assert run.row(1)["boot_id"] == "life-1"
    assert run.attempts()[1] == 1  # what was there already is not asked for again
    run.assert_all_verified()


async def test_another_model_after_a_restart(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)

    async def replace(call: Call) -> web.StreamResponse:
        call.server.meta = {"capture_layers": (0, 2, 4)}
        return await lethal()(call)

    async with FakeServer(run.root) as fake:
        fake.on(replace, row=1, times=1)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.SERVER
    assert "[0, 2, 4]" in end.sentence
    assert "than this run was made for" in end.sentence
    assert run.strikes() == [0] * N
    assert "failed" not in run.states()


async def test_a_restart_between_answer_and_dump(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, dump_timeout=20.0, sample_timeout=30.0)

    async def answered(call: Call) -> web.StreamResponse:
        call.server.soon(call.server.bounce("life-2", 0.3))
        return call.reply()

    async with FakeServer(run.root) as fake:
        fake.on(answered, row=1, attempt=1)
        fake.on(later(0.2), row=(3, 4, 5))  # something notices that the server is gone
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    (event,) = run.events("sent_back", row=1)
    assert event.detail["why"] == "the server was started anew before the dump was there"
    assert run.strikes() == [0] * N
    run.assert_all_verified()


async def test_no_server_past_the_pause_limit(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, pause_limit=0.5)
    end = await run.work(server_url="http://127.0.0.1:9")
    assert end.code == ExitCode.SERVER
    assert "no usable server for 0 s: the server at http://127.0.0.1:9 can't be reached" in end.sentence
    assert run.attempts() == [0] * N


async def test_an_outage_costs_no_strike(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS * 3)
    async with FakeServer(run.root) as fake:
        gone, back = asyncio.Event(), asyncio.Event()

        async def leave(call: Call) -> web.StreamResponse:
            await until(lambda: len(fake.current) == 4)  # one alone would be suspected
            call.server.soon(outage())
            return await good(call)

        async def outage() -> None:
            await fake.die()
            gone.set()
            await back.wait()
            await fake.rise()

        def told() -> bool:
            snapshot = Mirror(run.paths.mirror).read("snapshot.json") or {"pauses": {}}
            return "can't be reached" in snapshot["pauses"].get("server", "")

        fake.on(leave, row=5, times=1)
        fake.on(later(0.1))
        work = asyncio.create_task(run.work(server_url=fake.url))
        await gone.wait()
        await until(lambda: "sent" not in run.states() and told())
        during = run.attempts()
        await asyncio.sleep(0.7)
        assert run.attempts() == during  # nothing is sent into the void
        back.set()
        end = await work
    assert end.code == ExitCode.DONE, end.sentence
    assert run.strikes() == [0] * (3 * N)
    assert max(run.attempts()) <= 3
    assert [e.detail["what"] for e in run.events("resumed")] == ["server"]
    run.assert_all_verified()
