"""The whole job on a GPU: server, journal and sink to disk, beside what the server and the disk can do by themselves."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from gpu.cost import LOADS, Load, Side, run_round, server_arguments, start_consumer
from gpu.models import write_shape
from gpu.report import Bar, Report
from gpu.serving import REPOSITORY, SHM, CheckError, Deadline, Platform, program_environment, running

_IN_FLIGHT = 32
_DD_MIB = 4096
_DD_REPEATS = 3


def check(shape: str, samples: int, disk: Path, sink_threads: int, platform: Platform, deadline: Deadline) -> Report:
    """Run the job once; ``disk`` is a folder on the storage to write to."""
    report = Report(f"job-{shape}")
    load = LOADS[shape]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-check-")))
        target = Path(tempfile.mkdtemp(prefix="gpu-check-out-", dir=disk))
        stack.callback(shutil.rmtree, target, ignore_errors=True)
        root = Path(tempfile.mkdtemp(prefix="gpu-check-job-", dir=SHM))
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        config = write_shape(load.shape, scratch / "model")
        try:
            disk_rate = _disk_rate(target, _DD_MIB if platform.device == "cuda" else 64)
            print(f"dd oflag=direct: {disk_rate / 1e6:.0f} MB/s", flush=True)
            environment = {"HSJOURNAL_HANDOVER_ROOT": str(root / "root")}
            arguments = server_arguments(load, platform)
            server = stack.enter_context(
                running(
                    "job", scratch / "model", arguments, scratch=scratch, platform=platform, deadline=deadline,
                    environment=environment,
                )
            )  # fmt: skip
            with ExitStack() as consuming:
                side = Side(server, scratch / "taken.json")
                start_consumer("plugin", root / "root", scratch / "taken.json", consuming)
                run_round(side, load, max(4, load.requests // 5), _IN_FLIGHT, deadline)
                alone = [run_round(side, load, load.requests, _IN_FLIGHT, deadline)[0] for _ in range(2)]
            print(f"server alone: {', '.join(f'{speed:,.0f}' for speed in alone)} tok/s", flush=True)
            prompts = scratch / "prompts.jsonl"
            tokens = _write_prompts(prompts, load, samples)
            wall = _run_job(server.url, prompts, root / "root", target, sink_threads, deadline, scratch / "run.log")
            span, verified, written_bytes = _from_journal(target / "run" / "journal.db")
        except CheckError as error:
            report.problems.append(str(error))
            return report
        row_bytes = 2 * int(config["hidden_size"]) * 4  # bfloat16; three aux layers and the final state
        disk_speed = disk_rate / row_bytes
        limit = min(statistics.median(alone), disk_speed)
        if verified != samples:
            report.problems.append(f"{verified} of {samples} samples verified")
        for name, speed in (
            ("server alone", statistics.median(alone)),
            ("disk (dd oflag=direct)", disk_speed),
            ("job, first sent to last verified", tokens / span),
            ("job, whole command", tokens / wall),
        ):
            report.rows.append(
                {"what": name, "tok/s": f"{speed:,.0f}", "MB/s": speed * row_bytes / 1e6, "of the lower": speed / limit}
            )
        report.details = {"tokens": tokens, "span_s": span, "wall_s": wall, "output_bytes": written_bytes}
        report.bars.append(Bar("job_vs_lower", tokens / span / limit, 0.9, "higher"))
    return report


def _disk_rate(folder: Path, mib: int) -> float:
    """Bytes per second that ``dd oflag=direct`` writes: the median of a few."""
    rates = []
    for _ in range(_DD_REPEATS):
        file = folder / "dd.bin"
        begun = time.monotonic()
        subprocess.run(
            ["dd", "if=/dev/zero", f"of={file}", "bs=8M", f"count={mib // 8}", "oflag=direct", "conv=fsync"],
            check=True, capture_output=True,
        )  # fmt: skip
        rates.append((mib << 20) / (time.monotonic() - begun))
        file.unlink()
    return statistics.median(rates)


def _write_prompts(file: Path, load: Load, samples: int) -> int:
    draw = random.Random(99)  # noqa: S311
    total = 0
    with file.open("w") as out:
        for number in range(samples):
            tokens = load.tokens + draw.randrange(-load.tokens // 25, load.tokens // 25)
            ids = [draw.randrange(1000, 100_000) for _ in range(tokens)]
            out.write(json.dumps({"id": f"s{number}", "input_ids": ids, "loss_mask": [1] * tokens}) + "\n")
            total += tokens
    return total


def _run_job(
    url: str, prompts: Path, root: Path, target: Path, sink_threads: int, deadline: Deadline, log: Path
) -> float:
    """Seconds of the whole command.

    Raises:
        CheckError: when it fails; with the end of its output.
    """
    command = [
        sys.executable, "-m", "hsjournal.cli.main", "run", str(target / "run"), "--server", url, "--prompts", str(prompts),
        "--out", str(target / "out"), "--handover-root", str(root), "--max-in-flight", str(_IN_FLIGHT),
        "--sink-threads", str(sink_threads), "--plain",
    ]  # fmt: skip
    begun = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            env=program_environment(), cwd=REPOSITORY,
        )  # fmt: skip
        try:
            code: int | None = process.wait(deadline.left())
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    wall = time.monotonic() - begun
    lines = log.read_text(errors="replace").splitlines()
    print("\n".join(lines[-12:]), flush=True)
    if code != 0:
        raise CheckError(f"hsjournal run ended with {code}:\n" + "\n".join(lines[-40:]))
    return wall


def _from_journal(journal: Path) -> tuple[float, int, int]:
    """Seconds from the first send to the last verified sample, the samples verified, and the bytes written."""
    connection = sqlite3.connect(journal)  # the run is over: nobody else has it open
    try:
        first, last, count, written = connection.execute(
            "SELECT min(sent_at), max(verified_at), count(verified_at), sum(output_bytes) FROM sample"
        ).fetchone()
    finally:
        connection.close()
    if first is None or last is None:
        raise CheckError("no sample was verified")
    return float(last - first), int(count), int(written or 0)
