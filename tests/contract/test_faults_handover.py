"""FAULTS.md group C: the hand-over through shared memory. The real worker against a scripted server.

| fault | test |
|---|---|
| C1 | test_what_is_asked_for_never_exceeds_the_budget |
| C2 | test_leftovers_are_removed_before_the_first_send |
| C3 | test_foreign_names_survive |
| C4 | test_the_root_is_deleted_during_a_run, test_a_root_that_stays_away |
| C5 | test_a_sample_too_big_for_the_budget (before a new run: prepare's own check, tests/integration) |
| C7 | test_the_server_writes_elsewhere |
| C8 | test_a_slow_writer |
| C9 | test_a_stale_directory_of_the_same_name |
| C10 | test_a_dump_that_vanishes, test_dumps_that_always_vanish_for_one_sample |
| C11 | test_counters_say_nothing |
| C13 | test_a_dump_that_cannot_be_deleted, test_what_cannot_be_removed_does_not_stop_the_start |
| also | no room: test_the_root_is_full_for_a_while, test_the_root_stays_full, test_one_sample_never_finds_room |

Not here: protocol v1 (tests/integration/test_v1_job.py); a real full tmpfs and RemoveIPC (the drills).
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import zlib
from pathlib import Path

import pytest
from aiohttp import web

from hsjournal.dump import reader, reap
from hsjournal.dump.protocol import FailureReason, RequestId
from hsjournal.errors import ExitCode
from hsjournal.mirror import SNAPSHOT, Mirror
from hsjournal.worker import row as row_module
from hsjournal.worker import sweep as sweep_module
from tests.helpers.fake_server import Call, FakeServer, failure, good, hang, later, until
from tests.helpers.removing import delete
from tests.helpers.worker_runs import BYTES_PER_TOKEN, RUN_ID, Run, collected  # noqa: F401

LENGTHS = (20, 33, 20, 64, 7, 41)
N = len(LENGTHS)
SLACK = 1 << 16


async def test_what_is_asked_for_never_exceeds_the_budget(tmp_path: Path) -> None:
    lengths = (300, 700, 40, 900, 500, 120, 640, 80, 990, 310) * 2
    budget = 1000 * BYTES_PER_TOKEN + SLACK  # the largest sample fits, and nothing beside it but small ones
    run = Run(tmp_path, lengths, max_in_flight=8, handover_budget=2 * budget)
    async with FakeServer(run.root, budget=2 * budget, max_in_flight=8) as fake:
        fake.on(later(0.03), row=range(len(lengths)))
        end = await run.work(server_url=fake.url)
        assert fake.most_in_flight in (2, 3)  # each holds its reserve of 64 KiB beside its rows
    assert end.code == ExitCode.DONE, end.sentence
    assert run.events("paused") == []
    run.assert_all_verified()


async def test_leftovers_are_removed_before_the_first_send(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        rid = run.leave_sent(1, "life-0")
        fake.publish(run.ids[1], rid, boot_id="life-0")  # whole: it is used
        fake.publish(run.ids[2], RequestId.sample(RUN_ID, 2, 1, 20), boot_id="life-0")  # a row that is not under way
        fake.publish(run.ids[0], RequestId.for_probe(RUN_ID, 77, 20))
        fake.publish(run.ids[3], RequestId.sample(RUN_ID, 3, 1, 64), publish=False)  # half-written, its writer gone
        seen: list[list[str]] = []

        async def look(call: Call) -> web.StreamResponse:
            seen.append(run.in_root())
            return await good(call)

        fake.on(look, row=0)
        end = await run.work(server_url=fake.url)
        assert fake.rids(1) == []
    assert end.code == ExitCode.DONE, end.sentence
    assert not {f"hsj-{RUN_ID}-2-1-20", f"hsj-{RUN_ID}-p77-20", f".tmp-hsj-{RUN_ID}-3-1-64"} & set(seen[0])
    (event,) = run.events("reconciled_root")
    assert event.detail["freed_bytes"] > 3 * 20 * BYTES_PER_TOKEN
    run.assert_all_verified()
    async with FakeServer(run.root) as fake:
        await run.work(server_url=fake.url)
    assert len(run.events("reconciled_root")) == 1  # a second start finds nothing to free


async def test_foreign_names_survive(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    strangers = [
        "psm_x",
        "vllm_x",
        "req_7",
        "hsj-an0ther-0-1-20",
        f"hsj-{RUN_ID}-0-01-20",
        f".tmp-{RUN_ID}",
        "lost+found",
    ]
    for name in strangers:
        (run.root / name).mkdir()
        (run.root / name / "done").touch()
    async with FakeServer(run.root) as fake:
        other = RequestId.sample("an0ther", 5, 1, 20)
        fake.publish(run.ids[0], other)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    assert run.in_root() == sorted([*strangers, str(other)])
    assert len(os.listdir(run.root / str(other))) == 6
    (event,) = run.events("reconciled_root")
    assert set(event.detail["foreign"]) == {*strangers, str(other)}


@pytest.mark.parametrize("again", ["by itself", "by somebody"])
async def test_the_root_is_deleted_during_a_run(tmp_path: Path, again: str) -> None:
    run = Run(tmp_path, LENGTHS * 3, sample_timeout=20.0, read_timeout=20.0)
    if again == "by somebody":
        run.root.chmod(0o750)
    async with FakeServer(run.root) as fake:
        deleted = asyncio.Event()

        async def wipe(call: Call) -> web.StreamResponse:
            delete(run.root)  # a thread of the sink may be removing a dump just now
            if again == "by somebody":
                run.root.mkdir(mode=0o700)
            deleted.set()
            return await hang(call)

        async def careful(call: Call) -> web.StreamResponse:
            await asyncio.sleep(0.1)
            return await (good(call) if run.root.exists() else hang(call))

        fake.on(wipe, row=5, attempt=1)
        fake.on(careful, row=range(3 * N))
        end = await run.work(server_url=fake.url)
        assert deleted.is_set()
    assert end.code == ExitCode.DONE, end.sentence
    paused = [e.detail for e in run.events("paused") if e.detail["what"] == "root"]
    assert [p["why"] for p in paused] == [f"the hand-over root {run.root} was deleted or moved away"]
    assert "root" in [e.detail["what"] for e in run.events("resumed")]
    assert sum(run.strikes()) == 0
    run.assert_all_verified()
    assert run.root.stat().st_mode & 0o777 == 0o700


async def test_a_root_is_made_again_with_its_old_mode(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    run.root.chmod(0o2770)
    async with FakeServer(run.root) as fake:

        async def wipe(call: Call) -> web.StreamResponse:
            delete(run.root)
            await until(run.root.exists)
            await asyncio.sleep(0.1)
            return web.Response(status=503)

        fake.on(wipe, row=3, attempt=1)
        end = await run.work(server_url=fake.url, max_in_flight=1)
    assert end.code == ExitCode.DONE, end.sentence
    assert run.root.stat().st_mode & 0o7777 == 0o2770
    run.assert_all_verified()


async def test_a_root_that_stays_away(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, pause_limit=0.6)
    async with FakeServer(run.root) as fake:

        async def replace(call: Call) -> web.StreamResponse:
            delete(run.root)
            run.root.write_text("no folder")
            await asyncio.sleep(5)
            return web.Response(status=500)

        fake.on(replace, row=3, attempt=1)
        end = await run.work(server_url=fake.url, max_in_flight=1)
    assert end.code == ExitCode.NO_ROOM
    assert f"the hand-over root {run.root} was deleted and can't be made again: Not a directory" in end.sentence
    assert sum(run.strikes()) == 0
    assert run.states()[:3] == ["verified"] * 3


async def test_a_sample_too_big_for_the_budget(tmp_path: Path) -> None:
    lengths = (20, 3000, 33, 3500, 41)
    run = Run(tmp_path, lengths, handover_budget=2000 * BYTES_PER_TOKEN + SLACK)
    async with FakeServer(run.root) as fake:
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.NO_ROOM
    assert end.sentence.startswith(
        f"2 samples are too big for the hand-over root {run.root}, which can hold {2000 * BYTES_PER_TOKEN + SLACK:,} bytes: "
        f"row 3 needs {3500 * BYTES_PER_TOKEN + SLACK:,}; all others are done"
    )
    assert "--handover-budget" in end.sentence
    assert run.states() == ["verified", "pending", "verified", "pending", "verified"]
    assert run.attempts() == [1, 0, 1, 0, 1]
    async with FakeServer(run.root) as fake:
        end = await run.work(server_url=fake.url, handover_budget=1 << 30)
    assert end.code == ExitCode.DONE, end.sentence
    run.assert_all_verified()


async def test_no_room_for_the_next_sample_past_the_pause_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, LENGTHS, pause_limit=0.3)
    monkeypatch.setattr("hsjournal.dump.room.Room._available", lambda *_: 1000)  # others fill the file system
    async with FakeServer(run.root) as fake:
        end = await run.work(server_url=fake.url)
        assert fake.probes == len(fake.calls)
    assert end.code == ExitCode.NO_ROOM
    assert f"the hand-over root {run.root} has room for 1,000 bytes, the next sample needs" in end.sentence
    assert run.attempts() == [0] * N


async def test_the_server_writes_elsewhere(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, sample_timeout=0.5)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    async with FakeServer(elsewhere) as fake:
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.SERVER
    assert f"answers, but no dump arrives in {run.root}" in end.sentence
    assert "Server and client do not share this folder" in end.sentence
    assert run.attempts() == [0] * N


async def test_a_slow_writer(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, sample_timeout=20.0)

    async def slow(call: Call) -> web.StreamResponse:
        held: list[int] = []
        call.publish(publish=False, edit=lambda folder: held.append(os.open(folder, os.O_RDONLY)))
        fcntl.flock(held[0], fcntl.LOCK_EX)
        folder = run.root / f".tmp-{call.rid}"
        whole = (folder / "final.bin").read_bytes()
        (folder / "final.bin").write_bytes(b"")
        for start in range(0, len(whole), 100):
            with (folder / "final.bin").open("ab") as file:
                file.write(whole[start : start + 100])
            await asyncio.sleep(0.1)
        folder.rename(run.root / str(call.rid))
        os.close(held[0])
        return call.reply()

    async with FakeServer(run.root) as fake:
        fake.on(slow, row=3)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    assert run.attempts() == [1] * N
    assert run.strikes() == [0] * N
    run.assert_all_verified()


async def test_a_stale_directory_of_the_same_name(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)

    async def sneak(call: Call) -> web.StreamResponse:  # after the start, before row 5 is sent
        call.server.publish(run.ids[5], RequestId.sample(RUN_ID, 5, 1, 41), noise=7)
        return await good(call)

    async with FakeServer(run.root) as fake:
        fake.publish(run.ids[4], RequestId.sample(RUN_ID, 4, 1, 7), noise=7)  # before the start
        fake.on(sneak, row=0)
        end = await run.work(server_url=fake.url, max_in_flight=1)
        assert len(fake.rids(4)) == len(fake.rids(5)) == 1
    assert end.code == ExitCode.DONE, end.sentence
    assert {e.row for e in run.events("stale_dump")} | {e.row for e in run.events("dump_removed")} == {4, 5}
    run.assert_all_verified()  # by content: the stale ones held other rows


async def test_a_dump_that_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, LENGTHS)
    gone: list[str] = []
    really_open = reader.open_dump

    def open_dump(root_fd: int, rid: RequestId, expect: reader.Expectation | None) -> reader.Dump:
        if rid.row in (1, 3) and rid.attempt == 1:  # between listing and opening
            gone.append(str(rid))
            shutil.rmtree(run.root / str(rid))
        return really_open(root_fd, rid, expect)

    monkeypatch.setattr(reader, "open_dump", open_dump)
    async with FakeServer(run.root) as fake:
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    assert len(gone) == 2
    for row in (1, 3):
        (event,) = run.events("sent_back", row=row)
        assert (
            event.detail["why"]
            == f"vanished: {RequestId.sample(RUN_ID, row, 1, LENGTHS[row])} is not in the hand-over root"
        )
    assert run.strikes() == [0] * N
    run.assert_all_verified()


async def test_dumps_that_are_deleted_at_random(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS * 4, max_in_flight=8)
    wiping = True

    async def wipe() -> None:
        while wiping:
            for name in run.in_root():
                if name.startswith("hsj-") and zlib.crc32(name.encode()) % 3 == 0:
                    shutil.rmtree(run.root / name, ignore_errors=True)
            await asyncio.sleep(0.002)

    async with FakeServer(run.root, max_in_flight=8) as fake:
        fake.soon(wipe())
        work = asyncio.create_task(run.work(server_url=fake.url))
        await asyncio.sleep(2.0)
        wiping = False
        end = await work
    assert end.code == ExitCode.DONE, end.sentence
    assert sum(run.strikes()) == 0
    run.assert_all_verified()


async def test_dumps_that_always_vanish_for_one_sample(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)

    async def fleeting(call: Call) -> web.StreamResponse:
        call.publish()
        shutil.rmtree(run.root / str(call.rid))
        return call.reply()

    async with FakeServer(run.root) as fake:
        fake.on(fleeting, row=2)
        end = await run.work(server_url=fake.url, dump_timeout=0.1)
        assert len(fake.rids(2)) <= 10
    assert end.code == ExitCode.FAILED_SAMPLES
    run.assert_all_verified(but=[2])


async def test_counters_say_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        for row in (1, 3):  # the server is far ahead, but only two dumps are there
            fake.publish(run.ids[row], run.leave_sent(row, "life-0"), boot_id="life-0")
        end = await run.work(server_url=fake.url)
        sent = {call.rid.row for call in fake.calls if call.rid.row is not None}
    assert end.code == ExitCode.DONE, end.sentence
    assert sent == {0, 2, 4, 5}
    run.assert_all_verified()


async def test_a_dump_that_cannot_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, LENGTHS)
    refused: list[str] = []

    def remove_dump(root_fd: int, name: str, run_id: str | None = None) -> int:
        if "-3-1-" in name:
            refused.append(name)
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return reap.remove_dump(root_fd, name, run_id)

    monkeypatch.setattr(row_module, "remove_dump", remove_dump)
    monkeypatch.setattr(sweep_module, "remove_dump", remove_dump)
    async with FakeServer(run.root) as fake:
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence  # a clean-up that fails never fails a sample
    assert run.states() == ["verified"] * N
    assert run.in_root() == [f"hsj-{RUN_ID}-3-1-64"]
    assert len(run.events("cleanup_failed")) == 1  # told once
    assert len(refused) >= 2
    monkeypatch.undo()
    async with FakeServer(run.root) as fake:
        await run.work(server_url=fake.url)
    assert run.in_root() == []


async def test_what_cannot_be_removed_does_not_stop_the_start(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    strange = run.root / f"hsj-{RUN_ID}-2-1-20"
    (strange / "subfolder").mkdir(parents=True)
    async with FakeServer(run.root) as fake:
        end = await run.work(server_url=fake.url)
    assert end.code in (ExitCode.DONE, ExitCode.FAILED_SAMPLES), end.sentence
    assert run.events("cleanup_failed")
    assert run.states().count("verified") >= N - 1


async def test_the_root_is_full_for_a_while(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        full = True

        async def no_room(call: Call) -> web.StreamResponse:
            return await (failure(FailureReason.NO_ROOM) if full else good)(call)

        fake.on(no_room, row=range(N))
        work = asyncio.create_task(run.work(server_url=fake.url))
        await until(lambda: bool(run.events("capture_failed")))
        await asyncio.sleep(1.5)
        snapshot = Mirror(run.paths.mirror).read("snapshot.json")
        assert snapshot is not None
        assert f"the server finds no room in the hand-over root {run.root}" in snapshot["pauses"]["no_room"]
        sent = len(fake.calls) - fake.probes
        assert sent <= 4 + 6  # those in flight, then one at a time after 0.05, 0.1, 0.2 s …
        full = False
        end = await work
    assert end.code == ExitCode.DONE, end.sentence
    assert run.strikes() == [0] * N
    assert "no_room" in [e.detail["what"] for e in run.events("resumed")]
    run.assert_all_verified()


async def test_the_root_stays_full(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, pause_limit=0.8)
    async with FakeServer(run.root) as fake:
        fake.on(failure(FailureReason.NO_ROOM), row=range(N))
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.NO_ROOM
    assert f"the server finds no room in the hand-over root {run.root}" in end.sentence
    assert run.strikes() == [0] * N
    assert "failed" not in run.states()


async def test_the_root_is_full_at_the_start(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:
        fake.on(failure(FailureReason.NO_ROOM), probes=True, times=3)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    assert "can't capture: no_room" in run.events("paused")[0].detail["why"]
    assert run.strikes() == [0] * N
    run.assert_all_verified()


async def test_one_sample_never_finds_room(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS, pause_limit=5.0)
    async with FakeServer(run.root) as fake:
        fake.on(failure(FailureReason.NO_ROOM), row=3)
        end = await run.work(server_url=fake.url)
        assert len(fake.rids(3)) < 20
    assert end.code == ExitCode.NO_ROOM
    assert run.row(3)["state"] == "pending"
    assert run.strikes() == [0] * N
    run.assert_all_verified(but=[3])


async def test_the_mirror_is_deleted_during_a_run(tmp_path: Path) -> None:
    run = Run(tmp_path, LENGTHS)
    async with FakeServer(run.root) as fake:

        async def clean_up(call: Call) -> web.StreamResponse:
            delete(run.paths.shm)
            await until(lambda: Mirror(run.paths.mirror).read(SNAPSHOT) is not None)
            return await good(call)

        fake.on(clean_up, row=2)
        end = await run.work(server_url=fake.url)
    assert end.code == ExitCode.DONE, end.sentence
    run.assert_all_verified()
