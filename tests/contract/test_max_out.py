"""`--max-out`: the run waits for room that a trainer makes, never passes its limit, and loses nothing by waiting."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hsjournal.ops.release import Named, release
from hsjournal.prompts.forecast import file_bytes
from tests.helpers.fake_server import FakeServer
from tests.helpers.worker_runs import BYTES_PER_TOKEN, Run, collected  # noqa: F401

TOKENS = 8000
ROWS = 8
FILE = TOKENS * (BYTES_PER_TOKEN + 16)
"""Bytes of a file less its header: beside the states there are an id and a flag for each token."""


def on_disk(run: Run) -> int:
    return sum(path.stat().st_size for path in Path(run.manifest.out_dir).rglob("*.ckpt"))


async def test_it_waits_for_releases_and_finishes(tmp_path: Path) -> None:
    run = Run(tmp_path, [TOKENS] * ROWS)
    limit = 4 * FILE  # the headers of four files go beyond
    most, released = 0, 0
    async with FakeServer(run.root) as server:
        worker = asyncio.create_task(run.work(server_url=server.url, max_out=limit, pause_limit=30.0))
        while not worker.done():
            most = max(most, on_disk(run))
            done = [row for row in run.rows() if row["state"] == "verified" and row["released_at"] is None]
            if any(event.kind == "paused" for event in run.events("paused")) and done:
                released += release(run.paths, [Named(row=done[0]["row"])]).rows
            await asyncio.sleep(0.1)
        end = await worker
    assert (end.code, end.sentence) == (0, "")
    assert set(run.states()) == {"verified"}
    assert most <= limit
    assert released >= 3
    assert {event.detail["what"] for event in run.events("paused")} == {"max-out"}
    assert len(run.outputs()) == ROWS - released
    with run.journal() as journal:
        assert journal.released()[0] == released


async def test_when_nobody_releases_it_ends_after_the_pause_limit_and_resumes(tmp_path: Path) -> None:
    run = Run(tmp_path, [TOKENS] * 4)
    limit = 3 * FILE
    async with FakeServer(run.root) as server:
        end = await run.work(server_url=server.url, max_out=limit, pause_limit=5.0)
        assert end.code == 5, end
        assert "hsjournal release" in end.sentence
        assert "--max-out" in end.sentence
        assert on_disk(run) <= limit
        assert "verified" in run.states()
        again = await run.work(server_url=server.url)
    assert (again.code, again.sentence) == (0, "")
    run.assert_all_verified()


async def test_a_sample_that_just_fits_is_not_held_back(tmp_path: Path) -> None:
    run = Run(tmp_path, [TOKENS])
    m = run.manifest
    most = file_bytes(TOKENS, m.hidden_size, m.dtype, len(m.capture_layers))
    async with FakeServer(run.root) as server:
        end = await run.work(server_url=server.url, max_out=most, pause_limit=30.0)
    assert (end.code, on_disk(run) <= most) == (0, True)


async def test_a_sample_that_could_never_fit_is_told_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, [TOKENS])
    async with FakeServer(run.root) as server:
        end = await run.work(server_url=server.url, max_out=1000, pause_limit=30.0)
    assert end.code == 5
    assert "more than --max-out" in end.sentence
