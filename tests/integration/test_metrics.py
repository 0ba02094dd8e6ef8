"""Metrics: the real parser of the real client library reads them, and they say what the mirror says."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hsjournal.birth import own_create_time
from hsjournal.config import RunPaths
from hsjournal.errors import ExitCode, UsageError
from hsjournal.mirror import SNAPSHOT, SUPERVISOR, Heartbeat, Mirror
from hsjournal.ops import metrics
from hsjournal.states import State
from hsjournal.worker.tally import Tally
from tests.helpers.drill import attached
from tests.helpers.drill.attached import Attached
from tests.helpers.drill.stage import ended, wait_for, words
from tests.helpers.tiny_models import make_tiny_model


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    monkeypatch.setenv("HSJOURNAL_SHM", str(tmp_path / "shm"))
    (tmp_path / "shm").mkdir()
    found = RunPaths.of(tmp_path / 'a "strange"\nname\\')
    mirror = Mirror(found.mirror)
    mirror.create()
    tally = Tally({state: (10 * i, 100 * i, 0) for i, state in enumerate(State)})
    mirror.write(SNAPSHOT, tally.snapshot() | {"pauses": {"disk": "full"}, "epoch": 3})
    own = {"pid": os.getpid(), "create_time": own_create_time()}
    mirror.write(SUPERVISOR, own | {"lives": 4, "server": "http://a:1", "verdict": {"verdict": "slow"}})
    Heartbeat(found.mirror, 3)
    return found


def read(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, Any] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_every_hand_over_root_has_its_figures_once(paths: RunPaths) -> None:
    mirror = Mirror(paths.mirror)
    one, other = {"root": "/a", "reserved": 5, "available": 7}, {"root": "/b", "reserved": 11}
    servers = [{"url": f"http://{n}:1", "handover": root} for n, root in enumerate((one, one, other))]
    mirror.write(SNAPSHOT, (mirror.read(SNAPSHOT) or {}) | {"servers": servers, "handover": one})
    found = read(metrics.exposition(paths))
    assert found["hsjournal_handover_reserved_bytes"] == {(("root", "/a"),): 5, (("root", "/b"),): 11}
    assert found["hsjournal_handover_available_bytes"] == {(("root", "/a"),): 7}


def test_it_says_what_the_mirror_says(paths: RunPaths) -> None:
    found = read(metrics.exposition(paths))
    assert [dict(labels)["run_dir"] for labels in found["hsjournal_run_info"]] == [str(paths.run_dir)]
    assert found["hsjournal_rows"][("state", "verified"),] == 10 * list(State).index(State.VERIFIED)
    assert found["hsjournal_supervisor_up"][()] == 1
    assert found["hsjournal_worker_up"][()] == 1
    assert found["hsjournal_workers_started_total"][()] == 4
    assert found["hsjournal_paused"] == {(("what", "disk"),): 1}
    assert found["hsjournal_verdict"][("verdict", "slow"),] == 1
    assert sum(found["hsjournal_verdict"].values()) == 1
    assert 0 <= found["hsjournal_worker_beat_age_seconds"][()] < 60


def test_without_a_run_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSJOURNAL_SHM", str(tmp_path))
    found = read(metrics.exposition(RunPaths.of(tmp_path / "none")))
    assert (found["hsjournal_supervisor_up"][()], found["hsjournal_worker_up"][()]) == (0, 0)
    assert "hsjournal_rows" not in found


def test_the_process_serves_keeps_the_file_and_ends_with_its_parent(paths: RunPaths, tmp_path: Path) -> None:
    file = tmp_path / "out.prom"
    lifeline, held = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "hsjournal.ops.metrics", str(paths.run_dir), "--port", "0", "--textfile", str(file), "--every", "0.2",
         "--parent-fd", str(lifeline)],
        stdout=subprocess.PIPE, text=True, pass_fds=(lifeline,),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        said = [process.stdout.readline().split()[-1] for _ in range(2)]  # the address and the file, in any order
        (url,) = [word for word in said if word.startswith("http://127.0.0.1:")]
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.headers["Content-Type"] == metrics.CONTENT_TYPE
            served = read(answer.read().decode())
        limit = time.monotonic() + 10
        while not file.exists() and time.monotonic() < limit:
            time.sleep(0.05)
        assert read(file.read_text())["hsjournal_rows"] == served["hsjournal_rows"]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url.replace("/metrics", "/etc/passwd"), timeout=10)
        os.close(held)
        assert process.wait(10) < 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
        os.close(lifeline)


def test_a_text_file_that_cannot_be_written_is_tried_again(paths: RunPaths, tmp_path: Path) -> None:
    file, stop = tmp_path / "later" / "out.prom", threading.Event()
    thread = threading.Thread(target=metrics.keep_textfile, args=(paths, file, 0.05, stop))
    thread.start()
    try:
        time.sleep(0.2)
        file.parent.mkdir()
        limit = time.monotonic() + 10
        while not file.exists() and time.monotonic() < limit:
            time.sleep(0.05)
    finally:
        stop.set()
        thread.join()
    assert [p.name for p in file.parent.iterdir()] == ["out.prom"]


def test_a_port_that_is_taken_is_named(paths: RunPaths) -> None:
    with metrics.server(paths, "127.0.0.1", 0) as first, pytest.raises(UsageError, match=f":{first.server_address[1]}"):
        metrics.server(paths, "127.0.0.1", first.server_address[1])


# beside a run


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[attached.Served]:
    model = make_tiny_model("llama", tmp_path_factory.mktemp("served") / "model", seed=3)
    with attached.served(model, 0.2) as engine:
        yield engine


@pytest.fixture
def run(served: attached.Served) -> Iterator[Attached]:
    with attached.attached(served, 16) as run:
        yield run


def test_a_run_says_where_its_figures_are(run: Attached) -> None:
    child = run.run("--metrics-port", "0", "--max-in-flight", "1")
    url = run.wait_words("metrics at http://127.0.0.1:", child).split(" at ")[1]

    def some_are_verified() -> bool:
        with urllib.request.urlopen(url, timeout=5) as answer:
            rows = read(answer.read().decode()).get("hsjournal_rows", {})
        return rows.get((("state", "verified"),), 0) > 0

    wait_for(some_are_verified, 60, "the endpoint tells of verified rows")
    assert ended(child) == ExitCode.DONE, words(child)
    assert [url in e["words"] for e in run.truth.events("metrics_said")] == [True]
    assert run.truth.events("metrics_died") == []


def test_a_run_keeps_its_figures_in_a_file(run: Attached, served: attached.Served) -> None:
    file = run.stage.base / "metrics" / "hsj.prom"
    child = run.run("--metrics-file", str(file), "--max-in-flight", "1")
    run.wait_words(f"metrics can't be written to {file}: No such file", child)
    assert ended(child) == ExitCode.DONE, words(child)
    with attached.attached(served, 6) as other:
        file = other.stage.base / "hsj.prom"
        child = other.run("--metrics-file", str(file))
        other.wait_words(f"metrics are kept in {file}", child)
        assert ended(child) == ExitCode.DONE, words(child)
        assert [dict(labels)["run_dir"] for labels in read(file.read_text())["hsjournal_run_info"]] == [
            str(other.stage.run_dir)
        ]


def test_a_run_whose_port_is_taken_says_so_and_goes_on(run: Attached) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        child = run.run("--metrics-port", str(port))
        assert ended(child) == ExitCode.DONE, words(child)
    said = words(child, 1 << 20)
    assert f"metrics ended with exit code 2: can't serve metrics at 127.0.0.1:{port}: Address already in use" in said
    assert len(run.truth.events("metrics_died")) == 1
