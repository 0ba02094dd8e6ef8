"""``hsjournal run --launch`` over stock SGLang, as pip installs it: the whole job, with the server killed in its middle.

The schedulers, and SGLang's launcher, which may linger after SIGTERM, are ours to end: nothing of them is left (B13).
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hsjournal.config import RunPaths
from hsjournal.server.tree import Member, is_alive
from tests.helpers.cli import REPOSITORY, hsjournal, started
from tests.helpers.reference import Reference, check_outputs
from tests.helpers.sglang_models import VOCAB_SIZE, make_sglang_model
from tests.helpers.sglang_server import PLATFORM, distribution, sglang_python

pytestmark = pytest.mark.timeout(900)
ROWS = 48
SLOW = "sink.opened=delay:0.4"
START_S = 300.0


def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.25)


def command_line(model: Path, scratch: Path) -> str:
    """As a user would type it: variables first, no port, no address."""
    path = os.pathsep.join(map(str, (distribution(scratch), PLATFORM, REPOSITORY)))
    variables = {
        "PYTHONPATH": path,
        "SGLANG_USE_CPU_ENGINE": "0",
        "SGLANG_PLATFORM": "hsjournal_test",
        "OMP_NUM_THREADS": "1",
    }
    words = [str(sglang_python()), "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"]
    words += ["--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    words += ["--skip-tokenizer-init", "--disable-radix-cache", "--disable-overlap-schedule"]
    words += ["--max-total-tokens", "4096", "--mem-fraction-static", "0.3", "--chunked-prefill-size", "48"]
    return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in variables.items()), shlex.join(words)])


def verified(run_dir: Path) -> int:
    found = hsjournal("status", run_dir, "--json")
    counts: dict[str, Any] = found.json()["counts"] if found.code == 0 else {}
    return int(counts["verified"]["rows"]) if counts else 0


def members(run_dir: Path) -> set[Member]:
    """The processes of the server that runs now, as its guard says."""
    try:
        record = json.loads((RunPaths.of(run_dir).mirror / "server-log" / "server.json").read_text())
    except (OSError, ValueError):
        return set()
    return {Member(**member) for member in record["members"]}


def test_the_server_is_killed_in_the_middle_of_a_job(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    model = make_sglang_model("llama", tmp_path / "model")
    draw = random.Random(7)
    rows = [[draw.randrange(VOCAB_SIZE) for _ in range(1 + 3 * i)] for i in range(ROWS)]
    lines = [{"id": f"r{i}", "input_ids": ids, "loss_mask": [1] * len(ids)} for i, ids in enumerate(rows)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = tmp_path / "log"
    run = started(
        "run", run_dir, "--prompts", tmp_path / "prompts.jsonl", "--launch", command_line(model, tmp_path), "--layers", "1,3,4",
        "--start-timeout", "280", "--max-in-flight", "8", "--retry-pause", "0.3", "--plain",
        log=log, HSJOURNAL_FAULTS=SLOW,
    )  # fmt: skip
    seen: set[Member] = set()
    try:
        until(lambda: verified(run_dir) >= 5 or run.poll() is not None, START_S)
        assert run.poll() is None, log.read_text()
        seen = first = members(run_dir)
        assert len(first) >= 3  # launcher, scheduler, detokenizer
        for member in first:
            os.kill(member.pid, signal.SIGKILL)
        until(lambda: not any(is_alive(member) for member in first), 30)
        until(lambda: bool(members(run_dir) - first), 60)
        before = verified(run_dir)
        assert before < ROWS
        until(lambda: verified(run_dir) > before or run.poll() is not None, START_S)
        seen |= members(run_dir)
        assert run.wait(120) == 0, log.read_text()
    finally:
        run.terminate()
        run.wait(60)
    assert not any(is_alive(member) for member in seen)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(model) in (p.info["cmdline"] or [])]
    state = hsjournal("status", run_dir, "--json").json()
    assert state["counts"]["verified"]["rows"] == ROWS
    assert state["failures"] == []
    assert set(check_outputs(run_dir / "out", Reference(model))) == set(range(ROWS))
    said = (run_dir / "logs" / "server.log").read_text()
    assert said.count("The server is fired up") == 2
    removed = re.findall(r"hsjournal: removed what it left in /dev/shm: (.+)", said)
    assert any("sglang_loads_" in names for names in removed)
    assert not any((Path("/dev/shm") / name).exists() for names in removed for name in names.split(", "))
