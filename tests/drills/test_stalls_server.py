"""Servers that stall, and dumps that are refused for ever: named; a server of our own is restarted, no other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hsjournal.errors import ExitCode
from hsjournal.events import Event
from hsjournal.mirror import Mirror
from hsjournal.watch.verdict import Verdict
from tests.helpers.cli import started
from tests.helpers.drill import attached
from tests.helpers.drill.attached import Served
from tests.helpers.drill.seen import Outside
from tests.helpers.drill.stage import ended, wait_for, words
from tests.helpers.drill.stalls import QUICK, wait_event
from tests.helpers.fake_server import FakeServer, dump, hang, later, status, until
from tests.helpers.worker_runs import Run

PACE = 0.1


@contextlib.asynccontextmanager
async def resumed(run: Run, fake: FakeServer, log: Path, *options: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """The whole program against a scripted server; ended with the block."""
    command = ("resume", run.paths.run_dir, "--server", fake.url, "--handover-root", str(run.root), "--plain")
    child = started(*command, "--retry-pause", "0.2", "--max-in-flight", "4", *QUICK, *options, log=log)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        await asyncio.to_thread(child.wait)


async def until_event(run: Run, kind: str, log: Path, seconds: float = 60.0) -> Event:
    async with asyncio.timeout(seconds):
        while True:
            found = [e for _, e in Mirror(run.paths.mirror).events() if e.kind == kind]
            if found:
                return found[0]
            await asyncio.sleep(0.1)
    raise AssertionError(kind)


async def end_of(child: subprocess.Popen[bytes], log: Path, seconds: float = 90.0) -> int:
    return await asyncio.to_thread(ended_at, child, log, seconds)


async def finds(run: Run, verdict: str, place: str, way_out: str) -> None:
    """As somebody who only looks on does; beside the scripted server, which must go on answering."""
    outside = Outside(run.paths.run_dir, Path(os.environ["HSJOURNAL_SHM"]))
    await asyncio.to_thread(outside.finds, verdict, place, way_out)


def ended_at(child: subprocess.Popen[bytes], log: Path, seconds: float) -> int:
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        raise AssertionError(log.read_text()) from None


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HSJOURNAL_SHM", str(tmp_path / "shm"))
    return tmp_path


def ready(folder: Path, lengths: tuple[int, ...]) -> Run:
    """A run directory that the whole program can resume."""
    return Run(
        folder,
        lengths,
        manifest={"options": {"server": "", "handover_root": str(folder / "root"), "model_path": "/models/fake"}},
    )


def spoil(folder: Path) -> None:
    """A dump that is refused: NaN in every row of the final state."""
    path = folder / "final.bin"
    path.write_bytes(b"\xff\xff" * (path.stat().st_size // 2))


async def test_an_endless_loop_of_refused_dumps_is_a_stall_and_the_worker_stays(sources: Path) -> None:
    run, log = ready(sources, (20, 33, 41)), sources / "log"
    async with FakeServer(run.root) as fake:
        fake.on(later(0.1, dump(edit=spoil)))
        async with resumed(run, fake, log, "--max-strikes", "100000", "--canary-every", "0") as child:
            stall = await until_event(run, "stall", log)
            assert stall.detail["verdict"] == Verdict.SERVER_STALLED
            assert "again and again" in stall.detail["sentence"]
            await asyncio.sleep(3)
            fake.forget()
            assert await end_of(child, log) == ExitCode.DONE, log.read_text()
    run.assert_all_verified()
    assert len(run.events("stall")) == len(run.events("recovered")) == 1
    assert run.events("worker_ending") == []


async def test_a_server_wedged_behind_a_healthy_front_is_named_and_left_alone(sources: Path) -> None:
    run, log = ready(sources, (20, 33, 41, 25)), sources / "log"
    async with FakeServer(run.root) as fake:
        fake.on(hang, times=4)
        async with resumed(run, fake, log, "--sample-timeout", "25", "--canary-every", "0") as child:
            stall = await until_event(run, "stall", log)
            assert stall.detail["verdict"] == Verdict.SERVER_STALLED
            assert "answers its health check" in stall.detail["sentence"]
            await finds(run, Verdict.SERVER_STALLED, fake.url, "restart the server")
            assert await end_of(child, log) == ExitCode.DONE, log.read_text()
    run.assert_all_verified()
    assert run.events("worker_ending") == run.events("server_restart") == []
    assert len(run.events("worker_started")) == 1


async def test_a_server_that_goes_away_is_told_of_and_waited_for(sources: Path) -> None:
    run, log = ready(sources, (20, 33, 41, 25, 30, 31)), sources / "log"
    async with FakeServer(run.root) as fake:
        fake.on(hang)
        async with resumed(run, fake, log, "--canary-every", "0") as child:
            await until_event(run, "worker_started", log)
            await until(lambda: sum(call.rid.row is not None for call in fake.current) == 4, 60)
            await fake.die()
            stall = await until_event(run, "stall", log)
            assert stall.detail["verdict"] == Verdict.SERVER_DOWN
            await finds(run, Verdict.SERVER_DOWN, fake.url, "start the server")
            fake.forget()
            await fake.rise("life-2")
            assert await end_of(child, log) == ExitCode.DONE, log.read_text()
    run.assert_all_verified()
    assert len(run.events("worker_started")) == 1
    assert run.strikes() == [0] * 6


async def test_a_sample_ten_times_longer_on_a_slow_server_raises_no_alarm(sources: Path) -> None:
    """Sixty tokens take a second; six hundred take nine, more than twice the time-out."""
    run, log = ready(sources, (60, 60, 60, 600)), sources / "log"
    async with FakeServer(run.root) as fake:
        fake.on(later(1.0), row=(0, 1, 2))
        fake.on(later(9.0), row=3)
        async with resumed(run, fake, log, "--canary-every", "0") as child:
            assert await end_of(child, log) == ExitCode.DONE, log.read_text()
    run.assert_all_verified()
    assert run.events("stall") == []


async def test_many_failures_in_a_row_are_named_while_they_last(sources: Path) -> None:
    """The server does probes, and refuses every sample."""
    run, log = ready(sources, tuple(range(20, 50))), sources / "log"
    async with FakeServer(run.root) as fake:
        fake.on(status(400))
        async with resumed(run, fake, log, "--max-strikes", "1", "--canary-every", "0") as child:
            await until_event(run, "paused", log)
            await finds(run, Verdict.FAILURES, "samples in a row failed", "see the reasons in `status`")
            fake.forget()
            assert await end_of(child, log) == ExitCode.FAILED_SAMPLES, log.read_text()
    assert len(run.events("worker_started")) == 1


def test_an_engine_of_our_own_that_stalls_is_restarted(served: Served) -> None:
    with attached.attached(served, 12) as run:
        stage = run.stage
        armed = stage.fault("engine")
        child = stage.hsjournal(
            "run", stage.run_dir, "--prompts", stage.prompts_file, "--model", stage.model, "--out", stage.out_dir,
            "--plain", "--retry-pause", "0.3", *QUICK, HSJOURNAL_FAULTS=f"capture.publishing=stop@9,once:{armed}",
        )  # fmt: skip
        wait_for(lambda: not armed.exists() or child.poll() is not None, 90, "the engine stops")
        stall = wait_event(run, "stall", child)
        assert stall.detail["verdict"] in (Verdict.SERVER_STALLED, Verdict.SERVER_DOWN)
        assert ended(child) == ExitCode.DONE, words(child)
        assert run.truth.events("server_restart")[0]["who"] == "supervisor"
        assert run.truth.events("worker_ending") == []
        assert run.truth.struck() == []
        assert run.truth.finished() == 12
