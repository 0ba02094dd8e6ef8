"""What happens gets into the journal while the worker lives, each event once, and not while the journal is in trouble."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from hsjournal.errors import ExitCode, Trouble
from hsjournal.events import Event
from hsjournal.journal.group import JournalThread
from hsjournal.mirror import Mirror
from hsjournal.worker import process
from hsjournal.worker.chronicle import MOST_AT_ONCE, Chronicle
from hsjournal.worker.trouble import Pauses
from tests.helpers.fake_server import FakeServer, hang
from tests.helpers.worker_runs import Run, collected  # noqa: F401


def kinds(run: Run) -> Counter[str]:
    """What the journal itself holds, read by somebody else."""
    with closing(sqlite3.connect(f"file:{run.paths.journal}?mode=ro", uri=True)) as reader:
        return Counter(kind for (kind,) in reader.execute("SELECT kind FROM event"))


async def until(run: Run, kind: str) -> None:
    async with asyncio.timeout(20):
        while True:
            if kinds(run)[kind]:
                return
            await asyncio.sleep(0.05)


async def test_a_stall_that_costs_no_worker_its_life_is_in_the_journal_while_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor records it in the mirror; nothing passes a gate, and nobody ends."""
    monkeypatch.setattr(process, "Chronicle", partial(Chronicle, every=0.1))
    run = Run(tmp_path, (20, 33), sample_timeout=15.0)
    async with FakeServer(run.root) as fake:
        fake.on(hang, row=1, times=1)
        work = asyncio.create_task(run.work(server_url=fake.url, sample_timeout=4.0))
        await until(run, "worker_started")
        Mirror(run.paths.mirror).record(Event("stall", 1, {"verdict": "server_stalled"}))
        await until(run, "stall")
        assert not work.done(), "the worker lives"
        end = await work
    assert end.code == ExitCode.DONE, end.sentence
    assert kinds(run)["stall"] == 1
    assert kinds(run)["worker_started"] == 1


async def test_each_is_entered_once_in_parts_and_what_was_dropped_is_forgotten(tmp_path: Path) -> None:
    run = Run(tmp_path, (20,))
    mirror = Mirror(run.paths.mirror)
    mirror.create()
    thread = JournalThread(run.paths.journal, 0, pause_limit=1.0, retry_pause=0.1)
    await thread.start()
    kept = Chronicle(mirror, thread, Pauses(1.0, lambda _event: None))
    for number in range(2 * MOST_AT_ONCE + 7):
        mirror.record(Event("padding", None, {"number": number}))
    for _ in range(2):
        await kept.enter()
    mirror.record(Event("late"))
    await kept.enter()
    await thread.stop()
    assert kinds(run) == {"padding": 2 * MOST_AT_ONCE + 7, "late": 1}


async def test_a_journal_in_trouble_is_left_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, (20,))
    mirror = Mirror(run.paths.mirror)
    mirror.create()
    mirror.record(Event("stall"))
    pauses = Pauses(60.0, lambda _event: None)
    thread = JournalThread(run.paths.journal, 0, pause_limit=1.0, retry_pause=0.1)
    await thread.start()
    pauses.begin("journal", "the journal can't be written", Trouble.FAILING)
    keeping = asyncio.create_task(Chronicle(mirror, thread, pauses, every=0.05).keep())
    await asyncio.sleep(0.5)
    assert kinds(run) == {}
    pauses.end("journal")
    await until(run, "stall")
    keeping.cancel()
    await thread.stop()
