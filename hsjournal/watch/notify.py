"""Telling somebody: a command of the user's, or a POST to an address, each on a thread of its own with a time-out, in turn.

In the incident nobody was told. Whatever goes wrong in here is an event, and nothing else: a command that hangs, an
address that does not answer, a program that is not there. The command and the address may hold secrets: neither is ever
written down, but for the address's host.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from hsjournal.events import Event

VERSION = 1
"""Of the JSON form; fields are only ever added."""
TIMEOUT_S = 10.0
LAST_CALL_S = 12.0
"""So long the end of a run waits for what is being told."""
KINDS = ("stall", "recovery", "gave_up", "finished")


@dataclass(frozen=True, slots=True)
class Addressees:
    """Who is told; both may be empty.

    Args:
        command: for ``/bin/sh -c``; gets the payload on its standard input and in ``HSJOURNAL_*`` variables.
        url: gets the payload as a JSON POST.
    """

    command: str = ""
    url: str = ""


class Notifier:
    """Tells of stalls, recoveries and ends; never blocks who calls it.

    Args:
        to: who is told.
        record: keeps an event of a failure; called on another thread.
        fields: what every payload holds.
        timeout: seconds for each.
    """

    def __init__(
        self,
        to: Addressees,
        record: Callable[[Event], object],
        fields: Mapping[str, Any],
        timeout: float = TIMEOUT_S,
    ) -> None:
        self._to, self._record, self._fields, self._timeout = to, record, dict(fields), timeout
        self._threads: list[threading.Thread] = []
        self._last: dict[str, threading.Thread] = {}

    def tell(self, kind: str, **fields: Any) -> None:
        """Tell all addressees of one of :data:`KINDS`; returns at once.

        Args:
            kind: what happened.
            fields: JSON-able; beside those that every payload holds.
        """
        payload: dict[str, Any] = {
            "version": VERSION,
            "event": kind,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            **self._fields,
            **fields,
        }
        if self._to.command:
            self._start(kind, "command", lambda: self._run(payload))
        if self._to.url:
            self._start(kind, _host(self._to.url), lambda: self._post(payload))

    def wait(self, seconds: float = LAST_CALL_S) -> None:
        """Let what is under way come to an end, for a bounded time."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self, kind: str, to: str, work: Callable[[], str | None]) -> None:
        before = self._last.get(to)

        def run() -> None:
            if before is not None:
                before.join()  # as it happened, and never two at once in one file of the user's; each is bounded
            try:
                problem = work()
            except Exception as error:  # noqa: BLE001 - a typed event; its text is left out, it may hold the address
                problem = type(error).__name__
            if problem is not None:
                self._record(Event("notify_failed", None, {"what": kind, "to": to, "why": problem}))

        self._threads = [t for t in self._threads if t.is_alive()]
        thread = self._last[to] = threading.Thread(target=run, name="notify", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, payload: dict[str, Any]) -> str | None:
        text = json.dumps(payload, default=str)
        child = subprocess.Popen(
            ["/bin/sh", "-c", self._to.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | variables(payload, text),
        )
        try:
            child.communicate(text.encode(), self._timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1.0)
            return f"no end within {self._timeout:.0f} s"
        return f"exit code {child.returncode}" if child.returncode else None

    def _post(self, payload: dict[str, Any]) -> str | None:
        import urllib.error
        import urllib.request

        body = json.dumps(payload, default=str).encode()
        request = urllib.request.Request(  # noqa: S310 - the user's own address
            self._to.url, body, {"Content-Type": "application/json", "User-Agent": "hsjournal"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout):  # noqa: S310
                return None
        except urllib.error.HTTPError as error:
            return f"HTTP status {error.code}"
        except urllib.error.URLError as error:
            reason = error.reason
            return (reason.strerror or type(reason).__name__) if isinstance(reason, OSError) else "no answer"


def variables(payload: Mapping[str, Any], text: str) -> dict[str, str]:
    """The payload for a command's environment: each plain field as ``HSJOURNAL_<NAME>``, the whole as ``HSJOURNAL_PAYLOAD``."""
    plain = {k: v for k, v in payload.items() if isinstance(v, str | int | float) and k != "version"}
    return {f"HSJOURNAL_{key.upper()}": str(value) for key, value in plain.items()} | {"HSJOURNAL_PAYLOAD": text}


def _host(url: str) -> str:
    """An address without what may be secret in it."""
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(url)
        return f"{parts.scheme}://{parts.hostname}"
    return "url"
