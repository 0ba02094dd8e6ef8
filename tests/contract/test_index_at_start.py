"""What lies beside the files is whole again as soon as a worker starts, not only when it ends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from aiohttp import web

from hsjournal.catalogue.index import NAME
from hsjournal.ops.retry import retry
from tests.helpers.fake_server import Call, FakeServer, good, status, until
from tests.helpers.worker_runs import Run, collected  # noqa: F401


def rows_in(index: Path) -> list[int]:
    return [json.loads(line)["row"] for line in index.read_text().splitlines()]


async def test_a_lost_index_is_back_before_the_first_sample_of_a_resume_is_done(tmp_path: Path) -> None:
    run, go_on = Run(tmp_path, [5, 6, 7]), asyncio.Event()
    index = run.paths.run_dir / NAME

    async def held(call: Call) -> web.StreamResponse:
        await go_on.wait()
        return await good(call)

    async with FakeServer(run.root) as server:
        server.on(status(400), row=2)
        assert (await run.work(server_url=server.url)).code == 3
        assert rows_in(index) == [0, 1]
        index.unlink()
        retry(run.paths, [2])
        server.forget()
        server.on(held, row=2)
        worker = asyncio.create_task(run.work(server_url=server.url))
        await until(index.exists)
        assert rows_in(index) == [0, 1]
        assert run.states()[2] != "verified"
        go_on.set()
        assert (await worker).code == 0
    assert rows_in(index) == [0, 1, 2]
