"""What looking at a run costs it: 100 ``status`` calls and one ``status --watch`` beside it, and how long the log grows."""

from __future__ import annotations

import argparse
import json
import os
import random
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from bars import Bar, medians, say, work_folder

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, "-m", "hsjournal.cli.main"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of this benchmark."""
    parser.add_argument("--rows", type=int, default=12_000, help="of each run [default: 12,000]")
    parser.add_argument("--calls", type=int, default=100, help="of status during a run [default: 100]")
    parser.add_argument("--every", type=float, default=0.7, help="seconds from one to the next [default: 0.7]")


def run(options: argparse.Namespace) -> list[Bar]:
    """Speed beside onlookers against speed alone, and the size of the write-ahead log in both."""
    sys.path.insert(0, str(REPOSITORY))
    from tests.helpers.engine import running_engine
    from tests.helpers.tiny_models import VOCAB_SIZE, make_tiny_model

    logs: dict[str, list[int]] = {"alone": [], "onlooked": []}
    ends: set[str] = set()
    answers = _Answers()
    with work_folder(options.folder, on_disk=True) as folder:
        model, prompts = make_tiny_model("llama", folder / "model", seed=3), folder / "prompts.jsonl"
        draw = random.Random(1)  # noqa: S311 - repeatable, not secret
        with prompts.open("w") as file:
            for row in range(options.rows):
                ids = [draw.randrange(VOCAB_SIZE - 64) for _ in range(draw.randint(8, 300))]
                file.write(json.dumps({"id": f"s{row}", "input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n")
        root = Path(os.environ["HSJOURNAL_SHM"]) / "dumps"
        with running_engine(model, root) as engine:
            number = iter(range(1 << 20))

            def case(calls: int) -> float:
                run_dir = folder / f"run{next(number)}"
                arguments = [str(a) for a in arguments_of(prompts, root, engine.url)]
                kept = logs["onlooked" if calls else "alone"]
                return _job(run_dir, arguments, calls, options.every, kept, ends, answers)

            cases = {"alone": lambda: case(0), "onlooked": lambda: case(options.calls)}
            speeds = medians(cases, options.rounds, say)
            crashed = _crashed(folder, [str(a) for a in arguments_of(prompts, root, engine.url)])
    if len(ends) != 1:
        raise SystemExit(f"bench: the runs ended differently: {ends}")
    if min(answers.calls) < options.calls:
        raise SystemExit(f"bench: a run was over after {min(answers.calls)} calls: give it more --rows")
    alone, onlooked = (statistics.median(logs[name]) / 1e6 for name in ("alone", "onlooked"))
    note = f"{options.calls} status calls and a status --watch; {speeds['alone']:.1f} and {speeds['onlooked']:.1f} samples/s"
    return [
        Bar("onlooked_vs_alone", speeds["onlooked"] / speeds["alone"], 0.9, "higher", note),
        Bar(
            "wal_mb_onlooked", onlooked, max(16.0, 2 * alone), "lower", f"the log at its longest; alone {alone:.1f} MB"
        ),
        Bar("status_live_s", statistics.median(answers.seconds), 0.5, "lower", "the whole process, beside a run"),
        Bar("status_crashed_s", crashed, 0.5, "lower", "the whole process, supervisor and worker killed"),
    ]


@dataclass
class _Answers:
    """Of ``status``: seconds of each, and how many there were in each run."""

    seconds: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)


def arguments_of(prompts: Path, root: Path, url: str) -> list[str | Path]:
    """Of every run."""
    return ["--prompts", prompts, "--server", url, "--handover-root", root, "--quiet"]


def _status_s(run_dir: Path) -> float:
    begin = time.monotonic()
    done = subprocess.run([*PROGRAM, "status", str(run_dir)], capture_output=True, cwd=REPOSITORY, check=False)
    if done.returncode:
        raise SystemExit(f"bench: status ended with {done.returncode}: {done.stderr.decode()[-500:]}")
    return time.monotonic() - begin


def _crashed(folder: Path, arguments: list[str]) -> float:
    """Seconds that ``status`` takes after everything was killed; the median of five."""
    run_dir = folder / "crashed"
    child = subprocess.Popen(
        [*PROGRAM, "run", str(run_dir), *arguments], stdin=subprocess.DEVNULL, cwd=REPOSITORY, start_new_session=True
    )
    while not any((run_dir / "out").rglob("*.ckpt")):
        if child.poll() is not None:
            raise SystemExit(f"bench: the run that was to be killed ended with {child.returncode}")
        time.sleep(0.05)
    family = psutil.Process(child.pid).children(recursive=True)
    child.kill()
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    child.wait()
    return statistics.median(_status_s(run_dir) for _ in range(5))


def _job(
    run_dir: Path, arguments: list[str], calls: int, every: float, logs: list[int], ends: set[str], answers: _Answers
) -> float:
    """Samples per second between the first and the last verified row of one run."""
    child = subprocess.Popen([*PROGRAM, "run", str(run_dir), *arguments], stdin=subprocess.DEVNULL, cwd=REPOSITORY)
    watch = None
    stop, longest = threading.Event(), [0]

    def measure() -> None:
        while not stop.wait(0.1):
            try:
                longest[0] = max(longest[0], os.stat(run_dir / "journal.db-wal").st_size)
            except OSError:
                continue

    thread = threading.Thread(target=measure)
    thread.start()
    try:
        if calls:
            command = [*PROGRAM, "status", str(run_dir), "--watch", "--plain"]
            while not (run_dir / "manifest.toml").exists() and child.poll() is None:
                time.sleep(0.1)
            watch = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=REPOSITORY)
            made = 0
            while made < calls and child.poll() is None:
                answers.seconds.append(_status_s(run_dir))
                made += 1
                time.sleep(max(0.0, every - answers.seconds[-1]))
            if calls:
                answers.calls.append(made)
        if child.wait():
            raise SystemExit(f"bench: the run ended with {child.returncode}")
    finally:
        stop.set()
        thread.join()
        for process in (child, watch):
            if process is not None:
                process.terminate()
                process.wait()
    logs.append(longest[0])
    with closing(sqlite3.connect(run_dir / "journal.db")) as connection:
        rows, first, last, sent, strikes = connection.execute(
            "SELECT count(*), min(verified_at), max(verified_at), sum(attempt), sum(strikes) FROM sample "
            "WHERE state = 'verified'"
        ).fetchone()
    ends.add(f"{rows} rows verified, {sent} requests, {strikes} strikes")
    return float(rows) / max(float(last) - float(first), 1e-3)
