"""FAULTS.md group B, what the server answers: statuses, nonsense, refusals, keys. The real worker, a scripted server.

| fault | test |
|---|---|
| A21, B5 by status | test_an_error_for_one_sample, test_a_refused_sample, test_an_overloaded_server_is_nobodys_strike, test_one_sample_always_finds_the_server_busy |
| A22 without an end | test_an_answer_and_never_a_dump |
| B7 | test_an_aborted_request_is_sent_again |
| captures that fail | test_a_capture_that_fails_for_one_sample, test_an_unsupported_server_ends_the_run (no_room: test_faults_handover.py) |
| keys in logs | test_no_access, test_the_key_reaches_no_file |
| replies are not proof | test_an_answer_that_makes_no_sense, test_an_error_after_the_dump_changes_nothing |
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from hsjournal.dump.protocol import FailureReason
from hsjournal.errors import ExitCode
from tests.helpers.fake_server import Call, FakeServer, failure, hang, no_dump, status
from tests.helpers.worker_runs import Run, collected  # noqa: F401

LENGTHS = (20, 33, 20, 64, 7, 41)
N = len(LENGTHS)


async def test_an_answer_and_never_a_dump(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, dump_timeout=0.2)
    async with FakeServer(run.root) as fake:
        fake.on(no_dump, row=2)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.FAILED_SAMPLES
    assert run.row(2)["reason"] == "the server answered, but no dump appeared within 0.2 s"
    assert run.attempts()[2] == 3
    run.assert_all_verified(but=[2])


async def test_a_dump_that_is_missing_since_the_root_was_full_is_nobodys_strike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full root takes not even the report of the failed capture: the answer comes, and nothing else ever."""
    run = Run(tmp_path, LENGTHS, dump_timeout=0.2)
    monkeypatch.setattr("hsjournal.dump.room.Room.was_full", lambda _room, within: within >= 0.2)
    async with FakeServer(run.root) as fake:
        fake.on(no_dump, row=2, times=2)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE
    assert run.attempts()[2] == 3
    assert run.strikes() == [0] * len(LENGTHS)


@pytest.mark.parametrize(("full", "code"), [(True, ExitCode.NO_ROOM), (False, ExitCode.SERVER)])
async def test_a_server_that_stays_unusable_ends_with_5_if_its_root_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool, code: ExitCode
) -> None:
    """It may be full before the first sample, so that not even the preflight's probe comes through."""
    run = Run(tmp_path, LENGTHS, pause_limit=0.5)
    monkeypatch.setattr("hsjournal.dump.room.Room.was_full", lambda _room, within: full)
    async with FakeServer(run.root) as fake:
        fake.on(status(500), probes=True)
        end = await run.work(server_url=fake.url)
    assert end.code == code, end.sentence
    assert ("is full" in end.sentence) is full


@pytest.mark.parametrize("code", [500, 504, 408])
async def test_an_error_for_one_sample(tmp_path: Path, code: int) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        fake.on(status(code), row=4)
        end = await run.work(server_url=fake.url)
        assert fake.probes > 2  # the server was asked whether it is the row's fault
    assert end.code == ExitCode.FAILED_SAMPLES
    assert run.row(4)["reason"] == f'the server answered {code}: {{"error": {{"message": "as the test says"}}}}'
    assert run.strikes() == [0, 0, 0, 0, 3, 0]
    run.assert_all_verified(but=[4])


