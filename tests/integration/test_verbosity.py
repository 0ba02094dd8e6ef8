"""How much is said: --verbose into the worker's log, --quiet on the screen; and a log that rolls over misleads no diagnosis."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from hsjournal.config import RunPaths
from tests.helpers.cli import hsjournal, started
from tests.helpers.tiny_models import make_tiny_model

FULL = 16 << 20
"""Bytes at which the worker's log rolls over."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


def prompts(folder: Path, rows: int) -> Path:
    path = folder / "prompts.jsonl"
    row = {"input_ids": list(range(3, 30)), "loss_mask": [1] * 27}
    path.write_text("".join(json.dumps({"id": f"r{n}"} | row) + "\n" for n in range(rows)))
    return path


def test_quiet_says_nothing_and_verbose_names_every_step(model: Path, tmp_path: Path) -> None:
    words = ("--prompts", prompts(tmp_path, 3), "--model", model)
    quiet = hsjournal("run", tmp_path / "quiet", *words, "--quiet")
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")
    log = RunPaths.of(tmp_path / "quiet").logs / "worker.log"
    assert not log.exists() or "DEBUG" not in log.read_text()

    loud = hsjournal("run", tmp_path / "loud", *words, "-v")
    assert loud.code == 0
    text = (RunPaths.of(tmp_path / "loud").logs / "worker.log").read_text()
    steps = re.findall(r"DEBUG hsjournal\.worker\.row: row (\d), attempt 1: (\w+ to \w+)", text)
    for row in "012":
        way = [step for other, step in steps if other == row]
        assert way == ["pending to sent", "sent to dumped", "dumped to written", "written to verified"]


def test_a_log_that_has_just_rolled_over_is_as_fresh_as_its_newest_line(model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    log = RunPaths.of(run_dir).logs / "worker.log"
    log.parent.mkdir(parents=True)
    log.touch()
    os.truncate(log, FULL - 200)  # a few lines of room
    yesterday = time.time() - 86_400
    os.utime(log, (yesterday, yesterday))
    words = ("--prompts", prompts(tmp_path, 40), "--model", model, "-v")
    slow = tmp_path / "slow"
    slow.touch()
    faults = f"sink.opened=delay:1,while:{slow}"
    run = started("run", run_dir, *words, log=tmp_path / "out", HSJOURNAL_FAULTS=faults)
    try:
        deadline = time.monotonic() + 120
        while not log.with_name("worker.log.1").exists():
            assert run.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        while "size" not in (report := hsjournal("diagnose", run_dir, "--json").json())["log"]:
            assert time.monotonic() < deadline  # a child of it that got no core in time says nothing
    finally:
        slow.unlink()
        run.send_signal(signal.SIGINT)
        run.wait(60)
    assert report["log"]["path"] == str(log)
    assert report["log"]["size"] < FULL
    assert report["log"]["age_s"] < 30
    assert "hsjournal.worker.row: row " in report["log"]["last_line"]
    assert report["verdict"] in ("healthy", "slow", "waiting")
