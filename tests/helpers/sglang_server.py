"""Start and stop a stock SGLang server on the CPU, with our plugin and the test-only platform beside it."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 240.0
PLATFORM = Path(__file__).resolve().parent / "sglang_cpu"
_SHM = Path("/dev/shm")
_OURS_IN_SHM = re.compile(r"sem\.mp-\w+|sglang_\w+\.shm|psm_\w+")


@dataclass(frozen=True, slots=True)
class SglangServer:
    """A running server."""

    url: str
    root: Path
    log: Path
    process: subprocess.Popen[bytes]

    def info(self) -> dict[str, Any]:
        """``/server_info``."""
        with urllib.request.urlopen(f"{self.url}/server_info", timeout=30) as answer:
            return dict(json.load(answer))

    def kill(self) -> None:
        """Kill every process of it, as the kernel does when memory runs out."""
        _end(self.process)

    def tail(self) -> str:
        """The end of the log; SGLang's page-long print of its arguments left out."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if "server_args=" not in line]
        return "\n".join(lines[-40:])


@functools.cache
def sglang_python() -> Path:
    """The Python of an environment with stock SGLang; skips, and says why, only when none can be built."""
    given = os.environ.get("HSJOURNAL_SGLANG_PYTHON")
    if given:
        return Path(given)
    built = subprocess.run(
        [REPOSITORY / "scripts" / "sglang-env"], capture_output=True, text=True, timeout=1500, check=False
    )
    if built.returncode:
        pytest.skip(f"NO STOCK SGLANG: scripts/sglang-env failed: {built.stderr.strip()[-500:]}")
    return Path(built.stdout.split()[-1])


@contextmanager
def running_sglang(
    model_dir: Path,
    root: Path | None,
    *arguments: str,
    environment: dict[str, str] | None = None,
    radix_cache: bool = False,
    port: int = 0,
) -> Iterator[SglangServer]:
    """Serve ``model_dir`` in float32 until the block ends; then the whole process group is gone, and its shm files too.

    Args:
        model_dir: the model's folder.
        root: the hand-over root; None leaves the capture off.
        arguments: more of SGLang's command line.
        environment: added to the server's environment.
        radix_cache: leave the prefix cache on.
        port: 0 for a free one.
    """
    with tempfile.TemporaryDirectory(prefix="hsjournal-sglang-") as scratch:
        log, port = Path(scratch) / "log", port or free_port()
        command = [
            str(sglang_python()),
            "-m",
            "sglang.launch_server",
            "--model-path",
            str(model_dir),
            "--port",
            str(port),
        ]
        command += ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"]
        command += ["--sampling-backend", "pytorch", "--skip-tokenizer-init", "--disable-overlap-schedule"]
        command += ["--max-total-tokens", "4096", "--mem-fraction-static", "0.3", *arguments]
        command += [] if radix_cache else ["--disable-radix-cache"]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HSJOURNAL_", "SGLANG_"))}
        env |= {
            "PYTHONPATH": os.pathsep.join(map(str, (distribution(Path(scratch)), PLATFORM, REPOSITORY))),
            "SGLANG_USE_CPU_ENGINE": "0",
            "SGLANG_PLATFORM": "hsjournal_test",
            "OMP_NUM_THREADS": "1",
        }
        env |= {"HSJOURNAL_HANDOVER_ROOT": str(root)} if root is not None else {}
        before = set(os.listdir(_SHM))
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True, cwd=scratch, env=env | (environment or {}),
            )  # fmt: skip
        server = SglangServer(f"http://127.0.0.1:{port}", root or Path(), log, process)
        try:
            _await_start(server)
            yield server
        finally:
            _end(process)
            for name in set(os.listdir(_SHM)) - before:
                if _OURS_IN_SHM.fullmatch(name):
                    (_SHM / name).unlink(missing_ok=True)


def distribution(scratch: Path) -> Path:
    """A folder that makes our plugin, as pyproject.toml registers it, and the test platform known to SGLang."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = ["[sglang.srt.platforms]", "hsjournal_test = hsjournal_test_platform:activate", "[sglang.srt.plugins]"]
    lines += [f"{name} = {value}" for name, value in project["entry-points"]["sglang.srt.plugins"].items()]
    folder = scratch / "distribution"
    info = folder / "hsjournal_sglang_test-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hsjournal-sglang-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def _await_start(server: SglangServer) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while b"The server is fired up" not in server.log.read_bytes():
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"SGLang did not start (exit code {server.process.poll()}):\n{server.tail()}")
        time.sleep(0.3)


def _end(process: subprocess.Popen[bytes]) -> None:
    # The launcher may linger after SIGTERM, and nothing here depends on how it ends.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError(f"process group {process.pid} of an SGLang server is still there")


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
