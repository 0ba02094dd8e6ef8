"""A server of our own: how it starts, what it says when it can't, and that nothing of it is left, whoever is killed.

| fault | test |
|---|---|
| B13 | test_nothing_of_the_tree_is_left, test_a_killed_supervisor, test_a_killed_guard |
| B14 | test_one_that_is_never_ready |
| B15 | test_the_signal_that_ended_it_is_named |
| B4 | test_a_slow_start_is_waited_for |
| G13 | test_nothing_of_the_tree_is_left (a decoy lives on) |
| G14 | test_nothing_of_the_tree_is_left (a child with a session of its own, one whose parent is gone) |
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hsjournal.errors import ExitCode
from hsjournal.server.launch import LaunchError
from hsjournal.server.own import OwnServer
from hsjournal.server.recipe import Recipe, stock
from tests.helpers.cli import REPOSITORY

pytestmark = pytest.mark.timeout(120)
SERVER = Path(__file__).resolve().parents[1] / "helpers" / "sham_server.py"


def sham(*words: str, **settings: float) -> Recipe:
    return stock(f"{sys.executable} {SERVER} {' '.join(words)}", "/dev/shm/none", **settings)  # type: ignore[arg-type]


def own(tmp_path: Path, recipe: Recipe) -> OwnServer:
    return OwnServer(recipe, tmp_path / "ring", tmp_path / "logs" / "server.log")


def tree(tmp_path: Path) -> list[psutil.Process]:
    """The processes that the sham server says it started, itself among them."""
    return [psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split()]


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_at(server: OwnServer, pid: int | None) -> bool:
    return server.pid == pid


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def guard_of_all(tmp_path: Path) -> psutil.Process:
    """The guard, once it has seen the whole family."""
    until(lambda: len(json.loads((tmp_path / "ring" / "server.json").read_text())["members"]) >= 4)
    (guard,) = [
        p
        for p in psutil.Process().children()
        if p.status() != psutil.STATUS_ZOMBIE and "hsjournal.server.guard" in p.cmdline()
    ]
    return guard


def test_nothing_of_the_tree_is_left(tmp_path: Path) -> None:
    decoy = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    server = own(tmp_path, sham("--pids", str(tmp_path / "pids"), "--family", "--deaf", "--shm"))
    try:
        server.start()
        info = server.wait_ready(lambda: True)
        assert info["model_path"] == "sham"
        family = tree(tmp_path)
        assert len(family) == 4
        assert is_at(server, family[0].pid)
        left = [Path("/dev/shm") / name for name in info["shm"]]
        assert all(path.exists() for path in left)
        time.sleep(1.2)  # a look of the guard
        begun = time.monotonic()
        server.stop()
        assert time.monotonic() - begun < 12
        assert gone(family)
        assert [path.name for path in left if path.exists()] == ["sham-precious"]
        assert decoy.poll() is None
        assert is_at(server, None)
    finally:
        Path("/dev/shm/sham-precious").unlink(missing_ok=True)
        decoy.kill()
        decoy.wait()
        server.stop()
    assert "ready" in (tmp_path / "logs" / "server.log").read_text()


def test_children_go_when_the_server_dies(tmp_path: Path) -> None:
    server = own(tmp_path, sham("--pids", str(tmp_path / "pids"), "--family"))
    server.start()
    try:
        server.wait_ready(lambda: True)
        family = tree(tmp_path)
        os.kill(family[0].pid, signal.SIGKILL)
        until(lambda: server.returncode is not None)
        assert server.returncode == -signal.SIGKILL
        assert gone(family)  # by then, and not some time later: the next life needs their memory and their port
        server.start()
        assert server.wait_ready(lambda: True)
    finally:
        server.stop()


def test_a_killed_supervisor(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom tests.integration.test_server_own import own, sham\n"
        f"server = own(Path({str(tmp_path)!r}), sham('--pids', {str(tmp_path / 'pids')!r}, '--family'))\n"
        "server.start()\nserver.wait_ready(lambda: True)\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=REPOSITORY) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == b"up\n"
        family = tree(tmp_path)
        supervisor.kill()
        until(lambda: gone(family))


def test_a_killed_guard(tmp_path: Path) -> None:
    server = own(tmp_path, sham("--pids", str(tmp_path / "pids"), "--family"))
    server.start()
    try:
        server.wait_ready(lambda: True)
        family = tree(tmp_path)
        guard_of_all(tmp_path).kill()
        until(lambda: server.returncode is not None)
        server.start()  # ends what is left first
        assert gone(family)
        assert server.wait_ready(lambda: True)
    finally:
        server.stop()


def test_what_is_left_of_an_earlier_supervisor_is_ended(tmp_path: Path) -> None:
    first = own(tmp_path, sham("--pids", str(tmp_path / "pids"), "--family"))
    first.start()
    first.wait_ready(lambda: True)
    family = tree(tmp_path)
    guard = guard_of_all(tmp_path)
    guard.kill()
    guard.wait()
    second = own(tmp_path, sham("--pids", str(tmp_path / "pids")))
    second.start()
    try:
        assert gone(family)
    finally:
        second.stop()
        first.stop()


def test_one_that_ends_at_once(tmp_path: Path) -> None:
    server = own(tmp_path, sham("--say", "CUDA-out-of-memory", "--end", "7"))
    server.start()
    begun = time.monotonic()
    with pytest.raises(LaunchError) as error:
        server.wait_ready(lambda: True)
    server.stop()
    assert time.monotonic() - begun < 10
    assert "SGLang ended with exit code 7 before it was ready" in str(error.value)
    assert "CUDA-out-of-memory" in str(error.value)
    assert error.value.exit_code is ExitCode.SERVER


def test_the_signal_that_ended_it_is_named(tmp_path: Path) -> None:
    server = own(tmp_path, sham("--end", str(-signal.SIGBUS)))
    server.start()
    with pytest.raises(LaunchError, match="was ended by SIGBUS"):
        server.wait_ready(lambda: True)
    server.stop()


def test_one_that_is_never_ready(tmp_path: Path) -> None:
    server = own(tmp_path, sham("--say", "still-loading", "--ready-after", "600", start_timeout=8.0))
    server.start()
    with pytest.raises(LaunchError) as error:
        server.wait_ready(lambda: True)
    server.stop()
    assert "was not ready within 8 s (--start-timeout)" in str(error.value)
    assert "still-loading" in str(error.value)
    assert server.returncode is not None


def test_a_slow_start_is_waited_for(tmp_path: Path) -> None:
    server = own(tmp_path, sham("--ready-after", "2.5"))
    server.start()
    assert server.is_starting
    looks = 0

    def keep_waiting() -> bool:
        nonlocal looks
        looks += 1
        return True

    try:
        assert server.wait_ready(keep_waiting)
        assert looks > 3  # the screen goes on meanwhile
    finally:
        server.stop()


def test_a_stop_while_it_starts(tmp_path: Path) -> None:
    server = own(tmp_path, sham("--pids", str(tmp_path / "pids"), "--ready-after", "600"))
    server.start()
    until((tmp_path / "pids").exists)
    family = tree(tmp_path)
    assert server.wait_ready(lambda: False) == {}
    server.stop()
    assert gone(family)
