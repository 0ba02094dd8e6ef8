"""Bar 7: what the supervisor costs over a running job, and how soon a dump that is complete is seen."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from bars import Bar, say, work_folder

from hsjournal.dump.protocol import RequestId
from hsjournal.dump.watch import DumpWatch

SETTLE_S = 5.0
"""Seconds after the first row is in, before the measuring begins: imports and preparation are not the running job."""
RUN = "bench0run"
REPOSITORY = Path(__file__).resolve().parents[2]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of this benchmark."""
    parser.add_argument("--seconds", type=float, default=15.0, help="of the running job, a round [default: 15]")
    parser.add_argument("--dumps", type=int, default=500, help="whose arrival is timed, a round [default: 500]")


def run(options: argparse.Namespace) -> list[Bar]:
    """Three figures, each the median of the rounds; one job runs through all of its own."""
    with work_folder(options.folder, on_disk=False) as folder:
        rss, cpu, rows = _job(folder, options.seconds, options.rounds)
    p99s, middles = [], []
    for number in range(options.rounds):
        seen = _done_seen(options.dumps)
        p99s.append(statistics.quantiles(seen, n=100)[98])
        middles.append(statistics.median(seen))
        say(f"round {number + 1}/{options.rounds}: done seen, p99 {p99s[-1]:.2f} ms")
    note = (
        f"{options.rounds} x {options.seconds:.0f} s of a job with the embedded engine, {rows:,} rows verified in them"
    )
    own = "of one core, its own and its children's that ended, "
    dumps = f"{options.rounds} x {options.dumps:,} dumps; median {statistics.median(middles):.2f} ms"
    return [
        Bar("supervisor_rss_mb", statistics.median(rss), 60, "lower", "most of the resident set, " + note),
        Bar("supervisor_cpu_percent", statistics.median(cpu), 1, "lower", own + note),
        Bar("done_seen_p99_ms", statistics.median(p99s), 10, "lower", dumps),
    ]


def _job(folder: Path, seconds: float, rounds: int) -> tuple[list[float], list[float], int]:
    """Most resident MB and percent of one core in each round, of a running job's supervisor; rows verified in all."""
    sys.path.insert(0, str(REPOSITORY))
    from tests.helpers.tiny_models import VOCAB_SIZE, make_tiny_model

    model = make_tiny_model("llama", folder / "model", seed=3)
    draw = random.Random(1)  # noqa: S311 - repeatable, not secret
    prompts = folder / "prompts.jsonl"
    with prompts.open("w") as file:
        for row in range(40_000):
            ids = [draw.randrange(VOCAB_SIZE - 64) for _ in range(draw.randint(8, 40))]
            file.write(json.dumps({"id": f"s{row}", "input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n")
    run_dir = folder / "run"
    command = [
        sys.executable, "-m", "hsjournal.cli.main", "run", str(run_dir), "--prompts", str(prompts), "--model", str(model), "--plain",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=REPOSITORY)
    try:
        process = psutil.Process(child.pid)
        _wait_for_rows(child, run_dir, folder / "log")
        time.sleep(SETTLE_S)
        verified = _verified(run_dir)
        rss, cpu = [], []
        for number in range(rounds):
            begin, used, most = time.monotonic(), _used(process), 0
            while time.monotonic() - begin < seconds:
                time.sleep(0.5)
                if child.poll() is not None:
                    words = (folder / "log").read_text()[-500:]
                    raise SystemExit(f"bench: the job ended in round {number + 1}: {words}")
                most = max(most, process.memory_info().rss)
            rss.append(most / 1e6)
            cpu.append(100 * (_used(process) - used) / (time.monotonic() - begin))
            say(f"round {number + 1}/{rounds}: {rss[-1]:.1f} MB, {cpu[-1]:.2f} % of a core")
        return rss, cpu, _verified(run_dir) - verified
    finally:
        child.terminate()
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            child.kill()


def _used(process: psutil.Process) -> float:
    """Seconds of processor time: its own, and of the children that it has waited for, such as looks at the journal."""
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def _wait_for_rows(child: subprocess.Popen[bytes], run_dir: Path, log: Path) -> None:
    deadline = time.monotonic() + 240
    while _verified(run_dir) < 1:
        if child.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"bench: the job does not start: {log.read_text()[-500:]}")
        time.sleep(0.5)


def _verified(run_dir: Path) -> int:
    done = subprocess.run(
        [sys.executable, "-m", "hsjournal.cli.main", "status", run_dir, "--json"],
        capture_output=True, text=True, cwd=REPOSITORY, check=False,
    )  # fmt: skip
    try:
        return int(json.loads(done.stdout)["counts"]["verified"]["rows"])
    except (ValueError, KeyError):
        return 0


def _done_seen(count: int) -> list[float]:
    """Milliseconds from the rename that publishes a dump to the moment at which the worker's watch has it."""
    root = Path(tempfile.mkdtemp(prefix="hsj-bench-watch-", dir="/dev/shm"))
    try:
        return asyncio.run(_watch(root, count))
    finally:
        shutil.rmtree(root)


async def _watch(root: Path, count: int) -> list[float]:
    rids = [RequestId.sample(RUN, row, 1, 16) for row in range(count)]
    published: dict[str, float] = {}

    def publish() -> None:
        for rid in rids:
            (root / f".tmp-{rid}").mkdir()
            time.sleep(0.002)
            published[str(rid)] = time.monotonic()
            os.rename(root / f".tmp-{rid}", root / str(rid))

    seen: list[float] = []
    async with DumpWatch(root) as watch:
        writer = threading.Thread(target=publish)
        writer.start()
        for start in range(0, count, 32):  # so many are in flight
            await asyncio.gather(*(_time(watch, rid, published, seen) for rid in rids[start : start + 32]))
        writer.join()
        say(f"watched by {'inotify' if watch.uses_inotify else 'scans'}: {len(seen):,} dumps")
    return seen


async def _time(watch: DumpWatch, rid: RequestId, published: dict[str, float], seen: list[float]) -> None:
    already = str(rid) in published
    await watch.wait(rid, time.monotonic() + 60)
    if not already:  # it was waited for, as a worker waits
        seen.append(1000 * (time.monotonic() - published[str(rid)]))
