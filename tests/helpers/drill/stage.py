"""Where a drill plays: folders, prompts, an engine of its own, and ``hsjournal`` as a child; nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from tests.helpers.tiny_models import VOCAB_SIZE

REPOSITORY = Path(__file__).resolve().parents[3]
START_TIMEOUT = 240.0


@dataclass(slots=True)
class Stage:
    """The folders of one drill; :meth:`close` removes them and ends what was started here.

    Args:
        model: folder of the tiny model.
        prompts: token ids, one list a row; all different.
        base: scratch folder on a disk.
        shm: scratch folder in tmpfs: mirrors, and the hand-over root.
        home: another stage, whose engine serves this one too: the hand-over root and the record of rids are its.
    """

    model: Path
    prompts: list[list[int]]
    base: Path
    shm: Path
    home: Stage | None = None
    given_root: Path | None = None
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    lifeline: tuple[int, int] = field(default_factory=os.pipe)
    _count: int = 0

    @classmethod
    def make(cls, model: Path, prompts: list[list[int]], base: Path | None = None, home: Stage | None = None) -> Stage:
        """Fresh folders for ``prompts``; ``base`` on a file system of the caller's choice."""
        folder = Path(tempfile.mkdtemp(prefix="hsj-drill-", dir=base))
        shm = Path(tempfile.mkdtemp(prefix="hsj-drill-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        (folder / "outputs").mkdir()
        stage = cls(model, prompts, folder, shm, home)
        stage.prompts_file.write_text(
            "".join(
                json.dumps({"id": f"s{i}", "input_ids": ids, "loss_mask": mask_of(ids)}) + "\n"
                for i, ids in enumerate(prompts)
            )
        )
        return stage

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.base / "run"

    @property
    def out_dir(self) -> Path:
        """The output folder; its parent holds foreign things too."""
        return self.base / "outputs" / "out"

    @property
    def root(self) -> Path:
        """The hand-over root."""
        return self.home.root if self.home else self.given_root or self.shm / "dumps"

    @property
    def rid_log(self) -> Path:
        """Where every engine of this stage appends the rids that it accepted."""
        return self.home.rid_log if self.home else self.base / "rids"

    @property
    def prompts_file(self) -> Path:
        """The prompts as JSON Lines."""
        return self.base / "prompts.jsonl"

    def received(self) -> list[str]:
        """Every rid that an engine accepted so far, in order; a repeat stands twice."""
        return self.rid_log.read_text().split() if self.rid_log.exists() else []

    def environment(self, **more: str) -> dict[str, str]:
        """For every process of this stage; it also marks them as ours."""
        own = {
            "HSJOURNAL_SHM": str(self.shm),
            "HSJOURNAL_RID_LOG": str(self.rid_log),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "CI": "true",
            "NO_COLOR": "1",
        }
        return os.environ | own | more

    def hsjournal(self, *arguments: str | Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start ``hsjournal ARGUMENTS``; its words go to a log file of its own (:meth:`words`)."""
        return self.start([sys.executable, "-m", "hsjournal.cli.main", *map(str, arguments)], **environment)

    def start(self, command: Sequence[str], *pass_fds: int, **environment: str) -> subprocess.Popen[bytes]:
        """Start a process of this stage, in a session of its own."""
        self._count += 1
        log = self.base / f"log-{self._count:04d}"
        with log.open("wb") as file:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, cwd=REPOSITORY,
                env=self.environment(**environment), pass_fds=pass_fds,
            )  # fmt: skip
        child.log = log  # type: ignore[attr-defined]
        self.children.append(child)
        return child

    def fault(self, name: str) -> Path:
        """A file for ``once:`` or ``while:`` of a fault."""
        path = self.base / "faults" / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        return path

    def processes(self) -> dict[int, str]:
        """Every process that was started here, directly or not, and still runs: command lines by pid."""
        found = {}
        mark = f"HSJOURNAL_SHM={self.shm}".encode()
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                with contextlib.suppress(OSError):
                    if (
                        mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                        and state_of(int(entry)) not in "ZX"
                    ):
                        found[int(entry)] = (
                            Path(f"/proc/{entry}/cmdline")
                            .read_bytes()
                            .replace(b"\0", b" ")
                            .decode(errors="replace")[:160]
                        )
        return found

    def close(self, *, keep: bool = False) -> None:
        """End every process of this stage and, unless ``keep``, remove its folders."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(20)
        for end in self.lifeline:
            os.close(end)
        if not keep:
            shutil.rmtree(self.base, ignore_errors=True)
            shutil.rmtree(self.shm, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DrillEngine:
    """An embedded engine that runs are attached to; it can be killed, and comes back at the same address.

    Args:
        stage: whose model and root it serves.
        pace: seconds that each dump takes longer, so that there is always work under way.
    """

    def __init__(self, stage: Stage, pace: float = 0.0) -> None:
        self._stage, self._pace = stage, pace
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self._port = int(taken.getsockname()[1])
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address, over all its lives."""
        return f"http://127.0.0.1:{self._port}"

    def start(self, faults: str = "") -> None:
        """Start it, and return before it answers."""
        pace = f"capture.publishing=delay:{self._pace}" if self._pace else ""
        command = [
            sys.executable, "-m", "hsjournal.capture.embedded", "--model", str(self._stage.model), "--port", str(self._port),
            "--handover-root", str(self._stage.root), "--torch-threads", "1", "--dtype", "float32",
            "--parent-fd", str(self._stage.lifeline[0]),
        ]  # fmt: skip
        self.process = self._stage.start(
            command, self._stage.lifeline[0], HSJOURNAL_FAULTS="; ".join(filter(None, (pace, faults)))
        )

    @property
    def is_up(self) -> bool:
        """Whether it answers."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(self.url + "/server_info", timeout=2.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def wait(self) -> None:
        """Until it answers."""

        def look() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, words(self.process)
            return self.is_up

        wait_for(look, START_TIMEOUT, "the engine answers")


def wait_for(condition: Callable[[], Any], timeout: float, what: str) -> Any:
    """Look 50 times a second until ``condition`` holds; what it returned.

    Raises:
        AssertionError: when it does not hold in time.
    """
    deadline = time.monotonic() + timeout
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {timeout:.0f} s: {what}"
        time.sleep(0.02)
    return answer


def words(child: subprocess.Popen[bytes], last: int = 1500) -> str:
    """The end of what a child of a stage has said."""
    text: str = child.log.read_text(errors="replace")  # type: ignore[attr-defined]
    return text[-last:]


def ended(child: subprocess.Popen[bytes], timeout: float = 120.0) -> int:
    """The child's exit code.

    Raises:
        AssertionError: with its last words, when it does not end in time.
    """
    try:
        return child.wait(timeout)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"still running after {timeout:.0f} s: {words(child)}") from None


def state_of(pid: int) -> str:
    """The state letter of a process's main thread; ``X`` when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "X"


def child_of(supervisor: int, module: str) -> int | None:
    """The process below ``supervisor`` that runs ``module``, if there is one now."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(supervisor).children(recursive=True):  # a server is behind its guard
            with contextlib.suppress(psutil.Error):
                if module in child.cmdline():
                    return child.pid
    return None


def kill_and_wait(*pids: int, timeout: float = 20.0) -> None:
    """SIGKILL, and return when all are gone (zombies count as gone)."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: all(state_of(pid) in "ZX" for pid in pids), timeout, f"{pids} are dead")


def random_prompts(count: int, draw: random.Random, shortest: int = 3, longest: int = 40) -> list[list[int]]:
    """Token ids that a tiny model can run; no two rows are equal."""
    rows: dict[tuple[int, ...], None] = {}
    while len(rows) < count:
        rows[tuple(draw.randrange(VOCAB_SIZE - 64) for _ in range(draw.randint(shortest, longest)))] = None
    return [list(row) for row in rows]


def mask_of(ids: Sequence[int]) -> list[int]:
    """A loss mask that depends on the ids, so that a mixed-up one shows."""
    return [0, *((1 if token % 3 else 0) for token in ids[1:-1]), 1]
