"""Several output folders: files are spread, a folder in trouble is left alone, and a sample has one file whatever happens."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hsjournal.drift import refuse_nested
from hsjournal.errors import ExitCode, UsageError
from hsjournal.journal.gate import pass_gate
from hsjournal.ops.subset import Subset
from hsjournal.ops.verify import verify
from hsjournal.sink.stream import Sink
from hsjournal.sink.verify import verify_file
from hsjournal.sink.volumes import ASIDE_FOR, STUCK_AFTER, Job, Volumes
from tests.helpers.fake_server import FakeServer
from tests.helpers.worker_runs import Run, collected  # noqa: F401

LENGTHS = (20, 33, 7, 64, 12, 5, 18, 40)
MB = 1 << 20


def spread_run(tmp_path: Path, lengths: Sequence[int] = LENGTHS, **settings: Any) -> tuple[Run, Path]:
    """A run with a second output folder."""
    second = tmp_path / "second"
    second.mkdir()
    options = {"handover_root": str(tmp_path / "root"), "more_out": json.dumps([str(second)])}
    return Run(tmp_path, lengths, manifest={"options": options}, **settings), second


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


async def work(run: Run) -> None:
    async with FakeServer(run.root) as server:
        end = await run.work(server_url=server.url)
    assert (end.code, end.sentence) == (ExitCode.DONE, "")
    assert run.in_root() == []


async def test_files_are_spread_and_the_journal_says_where(tmp_path):
    run, second = spread_run(tmp_path)
    await work(run)
    first = Path(run.manifest.out_dir)
    assert files(first)
    assert files(second)
    assert sorted(files(first) + files(second)) == [f"data_{row}.ckpt" for row in range(len(LENGTHS))]
    for row in run.rows():
        assert (first / row["output_path"]).stat().st_size == row["output_bytes"]
        assert row["output_path"].startswith("/") == (second in (first / row["output_path"]).parents)
    report = verify(run.paths, Subset.parse(""), seed=0)
    assert (report.checked, report.damaged, report.strangers.count) == (len(LENGTHS), [], 0)
    (second / "not-ours").touch()
    assert verify(run.paths, Subset.parse(""), seed=0).strangers.paths == (str(second / "not-ours"),)


async def test_damage_in_another_folder_is_repaired(tmp_path):
    run, second = spread_run(tmp_path)
    await work(run)
    victim = next(row for row in run.rows() if row["output_path"].startswith("/"))
    os.truncate(victim["output_path"], victim["output_bytes"] - 1)
    report = verify(run.paths, Subset.parse(""), seed=0, repair=True)
    assert [(d.row, d.repaired) for d in report.damaged] == [(victim["row"], True)]
    assert victim["output_path"].rsplit("/", 1)[-1] not in files(second)
    await work(run)
    assert len(files(second)) + len(files(Path(run.manifest.out_dir))) == len(LENGTHS)


async def test_a_full_folder_is_left_alone_while_the_other_goes_on(tmp_path, monkeypatch):
    run, second = spread_run(tmp_path)
    real = Sink.write

    def write(self: Sink, dump: Any, sample: Any, progress: Any) -> Any:
        if self._out_dir == second:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(second))
        return real(self, dump, sample, progress)

    monkeypatch.setattr(Sink, "write", write)
    await work(run)
    assert files(second) == []
    run.assert_all_verified()
    (event, *_) = run.events("volume_set_aside")
    assert event.detail["folder"] == str(second)
    assert run.events("paused") == [], "nothing waited for it"


async def test_a_name_that_may_be_there_binds_the_sample_to_its_folder(tmp_path, monkeypatch):
    """The link was made, and then the storage failed: written elsewhere, the sample could have two files."""
    run, second = spread_run(tmp_path)
    real, failed = Sink.write, set()

    def write(self: Sink, dump: Any, sample: Any, progress: Any) -> Any:
        written = real(self, dump, sample, progress)
        if self._out_dir == second and sample.row not in failed:
            failed.add(sample.row)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(second))
        return written

    monkeypatch.setattr(Sink, "write", write)
    await work(run)
    assert failed, "the second folder was used"
    assert len(files(second)) + len(files(Path(run.manifest.out_dir))) == len(LENGTHS)
    assert verify(run.paths, Subset.parse(""), seed=0).damaged == []


async def test_read_backs_that_hang_in_one_folder_hold_up_no_other(tmp_path, monkeypatch):
    """Each worker thread of that folder hangs in a read; the other folder's files are verified all the same."""
    run, second = spread_run(tmp_path, sink_threads=1, max_in_flight=len(LENGTHS) * 3, lengths=LENGTHS * 3)
    thaw, hung = threading.Event(), set()

    def hanging(folder: Path, layout: Any, sample: Any, written: Any, progress: Any) -> Any:
        if folder == second:
            hung.add(sample.row)
            assert thaw.wait(60)
        return verify_file(folder, layout, sample, written, progress)

    monkeypatch.setattr("hsjournal.sink.output.verify_file", hanging)
    # As many files as there are may be under way there: with its share alone, two reads that hang would keep further ones away.
    monkeypatch.setattr("hsjournal.sink.output.Volumes", lambda folders, tell, _at_once: Volumes(folders, tell))
    working = asyncio.create_task(work(run))
    while not working.done():
        rows = run.rows()
        there = [row for row in rows if row["state"] == "written" and row["output_path"].startswith("/")]
        if len(there) + sum(row["state"] == "verified" for row in rows) == len(rows):
            assert len(there) > 4, "more than all threads that a folder has"
            break
        await asyncio.sleep(0.05)
    thaw.set()
    await working
    assert hung
    assert set(run.states()) == {"verified"}


