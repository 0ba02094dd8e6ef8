"""The supervisor's own life: it dies, is doubled, is interrupted, and has workers that do not live."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.helpers.cli import hsjournal, started
from tests.helpers.engine import Engine, running_engine
from tests.helpers.tiny_models import make_tiny_model

ROWS = 60
SLOW = "sink.opened=delay:0.6"
"""Keeps a run going for long enough to be interrupted."""


@dataclass(frozen=True)
class Stage:
    """An engine that outlives every run of this module."""

    model: Path
    engine: Engine


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    model = make_tiny_model("llama", tmp_path_factory.mktemp("model"))
    with (
        tempfile.TemporaryDirectory(prefix="hsj-sup-", dir="/dev/shm") as root,
        running_engine(model, Path(root) / "dumps") as engine,
    ):
        yield Stage(model, engine)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"r{i}", "input_ids": list(range(3, 23 + i)), "loss_mask": [1] * (20 + i)} for i in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def options(stage: Stage) -> tuple[str, ...]:
    return ("--server", stage.engine.url, "--handover-root", str(stage.engine.root), "--max-in-flight", "4")


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


def verified(run_dir: Path) -> int:
    result = hsjournal("status", run_dir, "--json")
    counts = result.json()["counts"] if result.code == 0 else {}
    return int(counts.get("verified", {}).get("rows", 0))


def start_run(stage: Stage, tmp_path: Path, prompts: Path, **environment: str) -> subprocess.Popen[bytes]:
    return started("run", tmp_path / "run", "--prompts", prompts, *options(stage), log=tmp_path / "log", **environment)


def finish(stage: Stage, run_dir: Path) -> None:
    """The last resume: every row verified, and nothing of ours left in the hand-over root."""
    last = hsjournal("resume", run_dir, *options(stage))
    assert last.code == 0, last
    until(lambda: verified(run_dir) == ROWS)
    assert [p.name for p in stage.engine.root.iterdir() if p.name.startswith(("hsj-", ".tmp-"))] == []


def test_its_worker_ends_with_it_and_a_resume_goes_on(stage: Stage, tmp_path: Path, prompts: Path) -> None:
    run = start_run(stage, tmp_path, prompts, HSJOURNAL_FAULTS=SLOW)
    until(lambda: verified(tmp_path / "run") > 2)
    children = psutil.Process(run.pid).children(recursive=True)
    assert children
    run.kill()
    run.wait()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []
    assert not hsjournal("status", tmp_path / "run", "--json").json()["supervisor"]["alive"]
    finish(stage, tmp_path / "run")


def commands_below(pid: int) -> list[str]:
    """Command lines of everything that a process started, also of what ends just now."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found.append(" ".join(process.cmdline()))
    return found


def test_an_engine_of_its_own_ends_with_it_too(stage: Stage, tmp_path: Path, prompts: Path) -> None:
    run = started("run", tmp_path / "run", "--prompts", prompts, "--model", stage.model, log=tmp_path / "log")
    until(lambda: any("hsjournal.capture" in c for c in commands_below(run.pid)))
    children = psutil.Process(run.pid).children(recursive=True)
    run.kill()
    run.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


def test_a_second_one_is_refused_at_once(stage: Stage, tmp_path: Path, prompts: Path) -> None:
    run = start_run(stage, tmp_path, prompts, HSJOURNAL_FAULTS=SLOW)
    try:
        until(lambda: verified(tmp_path / "run") > 0)
        for command in ("run", "resume"):
            second = hsjournal(command, tmp_path / "run", *options(stage))
            assert second.code == 11
            assert f"process {run.pid}" in second.err
            assert len(second.err.strip().splitlines()) == 1
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(60)
    finish(stage, tmp_path / "run")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGUSR1, 143)])
