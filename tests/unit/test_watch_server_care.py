"""A server of our own that stalls: what is said of its end, and when."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from hsjournal.mirror import Mirror
from hsjournal.watch.desk import Desk
from hsjournal.watch.lives import Lives
from hsjournal.watch.server_care import GRACE_S, ServerCare
from hsjournal.watch.verdict import Finding, Verdict
from hsjournal.watch.view import View


class Deaf:
    """As ``OwnServer``: one that ends only when it is let."""

    def __init__(self) -> None:
        self.let, self.starts = threading.Event(), 0
        self.pid, self.returncode, self.is_starting = 7, None, False

    def stop(self) -> None:
        self.let.wait(30)

    def start(self) -> None:
        self.starts += 1

    def look(self) -> bool:
        return True


def test_it_is_said_to_have_died_when_it_has_and_not_when_it_is_told_to(tmp_path: Path) -> None:
    """What breaks while it is being ended breaks before that: a row alone in flight then is no suspect."""
    mirror = Mirror(tmp_path / "a" / "b" / "mirror")
    mirror.folder.parent.mkdir(parents=True)
    mirror.create()
    server = Deaf()
    care = ServerCare(server, Desk(mirror, View(), lambda _view: None), Lives(), tmp_path / "log")  # type: ignore[arg-type]
    care._ready_at = time.monotonic() - GRACE_S - 1
    assert care.restart(Finding(Verdict.SERVER_STALLED, "it sends nothing", 9.0), 1)

    def kinds() -> list[str]:
        return [event.kind for _, event in mirror.events()]

    care.look()
    assert (kinds(), server.starts) == (["server_restart"], 0)
    server.let.set()
    deadline = time.monotonic() + 20
    while server.starts == 0:
        assert time.monotonic() < deadline
        care.look()
        time.sleep(0.01)
    assert kinds() == ["server_restart", "server_died"]
    (died,) = [event for _, event in mirror.events() if event.kind == "server_died"]
    assert died.detail["crash"] is False
