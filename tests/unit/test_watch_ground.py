"""Does the storage answer? A child asks; who waits hears of it and is free."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import psutil
import pytest

from hsjournal.watch import ground


@pytest.mark.parametrize("what", ["missing", "empty", "a run"])
def test_any_answer_will_do(tmp_path: Path, what: str) -> None:
    place = tmp_path / "run"
    if what != "missing":
        place.mkdir()
    if what == "a run":
        (place / "manifest.toml").write_text("x")
    said: list[str] = []
    ground.await_answer(place, said.append)
    assert said == []


def test_one_that_hangs_is_told_of_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FIFO stands for the disk: it answers when somebody opens its other end."""
    monkeypatch.setattr(ground, "TELL_AFTER_S", 0.3)
    os.mkfifo(tmp_path / "manifest.toml")

    def answer() -> None:
        time.sleep(1.0)
        (tmp_path / "manifest.toml").write_text("x")

    thread = threading.Thread(target=answer)
    thread.start()
    said: list[str] = []
    begin = time.monotonic()
    ground.await_answer(tmp_path, said.append)
    assert time.monotonic() - begin >= 0.9
    thread.join()
    assert [str(tmp_path) in line for line in said] == [True]
    assert psutil.Process().children() == []


def test_ctrl_c_ends_the_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ground, "TELL_AFTER_S", 0.2)
    os.mkfifo(tmp_path / "manifest.toml")

    def stop(_words: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ground.await_answer(tmp_path, stop)
    assert psutil.Process().children() == []
