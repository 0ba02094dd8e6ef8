"""Several servers and their API key, with real engines and the whole program: nothing lost, doubled, or told."""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from hsjournal.config import RunPaths
from hsjournal.dump.protocol import RequestId
from hsjournal.errors import ExitCode
from tests.helpers.cli import hsjournal, started
from tests.helpers.engine import Engine, running_engine
from tests.helpers.reference import Reference, check_outputs
from tests.helpers.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(400)
KEY = f"hsj-test-key-{random.SystemRandom().getrandbits(64):x}"
ROWS = 60
SLOW = "sink.opened=delay:1,while:{}"
"""Keeps a run going for as long as a file is there."""


@dataclass(frozen=True)
class Stage:
    """Two engines that demand the key, a root each."""

    model: Path
    prompts: Path
    key_file: Path
    engines: tuple[Engine, Engine]

    @property
    def servers(self) -> tuple[str, ...]:
        return tuple(w for e in self.engines for w in ("--server", e.url, "--handover-root", str(e.root)))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("servers")
    model = make_tiny_model("llama", folder / "model")
    draw = random.Random(4)
    rows = [[draw.randrange(3, 200) for _ in range(10 + i)] for i in range(ROWS)]
    lines = [{"id": f"r{i}", "input_ids": ids, "loss_mask": [1] * len(ids)} for i, ids in enumerate(rows)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    key_file = folder / "key"
    key_file.write_text(KEY + "\n")
    key_file.chmod(0o600)
    with tempfile.TemporaryDirectory(prefix="hsj-two-", dir="/dev/shm") as shm, ExitStack() as stack:
        engines = [
            stack.enter_context(running_engine(model, Path(shm) / name, environment={"HSJOURNAL_API_KEY": KEY}))
            for name in ("a", "b")
        ]
        yield Stage(model, folder / "prompts.jsonl", key_file, (engines[0], engines[1]))


class Spy(threading.Thread):
    """Looks at the command line of every process on the machine, again and again; remembers those with the key."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.told: set[str] = set()
        self.seen: set[str] = set()
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.02):
            for name in filter(str.isdigit, os.listdir("/proc")):
                try:
                    words = Path(f"/proc/{name}/cmdline").read_bytes()
                except OSError:
                    continue
                if KEY.encode() in words:
                    self.told.add(words.decode(errors="replace"))
                if b"hsjournal" in words:
                    self.seen |= {
                        word for word in words.decode(errors="replace").split("\0") if word.startswith("hsjournal.")
                    }

    def stop(self) -> None:
        self._over.set()
        self.join()


def until(condition: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.1)


def status(run_dir: Path) -> dict[str, Any]:
    found = hsjournal("status", run_dir, "--json")
    return found.json() if found.code == 0 else {}


def verified_at(run_dir: Path) -> list[int]:
    return [server["verified"] for server in status(run_dir).get("servers", [])]


def holders_of_the_key(*folders: Path) -> list[Path]:
    found = []
    for folder in folders:
        for place, _, names in os.walk(folder):  # unlike rglob, it passes over what goes while it is looked at
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    if KEY.encode() in Path(place, name).read_bytes():
                        found.append(Path(place, name))
    return found


def test_killed_and_resumed_with_one_server_lost(stage: Stage, tmp_path: Path) -> None:
    run_dir, (first, second) = tmp_path / "run", stage.engines
    mirror = RunPaths.of(run_dir).shm
    spy = Spy()
    spy.start()
    logs = [tmp_path / "1.log", tmp_path / "2.log"]
    words: tuple[str | Path, ...] = ("--max-in-flight", "4", "--plain", "--api-key-file", stage.key_file)
    command: tuple[str | Path, ...] = ("run", run_dir, "--prompts", stage.prompts, *stage.servers, *words)
    slow = tmp_path / "slow"
    slow.touch()
    run = started(*command, log=logs[0], HSJOURNAL_FAULTS=SLOW.format(slow))
    try:
        until(lambda: len(found := verified_at(run_dir)) == 2 and min(found) >= 3)
        assert holders_of_the_key(run_dir, mirror, first.root, second.root) == []
        worker = psutil.Process(status(run_dir)["worker"]["pid"])
        run.kill()
        run.wait()
        until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)

        run = started(
            "resume", run_dir, *words, log=logs[1], HSJOURNAL_FAULTS=SLOW.format(slow)
        )  # it knows its servers
        until(lambda: len(found := verified_at(run_dir)) == 2 and min(found) >= 3)
        first.process.kill()
        until(lambda: any(not server["up"] for server in status(run_dir).get("servers", [])[:1]))
        assert holders_of_the_key(run_dir, mirror) == []
        assert status(run_dir)["pauses"] == {}
        slow.unlink()
        assert run.wait(200) == 0, logs[1].read_text()
    finally:
        run.kill()
        run.wait()
        spy.stop()
    state = status(run_dir)
    assert state["counts"]["verified"]["rows"] == ROWS
    assert set(check_outputs(run_dir / "out", Reference(stage.model))) == set(range(ROWS))
    sent = [RequestId.parse(rid) for engine in stage.engines for rid in engine.received_rids()]
    samples = [str(rid) for rid in sent if rid is not None and rid.row is not None]
    assert len(samples) == len(set(samples))  # no request went to both, or twice
    assert len(samples) <= ROWS + 3 * 8  # only what was in flight at a death was sent again
    assert list(second.root.iterdir()) == []
    assert holders_of_the_key(run_dir) == []
    assert not any(KEY in log.read_text() for log in logs)
    assert spy.told == set()
    assert {"hsjournal.worker", "hsjournal.prepare", "hsjournal.journal.gate"} <= spy.seen  # it did look


def test_a_key_is_demanded_and_named_when_it_is_missing(stage: Stage, tmp_path: Path) -> None:
    server = ("--server", stage.engines[1].url, "--handover-root", stage.engines[1].root)
    found = hsjournal("run", tmp_path / "run", "--prompts", stage.prompts, *server)
    assert found.code == ExitCode.SERVER
    assert "refuses access" in found.err
    assert "--api-key-file" in found.err
    wrong = tmp_path / "wrong"
    wrong.write_text("another-key")
    wrong.chmod(0o600)
    found = hsjournal("run", tmp_path / "run", "--prompts", stage.prompts, *server, "--api-key-file", wrong)
    assert found.code == ExitCode.SERVER
    assert "refuses access" in found.err
    assert "another-key" not in found.err + found.out
    assert [p for p in tmp_path.rglob("*") if p.is_file() and p != wrong and b"another-key" in p.read_bytes()] == []


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [(KEY, 0o644, "read or written by everybody"), ("", 0o600, "holds no key"), ("two words", 0o600, "holds no key")],
)
def test_a_key_file_that_is_refused(stage: Stage, tmp_path: Path, content: str, mode: int, words: str) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    file.chmod(mode)
    found = hsjournal(
        "run", tmp_path / "run", "--prompts", stage.prompts, "--server", "http://127.0.0.1:9", "--api-key-file", file
    )
    assert found.code == ExitCode.USAGE
    assert words in found.err
    assert KEY not in found.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--server", "http://127.0.0.1:9", "--launch", "python -m sglang.launch_server"), "Leave one of them out"),
        (("--server", "http://127.0.0.1:9", "--server", "http://127.0.0.1:9/"), "named twice"),
        (("--server", "http://user:word@127.0.0.1:9"), "--api-key-file"),
        (("--server", "http://a:9", "--server", "http://b:9", "--server", "http://c:9", "--handover-root", "/x", "--handover-root", "/y"), "once for each"),
        (("--launch", "python -m sglang.launch_server --api-key word"), "every list of processes"),
        (("--launch", "python -m sglang.launch_server", "--dtype", "float32"), "--dtype"),
    ],
)  # fmt: skip
def test_servers_that_are_refused(stage: Stage, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    found = hsjournal("run", tmp_path / "run", "--prompts", stage.prompts, *words)
    assert found.code == ExitCode.USAGE, found
    assert said in found.err
    assert not (tmp_path / "run").exists()
