"""A server of our own is started again when it dies or stalls; one that we are attached to is never touched."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from hsjournal.errors import GaveUpError
from hsjournal.events import Event
from hsjournal.server.own import OwnServer
from hsjournal.watch.children import exit_words
from hsjournal.watch.desk import Desk
from hsjournal.watch.lives import Lives, is_crash, oom_kill_count
from hsjournal.watch.verdict import Finding

ASK_TIMEOUT_S = 5.0
GRACE_S = 60.0
"""Seconds after a restart in which a server is given time: the worker asks an absent server at growing intervals."""


class ServerCare:
    """Keeps a server of our own alive.

    Args:
        server: ours, or None.
        desk: keeps events.
        lives: bounds how often it may die.
        log: where its words are.
    """

    def __init__(self, server: OwnServer | None, desk: Desk, lives: Lives, log: Path) -> None:
        self._server, self._desk, self._lives, self._log = server, desk, lives, log
        self._again: float | None = None
        self._oom_kills = oom_kill_count()
        self._stopping: threading.Thread | None = None
        self._was_starting = self._ended_by_us = False
        self._ready_at = -GRACE_S

    @property
    def is_ours(self) -> bool:
        """Whether there is one to care for."""
        return self._server is not None

    def look(self) -> bool:
        """Start it again when it died, with a pause that doubles until a sample gets done; True when it is ready again.

        Raises:
            GaveUpError: when it died too often.
        """
        server = self._server
        if server is None or self._desk.signals:
            return False
        if self._stopping is not None:
            if not self._stopping.is_alive():
                self._stopping, self._was_starting = None, True
                if self._ended_by_us:  # said as of a death, once it is one: what broke until now is no suspect of it
                    self._ended_by_us = False
                    self._desk.record(Event("server_died", None, {"how": "ended by the supervisor", "crash": False}))
                server.start()
            return False
        if server.returncode is None:
            is_ready = server.look() and self._was_starting
            if is_ready:
                self._was_starting, self._ready_at = False, time.monotonic()
            return is_ready
        if self._again is None:
            kills, self._oom_kills = oom_kill_count() - self._oom_kills, oom_kill_count()
            how = {"how": exit_words(server.returncode), "crash": is_crash(server.returncode, kills)}
            self._desk.record(Event("server_died", None, how | {"log": server.last_lines()[-400:]}))
            self._again = time.monotonic() + self._pause(f"the server died (last: {how['how']})")
        if time.monotonic() >= self._again:
            self._again = None
            self._stop_then_start(server)
        return False

    def restart(self, finding: Finding, epoch: int) -> bool:
        """End a server of our own that stalls, and start it again; False when there is none, or it is starting anyway."""
        server = self._server
        if server is None or self._stopping is not None or self._again is not None or server.is_starting:
            return False
        if time.monotonic() - self._ready_at < GRACE_S:
            return False
        facts = {"who": "supervisor", "why": str(finding.verdict), "sentence": finding.sentence, "pid": server.pid}
        self._desk.record(Event("server_restart", finding.row, facts, epoch=epoch))
        self._ended_by_us = True
        self._pause(f"the server stalled ({finding.sentence})")
        self._stop_then_start(server)
        return True

    def _pause(self, words: str) -> float:
        pause = self._lives.died()
        if pause is None:
            raise GaveUpError(
                f"{words} {self._lives.deaths} times without a sample done",
                remedy=f"See {self._log}; `hsjournal resume` tries again.",
            )
        return pause

    def _stop_then_start(self, server: OwnServer) -> None:
        """On a thread: a server's processes may take a while to end."""
        self._stopping = threading.Thread(target=server.stop, name="server-stop", daemon=True)
        self._stopping.start()


def ask_server(url: str) -> str | None:
    """None when somebody answers at ``url``, however; else why not. Asks for nothing that makes the model work."""
    import urllib.error
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url.rstrip("/") + "/model_info", timeout=ASK_TIMEOUT_S):
            return None
    except urllib.error.HTTPError:
        return None
    except urllib.error.URLError as error:
        reason = error.reason
        return (reason.strerror or type(reason).__name__) if isinstance(reason, OSError) else str(reason)
    except OSError as error:
        return "no answer in time" if isinstance(error, TimeoutError) else str(error)
