"""What every test gets: its own tmpfs folder for mirrors, and a look at the end that nothing of ours is left behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True, scope="session")
def _private_shm() -> Iterator[Path]:
    """Mirrors and default hand-over roots of all tests lie in a folder of this session's, in tmpfs."""
    with tempfile.TemporaryDirectory(prefix="hsj-test-", dir="/dev/shm") as folder:
        os.environ["HSJOURNAL_SHM"] = folder
        yield Path(folder)


@pytest.fixture(autouse=True, scope="module")
def _nothing_left() -> Iterator[None]:
    """No test module may leave a process of hsjournal behind."""
    before = _ours()
    yield
    gone, alive = psutil.wait_procs(
        [psutil.Process(pid) for pid in _ours() - before if psutil.pid_exists(pid)], timeout=10
    )
    left = {p.pid: " ".join(p.cmdline())[:200] for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE}
    assert not left, f"processes left behind: {left}"
    del gone


def _ours() -> set[int]:
    """Processes that this one started, directly or not, and that run hsjournal."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if "hsjournal" in " ".join(process.cmdline()):
                found.add(process.pid)
        except psutil.Error:
            continue
    return found
