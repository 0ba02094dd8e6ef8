"""Telling somebody: a real command, a real address; whatever goes wrong is an event, and never a wait or a leak."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hsjournal.events import Event
from hsjournal.watch.notify import Addressees, Notifier

SECRET = "T0K3N-not-to-be-seen"


class Receiver(ThreadingHTTPServer):
    """Keeps what is posted to it; answers with ``status`` after ``delay`` seconds."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[dict[str, Any]] = []
        self.status, self.delay = 200, 0.0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def url(self) -> str:
        return f"http://user:{SECRET}@127.0.0.1:{self.server_port}/hook/{SECRET}?key={SECRET}"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(json.loads(body) | {"type": self.headers["Content-Type"], "path": self.path})
        time.sleep(self.server.delay)
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Be quiet."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    yield server
    server.shutdown()
    server.server_close()


def told(to: Addressees, kind: str = "stall", timeout: float = 5.0, **fields: Any) -> list[Event]:
    """Tell, wait for the end, and return the events of failures."""
    events: list[Event] = []
    notifier = Notifier(to, events.append, {"run_dir": "/r", "host": "h"}, timeout)
    begin = time.monotonic()
    notifier.tell(kind, **fields)
    assert time.monotonic() - begin < 0.5, "it must not wait"
    notifier.wait()
    return events


def test_a_command_gets_the_facts_on_its_input_and_in_its_environment(tmp_path: Path) -> None:
    facts: dict[str, Any] = {
        "verdict": "storage_stalled",
        "sentence": 'it\'s "stuck" ; $(x)',
        "row": 7,
        "threads": ["sink-1: D w"],
    }
    command = f'cat > {tmp_path}/in; printf "%s|%s|%s" "$HSJOURNAL_EVENT" "$HSJOURNAL_ROW" "$HSJOURNAL_SENTENCE" > {tmp_path}/env'
    assert told(Addressees(command), **facts) == []
    payload = json.loads((tmp_path / "in").read_text())
    assert payload | facts | {"event": "stall", "run_dir": "/r", "version": 1} == payload
    assert (tmp_path / "env").read_text() == f"stall|7|{facts['sentence']}"


def test_what_happens_at_once_is_told_in_turn(tmp_path: Path) -> None:
    """A recovery that is seen at the end is told with it: the second command waits for the first."""
    command = f'[ "$HSJOURNAL_EVENT" = recovery ] && sleep 0.5; (cat; echo) >> {tmp_path}/told'
    notifier = Notifier(Addressees(command), lambda _event: None, {})
    for kind in ("stall", "recovery", "finished"):
        notifier.tell(kind)
    notifier.wait()
    lines = (tmp_path / "told").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["stall", "recovery", "finished"]


@pytest.mark.parametrize(
    ("command", "why"),
    [("exit 3", "exit code 3"), ("/nowhere/at/all", "exit code 127"), ("sleep 60", "no end within 1 s")],
)
def test_a_command_that_fails_or_hangs_is_an_event_and_no_more(command: str, why: str) -> None:
    begin = time.monotonic()
    (event,) = told(Addressees(f"{command} # {SECRET}"), "recovery", 1.0)
    assert (event.kind, event.detail) == ("notify_failed", {"what": "recovery", "to": "command", "why": why})
    assert time.monotonic() - begin < 5


def test_an_address_gets_the_same_as_json(receiver: Receiver) -> None:
    assert told(Addressees(url=receiver.url().replace(f"user:{SECRET}@", "")), "finished", exit_code=0) == []
    (got,) = receiver.got
    assert (got["event"], got["exit_code"], got["type"]) == ("finished", 0, "application/json")
    assert SECRET in got["path"]


def test_an_address_that_refuses_is_slow_or_is_not_there_leaks_nothing(receiver: Receiver) -> None:
    url = receiver.url().replace(f"user:{SECRET}@", "")
    receiver.status = 403
    found = told(Addressees(url=url))
    receiver.delay = 3.0
    found += told(Addressees(url=url), timeout=0.5)
    for bad in (f"http://127.0.0.1:9/{SECRET}", f"nonsense:{SECRET}", SECRET, f"http://[{SECRET}"):
        found += told(Addressees(url=bad))
    assert [e.kind for e in found] == ["notify_failed"] * 6
    assert found[0].detail["why"] == "HTTP status 403"
    assert found[0].detail["to"] == "http://127.0.0.1"
    assert "refused" in found[2].detail["why"]
    assert SECRET.lower() not in "".join(e.to_json() for e in found).lower()


def test_nobody_is_told_when_nobody_is_named() -> None:
    assert told(Addressees()) == []
