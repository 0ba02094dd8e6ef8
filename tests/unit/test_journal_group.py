"""Group commit: together, all or nothing, and patient with a full disk."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from contextlib import closing

import pytest

from hsjournal.errors import FencedError, HsjournalError, NoJournalError, NoRoomError, Trouble
from hsjournal.events import Event
from hsjournal.journal.group import MOST_PER_COMMIT, JournalThread
from hsjournal.journal.pragmas import connect
from hsjournal.journal.store import Journal, Move
from hsjournal.states import State
from tests.helpers.journals import started, transition
from tests.helpers.mounts import fill, tmpfs

SENT = transition(State.PENDING, State.SENT)


def send(row: int, attempt: int = 0) -> Move:
    return Move(row, attempt, SENT, {"attempt": attempt + 1})


async def opened(path, epoch=1, **options) -> JournalThread:
    thread = JournalThread(path, epoch, **{"pause_limit": 5.0, "retry_pause": 0.05, **options})
    await thread.start()
    return thread


def sent_rows(path) -> list[int]:
    with Journal(path) as journal:
        return [r["row"] for r in journal.rows_in(State.SENT)]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [t for t in threading.enumerate() if t.name == "journal"]


class Commits:
    """Counts the transactions of a store."""

    def __init__(self, monkeypatch) -> None:
        self.sizes: list[int] = []
        real = Journal.apply

        def counted(journal, moves, epoch, events=()):
            self.sizes.append(len(moves))
            real(journal, moves, epoch, events)

        monkeypatch.setattr(Journal, "apply", counted)


async def test_what_gathers_while_one_commit_runs_is_committed_together(tmp_path, monkeypatch):
    path, _ = started(tmp_path, [4] * 600)
    commits = Commits(monkeypatch)
    thread = await opened(path)
    await asyncio.gather(*(thread.apply(send(row)) for row in range(600)))
    await thread.stop()
    assert sent_rows(path) == list(range(600))
    assert sum(commits.sizes) == 600
    assert max(commits.sizes) == MOST_PER_COMMIT
    assert len(commits.sizes) <= 8


async def test_apply_returns_only_after_the_commit(tmp_path):
    path, _ = started(tmp_path)
    thread = await opened(path)
    with closing(connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")  # nobody can commit now
        task = asyncio.create_task(thread.apply(send(0), events=[Event("with_it")]))
        await asyncio.sleep(0.3)
        assert not task.done()
        other.execute("ROLLBACK")
        await task
        assert other.execute("SELECT state FROM sample WHERE row = 0").fetchone() == ("sent",)
        assert other.execute("SELECT kind FROM event").fetchall() == [("with_it",)]
    await thread.stop()


async def test_a_fenced_change_fails_its_whole_batch_and_nothing_is_changed(tmp_path):
    path, _ = started(tmp_path, [4] * 10)
    thread = await opened(path)
    busy = threading.Event()
    waiting = asyncio.create_task(thread.call(lambda _journal: busy.wait(5)))  # so that the rest gathers behind it
    await asyncio.sleep(0.1)
    changes = [asyncio.create_task(thread.apply(send(row, attempt=3 if row == 5 else 0))) for row in range(10)]
    await asyncio.sleep(0.1)
    busy.set()
    results = await asyncio.gather(*changes, return_exceptions=True)
    assert all(isinstance(r, FencedError) for r in results)
    assert await waiting
    await thread.apply(send(9))  # the thread lives on
    await thread.stop()
    assert sent_rows(path) == [9]


async def test_a_newer_epoch_fences_the_thread(tmp_path):
    path, _ = started(tmp_path)
    thread = await opened(path)
    await thread.apply(send(0))
    with Journal(path) as journal:
        journal.raise_epoch()
    for attempt in (thread.apply(send(1)), thread.take(0, State.SENT)):
        with pytest.raises(FencedError, match=r"epoch 1 is over \(now 2\)|epoch 1 is over"):
            await attempt
    await thread.stop()
    assert sent_rows(path) == [0]


async def test_changes_and_calls_keep_their_order(tmp_path):
    path, _ = started(tmp_path, [4] * 40)
    thread = await opened(path)
    seen = []

    async def one(row: int) -> None:
        await thread.apply(send(row))

    tasks = []
    for row in range(0, 40, 2):
        tasks += [asyncio.create_task(one(row)), asyncio.create_task(one(row + 1))]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(thread.call(lambda j: seen.append(len(j.rows_in(State.SENT))))))
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    await thread.stop()
    assert seen == list(range(2, 41, 2))


async def test_what_a_call_raises_reaches_its_caller_only(tmp_path):
    path, _ = started(tmp_path)
    thread = await opened(path)

    def bad(_journal: Journal) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await thread.call(bad)
    assert await thread.call(lambda j: j.epoch) == 1
    with pytest.raises(sqlite3.OperationalError, match="no such table"):  # a mistake in a statement is no full disk
        await asyncio.wait_for(thread.call(lambda j: j._read("SELECT * FROM nowhere")), 3)
    await thread.stop()


async def test_a_cancelled_waiter_does_not_end_the_thread(tmp_path):
    path, _ = started(tmp_path, [4] * 10)
    thread = await opened(path)
    busy = threading.Event()
    first = asyncio.create_task(thread.call(lambda _journal: busy.wait(5)))
    await asyncio.sleep(0.1)
    waiters = [asyncio.create_task(thread.apply(send(row))) for row in range(3)]
    await asyncio.sleep(0.1)
    waiters[1].cancel()
    first.cancel()
    await asyncio.sleep(0)
    busy.set()
    await asyncio.gather(waiters[0], waiters[2])
    await thread.apply(send(5))
    await thread.stop()
    assert sent_rows(path) == [0, 2, 5]  # what nobody waited for any more was not begun


async def test_stop_commits_what_is_queued_and_refuses_what_comes_later(tmp_path):
    path, _ = started(tmp_path, [4] * 300)
    thread = await opened(path)
    tasks = [asyncio.create_task(thread.apply(send(row))) for row in range(300)]
    await asyncio.sleep(0)
    await thread.stop()
    await asyncio.gather(*tasks)
    assert sent_rows(path) == list(range(300))
    for late in (thread.apply(send(1)), thread.call(lambda j: j.epoch)):
        with pytest.raises(HsjournalError, match="closed"):
            await asyncio.wait_for(late, 3)
    await thread.stop()


async def test_a_journal_that_can_not_be_opened_is_said_at_the_start(tmp_path):
    thread = JournalThread(tmp_path / "journal.db", 1, pause_limit=1, retry_pause=0.1)
    with pytest.raises(NoJournalError):
        await thread.start()
    await asyncio.wait_for(thread.stop(), 3)


@pytest.mark.root
async def test_a_full_journal_disk_pauses_and_heals(tmp_path):
    with tmpfs(tmp_path / "small", "4m") as mount:
        path, _ = started(mount, [4] * 400)
        told: list[NoRoomError | None] = []
        thread = await opened(path, pause_limit=30.0, on_trouble=told.append)
        filler = fill(mount)
        tasks = [
            asyncio.create_task(thread.apply(send(row), events=[Event("padding", row, {"x": "y" * 400})]))
            for row in range(400)
        ]
        deadline = time.monotonic() + 20
        while not told:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert told[0] is not None
        assert told[0].trouble is Trouble.FULL
        # Nothing is claimed that is not committed: who was told so finds it there.
        done = {row for row, task in enumerate(tasks) if task.done()}
        with closing(connect(path)) as other:
            there = {r[0] for r in other.execute("SELECT row FROM sample WHERE state = 'sent'")}
        assert done == there
        assert not all(task.done() for task in tasks)
        filler.unlink()
        await asyncio.wait_for(asyncio.gather(*tasks), 30)
        assert told[-1] is None
        await thread.stop()
        assert len(sent_rows(path)) == 400


@pytest.mark.root
async def test_past_the_pause_limit_the_disk_is_named_and_nothing_was_changed(tmp_path):
    with tmpfs(tmp_path / "small", "1m") as mount:
        path, _ = started(mount, [4] * 500)
        thread = await opened(path, pause_limit=0.4)
        filler = fill(mount)
        changes = [thread.apply(send(row), events=[Event("padding", row, {"x": "y" * 2000})]) for row in range(500)]
        results = await asyncio.wait_for(asyncio.gather(*changes, return_exceptions=True), 30)
        failed = [row for row, r in enumerate(results) if isinstance(r, NoRoomError)]
        assert failed
        assert {type(r) for r in results} <= {NoRoomError, type(None)}
        assert all(r.exit_code == 5 for r in results if isinstance(r, NoRoomError))
        filler.unlink()
        await thread.apply(send(failed[0]))  # there is room again
        await thread.stop()
        assert sent_rows(path) == sorted({row for row, r in enumerate(results) if r is None} | {failed[0]})


async def test_a_damaged_journal_is_no_pause(tmp_path):
    path, _ = started(tmp_path, [4] * 3000)
    with path.open("r+b") as file:  # the second half of the tables; the header and the schema stay
        size = path.stat().st_size
        file.seek(size // 4)
        file.write(b"\xaa" * (size - size // 4))
    thread = await opened(path, pause_limit=60)
    with pytest.raises(HsjournalError, match=r"damaged.*Restore"):
        await asyncio.wait_for(asyncio.gather(*(thread.apply(send(row)) for row in range(3000))), 20)
    await thread.stop()
