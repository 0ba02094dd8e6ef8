"""A worker that the test starts itself, without a supervisor: so that it may outlive its epoch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsjournal.config import Settings
from hsjournal.prepare import Request
from tests.helpers.drill.stage import Stage, ended, wait_for, words


@dataclass(frozen=True, slots=True)
class Alone:
    """A run directory on a stage, attached to an engine, and its processes one by one."""

    stage: Stage
    url: str

    def prepare(self) -> None:
        """What ``hsjournal run`` does before the first worker."""
        stage = self.stage
        stage.run_dir.mkdir(exist_ok=True)
        request = Request(
            run_dir=str(stage.run_dir), run_id=uuid.uuid4().hex[:8], prompts=(str(stage.prompts_file),), model=str(stage.model),
            server_url=self.url, handover_root=str(stage.root), out_dir=str(stage.out_dir), attached_to=self.url,
        )  # fmt: skip
        child = stage.start([sys.executable, "-m", "hsjournal.prepare", request.to_json()])
        assert ended(child) == 0, words(child)

    def gate(self) -> dict[str, Any]:
        """Ask for a new epoch; the gate's answer."""
        child = self.stage.start(
            [sys.executable, "-m", "hsjournal.journal.gate", str(self.stage.run_dir), str(self.stage.out_dir)]
        )
        child.wait(60)
        answer = json.loads(words(child).strip().splitlines()[-1])
        assert isinstance(answer, dict)
        return answer

    def worker(self, epoch: int, faults: str = "", **settings: Any) -> subprocess.Popen[bytes]:
        """Start a worker of ``epoch`` that no supervisor's end ends."""
        asked = Settings(self.url, str(self.stage.root), retry_pause=0.2, **settings)
        arguments = [str(self.stage.run_dir), "--epoch", str(epoch), "--settings", asked.to_json(), "--parent-fd", "-1"]
        return self.stage.start([sys.executable, "-m", "hsjournal.worker", *arguments], HSJOURNAL_FAULTS=faults)

    def stopped_worker(self, epoch: int, point: str, passage: int) -> subprocess.Popen[bytes]:
        """A worker that has stopped itself inside ``point``.

        One row at a time: a process stopped in the middle of a transaction would lock the journal for everybody.
        """
        armed = self.stage.fault(f"{point}-{passage}")
        worker = self.worker(epoch, f"{point}=stop@{passage},once:{armed}", max_in_flight=1)
        wait_for(
            lambda: worker.poll() is not None or (not armed.exists() and set(thread_states(worker.pid)) == {"T"}),
            120,
            f"stops at {point}",
        )
        assert worker.poll() is None, words(worker)
        return worker

    def lose_lock(self) -> None:
        """As if the lock were not seen: a run directory restored from a copy, another mount, a lock file deleted by hand."""
        (self.stage.run_dir / "worker.lock").rename(self.stage.base / f"worker.lock-{uuid.uuid4().hex}")


def thread_states(pid: int) -> list[str]:
    """The state letter of each thread."""
    states = []
    with contextlib.suppress(FileNotFoundError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                states.append(Path(f"/proc/{pid}/task/{task}/stat").read_text().rsplit(")", 1)[1].split()[0])
    return states


def let_go(worker: subprocess.Popen[bytes], timeout: float = 60.0) -> int:
    """Continue a stopped worker; its exit code."""
    os.kill(worker.pid, signal.SIGCONT)
    return ended(worker, timeout)


def wait_stuck(pid: int, seconds: float = 0.5, timeout: float = 60.0) -> None:
    """Until a thread of the process has been in the kernel, uninterruptible, for so long."""
    since = time.monotonic()

    def look() -> bool:
        nonlocal since
        if "D" not in thread_states(pid):
            since = time.monotonic()
        return time.monotonic() - since >= seconds

    wait_for(look, timeout, "it hangs in the kernel")
