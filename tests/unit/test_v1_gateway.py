"""The gateway before a v1 server: no count is lost, no bar falls too early, and hundreds of leftovers cost little."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from hsjournal.dump.protocol import RequestId
from hsjournal.server.client import HeldError, RefusedError, ServerClient
from hsjournal.server.v1 import gateway
from hsjournal.server.v1.__main__ import Front
from hsjournal.server.v1.gateway import Desk, Setup, pause
from tests.helpers.v1_server import LAYERS, V1Call, V1Server

RUN = "abcd1234"


def rid(row: int, tokens: int) -> RequestId:
    return RequestId.sample(RUN, row, 1, tokens)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    (tmp_path / "root").mkdir(mode=0o700)
    return Desk(Setup(tmp_path / "root", LAYERS, "post", tmp_path / "state"))


async def until(holds: Callable[[], object], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 - other threads and processes make it so
            await asyncio.sleep(0.02)


def test_a_root_that_is_gone_costs_no_count(desk: Desk) -> None:
    async def story() -> None:
        await desk.admit(rid(0, 5), [1] * 5)
        shutil.rmtree(desk.setup.root)
        with pytest.raises(FileNotFoundError):
            await desk.admit(rid(1, 7), [1] * 7)
        desk.setup.root.mkdir(mode=0o700)
        async with asyncio.timeout(5):
            await desk.admit(rid(1, 7), [1] * 7)
        assert desk.in_flight == [str(rid(0, 5)), str(rid(1, 7))]

    asyncio.run(story())


@pytest.mark.parametrize("steps", range(8))
def test_a_client_that_goes_away_during_admission_costs_no_count(desk: Desk, steps: int) -> None:
    """Cancelled after so many turns of the loop, wherever that is."""

    async def story() -> None:
        task = asyncio.create_task(desk.admit(rid(1, 7), [1] * 7))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():  # it was through
            await desk.refused(7, str(rid(1, 7)))
        async with asyncio.timeout(5):
            await desk.admit(rid(2, 7), [2] * 7)

    asyncio.run(story())


def test_who_waits_for_another_of_its_length_is_told_so_after_a_while(desk: Desk) -> None:
    desk.setup = replace(desk.setup, admit_timeout=0.2)

    async def story() -> None:
        await desk.admit(rid(1, 7), [1] * 7)
        with pytest.raises(gateway.HeldError, match="another request of 7 tokens is at the server"):
            await desk.admit(rid(2, 7), [2] * 7)
        await desk.refused(7, str(rid(2, 7)))
        assert desk.in_flight == [str(rid(1, 7))], "what was never sent ends nobody else's request"

    asyncio.run(story())


def test_hundreds_of_leftovers_cost_little(desk: Desk) -> None:
    assert pause(0.0001, waits=True) == gateway.POLL_S
    assert pause(0.004, waits=True) == pytest.approx(0.08)
    assert pause(5.0, waits=True) == gateway.LONGEST_POLL_S
    for number in range(800):
        folder = desk.setup.root / f"req_{number}"
        folder.mkdir()
        (folder / "done").touch()

    async def story() -> float:
        await desk.look()  # each is read once
        await desk.admit(rid(1, 7), [1] * 7)
        task = asyncio.create_task(desk.run())
        used, begin = time.thread_time(), time.monotonic()
        await asyncio.sleep(1.5)
        share = (time.thread_time() - used) / (time.monotonic() - begin)
        task.cancel()
        return share

    assert asyncio.run(story()) < 0.12


@asynccontextmanager
async def front(server: V1Server, folder: Path) -> AsyncIterator[tuple[Front, Desk, ServerClient]]:
    """A gateway in this process, and the worker's own client of it."""
    desk = Desk(Setup(server.root, LAYERS, "post", folder / "state", 2.0))
    made = Front(desk, server.url)
    async with TestClient(TestServer(made.app())) as http, ServerClient(str(http.make_url(""))) as client:
        yield made, desk, client


def never(call: V1Call) -> int:
    """Taken, and not answered before the client says so."""
    call.aborted.wait(30)
    return 500


async def give_up(client: ServerClient, server: V1Server, row: int, tokens: int) -> None:
    """A request that the server keeps, and that its client gives up."""
    request = asyncio.create_task(client.generate(str(rid(row, tokens)), [1] * tokens))
    await until(lambda: any(call.row == row for call in server.calls))
    request.cancel()
    await client.abort(str(rid(row, tokens)))


def test_only_a_server_that_refuses_connections_has_ended(tmp_path: Path) -> None:
    """An error of our own on the way there (a network that can't be reached, no descriptor) lifts no bar."""

    def deaf(call: V1Call) -> int:
        time.sleep(3)
        call.dump()
        return 200

    async def story(server: V1Server) -> None:
        async with front(server, tmp_path) as (made, desk, client):
            await client.server_info()
            boot_id = desk.boot_id
            await give_up(client, server, 0, 7)
            assert desk.barred == [7]
            made._upstream = "http://255.255.255.255:9"
            with pytest.raises(RefusedError, match="503"):
                await client.server_info()
            made._upstream = server.url
            await client.server_info()
            assert (desk.boot_id, desk.barred) == (boot_id, [7])

    with V1Server(tmp_path / "root", {(0, 1): deaf}) as server:
        asyncio.run(story(server))


def test_after_a_restart_the_bars_fall_when_the_server_has_nothing_left_to_do(tmp_path: Path) -> None:
    async def story(server: V1Server) -> None:
        async with front(server, tmp_path) as (_, desk, client):
            await client.server_info()
            boot_id = desk.boot_id
            request = asyncio.create_task(client.generate(str(rid(0, 7)), [1] * 7))
            await until(lambda: server.calls)
            server.stop()
            with pytest.raises(RefusedError, match="503"):
                await client.server_info()
            server.start()  # and a thread of the last life still has the request
            await client.server_info()
            assert desk.boot_id != boot_id
            assert desk.barred == [7]
            await asyncio.sleep(2.5)
            assert desk.barred == [7], "the server says that it has something to do"
            server.calls[0].aborted.set()
            await until(lambda: not desk.barred)
            request.cancel()

    with V1Server(tmp_path / "root", {(0, 1): never}) as server:
        asyncio.run(story(server))


def test_a_length_that_waits_for_a_restart_is_held_at_once_and_others_go(tmp_path: Path) -> None:
    def keeps(call: V1Call) -> int:
        time.sleep(1.0)
        return 500

    async def story(server: V1Server) -> None:
        async with front(server, tmp_path) as (_, desk, client):
            await give_up(client, server, 0, 7)
            with pytest.raises(HeldError, match="started anew"):
                async with asyncio.timeout(10):
                    await client.generate(str(rid(1, 7)), [1] * 7)
            assert (await client.generate(str(rid(2, 9)), [1] * 9)).prompt_tokens == 9
            assert [call.row for call in server.calls] == [0, 2]
            server.stop()
            with pytest.raises(RefusedError, match="503"):
                await client.server_info()
            server.start()
            await client.server_info()
            assert desk.barred == [], "it tells no load: its new life must do"
            await client.generate(str(rid(1, 7)), [1] * 7)

    with V1Server(tmp_path / "root", {(0, 1): keeps}, tells_load=False) as server:
        asyncio.run(story(server))
