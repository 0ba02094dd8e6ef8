"""The whole job on stock SGLang, as pip installs it: ``hsjournal run --server``, through kills, full and frozen storage.

One server serves all tests of this module, with small chunks and a short watchdog; the last test kills it. Every row of
every output is held against transformers.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.cli import Result, hsjournal, started
from tests.helpers.engine_contract import Engine, EngineContract, reference
from tests.helpers.mounts import ext4, fill
from tests.helpers.sglang_models import HIDDEN, VOCAB_SIZE, make_sglang_model, reference_states
from tests.helpers.sglang_server import SglangServer, free_port, running_sglang

pytestmark = pytest.mark.timeout(900)
TOLERANCE = 1e-4
CHUNK = 48
WATCHDOG_S = 10
LAYERS = (1, 3, 4)
OPTIONS = ("--max-in-flight", "16", "--canary-every", "10", "--retry-pause", "0.3", "--plain")


@dataclass
class Host:
    """The machine that serves: its server may die and come back at the same address, with other weights under the path.

    Args:
        model: the folder that it serves.
        root: the hand-over root.
        port: of the server.
    """

    model: Path
    root: Path
    port: int = field(default_factory=free_port)
    server: SglangServer = field(init=False)
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def url(self) -> str:
        """Where it listens, or will again."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start a server; the one before must be dead."""
        options = ("--chunked-prefill-size", str(CHUNK), "--watchdog-timeout", str(WATCHDOG_S), "--sleep-on-idle")
        self.server = self.stack.enter_context(running_sglang(self.model, self.root, *options, port=self.port))

    def generates(self) -> bool:
        """Whether it serves somebody else's request just now."""
        body = {"rid": "somebody", "input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
        request = urllib.request.Request(
            f"{self.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return len(json.load(answer)["output_ids"]) == 2


@pytest.fixture(scope="module")
def small_root() -> Iterator[Path]:
    """A hand-over root on a tmpfs of its own where that is allowed, so that it can be full."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="hsjournal-test-"))
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", str(folder)], check=False
        ).returncode
    )
    try:
        yield folder / "root"
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, small_root: Path) -> Iterator[Host]:
    """The server of this module."""
    host = Host(make_sglang_model("llama", tmp_path_factory.mktemp("served")), small_root)
    with host.stack:
        host.start()
        yield host


@pytest.fixture(scope="module")
def model(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served weights as they were at first."""
    folder = tmp_path_factory.mktemp("copy") / "model"
    shutil.copytree(host.model, folder)
    return folder


@pytest.fixture(scope="module")
def engine(host: Host, model: Path) -> Engine:
    """The same server, for the contract of engines."""
    return Engine(host.url, host.root, model, longest=2041)


class TestSglang(EngineContract):
    """All tests of the contract of engines."""


@dataclass(frozen=True)
class Job:
    """A run directory, and what it was asked to do."""

    host: Host
    run_dir: Path
    ids: Sequence[Sequence[int]]
    processes: list[subprocess.Popen[bytes]]

    @property
    def command(self) -> tuple[str | Path, ...]:
        """Of a new run."""
        prompts = self.run_dir.with_name("prompts.jsonl")
        rows = [{"id": f"s{i}", "input_ids": list(ids), "loss_mask": [1] * len(ids)} for i, ids in enumerate(self.ids)]
        prompts.write_text("\n".join(map(json.dumps, rows)))
        return ("run", self.run_dir, "--prompts", prompts, "--server", self.host.url, "--handover-root", self.host.root, *OPTIONS)  # fmt: skip

    def start(self, *more: str | Path) -> subprocess.Popen[bytes]:
        """Start it; its words go to ``log`` beside the run directory."""
        self.processes.append(started(*self.command, *more, log=self.log))
        return self.processes[-1]

    def resume(self) -> Result:
        """Go on, to the end."""
        return hsjournal("resume", self.run_dir, *OPTIONS)

    @property
    def log(self) -> Path:
        """What it said."""
        return self.run_dir.with_name("log")

    def status(self) -> dict[str, Any]:
        """``status --json``; empty while there is none."""
        found = hsjournal("status", self.run_dir, "--json")
        return found.json() if found.code == 0 else {}

    def verified(self) -> int:
        """Rows that are."""
        return int(self.status().get("counts", {}).get("verified", {}).get("rows", 0))

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The journal's, of one kind; the run has ended."""
        from hsjournal.journal.reading import JournalReader

        with JournalReader(self.run_dir / "journal.db") as journal:
            return [event.detail for _, event in journal.events(most=100_000) if event.kind == kind]

    def strikes(self) -> int:
        """Of all rows together."""
        from hsjournal.journal.reading import JournalReader

        with JournalReader(self.run_dir / "journal.db") as journal:
            return sum(row["strikes"] for row in journal.all_rows())

    def assert_right(self, model: Path, out: Path | None = None) -> None:
        """One file for each row, and every row of it as transformers has it."""
        import torch

        files = {int(p.stem.removeprefix("data_")): p for p in (out or self.run_dir / "out").rglob("*.ckpt")}
        assert sorted(files) == list(range(len(self.ids)))
        for row, ids in enumerate(self.ids):
            held = torch.load(files[row], weights_only=True)
            assert held["input_ids"].tolist() == list(ids)
            wanted, _ = reference_states(reference(model), ids, LAYERS)
            for got, want in (
                *zip(held["aux_hidden_state"][0].split(HIDDEN, dim=1), wanted, strict=False),
                (held["hidden_state"][0], wanted[-1]),
            ):
                assert float(((got - want).norm(dim=1) / want.norm(dim=1)).max()) < TOLERANCE, row
        assert [p.name for p in self.host.root.iterdir()] == []


@pytest.fixture
def make_job(host: Host, tmp_path: Path) -> Iterator[Callable[[int, int, int], Job]]:
    """Makes a job of some rows, up to so many tokens each, by a seed; whatever happens, it does not outlive its test."""
    processes: list[subprocess.Popen[bytes]] = []

    def make(rows: int, longest: int, seed: int) -> Job:
        draw = random.Random(seed)
        lengths = [draw.choice((1, 2, 15, 16, 17, 33, draw.randrange(40, longest), longest)) for _ in range(rows)]
        ids = [[draw.randrange(1, VOCAB_SIZE) for _ in range(n)] for n in lengths]
        return Job(host, tmp_path / "run", ids, processes)

    yield make
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


MakeJob = Callable[[int, int, int], Job]


def wait(condition: Callable[[], object], what: str, job: Job, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, (
            f"{what} did not come:\n{job.log.read_text()[-3000:]}\n{job.host.server.tail()}"
        )
        time.sleep(0.1)


def finish(process: subprocess.Popen[bytes], job: Job, seconds: float = 240.0) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it did not end:\n{job.log.read_text()[-3000:]}\n{job.host.server.tail()}") from None


def test_the_whole_job_with_its_worker_killed(host: Host, model: Path, make_job: MakeJob) -> None:
    job = make_job(60, 300, 1)
    process = job.start()
    wait(lambda: job.verified() >= 8, "the eighth row", job)
    worker = job.status()["worker"]
    assert worker["alive"]
    os.kill(worker["pid"], signal.SIGKILL)
    assert finish(process, job) == 0, job.log.read_text()[-3000:]
    job.assert_right(model)
    assert job.strikes() == 0

    line = '"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": true}'
    assert line in job.log.read_text()
    assert job.status()["draft_config"] == line
    first, *others = job.events("preflight")
    assert first["engine"] == "sglang"
    assert first["versions"]["sglang"] == host.server.info()["version"]
    assert (first["chunk_size"], first["context_length"], first["longest_prompt"]) == (CHUNK, 2048, 2041)
    assert (first["agreement"]["tokens"], first["agreement"]["others"]) == (500, 6)
    assert first["agreement"]["in_company"]["worst_error"] < TOLERANCE
    assert {found["boot_id"] for found in (first, *others)} == {host.server.info()["hsjournal"]["boot_id"]}
    assert len(others) >= 2  # of each worker
    canaries = job.events("canary")
    assert len(canaries) >= 3  # their count begins anew with each worker
    assert all(canary.get("worst_error", 0.0) < TOLERANCE for canary in canaries)


def test_a_full_handover_root_costs_neither_a_row_nor_the_server(host: Host, model: Path, make_job: MakeJob) -> None:
    if not host.root.parent.is_mount():
        pytest.skip("a small tmpfs for the hand-over root needs root")
    job = make_job(80, 400, 2)
    process = job.start()
    wait(lambda: any((job.run_dir / "out").rglob("*.ckpt")), "the first file", job)  # at once: they come in heaps
    filler = fill(host.root.parent)
    wait(lambda: job.status().get("pauses"), "a pause", job)
    before = job.verified()
    time.sleep(5.0)
    assert job.verified() <= before + 16  # what was on its way
    assert host.generates()
    filler.unlink()
    assert finish(process, job) == 0, job.log.read_text()[-3000:]
    assert host.server.process.poll() is None
    job.assert_right(model)
    kinds = ("capture_failed", "dump_rejected", "no_dump", "suspect", "crash_strike", "paused")
    assert job.strikes() == 0, {kind: job.events(kind)[:5] for kind in kinds}


def test_frozen_output_outlasts_the_servers_watchdog(
    host: Host, model: Path, make_job: MakeJob, tmp_path: Path
) -> None:
    with ext4(tmp_path, 256) as disk:
        job = make_job(60, 300, 3)
        out = disk.mount / "out"
        process = job.start("--out", out, "--handover-budget", str(4 << 20))
        wait(lambda: job.verified() >= 4, "the fourth row", job)
        with disk.frozen():
            until = time.monotonic() + WATCHDOG_S + 6
            while time.monotonic() < until:
                assert host.server.process.poll() is None, host.server.tail()
                time.sleep(0.5)
            assert host.generates()
            used = sum(p.stat().st_size for p in host.root.rglob("*") if p.is_file())
            assert 0 < used <= 5 << 20
        assert finish(process, job) == 0, job.log.read_text()[-3000:]
        job.assert_right(model, out)
    assert "watchdog timeout" not in host.server.log.read_text().lower().replace("watchdog_timeout", "")


def test_a_killed_server_is_waited_for_and_other_weights_are_refused(
    host: Host, model: Path, make_job: MakeJob
) -> None:
    job = make_job(50, 300, 4)
    process = job.start()
    wait(lambda: job.verified() >= 6, "the sixth row", job)
    host.server.kill()
    wait(lambda: "server" in job.status().get("pauses", {}), "a pause for the server", job)
    verified = job.verified()

    # The same path, shapes and names, and other weights: nothing but the probe prompt can tell.
    make_sglang_model("llama", host.model, seed=1)
    host.start()
    assert finish(process, job) == 13, job.log.read_text()[-3000:]
    said = job.log.read_text()
    assert "gives other states for the run's probe prompt than at the run's start" in said
    again = job.resume()
    assert again.code == 13, again
    assert "gives other states for the run's probe prompt than at the run's start" in again.err
    assert job.verified() == verified
    host.server.kill()
    shutil.copytree(model, host.model, dirs_exist_ok=True)

    host.start()
    assert (end := job.resume()).code == 0, end
    job.assert_right(model)
    assert job.strikes() == 0
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(job.run_dir) in " ".join(p.info["cmdline"] or [])]
