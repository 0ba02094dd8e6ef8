"""Several servers, one journal, one worker: what holds for one server in FAULTS.md, groups A and B, must hold for each alone.

| fault | test |
|---|---|
| B1, B5 | test_a_wedged_server_is_set_aside |
| B7, C9 | test_a_row_that_was_sent_before_is_awaited_where_it_is |
| B12 | test_a_server_that_comes_back_as_another_is_set_aside, test_two_names_of_one_server |
| B14 | test_all_servers_gone_past_the_pause_limit |
| B16 | test_one_server_dies, test_all_servers_gone_for_a_while |
| E5 | test_a_sample_that_every_server_dies_of |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from hsjournal.config import Endpoint
from hsjournal.errors import ExitCode
from hsjournal.mirror import SNAPSHOT, Mirror
from tests.helpers.fake_server import FakeServer, good, hang, later, lethal, status, until
from tests.helpers.worker_runs import Run, collected  # noqa: F401

LENGTHS = (20, 33, 20, 64, 7, 41, 20, 12, 50, 9, 31, 28)


@asynccontextmanager
async def two(run: Run, *, roots: bool = False) -> AsyncIterator[tuple[FakeServer, FakeServer]]:
    """Two servers over one root, or over one each; ``run.settings`` names both."""
    second = run.root
    if roots:
        second = run.root.with_name("root-2")
        second.mkdir(mode=0o700)
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(FakeServer(run.root, boot_id="a-1"))
        b = await stack.enter_async_context(FakeServer(second, boot_id="b-1"))
        yield a, b


def more(server: FakeServer) -> tuple[Endpoint, ...]:
    return (Endpoint(server.url, str(server.root)),)


def rows_at(server: FakeServer) -> set[int]:
    return {call.rid.row for call in server.calls if call.rid.row is not None}


@pytest.mark.parametrize("roots", [False, True], ids=["one root", "a root each"])
async def test_rows_are_spread(tmp_path: Path, roots: bool) -> None:
    run = Run(tmp_path, LENGTHS, max_in_flight=2)
    async with two(run, roots=roots) as (a, b):
        for server in (a, b):
            server.on(later(0.3))
        end = await run.work(server_url=a.url, more_servers=more(b))
        assert end.code == ExitCode.DONE, end.sentence
        assert rows_at(a) | rows_at(b) == set(range(len(LENGTHS)))
        assert not rows_at(a) & rows_at(b)
        assert min(len(rows_at(a)), len(rows_at(b))) >= 3
        assert a.most_in_flight == b.most_in_flight == 2  # each server has its own limit
        assert list(b.root.iterdir()) == []
        by_url = {a.url: rows_at(a), b.url: rows_at(b)}
        boots = {a.url: "a-1", b.url: "b-1"}
        for row in run.rows():
            assert row["row"] in by_url[row["server"]]
            assert row["boot_id"] == boots[row["server"]]
    run.assert_all_verified()
    servers = {s["url"]: s for s in (Mirror(run.paths.mirror).read(SNAPSHOT) or {})["servers"]}
    assert {url: s["up"] for url, s in servers.items()} == dict.fromkeys(by_url, True)
    assert {url: s["verified"] for url, s in servers.items()} == {url: len(rows) for url, rows in by_url.items()}


async def test_the_least_loaded_takes_the_next_row(tmp_path: Path) -> None:
    run = Run(tmp_path, (200, *[5] * 12), max_in_flight=4)
    async with two(run) as (a, b):
        a.on(later(1.0), row=0)
        b.on(later(1.0), row=0)
        end = await run.work(server_url=a.url, more_servers=more(b))
        free = b if 0 in rows_at(a) else a
        assert end.code == ExitCode.DONE, end.sentence
        assert {1, 2, 3, 4} <= rows_at(free)  # counted in tokens, not in requests
    run.assert_all_verified()


@pytest.mark.parametrize("roots", [False, True], ids=["one root", "a root each"])
async def test_one_server_dies(tmp_path: Path, roots: bool) -> None:
    run = Run(tmp_path, LENGTHS, max_in_flight=2)
    async with two(run, roots=roots) as (a, b):
        a.on(hang)
        b.on(later(0.05))
        work = asyncio.create_task(run.work(server_url=a.url, more_servers=more(b)))
        await until(lambda: len(rows_at(a)) == 2)
        await a.die()
        end = await work
        assert end.code == ExitCode.DONE, end.sentence
        assert rows_at(b) == set(range(len(LENGTHS)))
    run.assert_all_verified()
    assert run.strikes() == [0] * len(LENGTHS)
    assert not run.events("paused")  # the run itself never paused
    (aside,) = run.events("server_set_aside")
    assert aside.detail["where"] == a.url


async def test_it_comes_back_and_is_used_again(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS * 3, max_in_flight=2)
    async with two(run) as (a, b):
        b.on(later(0.1))
        a.soon(a.bounce("a-2", 0.3))
        end = await run.work(server_url=a.url, more_servers=more(b))
        assert end.code == ExitCode.DONE, end.sentence
        assert any(row["boot_id"] == "a-2" for row in run.rows())
    run.assert_all_verified()


async def test_a_wedged_server_is_set_aside(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, max_in_flight=2, sample_timeout=0.6)
    async with two(run) as (a, b):
        a.on(good, probes=True, times=2)  # the preflight goes well
        a.on(hang, probes=True)
        end = await run.work(server_url=a.url, more_servers=more(b))
        assert end.code == ExitCode.DONE, end.sentence
        assert rows_at(b) == set(range(len(LENGTHS)))
        assert a.aborted
    run.assert_all_verified()
    assert run.strikes() == [0] * len(LENGTHS)
    assert not run.events("paused")
    told = {s["url"]: s for s in (Mirror(run.paths.mirror).read(SNAPSHOT) or {})["servers"]}
    assert not told[a.url]["up"]
    assert "did not answer a probe" in told[a.url]["problem"]


async def test_a_row_that_fails_at_one_server_is_tried_at_the_other(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, max_in_flight=1)
    async with two(run) as (a, b):
        a.on(status(500))
        end = await run.work(server_url=a.url, more_servers=more(b))
        assert end.code == ExitCode.DONE, end.sentence
    run.assert_all_verified()
    assert max(run.strikes()) <= 1


async def test_a_server_that_comes_back_as_another_is_set_aside(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, max_in_flight=2)
    async with two(run) as (a, b):
        b.on(later(0.15))
        a.on(hang)
        work = asyncio.create_task(run.work(server_url=a.url, more_servers=more(b)))
        await until(lambda: len(rows_at(a)) == 2)
        a.meta["capture_layers"] = (2, 4, 6)
        await a.bounce("a-2", 0.1)
        end = await work
        assert end.code == ExitCode.DONE, end.sentence
    run.assert_all_verified()
    told = {s["url"]: s for s in (Mirror(run.paths.mirror).read(SNAPSHOT) or {})["servers"]}
    assert "capture layers" in told[a.url]["problem"]


async def test_another_one_at_the_start_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with two(run) as (a, b):
        b.meta["capture_layers"] = (2, 4, 6)
        end = await run.work(server_url=a.url, more_servers=more(b))
    assert end.code == ExitCode.SERVER
    assert "capture layers" in end.sentence
    assert run.attempts() == [0] * len(LENGTHS)


async def test_two_names_of_one_server(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root, max_probes=2) as fake:
        other = fake.url.replace("127.0.0.1", "localhost")
        end = await run.work(server_url=fake.url, more_servers=(Endpoint(other, str(run.root)),))
    assert end.code == ExitCode.SERVER
    assert "one and the same server" in end.sentence


async def test_all_servers_gone_for_a_while(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, max_in_flight=2)
    async with two(run) as (a, b):
        for server in (a, b):
            server.on(hang, attempt=1)
        work = asyncio.create_task(run.work(server_url=a.url, more_servers=more(b)))
        await until(lambda: len(rows_at(a)) == len(rows_at(b)) == 2)
        await a.die()
        await b.die()
        await until(lambda: bool(run.events("paused")))
        for server in (a, b):
            server.forget()
        await b.rise("b-2")
        end = await work
        assert end.code == ExitCode.DONE, end.sentence
    run.assert_all_verified()
    assert run.strikes() == [0] * len(LENGTHS)
    (paused,) = run.events("paused")
    assert paused.detail["what"] == "server"
    assert len(run.events("resumed")) == 1


async def test_all_servers_gone_past_the_pause_limit(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, max_in_flight=2, pause_limit=0.6)
    async with two(run) as (a, b):
        b.on(later(0.3))
        work = asyncio.create_task(run.work(server_url=a.url, more_servers=more(b)))
        await until(lambda: len(rows_at(b)) == 2)
        await a.die()
        await asyncio.sleep(0.8)  # longer than the limit, while the other one works
        assert not work.done()
        await b.die()
        end = await work
    assert end.code == ExitCode.SERVER
    assert "no usable server" in end.sentence


@pytest.mark.parametrize("roots", [False, True], ids=["one root", "a root each"])
async def test_a_row_that_was_sent_before_is_awaited_where_it_is(tmp_path: Path, roots: bool) -> None:
    run = Run(tmp_path, LENGTHS)
    async with two(run, roots=roots) as (a, b):
        b.on(later(0.5), row=3)
        rid = run.leave_sent(3, "b-1")
        lost = run.leave_sent(4, "of a server that is gone")
        send = asyncio.create_task(_generate(b.url, str(rid), list(run.ids[3])))
        await until(lambda: bool(b.current))
        b.forget()
        end = await run.work(server_url=a.url, more_servers=more(b))
        await send
        assert end.code == ExitCode.DONE, end.sentence
        assert a.rids(3) == []
        assert b.rids(3) == [str(rid)]  # not sent again: it was there
        assert str(lost) not in a.rids(4) + b.rids(4)
    run.assert_all_verified()
    assert run.row(3)["attempt"] == 1
    assert run.row(3)["boot_id"] == "b-1"
    assert run.row(4)["attempt"] == 2


async def test_a_sample_that_every_server_dies_of(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, max_strikes=2)
    async with two(run) as (a, b):
        for server in (a, b):
            server.on(lethal(0.1), row=5)
        end = await run.work(server_url=a.url, more_servers=more(b))
    assert end.code == ExitCode.FAILED_SAMPLES, end.sentence
    run.assert_all_verified(but=[5])
    assert run.row(5)["state"] == "failed"
    assert [s for row, s in enumerate(run.strikes()) if row != 5] == [0] * (len(LENGTHS) - 1)


async def _generate(url: str, rid: str, ids: list[int]) -> None:
    """As an earlier worker sent it."""
    from hsjournal.server.client import ServerClient

    async with ServerClient(url) as client:
        await client.generate(rid, ids)
