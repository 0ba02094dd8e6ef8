"""A terminal that is closed, that takes no bytes, or a pipe without a reader: the run goes on, and stalls are noticed."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.cli import REPOSITORY, hsjournal
from tests.helpers.fleets import make_job, until

ROWS = 40


class Run:
    """A real run, slow for as long as its folder has a file ``slow``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        self._job = make_job(folder, ROWS)
        self.slow = folder / "slow"
        self.slow.touch()
        (folder / "shm").mkdir()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *words: str, out: int, session_of: int | None = None) -> None:
        """With its three standard streams on ``out``; ``session_of`` becomes its controlling terminal."""
        own = {
            "HSJOURNAL_SHM": str(self.folder / "shm"), "HSJOURNAL_FAULTS": f"sink.opened=delay:1,while:{self.slow}",
            "OMP_NUM_THREADS": "1", "TERM": "xterm-256color",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hsjournal.cli.main", "run", str(self.run_dir), *self._job, "--sink-threads", "1", *words],
            stdin=out, stdout=out, stderr=out, cwd=REPOSITORY, start_new_session=session_of is None,
            preexec_fn=None if session_of is None else lambda: os.login_tty(session_of),  # noqa: PLW1509
            env={name: value for name, value in os.environ.items() if name != "CI"} | own,
        )  # fmt: skip

    def told(self) -> dict[str, Any]:
        """What status says."""
        return hsjournal("status", self.run_dir, "--json", HSJOURNAL_SHM=str(self.folder / "shm")).json()

    def verified(self) -> int:
        """Rows so far."""
        assert self.process is not None
        assert self.process.poll() in (None, 0), "the run ended"
        with contextlib.suppress(IndexError, KeyError):  # there is no run yet
            return int(self.told()["counts"]["verified"]["rows"])
        return 0

    def await_verified(self, rows: int) -> None:
        """Until so many are."""
        until(lambda: self.verified() >= rows, 120, "no row was verified")

    def events(self, kind: str) -> list[dict[str, Any]]:
        """All of one kind."""
        found = hsjournal("events", self.run_dir, HSJOURNAL_SHM=str(self.folder / "shm")).out.splitlines()
        return [event for event in map(json.loads, found) if event["kind"] == kind]

    def ends_whole(self) -> None:
        """To the end, with every row."""
        assert self.process is not None
        self.slow.unlink()
        assert self.process.wait(120) == 0
        assert self.verified() == ROWS
        assert psutil.pid_exists(self.process.pid) is False


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    found = Run(tmp_path)
    yield found
    if found.process is not None and found.process.poll() is None:
        family = [psutil.Process(found.process.pid), *psutil.Process(found.process.pid).children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        found.process.wait()


def closed_terminal(run: Run, *words: str) -> Callable[[], None]:
    """On a terminal; what closes it."""
    keyboard, terminal = pty.openpty()
    run.start(*words, out=terminal, session_of=terminal)
    os.close(terminal)
    return lambda: os.close(keyboard)


def unread_pipe(run: Run, *words: str) -> Callable[[], None]:
    """On a pipe; what takes its reader away."""
    reader, writer = os.pipe()
    run.start(*words, out=writer)
    os.close(writer)
    return lambda: os.close(reader)


@pytest.mark.parametrize(("begin", "words"), [(closed_terminal, []), (closed_terminal, ["--plain"]), (unread_pipe, [])])
def test_the_run_goes_on_and_its_log_has_what_the_screen_would_have_shown(
    run: Run, begin: Callable[..., Callable[[], None]], words: list[str]
) -> None:
    close = begin(run, *words)
    run.await_verified(2)
    close()
    before = run.verified()
    run.await_verified(before + 3)
    assert run.told()["supervisor"]["alive"]
    run.ends_whole()
    log = (run.run_dir / "logs" / "screen.log").read_text()
    assert "nobody reads here any more" in log.splitlines()[0]
    assert f"/{ROWS} verified" in log
    assert f"total              {ROWS}" in log
    assert "Traceback" not in log
    assert "\x1b" not in log


def test_a_terminal_that_takes_no_bytes_hides_no_stall(run: Run) -> None:
    keyboard, terminal = pty.openpty()
    os.set_blocking(terminal, False)
    with contextlib.suppress(BlockingIOError):  # full, and not read, as behind a connection that is half dead
        while os.write(terminal, b"full" * 1000):
            pass
    os.set_blocking(terminal, True)
    run.start("--stall-timeout", "8", "--poll-interval", "1", out=terminal, session_of=terminal)
    os.close(terminal)
    run.await_verified(2)
    worker = int(run.told()["worker"]["pid"])
    os.kill(worker, signal.SIGSTOP)
    until(lambda: run.events("stall"), 60, "the stall was not noticed")
    assert run.events("stall")[0]["detail"]["verdict"] == "worker_stopped"
    until(lambda: run.told()["worker"]["pid"] not in (worker, None), 60, "no other worker was started")
    run.slow.unlink()
    until(lambda: run.verified() == ROWS, 120, "the run did not go on")
    assert run.process is not None
    os.close(keyboard)  # its last words are held up until somebody reads, or nobody can
    assert run.process.wait(30) == 0