def test_the_first_interrupt_finishes_what_is_in_flight(
    stage: Stage, tmp_path: Path, prompts: Path, number: int, code: int
) -> None:
    """SIGUSR1 is what Slurm sends before the time is up."""
    run = start_run(stage, tmp_path, prompts, HSJOURNAL_FAULTS=SLOW)
    until(lambda: verified(tmp_path / "run") > 2)
    run.send_signal(number)
    assert run.wait(60) == code
    counts = hsjournal("status", tmp_path / "run", "--json").json()["counts"]
    assert {state: c["rows"] for state, c in counts.items() if c["rows"] and state not in ("verified", "pending")} == {}
    assert 0 < counts["pending"]["rows"] < ROWS
    assert "hsjournal resume" in (tmp_path / "log").read_text()
    sent = len(stage.engine.received_rids())
    finish(stage, tmp_path / "run")
    samples = [rid for rid in stage.engine.received_rids()[sent:] if "-p" not in rid]
    assert len(samples) == counts["pending"]["rows"]  # not one that was done


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_second_interrupt_stops_now(stage: Stage, tmp_path: Path, prompts: Path, number: int, code: int) -> None:
    run = start_run(stage, tmp_path, prompts, HSJOURNAL_FAULTS="sink.opened=delay:20")
    until(lambda: "dumped" in (tmp_path / "log").read_text(errors="replace") or _dumped(tmp_path / "run") > 0)
    run.send_signal(number)
    time.sleep(1.0)
    assert run.poll() is None  # it waits for what is in flight
    begin = time.monotonic()
    run.send_signal(number)
    assert run.wait(30) == code
    assert time.monotonic() - begin < 12
    finish(stage, tmp_path / "run")


def _dumped(run_dir: Path) -> int:
    result = hsjournal("status", run_dir, "--json")
    return int(result.json()["counts"].get("dumped", {}).get("rows", 0)) if result.code == 0 else 0


def test_a_worker_that_dies_at_every_start_is_given_up_loudly(stage: Stage, tmp_path: Path, prompts: Path) -> None:

    made = hsjournal(
        "run",
        tmp_path / "run",
        "--prompts",
        prompts,
        *options(stage),
        "--max-restarts",
        "3",
        HSJOURNAL_FAULTS="worker.claiming=exit",
    )
    assert made.code == 4, made
    assert "Traceback" not in made.out + made.err
    line = made.err.strip().splitlines()[-1]
    assert "without finishing a sample" in line
    assert "exit code 70" in line
    assert "worker.log" in line
    waits = [float(word.removesuffix("s")) for word in _waits(made.out)]
    assert waits == sorted(waits)
    assert waits[-1] > waits[0]
    finish(stage, tmp_path / "run")


def _waits(out: str) -> list[str]:
    return [line.split(" in ")[1].split(" s")[0] for line in out.splitlines() if "starting it again in" in line]


def test_a_run_killed_before_its_manifest_is_made_anew(stage: Stage, tmp_path: Path, prompts: Path) -> None:
    run = start_run(stage, tmp_path, prompts, HSJOURNAL_FAULTS="ingest.batch=delay:30")
    until((tmp_path / "run" / "journal.db").exists)
    time.sleep(1.0)
    run.kill()
    run.wait()
    assert not (tmp_path / "run" / "manifest.toml").exists()
    assert hsjournal("resume", tmp_path / "run").code == 10
    again = hsjournal("run", tmp_path / "run", "--prompts", prompts, *options(stage))
    assert again.code == 0, again
    until(lambda: verified(tmp_path / "run") == ROWS)


def test_a_preparation_that_found_no_room_can_be_asked_again(stage: Stage, tmp_path: Path, prompts: Path) -> None:
    """Its prompts were in, its manifest was not: neither `run` nor `resume` may send the user to the other."""
    held = tmp_path / "held"
    held.touch()
    fault = f"prepare.finishing=errno:ENOSPC,while:{held}"
    first = hsjournal("run", tmp_path / "run", "--prompts", prompts, *options(stage), HSJOURNAL_FAULTS=fault)
    assert first.code == 5, first
    held.unlink()
    again = hsjournal("run", tmp_path / "run", "--prompts", prompts, *options(stage))
    assert again.code == 0, again
    until(lambda: verified(tmp_path / "run") == ROWS)


def test_status_of_a_run_whose_supervisor_was_killed_says_so(stage: Stage, tmp_path: Path, prompts: Path) -> None:
    run = start_run(stage, tmp_path, prompts, HSJOURNAL_FAULTS=SLOW)
    until(lambda: verified(tmp_path / "run") > 0)
    run.kill()
    run.wait()
    text = hsjournal("status", tmp_path / "run").out
    assert "DEAD" in text
    assert "hsjournal resume" in text
    verdict = hsjournal("status", tmp_path / "run", "--json").json()["verdict"]
    assert verdict["verdict"] == "supervisor_dead"
    assert "hsjournal resume" in verdict["way_out"]
    finish(stage, tmp_path / "run")
