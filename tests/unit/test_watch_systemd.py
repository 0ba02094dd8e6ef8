"""What systemd is told: a real socket in its place."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hsjournal.watch import systemd
from hsjournal.watch.systemd import Systemd
from hsjournal.watch.view import View


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(str(tmp_path / "notify"))
        found.settimeout(5)
        yield found


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "EVERY", 0.0)


def heard(listening: socket.socket) -> dict[str, str]:
    return dict(line.split("=", 1) for line in listening.recv(4096).decode().split("\n"))


def test_ready_comes_once_and_status_always(listening: socket.socket) -> None:
    told = Systemd(listening.getsockname())
    told.tell(View(stage="preparing", sentence="starting"))
    first = heard(listening)
    assert (first["STATUS"], first["WATCHDOG"], first["EXTEND_TIMEOUT_USEC"]) == (
        "preparing: starting",
        "1",
        "60000000",
    )
    assert "READY" not in first
    told.tell(View(stage="running", sentence="a\nREADY=0"))
    assert heard(listening) == {"STATUS": "running: a READY=0", "READY": "1", "WATCHDOG": "1"}
    told.tell(View(stage="running"))
    assert "READY" not in heard(listening)
    told.stopping()
    assert heard(listening) == {"STOPPING": "1"}
    told.tell(View(stage="running"))
    told.stopping()


@pytest.mark.parametrize(
    ("verdict", "alive"),
    [
        (None, True),
        ({"verdict": "healthy", "overdue": False}, True),
        ({"verdict": "disk_full", "overdue": False}, True),
        ({"verdict": "disk_full", "overdue": True}, True),
        ({"verdict": "unkillable", "overdue": True}, True),
        ({"verdict": "server_down", "overdue": True}, True),
        ({"verdict": "storage_stalled", "overdue": True}, False),
        ({"verdict": "preparation_stuck", "overdue": True}, False),
    ],
)
def test_a_sign_of_life_means_progress_or_an_explained_wait(
    listening: socket.socket, verdict: dict[str, object] | None, alive: bool
) -> None:
    told = Systemd(listening.getsockname())
    told.tell(View(stage="running", verdict=verdict))
    assert ("WATCHDOG" in heard(listening)) is alive
    told.tell(View(stage="preparing", verdict=verdict))
    told.stopping()
    assert ("EXTEND_TIMEOUT_USEC" in heard(listening)) is alive


def test_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("", "nonsense", str(tmp_path / "gone"), "@hsjournal-nobody"):
        told = Systemd(address)
        told.tell(View(stage="running"))
        told.stopping()
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    Systemd().tell(View())


def test_a_full_socket_never_blocks(listening: socket.socket) -> None:
    told = Systemd(listening.getsockname())
    for _ in range(2000):
        told.tell(View(stage="running", sentence="x" * 400))
    told.stopping()
