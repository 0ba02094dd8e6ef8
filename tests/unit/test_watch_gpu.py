"""GPU figures come from a child, so that a stuck driver hangs nobody else; without library or driver there are none."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hsjournal.states import State
from hsjournal.ui.frame import frame
from hsjournal.ui.history import History
from hsjournal.watch import gpu
from hsjournal.watch.gpu import Gpus
from hsjournal.watch.view import View
from hsjournal.worker.tally import Tally

# The library's names and shapes, with two GPUs that can be made to hang.
LIBRARY = """
import os, time
class NVMLError(Exception): pass
class _Memory: used, total = 3 << 30, 80 << 30
class _Rates: gpu = 97
def nvmlInit(): pass
def nvmlDeviceGetCount():
    if os.path.exists(os.environ["HANG"]): time.sleep(60)
    return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetName(handle): return b"NVIDIA H200" if handle else "NVIDIA H200"
def nvmlDeviceGetMemoryInfo(handle): return _Memory
def nvmlDeviceGetUtilizationRates(handle): return _Rates
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pynvml.py").write_text(LIBRARY)
    (tmp_path / "driver").touch()
    monkeypatch.setattr(gpu, "DRIVER", tmp_path / "driver")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("HANG", str(tmp_path / "hang"))
    return tmp_path


def wait(gpus: Gpus, seconds: float = 15.0) -> list[dict[str, Any]]:
    deadline = time.monotonic() + seconds
    while not (found := gpus.look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def test_figures_of_every_gpu(library: Path) -> None:
    lifeline, held = os.pipe()
    gpus = Gpus.start(lifeline)
    assert gpus is not None
    found = wait(gpus)
    one = {"name": "NVIDIA H200", "busy_percent": 97, "memory_used": 3 << 30, "memory_total": 80 << 30}
    assert found == [{"gpu": 0} | one, {"gpu": 1} | one]
    gpus.close()
    assert psutil.Process().children() == []
    os.close(lifeline)
    os.close(held)


def test_the_live_screen_shows_what_the_library_says(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    snapshot = Tally(dict.fromkeys(State, (0, 0, 0))).snapshot() | {"pauses": {}}
    lines = [line.plain for line in frame(View(snapshot=snapshot, gpus=gpu.figures()), History(), 80, 24)]
    monkeypatch.delitem(sys.modules, "pynvml")
    assert "gpu      0: 97 %  1: 97 %" in [line.rstrip() for line in lines]


def test_a_driver_that_hangs_is_waited_for_by_nobody(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (library / "hang").touch()
    lifeline, held = os.pipe()
    begin = time.monotonic()
    gpus = Gpus.start(lifeline)
    assert gpus is not None
    assert wait(gpus, 2.0) == []
    gpus.close()
    assert time.monotonic() - begin < 6
    assert psutil.Process().children() == []
    os.close(lifeline)
    os.close(held)


def test_it_ends_with_who_started_it(library: Path) -> None:
    lifeline, held = os.pipe()
    gpus = Gpus.start(lifeline)
    assert gpus is not None
    wait(gpus)
    child = psutil.Process().children()
    os.close(held)
    assert psutil.wait_procs(child, timeout=10)[1] == []
    gpus.close()
    os.close(lifeline)


def test_without_a_driver_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "DRIVER", tmp_path / "none")
    assert Gpus.start(0) is None
