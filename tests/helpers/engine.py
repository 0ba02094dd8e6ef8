"""Start and stop a real embedded engine, as its own process."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Engine:
    """A running engine."""

    url: str
    boot_id: str
    root: Path
    process: subprocess.Popen[bytes]
    rid_log: Path
    stderr: Path
    parent_pipe: list[int]

    def close_parent_pipe(self) -> None:
        """What the engine sees when the process that started it ends."""
        while self.parent_pipe:
            os.close(self.parent_pipe.pop())

    def received_rids(self) -> list[str]:
        """Every accepted ``/generate`` request of ours so far, in order; a repeat stands twice."""
        return self.rid_log.read_text().split() if self.rid_log.exists() else []


@contextmanager
def running_engine(
    model_dir: Path,
    root: Path,
    *,
    environment: dict[str, str] | None = None,
    **options: str | int | bool,
) -> Iterator[Engine]:
    """Run ``python -m hsjournal.capture.embedded`` over ``model_dir`` until the block ends.

    Args:
        model_dir: the model's folder.
        root: the hand-over root (made by the engine if it is missing).
        environment: added to the process's environment (``HSJOURNAL_FAULTS``, for example).
        options: command-line options of the engine, ``layers="1,3,4"`` for ``--layers 1,3,4``; True for a bare flag.
            ``boot_id``, ``port``, ``host`` and ``rid_log`` have defaults here.
    """
    with tempfile.TemporaryDirectory(prefix="hsjournal-engine-") as scratch:
        boot_id = str(options.pop("boot_id", uuid.uuid4().hex))
        rid_log = Path(str(options.pop("rid_log", Path(scratch) / "rids")))
        stderr = Path(scratch) / "stderr"
        settings: dict[str, str | int | bool] = {
            "host": "127.0.0.1",
            "port": 0,
            "torch_threads": 1,
            "dtype": "float32",
            **options,
        }
        command = [sys.executable, "-m", "hsjournal.capture.embedded", "--model", str(model_dir)]
        command += ["--handover-root", str(root), "--boot-id", boot_id, "--rid-log", str(rid_log)]
        for name, value in settings.items():
            flag = "--" + name.replace("_", "-")
            command += [flag] if value is True else [] if value is False else [flag, str(value)]
        read_end, write_end = os.pipe()
        with stderr.open("wb") as log:
            process = subprocess.Popen(
                [*command, "--parent-fd", str(read_end)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=(read_end,),
                cwd=REPOSITORY,
                env={**os.environ, **(environment or {})},
            )
        os.close(read_end)
        engine = Engine("", boot_id, root, process, rid_log, stderr, [write_end])
        try:
            engine.url = _announced_url(process, stderr)
            yield engine
        finally:
            engine.close_parent_pipe()
            _stop(process)


def _announced_url(process: subprocess.Popen[bytes], stderr: Path) -> str:
    assert process.stdout is not None
    deadline = time.monotonic() + START_TIMEOUT_S
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(process.stdout.fileno(), 4096) if ready else b""
        if not chunk:
            raise AssertionError(f"the engine did not start (exit code {process.poll()}): {stderr.read_text()}")
        line += chunk
    return str(json.loads(line)["url"])


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
