from __future__ import annotations

import asyncio
import os
import time

import pytest

from hsjournal.dump import watch
from hsjournal.dump.protocol import RequestId
from hsjournal.dump.watch import DumpWatch
from tests.helpers.dumps import random_ids, write_dump

RID = RequestId.sample("abcd", 3, 1, 7)
IDS = random_ids(7)


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture(autouse=True)
def no_descriptor_leaks():
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_dump_is_seen_by_inotify_alone(tmp_path):
    async with DumpWatch(tmp_path, scan_s=3600) as seen:
        assert seen.uses_inotify
        waiting = asyncio.create_task(seen.wait(RID, soon()))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        write_dump(tmp_path, RID, IDS)
        await waiting


async def test_a_dump_is_seen_by_the_scan_where_inotify_is_blind(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_watch", lambda _: -1)
    async with DumpWatch(tmp_path, scan_s=0.05) as seen:
        assert not seen.uses_inotify
        waiting = asyncio.create_task(seen.wait(RID, soon()))
        await asyncio.sleep(0.02)
        write_dump(tmp_path, RID, IDS)
        await waiting


async def test_a_dump_that_was_there_before_is_seen_at_once(tmp_path):
    write_dump(tmp_path, RID, IDS)
    async with DumpWatch(tmp_path, scan_s=3600) as seen:
        await seen.wait(RID, soon(0))


async def test_an_unpublished_directory_a_file_and_other_names_are_not_it(tmp_path):
    async with DumpWatch(tmp_path, scan_s=0.02) as seen:
        write_dump(tmp_path, RID, IDS, publish=False)
        write_dump(tmp_path, RequestId.sample("abcd", 3, 2, 7), IDS)
        (tmp_path / str(RID)).touch()
        with pytest.raises(TimeoutError):
            await seen.wait(RID, soon(0.2))


async def test_several_wait_each_for_their_own_and_nothing_is_kept(tmp_path):
    rids = [RequestId.sample("abcd", row, 1, 7) for row in range(20)]
    async with DumpWatch(tmp_path, scan_s=3600) as seen:
        waiting = [asyncio.create_task(seen.wait(rid, soon())) for rid in (*rids, rids[0])]
        for rid in reversed(rids):
            await asyncio.sleep(0)
            write_dump(tmp_path, rid, IDS, hidden=1)
        await asyncio.gather(*waiting)
        assert seen._waiting == {}


@pytest.mark.parametrize("how", ["deleted", "moved"])
async def test_a_root_that_goes_away_ends_every_wait(tmp_path, how):
    root = tmp_path / "root"
    root.mkdir()
    # whoever holds the root open keeps inotify from telling of its deletion: the scan does
    async with DumpWatch(root, scan_s=0.02 if how == "deleted" else 3600) as seen:
        waiting = asyncio.create_task(seen.wait(RID, soon()))
        await asyncio.sleep(0.02)
        root.rmdir() if how == "deleted" else root.rename(tmp_path / "elsewhere")
        with pytest.raises(FileNotFoundError, match="deleted or moved"):
            await waiting
        assert seen.gone.is_set()
        with pytest.raises(FileNotFoundError):
            await seen.wait(RID, soon())


async def test_the_scan_notices_a_root_that_was_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_watch", lambda _: -1)
    root = tmp_path / "root"
    root.mkdir()
    async with DumpWatch(root, scan_s=0.02) as seen:
        root.rename(tmp_path / "old")
        root.mkdir()
        await asyncio.wait_for(seen.gone.wait(), 5)


async def test_an_overflowed_queue_is_made_good_by_a_look(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_watch", lambda _: -1)
    async with DumpWatch(tmp_path, scan_s=3600) as seen:
        waiting = asyncio.create_task(seen.wait(RID, soon()))
        await asyncio.sleep(0)
        write_dump(tmp_path, RID, IDS)
        here, there = os.pipe()
        seen._notify_fd = here
        asyncio.get_running_loop().add_reader(here, seen._read)
        os.write(there, watch._EVENT.pack(-1, watch._IN_Q_OVERFLOW, 0, 0))
        await waiting
        os.close(there)


async def test_a_missing_root_is_told_on_entering(tmp_path):
    with pytest.raises(FileNotFoundError):
        async with DumpWatch(tmp_path / "none"):
            pass
