"""Bar 8: the whole job on the embedded engine beside a plain packed forward over the same tokens, in the same rounds.

The job's time runs from its first request to its last verified row; loading the model counts on neither side.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path

from bars import Bar, say, work_folder

REPOSITORY = Path(__file__).resolve().parents[2]
BATCH_TOKENS = 2048


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of this benchmark."""
    parser.add_argument("--model", type=Path, help="folder of the model [default: SmolLM2-135M-Instruct, fetched once]")
    parser.add_argument("--prompts", type=int, default=50, help="real prompts [default: 50]")


def run(options: argparse.Namespace) -> list[Bar]:
    """One figure; the tokens per second of both sides are told beside it."""
    model = options.model or _smollm2()
    with work_folder(options.folder, on_disk=True) as folder:
        prompts = folder / "prompts.jsonl"
        _say_prompts(prompts, options.prompts)
        ratios, jobs, forwards = [], [], []
        forward: _Forward | None = None
        tokens = 0
        for number in range(options.rounds):
            ids, seconds = _job(folder / f"run{number}", prompts, model)
            tokens = sum(map(len, ids))
            if forward is None:
                (folder / "ids.json").write_text(json.dumps(ids))
                forward = _Forward(model, folder / "ids.json")
            jobs.append(tokens / seconds)
            forwards.append(tokens / forward.seconds())
            ratios.append(jobs[-1] / forwards[-1])
            say(
                f"round {number + 1}/{options.rounds}: job {jobs[-1]:.0f}, forward {forwards[-1]:.0f} tok/s, {ratios[-1]:.3f}"
            )
        if forward is not None:
            forward.close()
    note = f"{tokens:,} tokens: job {statistics.median(jobs):.0f}, forward {statistics.median(forwards):.0f} tok/s"
    return [Bar("job_vs_forward", statistics.median(ratios), 0.95, "higher", note)]


def _job(run_dir: Path, prompts: Path, model: Path) -> tuple[list[list[int]], float]:
    """The token ids of the rows, and the seconds from the first request to the last verified row."""
    root = Path(tempfile.mkdtemp(prefix="hsj-bench-job-", dir="/dev/shm"))
    command = [
        sys.executable, "-m", "hsjournal.cli.main", "run", str(run_dir), "--prompts", str(prompts), "--model", str(model),
        "--handover-root", str(root), "--dtype", "float32", "--max-in-flight", "64", "--canary-every", "0", "--plain",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=_environment(), check=False)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if done.returncode:
        raise SystemExit(
            f"bench: hsjournal run ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
    connection = sqlite3.connect(run_dir / "journal.db")  # the run is over: nobody else has it open
    try:
        ((first, last),) = connection.execute("SELECT min(sent_at), max(verified_at) FROM sample").fetchall()
        rows = connection.execute("SELECT input_ids FROM prompt ORDER BY row").fetchall()
    finally:
        connection.close()
    return [array("I", row[0]).tolist() for row in rows], last - first


def _environment() -> dict[str, str]:
    """Both sides use every core: the benchmarks' own limit of threads is not theirs."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


class _Forward:
    """The plain forward, in a process that loads the model once."""

    def __init__(self, model: Path, ids: Path) -> None:
        script = Path(__file__).with_name("forward_child.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(model), str(ids), str(BATCH_TOKENS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(),
        )  # fmt: skip
        self._answer()

    def seconds(self) -> float:
        """Of one pass over all prompts."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        """End it."""
        self._process.communicate()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"bench: the plain forward ended with {self._process.wait()}")
        told: dict[str, float] = json.loads(line)
        return told


def _say_prompts(target: Path, count: int) -> None:
    every = target.with_suffix(".all")
    subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "make_prompts.py"), str(every)], check=True, capture_output=True
    )
    target.write_text("".join(every.read_text().splitlines(keepends=True)[:count]))


def _smollm2() -> Path:
    command = [str(REPOSITORY / "scripts" / "smollm2-model")]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.splitlines()[-1])
