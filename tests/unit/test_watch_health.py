"""Several servers: each is asked, and a run's servers are down only when all are that its rows wait for."""

from __future__ import annotations

import http.server
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hsjournal.mirror import SNAPSHOT, Heartbeat, Mirror, Phase
from hsjournal.watch.health import KNOWN_S, Health
from hsjournal.watch.server_care import ask_server
from hsjournal.watch.verdict import Judge, Limits, Verdict
from hsjournal.watch.watcher import Watcher


class Silent(http.server.BaseHTTPRequestHandler):
    """Answers, however."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def up() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def down() -> Iterator[str]:
    with socket.socket() as bound:  # taken, and nobody listens
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def asked(urls: list[str]) -> Health:
    health = Health(urls, ask_server)
    health.refresh(time.monotonic())
    deadline = time.monotonic() + 10
    while not all(server.is_known(time.monotonic()) for server in health._servers.values()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return health


def test_only_those_count_that_rows_wait_for(up: str, down: str) -> None:
    health, now = asked([up, f"{down}/"]), time.monotonic()
    assert health.of([up], now) == (None, True)
    assert health.of([down], now) == (f"{down}: Connection refused", True)
    assert health.of([down, up], now) == (None, True)
    assert health.of([], now) == (None, True)
    assert health.of([down], now + KNOWN_S + 1) == (None, False), "an old answer says nothing of now"


def test_not_asked_yet_is_no_answer(up: str) -> None:
    assert Health([up], ask_server).of([up], time.monotonic()) == (None, False)


def test_a_second_server_that_is_down_is_named_though_the_first_answers(up: str, down: str, tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "a" / "b" / "mirror")
    mirror.folder.parent.mkdir(parents=True)
    mirror.create()
    beat = Heartbeat(mirror.folder, 3)
    beat.phase(Phase.RUNNING)
    judge = Judge(Limits(stall_timeout=1.0), time.monotonic())
    watcher = Watcher(judge, mirror, os.getpid(), 3, Health([up, down], ask_server))
    flight = {"row": 7, "attempt": 1, "tokens": 10, "phase": "waiting", "state": "sent"}
    finding = None
    deadline = time.monotonic() + 15
    verdicts = {}
    for server in (down, up):
        judge.new_life(time.monotonic())
        while True:
            body = {"epoch": 3, "monotonic": time.monotonic(), "counts": {}, "in_flight": [flight | {"server": server}]}
            mirror.write(SNAPSHOT, body | {"pauses": {}})
            finding = watcher.judge()
            if finding.is_stall:
                break
            assert time.monotonic() < deadline
            time.sleep(0.1)
        verdicts[server] = finding
    assert verdicts[down].verdict is Verdict.SERVER_DOWN
    assert down in verdicts[down].sentence
    assert verdicts[up].verdict is Verdict.SERVER_STALLED
    assert f"at {up}, which answers its health check" in verdicts[up].sentence
