"""The whole job on a GPU: server, journal and sink to disk, beside what the server and the disk can do by themselves.

A job that reads back all that it writes (``--verify full``) moves every byte over the disk twice; beside it stands one that leaves
the read-back to a later ``hsjournal verify``, and beside ``dd``'s writing ``dd``'s writing while another ``dd`` reads.
"""

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gpu.cost import LOADS, Load, Side, run_round, server_arguments, start_consumer
from gpu.models import write_shape
from gpu.report import Bar, Report
from gpu.serving import REPOSITORY, SHM, CheckError, Deadline, Platform, program_environment, running

_DD_MIB = 4096
_DD_REPEATS = 3
_HSJOURNAL = (sys.executable, "-m", "hsjournal.cli.main")


def check(
    shape: str,
    samples: int,
    disk: Path,
    sink_threads: int,
    policies: tuple[str, ...],
    platform: Platform,
    deadline: Deadline,
) -> Report:
    """Run the job once for each of ``policies`` (``--verify``); ``disk`` is a folder on the storage to write to."""
    report = Report(f"job-{shape}")
    load = LOADS[shape]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-check-")))
        target = Path(tempfile.mkdtemp(prefix="gpu-check-out-", dir=disk))
        stack.callback(shutil.rmtree, target, ignore_errors=True)
        root = Path(tempfile.mkdtemp(prefix="gpu-check-job-", dir=SHM))
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        config = write_shape(load.shape, scratch / "model")
        row_bytes = 2 * int(config["hidden_size"]) * 4  # bfloat16; three aux layers and the final state

        def put(what: str, speed: float, limit: float = 0.0) -> None:
            share = f"{speed / limit:.2f}" if limit else ""
            row = {"what": what, "tok/s": f"{speed:,.0f}", "MB/s": speed * row_bytes / 1e6, "of the lower": share}
            report.rows.append(row)

        try:
            disk_rate, beside_rate = _disk_rates(target, _DD_MIB if platform.device == "cuda" else 64)
            print(f"dd oflag=direct: {disk_rate / 1e6:.0f} MB/s, beside a reader {beside_rate / 1e6:.0f}", flush=True)
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
                run_round(side, load, max(4, load.requests // 5), max(load.in_flight), deadline)
                alone = statistics.median(
                    run_round(side, load, load.requests, max(load.in_flight), deadline)[0] for _ in range(2)
                )
            limit = min(alone, disk_rate / row_bytes)
            put("server alone", alone)
            put("disk (dd oflag=direct)", disk_rate / row_bytes)
            put("disk while another dd reads", beside_rate / row_bytes)
            prompts = scratch / "prompts.jsonl"
            tokens = _write_prompts(prompts, load, samples)
            for policy in policies:
                folder = target / policy.replace(":", "-")
                job = Job(server.url, prompts, root / "root", folder, policy, sink_threads, max(load.in_flight))
                wall = job.run(deadline, scratch / f"run-{policy}.log")
                span, done = job.span()
                if done != samples:
                    report.problems.append(f"--verify {policy}: {done} of {samples} samples done")
                put(f"job --verify {policy}, first sent to last done", tokens / span, limit)
                put(f"job --verify {policy}, whole command", tokens / wall, limit)
                report.details[policy] = {"tokens": tokens, "span_s": span, "wall_s": wall}
                report.bars.append(Bar(f"job_vs_lower, --verify {policy}", tokens / span / limit, 0.9, "higher"))
                shutil.rmtree(folder)
        except CheckError as error:
            report.problems.append(str(error))
    return report


def _disk_rates(folder: Path, mib: int) -> tuple[float, float]:
    """Bytes per second that ``dd oflag=direct`` writes, alone and while another reads: medians of a few."""
    alone, beside = [], []
    count = f"count={mib // 8}"
    first, second = folder / "dd.bin", folder / "dd-2.bin"
    for _ in range(_DD_REPEATS):
        begun = time.monotonic()
        _dd("if=/dev/zero", f"of={first}", "bs=8M", count, "oflag=direct", "conv=fsync").check_returncode()
        alone.append((mib << 20) / (time.monotonic() - begun))
        with ThreadPoolExecutor(1) as pool:
            begun = time.monotonic()
            reading = pool.submit(_dd, f"if={first}", "of=/dev/null", "bs=8M", count, "iflag=direct")
            _dd("if=/dev/zero", f"of={second}", "bs=8M", count, "oflag=direct", "conv=fsync").check_returncode()
            reading.result().check_returncode()
            beside.append((mib << 20) / (time.monotonic() - begun))
    first.unlink()
    second.unlink()
    return statistics.median(alone), statistics.median(beside)


def _dd(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["dd", *arguments], capture_output=True, check=False)


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


@dataclass(frozen=True, slots=True)
class Job:
    """One ``hsjournal run``.

    Args:
        url: of the server.
        prompts: the file.
        root: the server's hand-over root.
        folder: made, for the run directory and the output.
        policy: of reading back, ``--verify``.
        sink_threads: as the option says.
        in_flight: likewise.
    """

    url: str
    prompts: Path
    root: Path
    folder: Path
    policy: str
    sink_threads: int
    in_flight: int

    def run(self, deadline: Deadline, log: Path) -> float:
        """Seconds of the whole command; what ``status`` says of the GPUs in the middle of it is printed.

        Raises:
            CheckError: when it fails; with the end of its output.
        """
        self.folder.mkdir()
        command = [
            *_HSJOURNAL, "run", str(self.folder / "run"), "--server", self.url, "--prompts", str(self.prompts),
            "--out", str(self.folder / "out"), "--handover-root", str(self.root), "--max-in-flight", str(self.in_flight),
            "--sink-threads", str(self.sink_threads), "--verify", self.policy, "--plain",
        ]  # fmt: skip
        begun = time.monotonic()
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env=program_environment(), cwd=REPOSITORY,
            )  # fmt: skip
            gpus: object = None
            try:
                while not gpus and process.poll() is None:
                    time.sleep(deadline.left(1.0))
                    gpus = self._gpus()
                code: int | None = process.wait(deadline.left())
            except (subprocess.TimeoutExpired, CheckError):
                code = None
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        wall = time.monotonic() - begun
        lines = log.read_text(errors="replace").splitlines()
        print("\n".join(lines[-12:]), f"GPUs as status told them: {gpus}", sep="\n", flush=True)
        if code != 0:
            raise CheckError(f"hsjournal run ended with {code}:\n" + "\n".join(lines[-40:]))
        return wall

    def _gpus(self) -> object:
        """What ``status --json`` says of the GPUs; None as long as it says nothing."""
        command = [*_HSJOURNAL, "status", str(self.folder / "run"), "--json"]
        found = subprocess.run(
            command, capture_output=True, check=False, env=program_environment(), cwd=REPOSITORY, timeout=60
        )
        try:
            return json.loads(found.stdout).get("gpus")
        except ValueError:
            return None  # no journal yet

    def span(self) -> tuple[float, int]:
        """Seconds from the first send until the last sample was done as the policy asks, and the samples done.

        Raises:
            CheckError: when there is none.
        """
        connection = sqlite3.connect(self.folder / "run" / "journal.db")  # the run is over: nobody else has it open
        try:
            first, last, count = connection.execute(
                "SELECT min(sent_at), max(verified_at), sum(state = 'verified' OR verify_method = 'deferred') FROM sample"
            ).fetchone()
        finally:
            connection.close()
        if last is None:  # nothing was read back: the last file got its name then
            last = max(
                (file.stat().st_ctime for file in (self.folder / "out").rglob("*") if file.is_file()), default=None
            )
        if first is None or last is None:
            raise CheckError("no sample was done")
        return float(last - first), int(count)
