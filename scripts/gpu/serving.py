"""Start stock SGLang servers with the plugins under test, talk to them, and always end them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

REPOSITORY = Path(__file__).resolve().parents[2]
START_LIMIT_S = 450.0  # two servers of experts that compile beside one another take more than 300
PLUGIN = "hsjournal = hsjournal.capture.sglang_plugin:register"
SHM = Path("/dev/shm")  # noqa: S108 - where SGLang leaves its files
_LEFT_BEHIND = re.compile(r"sem\.mp-\w+|sglang_\w+\.shm|psm_\w+")
_TAIL_LINES = 40
_KEPT_LOG_BYTES = 2 << 20
_END_LIMIT_S = 20.0


class CheckError(Exception):
    """A check could not be made; the message says why, with the end of the log where there is one."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of the time that one call may take."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """That many seconds from now."""
        return cls(time.monotonic() + seconds)

    def left(self, most: float = float("inf")) -> float:
        """Seconds left, ``most`` at most.

        Raises:
            CheckError: when none are.
        """
        left = self.at - time.monotonic()
        if left <= 0:
            raise CheckError("the time of this call is used up")
        return min(left, most)


@dataclass(frozen=True, slots=True)
class Platform:
    """How servers are started here: on a GPU, or on a CPU as a rehearsal.

    Args:
        device: ``cuda`` or ``cpu``.
        python: the interpreter that has SGLang.
        logs: folder that keeps the ends of the servers' logs, ``NAME.log``.
    """

    device: str = "cuda"
    python: str = sys.executable
    logs: Path | None = None

    def arguments(self) -> list[str]:
        """The backends; the cut kernel wheel has no flash attention."""
        if self.device == "cuda":
            return ["--attention-backend", "triton", "--sampling-backend", "pytorch"]
        return [
            "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
            "--disable-overlap-schedule", "--dtype", "float32",
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Beside the caller's own."""
        common = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        if self.device == "cuda":  # NVLink multicast can disturb others on a shared host, and nothing here needs it
            off = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
            return common | off
        return common | {"SGLANG_USE_CPU_ENGINE": "0", "SGLANG_PLATFORM": "hsjournal_test", "OMP_NUM_THREADS": "1"}

    def paths(self) -> list[Path]:
        """Added to the servers' path."""
        here = [REPOSITORY, REPOSITORY / "scripts"]
        return here if self.device == "cuda" else [*here, REPOSITORY / "tests" / "helpers" / "sglang_cpu"]


@dataclass(slots=True)
class Server:
    """A running server."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)
    start_s: float = 0.0

    def tail(self, lines: int = _TAIL_LINES) -> str:
        """The end of the log; SGLang's page-long print of its arguments left out."""
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join([line for line in text if "server_args=" not in line][-lines:])

    def prefill_graphs(self) -> str:
        """How many prefill batches ran as a CUDA graph, from the log."""
        batches = re.findall(r"Prefill batch.*?graph: (\w+)", self.log.read_text(errors="replace"))
        return f"{batches.count('True')}/{len(batches)}"


def write_distribution(folder: Path, plugins: Sequence[str], platform: Platform) -> Path:
    """A folder that makes plugins known to SGLang without installing anything: entry points alone."""
    lines = ["[sglang.srt.plugins]", *plugins]
    if platform.device == "cpu":
        lines += ["[sglang.srt.platforms]", "hsjournal_test = hsjournal_test_platform:activate"]
    info = folder / "hsjournal_gpu_check-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hsjournal-gpu-check\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@contextmanager
def running(
    name: str,
    model: Path,
    arguments: Sequence[str],
    *,
    scratch: Path,
    platform: Platform,
    deadline: Deadline,
    plugins: Sequence[str] = (PLUGIN,),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Serve ``model`` until the block ends; then the server's whole process group is gone.

    Raises:
        CheckError: when it does not come up; with the end of its log.
    """
    port = free_port()
    command = [
        platform.python, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1",
        "--port", str(port), "--nccl-port", str(free_port()), "--skip-tokenizer-init", "--disable-radix-cache",
        *platform.arguments(), *arguments,
    ]  # fmt: skip
    distribution = write_distribution(scratch / f"{name}-distribution", plugins, platform)
    paths = [str(distribution), *map(str, platform.paths()), os.environ.get("PYTHONPATH", "")]
    env = {k: v for k, v in os.environ.items() if not k.startswith("HSJOURNAL_")}
    env |= platform.environment() | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | dict(environment or {})
    log = scratch / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=env,
            cwd=scratch,
        )  # fmt: skip
    server = Server(f"http://127.0.0.1:{port}", log, process)
    try:
        _await_start(server, deadline.left(START_LIMIT_S))
        print(f"[{name}] serving after {server.start_s:.0f} s", flush=True)
        yield server
    finally:
        _end(process)
        if platform.logs is not None:
            platform.logs.mkdir(parents=True, exist_ok=True)
            (platform.logs / f"{name}.log").write_bytes(log.read_bytes()[-_KEPT_LOG_BYTES:])


def remove_leftovers(before: set[str]) -> None:
    """Remove what SGLang's servers left in shared memory since ``before`` was listed."""
    for name in set(os.listdir(SHM)) - before:
        if _LEFT_BEHIND.fullmatch(name):
            (SHM / name).unlink(missing_ok=True)


def shm_names() -> set[str]:
    """What lies in shared memory."""
    return set(os.listdir(SHM))


def send(
    server: Server, requests: Sequence[tuple[str, Sequence[int], int]], in_flight: int, timeout_s: float
) -> tuple[list[dict[str, Any]], float]:
    """Send (rid, ids, new tokens), at most ``in_flight`` at once; the answers in order, and the seconds it took.

    Raises:
        CheckError: when a request is not answered with 200, or not in time.
    """

    async def go() -> list[dict[str, Any]]:
        gate = asyncio.Semaphore(in_flight)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with aiohttp.ClientSession(trust_env=False, connector=connector, timeout=timeout) as session:

            async def one(rid: str, ids: Sequence[int], new: int) -> dict[str, Any]:
                sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
                body = {"rid": rid, "input_ids": list(ids), "sampling_params": sampling}
                async with gate, session.post(f"{server.url}/generate", json=body) as answer:
                    if answer.status != 200:
                        text = (await answer.text())[:300]
                        raise CheckError(f"{rid} was answered {answer.status}: {text}\n{server.tail()}")
                    return dict(await answer.json())

            return list(await asyncio.gather(*(one(*request) for request in requests)))

    begun = time.monotonic()
    try:
        answers = asyncio.run(go())
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise CheckError(f"{type(error).__name__} while sending: {error}\n{server.tail()}") from error
    return answers, time.monotonic() - begun


def server_info(server: Server) -> dict[str, Any]:
    """``/server_info``."""

    async def go() -> dict[str, Any]:
        async with (
            aiohttp.ClientSession(trust_env=False) as session,
            session.get(f"{server.url}/server_info") as answer,
        ):
            return dict(await answer.json())

    return asyncio.run(go())


def program_environment() -> dict[str, str]:
    """For programs of this package: the repository on their path."""
    paths = [str(REPOSITORY), str(REPOSITORY / "scripts"), os.environ.get("PYTHONPATH", "")]
    more = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return os.environ | more


def run_module(module: str, *arguments: str, deadline: Deadline, log: Path) -> None:
    """Run one of this package's programs in a process of its own.

    Raises:
        CheckError: when it fails or takes too long; with the end of its output.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True, env=program_environment(),
        )  # fmt: skip
        try:
            code = process.wait(deadline.left())
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    if code != 0:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        raise CheckError(f"{module} {' '.join(arguments)} ended with {code}:\n{end}")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_start(server: Server, limit_s: float) -> None:
    limit = time.monotonic() + limit_s
    while b"The server is fired up" not in server.log.read_bytes():
        code = server.process.poll()
        if code is not None or time.monotonic() > limit:
            how = f"ended with {code}" if code is not None else f"was not up after {limit_s:.0f} s"
            raise CheckError(f"SGLang {how}:\n{server.tail()}")
        time.sleep(0.3)
    server.start_s = time.monotonic() - server.started


def _end(process: subprocess.Popen[bytes]) -> None:
    """KILL: the launcher may linger after SIGTERM, and nothing here depends on how it ends."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    limit = time.monotonic() + _END_LIMIT_S
    with suppress(ProcessLookupError):
        while time.monotonic() < limit:
            os.killpg(process.pid, 0)  # its schedulers still hold the GPU's memory
            time.sleep(0.1)
