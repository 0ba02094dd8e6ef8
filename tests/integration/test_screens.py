"""The live screen as people have it: in a real terminal, beside a real run, at two sizes; leaving it changes nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from rich.cells import cell_len

from tests.helpers.cli import REPOSITORY, hsjournal
from tests.helpers.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(
    shutil.which("tmux") is None and "CI" not in os.environ, reason="NO TMUX: no real terminal to look at"
)
ROWS = 400
HOLDS = 100
"""Rows, about, that the output may hold: then the run pauses."""
COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|9[0-7])[;m]")


class Terminal:
    """A tmux server of its own, with one session for each screen."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._socket = str(folder / "tmux")
        self._environment = environment

    def open(self, name: str, width: int, height: int, *command: str) -> None:
        """Run ``command`` in a new terminal."""
        words = [f"{key}={value}" for key, value in self._environment.items()]
        self._tmux(
            "-f", "/dev/null", "new-session", "-d", "-s", name, "-x", str(width), "-y", str(height), "-c", str(REPOSITORY),
            "env", "-u", "CI", "-u", "NO_COLOR", "-u", "COLUMNS", "-u", "LINES", "TERM=screen-256color", *words,
            "sh", "-c", 'trap "" INT; (trap - INT; exec "$@"); echo "ended with $?"; sleep 600', "sh", *command,
        )  # fmt: skip

    def screen(self, name: str) -> list[str]:
        """The lines that are seen now."""
        seen = ""
        while seen != (seen := self._tmux("capture-pane", "-t", name, "-p")):  # twice the same: no half-drawn frame
            time.sleep(0.05)
        return seen.splitlines()

    def has_colour(self, name: str) -> bool:
        """Whether any of them is coloured."""
        return bool(COLOUR.search(self._tmux("capture-pane", "-t", name, "-p", "-e")))

    def shows(self, name: str, *words: str) -> bool:
        """Whether all of ``words`` are seen now."""
        text = "\n".join(self.screen(name))
        return all(word in text for word in words)

    def keys(self, name: str, *keys: str) -> None:
        """Type."""
        self._tmux("send-keys", "-t", name, *keys)

    def resize(self, name: str, width: int, height: int) -> None:
        """Make the terminal's window another size."""
        self._tmux("resize-window", "-t", name, "-x", str(width), "-y", str(height))

    def has_ended(self, name: str) -> bool:
        """Whether its command has."""
        return "ended with " in "\n".join(self.screen(name))

    def cursor_is_shown(self, name: str) -> bool:
        """Whether the terminal was given back with its cursor."""
        return self._tmux("display-message", "-t", name, "-p", "#{cursor_flag}").strip() == "1"

    def close(self) -> None:
        """End all that runs in it, which a closed terminal does not, and the server."""
        panes = subprocess.run(
            ["tmux", "-S", self._socket, "list-panes", "-a", "-F", "#{pane_pid}"],
            check=False,
            capture_output=True,
            text=True,
        )
        family = [child for pid in panes.stdout.split() for child in psutil.Process(int(pid)).children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], check=False, capture_output=True)

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, *words], check=True, capture_output=True, text=True, timeout=20
        )
        return done.stdout


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(tmp_path, {"HSJOURNAL_SHM": str(tmp_path / "shm"), "OMP_NUM_THREADS": "1"})
    (tmp_path / "shm").mkdir()
    yield found
    found.close()


