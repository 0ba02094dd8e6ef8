"""The embedded engine as a process: how it refuses to start, and how it ends."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.engine import REPOSITORY, Engine, running_engine
from tests.helpers.tiny_models import make_tiny_model

COMMAND = [sys.executable, "-m", "hsjournal.capture.embedded"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="hsjournal-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def refusal(*arguments: str | Path) -> tuple[int, str]:
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.returncode, done.stderr


def test_no_model(root: Path) -> None:
    code, text = refusal("--model", "/nonexistent", "--handover-root", root)
    assert code == 2
    assert "/nonexistent" in text


def test_a_port_that_is_taken_is_told_before_the_model_loads(root: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        begun = time.monotonic()
        code, text = refusal("--model", model, "--handover-root", root, "--port", str(port))
    assert code == 13
    assert f"Port {port}" in text
    assert "--port" in text
    assert time.monotonic() - begun < 10


def test_layers_that_the_model_has_not(root: Path, model: Path) -> None:
    code, text = refusal("--model", model, "--handover-root", root, "--port", "0", "--layers", "1,7")
    assert code == 2
    assert "Layer 7 of 8" in text


def test_an_unusable_root(model: Path) -> None:
    code, text = refusal("--model", model, "--handover-root", "/dev/shm", "--port", "0")
    assert code == 2
    assert "/dev/shm" in text


def test_weights_cut_short(root: Path, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model.safetensors", 5000)
    code, text = refusal("--model", tmp_path / "cut", "--handover-root", root, "--port", "0")
    assert code == 2
    assert str(tmp_path / "cut") in text


def test_missing_weights_are_not_made_up(root: Path, model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, tmp_path / "less")
    weights = load_file(tmp_path / "less" / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "less" / "model.safetensors", metadata={"format": "pt"})
    code, text = refusal("--model", tmp_path / "less", "--handover-root", root, "--port", "0")
    assert code == 2
    assert "model.layers.2.mlp.up_proj.weight" in text


def test_a_vision_model_or_an_encoder_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "architectures": ["ViTModel"]}))
    code, text = refusal("--model", tmp_path, "--handover-root", root, "--port", "0")
    assert code == 2
    assert str(tmp_path) in text


def send_slowly(engine: Engine) -> socket.socket:
    """A request whose dump is being written when this returns."""
    host, port = engine.url.removeprefix("http://").split(":")
    body = b'{"rid": "hsj-abcd-0-1-3", "input_ids": [1, 2, 3]}'
    raw = socket.create_connection((host, int(port)))
    raw.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    deadline = time.monotonic() + 20
    while not (engine.root / ".tmp-hsj-abcd-0-1-3").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return raw


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (None, 0)])
def test_it_ends_and_leaves_no_unfinished_dump(
    model: Path, root: Path, number: signal.Signals | None, code: int
) -> None:
    """By signal, or because the parent's end of the pipe closes (None)."""
    slow = {"HSJOURNAL_FAULTS": "capture.writing=delay:1"}
    with running_engine(model, root, environment=slow) as engine, send_slowly(engine):
        begun = time.monotonic()
        if number is None:
            engine.close_parent_pipe()
        else:
            engine.process.send_signal(number)
        assert engine.process.wait(20) == code
        assert time.monotonic() - begun < 10
        assert [name for name in os.listdir(root) if name.startswith(".tmp-")] == []
        assert "Traceback" not in engine.stderr.read_text()


def test_a_killed_engine_leaves_a_folder_that_the_next_one_removes(model: Path, root: Path) -> None:
    kill = {"HSJOURNAL_FAULTS": "capture.publishing=kill"}
    with running_engine(model, root, environment=kill) as engine:
        send_slowly(engine).close()
        assert engine.process.wait(20) == -signal.SIGKILL
    assert os.listdir(root) == [".tmp-hsj-abcd-0-1-3"]
    with running_engine(model, root):
        assert os.listdir(root) == []


def test_it_outlives_the_thread_that_started_it_but_not_the_process(model: Path, root: Path, tmp_path: Path) -> None:
    """PR_SET_PDEATHSIG fires when a thread ends: that alone must not stop an engine."""
    starter = f"""
import os, subprocess, sys, threading, time
read_end, write_end = os.pipe()
def start():
    global engine
    engine = subprocess.Popen([sys.executable, "-m", "hsjournal.capture.embedded", "--model", {str(model)!r},
        "--handover-root", {str(root)!r}, "--port", "0", "--torch-threads", "1", "--parent-fd", str(read_end)],
        pass_fds=(read_end,), stdout=subprocess.PIPE)
    print(engine.stdout.readline().decode().strip(), engine.pid, flush=True)
thread = threading.Thread(target=start)
thread.start()
thread.join()
time.sleep(0.5)
print(engine.poll(), flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", starter], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        pid = int(parent.stdout.readline().split()[-1])
        assert parent.stdout.readline().strip() == "None", "the engine ended with the thread"
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    ended = os.pidfd_open(pid) if Path(f"/proc/{pid}").exists() else None
    if ended is not None:
        readable, _, _ = select.select([ended], [], [], 20)
        os.close(ended)
        assert readable, "the engine outlived its parent"


def test_a_shortage_in_the_root_costs_one_request_and_not_the_engine(model: Path, root: Path) -> None:
    import http.client

    full = {"HSJOURNAL_FAULTS": "capture.writing=errno:ENOSPC"}
    with running_engine(model, root, environment=full, room_wait="0.3") as engine:
        for row in range(2):
            connection = http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=30)
            rid = f"hsj-abcd-{row}-1-2"
            connection.request("POST", "/generate", json.dumps({"rid": rid, "input_ids": [1, 2]}))
            assert connection.getresponse().status == 200
            connection.close()
            assert json.loads((root / rid / "error").read_text())["reason"] == "no_room"
            assert os.listdir(root / rid) == ["error"]


def test_a_deleted_root_does_not_end_the_engine(model: Path, root: Path) -> None:
    import http.client

    with running_engine(model, root) as engine:
        shutil.rmtree(root)
        connection = http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=30)
        connection.request("POST", "/generate", json.dumps({"rid": "hsj-abcd-0-1-2", "input_ids": [1, 2]}))
        assert connection.getresponse().status == 200
        connection.close()
        assert (root / "hsj-abcd-0-1-2" / "done").exists()


SECOND_WRITER = """
import sys
from pathlib import Path
from hsjournal.capture.writer import CaptureSettings, DumpWriter
DumpWriter(CaptureSettings(Path(sys.argv[1]), (1,), 64, "float32", "post", "another boot", "embedded"))
"""


def test_another_server_on_the_same_root_leaves_a_dump_alone_that_is_being_written(model: Path, root: Path) -> None:
    slow = {"HSJOURNAL_FAULTS": "capture.writing=delay:4"}
    with running_engine(model, root, environment=slow) as first, send_slowly(first) as raw:
        subprocess.run([sys.executable, "-c", SECOND_WRITER, str(root)], cwd=REPOSITORY, check=True, timeout=60)
        assert os.listdir(root) == [".tmp-hsj-abcd-0-1-3"]
        raw.settimeout(60)
        assert raw.recv(100).startswith(b"HTTP/1.1 200")
        assert (root / "hsj-abcd-0-1-3" / "done").exists()