def test_one_in_which_a_read_hangs_gets_no_further_file(tmp_path):
    made = volumes(tmp_path, 2)
    with made.reading(made.all[0]) as job:
        job.moved -= STUCK_AFTER + 1
        assert {picked(made) for _ in range(5)} == {1}
        assert made.told()[0]["problem"] == "stuck"
    assert made.told()[0]["problem"] is None


async def test_a_file_that_a_dead_worker_left_in_one_folder_is_found_there(tmp_path, monkeypatch):
    run, second = spread_run(tmp_path)
    monkeypatch.setattr(Volumes, "pick", only(second, Volumes.pick))
    monkeypatch.setenv("HSJOURNAL_FAULTS", "")
    async with FakeServer(run.root) as server:
        process = run.start_process(server.url, HSJOURNAL_FAULTS="sink.published=kill@3")
        await asyncio.to_thread(process.wait)
    assert process.stdout is not None
    process.stdout.close()
    monkeypatch.undo()
    left = set(files(second)) | set(files(Path(run.manifest.out_dir)))
    assert left, "it got so far"
    await work(run)
    assert len(files(second)) + len(files(Path(run.manifest.out_dir))) == len(LENGTHS)


def only(folder: Path, real: Callable[..., Any]) -> Callable[..., Any]:
    """As ``pick``, for one folder."""

    def pick(self: Volumes, nbytes: int, tried: Any, home: Any) -> Any:
        return real(self, nbytes, tried, home or next(v for v in self.all if v.folder == folder))

    return pick


def volumes(tmp_path: Path, count: int = 3) -> Volumes:
    folders = [tmp_path / str(number) for number in range(count)]
    for folder in folders:
        folder.mkdir()
    return Volumes(folders, lambda _event: None)


def picked(made: Volumes, nbytes: int = MB) -> int:
    found = made.pick(nbytes, [], None)
    assert found is not None
    volume, job = found
    volume.jobs.discard(job)
    return made.all.index(volume)


def test_the_one_that_will_be_done_first_is_taken(tmp_path):
    made = volumes(tmp_path)
    made.all[0].speed, made.all[1].speed, made.all[2].speed = 1e6, 3e6, 2e6
    assert picked(made) == 1
    made.all[1].jobs.add(Job(2 * MB))
    assert picked(made) == 2


def test_stuck_full_and_failing_ones_are_left_alone(tmp_path):
    made = volumes(tmp_path)
    picked(made)  # looks at the room of each
    made.all[0].jobs.add(Job(MB, moved=time.monotonic() - STUCK_AFTER - 1))
    made.all[1].free = 2 * MB
    assert {picked(made) for _ in range(5)} == {2}
    made.set_aside(made.all[2], OSError(errno.EIO, "x"))
    assert picked(made) == 1, "little room is better than trouble, and that better than a system call that hangs"
    made.all[2].aside_until -= ASIDE_FOR
    assert picked(made) == 2


@pytest.mark.parametrize("names", [("a", "a"), ("a", "a/b"), ("a/b", "a"), ("a", "link")])
def test_folders_within_one_another_are_refused(tmp_path, names):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(UsageError, match="the same, or one lies in the other"):
        refuse_nested([tmp_path / name for name in names])
    refuse_nested([tmp_path / "a", tmp_path / "c"])


async def test_the_gate_opens_when_one_folder_takes_a_file(tmp_path):
    run, second = spread_run(tmp_path)
    second.rmdir()
    assert pass_gate(run.paths, Path(run.manifest.out_dir), crashed=False, max_strikes=3)["in_flight"] == []