def until(condition: Callable[[], bool], seconds: float = 90.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come"
        time.sleep(0.2)


def check(lines: list[str], width: int, height: int, *, is_paused: bool = False) -> None:
    """One whole frame: nothing twice, nothing broken, the bar as wide as the terminal, the numbers adding up."""
    text = "\n".join(lines)
    fits(lines, width, height)
    for once in (
        r"^speed ",
        r"^overall ",
        r"^left ",
        r"^shm ",
        r"^disk ",
        r"^worker ",
        r"^PAUSED" if is_paused else r"^in flight",
        r"^events",
    ):
        assert len(re.findall(once, text, re.MULTILINE)) == 1, (once, text)
    bars = [line for line in lines if line and set(line) <= set("█▓▒░·!-")]
    assert [len(bar) for bar in bars] == [width], text
    together = re.search(r"of ([\d,]+)", text)
    assert together is not None
    assert int(together[1].replace(",", "")) == ROWS
    counts = re.findall(r"[█▓▒░·!-] ([\d,]+) (?:verified|written|dumped|sent|pending|failed|skipped)", text)
    assert sum(int(count.replace(",", "")) for count in counts) == ROWS, text


def fits(lines: list[str], width: int, height: int) -> None:
    """Within the terminal, and only one frame of it."""
    text = "\n".join(lines)
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    assert len(re.findall(r"^hsjournal \w+", text, re.MULTILINE)) == 1, text
    assert "Traceback" not in text


def worker_of(run_dir: Path, shm: str) -> int:
    pid = hsjournal("status", run_dir, "--json", HSJOURNAL_SHM=shm).json()["worker"]["pid"]
    assert isinstance(pid, int)
    return pid


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("run_size", "watch_size", "colour"), [((80, 24), (160, 50), True), ((160, 50), (80, 24), False)]
)
def test_two_screens_of_one_run(
    terminal: Terminal, tmp_path: Path, run_size: tuple[int, int], watch_size: tuple[int, int], colour: bool
) -> None:
    """Preparing, running, after a worker that was stopped, and paused; each at both sizes, in colour and without."""
    model, prompts, run_dir = (
        make_tiny_model("llama", tmp_path / "model", seed=5),
        tmp_path / "p.jsonl",
        tmp_path / "run",
    )
    rows = [
        {"id": f"☃ 输出 {i} \x1b[31m", "input_ids": list(range(3, 30 + i % 200)), "loss_mask": [1] * (27 + i % 200)}
        for i in range(ROWS)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    slow, shm = tmp_path / "slow", str(tmp_path / "shm")
    slow.touch()
    program = ["env", *(() if colour else ("NO_COLOR=1",)), sys.executable, "-m", "hsjournal.cli.main"]
    terminal.open(
        "run", *run_size, "env", f"HSJOURNAL_FAULTS=sink.opened=delay:0.3,while:{slow}", *program, "run", str(run_dir),
        "--prompts", str(prompts), "--model", str(model), "--max-out", f"{HOLDS * 64_000}", "--stall-timeout", "8",
        "--poll-interval", "1",
    )  # fmt: skip
    until(lambda: terminal.shows("run", "hsjournal preparing"))
    fits(terminal.screen("run"), *run_size)

    until(lambda: terminal.shows("run", "hsjournal running", "\nin flight", "verified", "speed"))
    terminal.open("other", *watch_size, *program, "status", str(run_dir), "--watch")
    until(lambda: terminal.shows("other", "hsjournal running", "\nin flight"), 40)
    for name, size in (("run", run_size), ("other", watch_size)):
        check(terminal.screen(name), *size)
        assert terminal.has_colour(name) is colour
        terminal.resize(name, 100, 30)
    time.sleep(2)
    for name, size in (("run", run_size), ("other", watch_size)):
        check(terminal.screen(name)[-30:], 100, 30)
        terminal.resize(name, *size)

    stopped = worker_of(run_dir, shm)
    os.kill(stopped, signal.SIGSTOP)
    until(lambda: terminal.shows("run", "worker_stopped"), 60)
    until(lambda: worker_of(run_dir, shm) not in (stopped, None), 60)
    slow.unlink()

    until(lambda: terminal.shows("run", "\nPAUSED") and terminal.shows("other", "\nPAUSED"), 120)
    time.sleep(1)
    for name, size in (("run", run_size), ("other", watch_size)):
        check(terminal.screen(name), *size, is_paused=True)
        assert terminal.shows(name, "--max-out")

    terminal.keys("other", "C-c")
    until(lambda: terminal.has_ended("other"), 20)
    assert terminal.cursor_is_shown("other")
    assert not terminal.has_ended("run")  # it goes on

    terminal.keys("run", "C-c")
    until(lambda: terminal.has_ended("run"), 60)
    assert terminal.cursor_is_shown("run")
    assert terminal.shows("run", "stopped; nothing is lost.")
    state = hsjournal("status", run_dir, "--json", HSJOURNAL_SHM=shm).json()
    assert state["rows"] == ROWS
    assert state["counts"]["failed"]["rows"] == 0