async def test_a_refused_sample(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        fake.on(status(400, "too long"), row=3)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.FAILED_SAMPLES
    assert run.row(3)["reason"] == 'the server answered 400: {"error": {"message": "too long"}}'
    assert run.attempts()[3] == 3
    run.assert_all_verified(but=[3])


@pytest.mark.parametrize("code", [429, 502, 503])
async def test_an_overloaded_server_is_nobodys_strike(tmp_path: Path, code: int) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        fake.on(status(code), row=range(N), times=7)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    assert run.strikes() == [0] * N
    assert f"the server answered {code}" in run.events("paused")[0].detail["why"]
    run.assert_all_verified()


async def test_one_sample_always_finds_the_server_busy(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        fake.on(status(503), row=0)
        end = await run.work(server_url=fake.url)
        assert len(fake.rids(0)) <= 10
    assert end.code == ExitCode.FAILED_SAMPLES
    assert run.row(0)["strikes"] == 3
    run.assert_all_verified(but=[0])


async def test_no_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSJOURNAL_API_KEY", "sk-very-secret")
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        fake.on(status(401, "wrong key sk-very-secret"), row=0)
        end = await run.work(server_url=fake.url)
        assert all(headers["Authorization"] == "Bearer sk-very-secret" for headers in fake.headers)
    assert end.code == ExitCode.SERVER
    assert "refuses access" in end.sentence
    assert "HSJOURNAL_API_KEY" in end.sentence
    assert "wrong key ***" in end.sentence
    assert run.strikes() == [0] * N


async def test_the_key_reaches_no_file(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, log_level="DEBUG")
    async with FakeServer(run.root) as fake:
        fake.on(status(400, "wrong key sk-very-secret"), row=0)
        fake.on(status(500, "wrong key sk-very-secret"), row=1)
        process = run.start_process(fake.url, HSJOURNAL_API_KEY="sk-very-secret")
        output, _ = await asyncio.to_thread(process.communicate, timeout=60)
        assert all(headers["Authorization"] == "Bearer sk-very-secret" for headers in fake.headers)
    assert process.returncode == ExitCode.FAILED_SAMPLES, output
    assert "***" in run.row(0)["reason"]
    assert b"very-secret" not in output
    places = [run.paths.run_dir, run.paths.mirror, run.root]
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert any(path.name == "worker.log" for path in files)
    assert [path for path in files if b"very-secret" in path.read_bytes()] == []


@pytest.mark.parametrize("text", ["<html>", '{"meta_info": 3}', '{"meta_info": {"prompt_tokens": "many"}}', "[]", ""])
async def test_an_answer_that_makes_no_sense(tmp_path: Path, text: str) -> None:
    run = Run(tmp_path, LENGTHS)

    async def nonsense(call: Call) -> web.StreamResponse:
        call.server.soon(_publish(call, 0.1))
        return web.Response(text=text)

    async with FakeServer(run.root) as fake:
        fake.on(nonsense, row=(1, 2))
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    assert run.strikes() == [0] * N
    run.assert_all_verified()  # only the dump counts


async def _publish(call: Call, seconds: float) -> None:
    await asyncio.sleep(seconds)
    call.publish()


async def test_an_error_after_the_dump_changes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)

    async def both(call: Call) -> web.StreamResponse:
        call.publish()
        return await status(500)(call)

    async with FakeServer(run.root) as fake:
        fake.on(both, row=(0, 1))
        fake.on(_dump_then_cut, row=2)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    assert run.attempts() == [1] * N
    run.assert_all_verified()


async def _dump_then_cut(call: Call) -> web.StreamResponse:
    call.publish()
    return call.cut()


async def test_an_aborted_request_is_sent_again(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)

    async def aborted(call: Call) -> web.StreamResponse:
        return call.reply(finish="abort")

    async with FakeServer(run.root) as fake:
        fake.on(aborted, row=1, attempt=1)
        fake.on(failure(FailureReason.ABORTED), row=2, attempt=1)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    assert run.strikes() == [0] * N
    assert run.attempts() == [1, 2, 2, 1, 1, 1]
    run.assert_all_verified()


@pytest.mark.parametrize("reason", [FailureReason.INTERNAL, FailureReason.MISMATCH])
async def test_a_capture_that_fails_for_one_sample(tmp_path: Path, reason: FailureReason) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        fake.on(failure(reason), row=1)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.FAILED_SAMPLES
    assert run.row(1)["reason"] == f"{reason}: as the test says"
    assert len(run.events("capture_failed", row=1)) == 3
    run.assert_all_verified(but=[1])


async def test_an_unsupported_server_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        fake.on(failure(FailureReason.UNSUPPORTED), row=1)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.SERVER
    assert "can't capture: unsupported: as the test says" in end.sentence
    assert run.strikes() == [0] * N


async def test_wrong_dumps_while_the_server_is_away_are_nobodys_strike(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)

    async def bad(call: Call) -> web.StreamResponse:
        await asyncio.sleep(0.2)  # longer than the preflight's word counts
        call.server.soon(last_words(call))
        return await hang(call)

    async def last_words(call: Call) -> None:
        call.publish(num_tokens=3)
        await call.server.bounce("life-2")

    async with FakeServer(run.root) as fake:
        fake.on(bad, row=0, attempt=1)
        end = await run.work(server_url=fake.url, max_in_flight=1)
    assert end.code == ExitCode.DONE, end.sentence
    assert run.strikes() == [0] * N
    run.assert_all_verified()
