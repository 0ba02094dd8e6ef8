"""Runs that end by themselves before all of their rows: asked afterwards, they say when, with what exit code, why, and what to do."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from aiohttp import web

from hsjournal.errors import ExitCode
from tests.drills.test_stalls_server import end_of, ready, resumed
from tests.helpers.drill.attached import Attached
from tests.helpers.drill.seen import Outside
from tests.helpers.drill.stage import ended, words
from tests.helpers.drill.stalls import finishes
from tests.helpers.fake_server import Call, FakeServer

PACE = 0.1
OTHER_ROWS = 700
"""A shift of the fake server's rows that makes them other rows."""


def said_to_have_ended(outside: Outside, code: ExitCode, why: str, remedy: str, exit_code: ExitCode) -> None:
    """By ``status`` in both forms, ``diagnose`` in both forms, and the screen."""
    status = outside.asks("status", "--json").json()
    assert (status["verdict"]["verdict"], status["supervisor"]["state"]) == ("not_running", "ended")
    assert status["supervisor"]["exit_code"] == code
    assert time.time() - status["supervisor"]["ended_at"] < 120
    done = outside.asks("diagnose", "--json")
    report = done.json()
    assert (report["verdict"], done.code) == ("not_running", exit_code), report["sentence"]
    assert report["supervisor"]["exit_code"] == code
    told = (
        (status["verdict"]["sentence"], status["verdict"]["way_out"]),
        (report["sentence"], report["next_step"]),
        (text := outside.asks("status").out, text),
        (text := outside.asks("diagnose").out, text),
        (text := "".join(line.removeprefix(" " * 8) for line in outside.screen()), text),
    )
    for sentence, way_out in told:
        assert f"with exit {code}: " in sentence, sentence
        assert why in sentence, sentence
        assert remedy in way_out, way_out
        assert "DEAD" not in sentence
        assert "supervisor died" not in sentence


def test_ctrl_c_5_and_4_of_one_run_which_then_ends_well(run: Attached) -> None:
    outside, resume = Outside(run.stage.run_dir, run.stage.shm), f"hsjournal resume {run.stage.run_dir}"
    child = run.run("--max-in-flight", "2")
    run.wait_files(2, child)
    os.kill(child.pid, signal.SIGINT)
    assert ended(child) == ExitCode.INTERRUPTED, words(child)
    said_to_have_ended(outside, ExitCode.INTERRUPTED, "stopped by SIGINT", resume, ExitCode.ERROR)

    there = sum(path.stat().st_size for path in run.stage.out_dir.rglob("*.ckpt"))
    child = run.run("--max-out", str(there + 150_000), "--pause-limit", "1")
    assert ended(child) == ExitCode.NO_ROOM, words(child)
    said_to_have_ended(outside, ExitCode.NO_ROOM, "--max-out", "resume", ExitCode.NO_ROOM)

    shutil.rmtree(next(run.stage.shm.glob("hsjournal-*/*/mirror")))  # as a reboot does
    status = outside.asks("status", "--json").json()
    assert status["supervisor"]["exit_code"] == ExitCode.NO_ROOM
    assert outside.asks("diagnose", "--json").json()["supervisor"]["exit_code"] == ExitCode.NO_ROOM

    wide = ("--max-out", "1TB", "--pause-limit", "60")
    child = run.run(*wide, "--max-restarts", "1", faults="worker.claiming=raise")
    assert ended(child) == ExitCode.GAVE_UP, words(child)
    said_to_have_ended(outside, ExitCode.GAVE_UP, "without finishing a sample", "worker.log", ExitCode.ERROR)
    finishes(run, run.run(*wide, "--max-restarts", "10"))


async def test_13_of_a_failed_canary_leaves_its_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``resume`` alone would keep the rows in doubt: the way out is ``retry --doubted`` first."""
    monkeypatch.setenv("HSJOURNAL_SHM", str(tmp_path / "shm"))
    run, log = ready(tmp_path, tuple(range(20, 40))), tmp_path / "log"
    noise = 0

    async def turn(call: Call) -> web.StreamResponse:
        nonlocal noise
        noise = OTHER_ROWS if call.rid.row == 9 else noise
        call.publish(noise=noise)
        return call.reply()

    async with FakeServer(run.root) as fake:
        fake.on(turn, probes=True)
        async with resumed(run, fake, log, "--canary-every", "4", "--max-in-flight", "1") as child:
            assert await end_of(child, log) == ExitCode.SERVER, log.read_text()
    outside = Outside(run.paths.run_dir, tmp_path / "shm")
    why = "gives other states"
    said_to_have_ended(outside, ExitCode.SERVER, why, "--doubted", ExitCode.SERVER)
