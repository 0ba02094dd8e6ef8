"""A server of our own: started, waited for, started again when it dies, and ended with everything that it started.

The embedded engine and a stock SGLang server differ in their :class:`~hsjournal.server.recipe.Recipe` only. Between us
and the server stands a guard (:mod:`hsjournal.server.guard`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hsjournal.config import KEY_VARIABLE
from hsjournal.dump.protocol import BOOT_ID_VARIABLE
from hsjournal.errors import ExitCode, HsjournalError
from hsjournal.server import logring
from hsjournal.server.guard import NOT_STARTED, RECORD, Spec
from hsjournal.server.launch import LaunchError, fetch_json
from hsjournal.server.recipe import Recipe
from hsjournal.server.tree import Member, in_session, is_alive, kill_all, living

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL; SGLang's launcher has been seen to linger until the latter."""
_STOP_WAIT_S = GRACE_S + 15.0
_CARRY_EVERY_S, _CARRY_LAST_S = 5.0, 3.0
_LAST_LINES = 8
_LAST_BYTES = 1 << 18
"""Among which they are looked for: a server that takes a quarter of an hour logs a line for each of our questions."""
_NOT_TOLD = ("server_args=", '"GET /health', '"GET /server_info', '"GET /model_info')


class OwnServer:
    """One server of our own, over all its lives.

    Args:
        recipe: what to start.
        ring: folder in tmpfs for its log.
        log_file: where the log is carried to, on a disk.
    """

    def __init__(self, recipe: Recipe, ring: Path, log_file: Path) -> None:
        self._recipe, self._ring, self._log_file = recipe, ring, log_file
        self._guard: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._started = 0.0
        self._question: _Question | None = None
        self._info: dict[str, Any] | None = None
        self._overdue = False
        self._carrier: subprocess.Popen[bytes] | None = None
        self._carried = 0.0
        self._mark = (0, 0)

    @property
    def name(self) -> str:
        """What to call it to people."""
        return self._recipe.name

    @property
    def url(self) -> str:
        """Where it listens, or will."""
        return self._recipe.url

    @property
    def pid(self) -> int | None:
        """Of the server's first process while it runs."""
        if self.returncode is not None or self._guard is None:
            return None
        leader, _ = self._record()
        return leader.pid if leader is not None and is_alive(leader) else None

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs. A whole tree is gone then."""
        return self._guard.poll() if self._guard is not None else None

    @property
    def is_starting(self) -> bool:
        """Whether it was started and has not answered since."""
        return self._guard is not None and self.returncode is None and self._info is None

    def start(self) -> None:
        """Start it; returns at once. What an earlier life, or an earlier supervisor's, left behind is ended first."""
        self._end_strays()
        self._ring.mkdir(mode=0o700, parents=True, exist_ok=True)
        environment = {k: v for k, v in os.environ.items() if k not in self._recipe.without}
        environment |= {BOOT_ID_VARIABLE: uuid.uuid4().hex} | dict(self._recipe.environment)
        secrets = [secret for secret in (os.environ.get(KEY_VARIABLE, ""),) if secret]
        spec = Spec(list(self._recipe.argv), environment, str(self._ring), secrets, GRACE_S)
        parent_end, self._lifeline = os.pipe()
        spec_end, spec_in = os.pipe()
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "hsjournal.server.guard", str(spec_end), str(parent_end)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(spec_end, parent_end),
                env={k: v for k, v in os.environ.items() if k != KEY_VARIABLE},
            )
        finally:
            os.close(spec_end)
            os.close(parent_end)
        with contextlib.suppress(BrokenPipeError), os.fdopen(spec_in, "wb") as pipe:
            pipe.write(spec.to_json().encode())
        self._started, self._info, self._question, self._overdue = time.monotonic(), None, None, False

    def look(self) -> bool:
        """Whether it is ready; to be called now and then while it starts and runs. Never blocks.

        A server that is not ready in time is ended: its ``returncode`` says so.
        """
        self.carry_log()
        if self._info is not None or self._guard is None or self.returncode is not None:
            return self._info is not None
        if self._question is None or self._question.is_over:
            answer = self._question.answer if self._question is not None else None
            if answer is not None:
                self._info = answer
                return True
            self._question = _Question(self._recipe)
        if time.monotonic() - self._started > self._recipe.start_timeout and not self._overdue:
            self._overdue = True
            self._guard.terminate()
        return False

    def wait_ready(self, keep_waiting: Callable[[], bool]) -> dict[str, Any]:
        """Wait until it is ready; its ``/server_info``, empty when ``keep_waiting`` said no.

        Raises:
            LaunchError: when it ends first, or the time is up; with the last lines of its log.
        """
        while not self.look():
            if self.returncode is not None:
                raise self._ended()
            if not keep_waiting():
                return {}
            time.sleep(0.1)
        return dict(self._info or {})

    def stop(self) -> None:
        """End it and everything that it started: TERM, then KILL; what the guard can't do any more is done here."""
        guard = self._guard
        if guard is None:
            return
        if guard.poll() is None:
            guard.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                guard.wait(_STOP_WAIT_S)
            if guard.poll() is None:
                guard.kill()
                guard.wait()
        self._end_strays()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        self.carry_log(last=True)

    def last_lines(self) -> str:
        """The end of its log, on one line; without its page of arguments, and what it says of our own asking."""
        lines = [line.strip() for line in logring.tail(self._ring, _LAST_BYTES).splitlines()]
        told = [line for line in lines if line and not any(words in line for words in _NOT_TOLD)]
        return " | ".join(told[-_LAST_LINES:]) or "(it said nothing)"

    def carry_log(self, *, last: bool = False) -> None:
        """Have a throw-away child append what is new in the log to the file on the disk; one that hangs is left alone."""
        if self._carrier is not None and self._carrier.poll() is None:
            if not last:
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._carrier.wait(_CARRY_LAST_S)
            if self._carrier.poll() is None:
                return
        if not last and time.monotonic() - self._carried < _CARRY_EVERY_S:
            return
        self._carried = time.monotonic()
        mark, self._mark = self._mark, logring.newest(self._ring)
        if mark == self._mark and not last:
            return
        self._carrier = subprocess.Popen(
            [sys.executable, "-I", "-S", logring.__file__, str(self._ring), str(self._log_file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if last:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._carrier.wait(_CARRY_LAST_S)
            if self._carrier.poll() is None:
                self._carrier.kill()

    def _record(self) -> tuple[Member | None, set[Member]]:
        """Who the guard said the server's processes are: the first one, and all."""
        try:
            record = json.loads((self._ring / RECORD).read_text())
            return Member(**record["leader"]), {Member(**member) for member in record["members"]}
        except (OSError, ValueError, TypeError, KeyError):
            return None, set()

    def _end_strays(self) -> None:
        """Processes of a life whose guard was killed: those that it had recorded, and their session's."""
        leader, members = self._record()
        if leader is None:
            return
        kill_all(lambda: living(members) | in_session(leader))
        with contextlib.suppress(OSError):
            (self._ring / RECORD).unlink()

    def _ended(self) -> HsjournalError:
        code = self.returncode or 0
        words = self.last_lines()
        if (
            code in (ExitCode.USAGE, ExitCode.SERVER) and "hsjournal: " in words
        ):  # it has said in one sentence what is wrong
            return LaunchError(words.rpartition("hsjournal: ")[2].partition(" | ")[0], exit_code=code)
        if self._overdue:
            what = (
                f"{self.name} was not ready within {self._recipe.start_timeout:.0f} s (--start-timeout) and was ended"
            )
        elif code == NOT_STARTED:
            return LaunchError(f"{self.name} could not be started: {words}", "Check --launch.")
        elif code < 0:
            what = f"{self.name} was ended by {_signal_name(-code)} before it was ready"
        else:
            what = f"{self.name} ended with exit code {code} before it was ready"
        return LaunchError(f"{what}; its log {self._log_file} ends with: {words}")


class _Question:
    """Asks on a thread of its own whether the server is ready; the answer may take as long as a real token does."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.answer: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._run, name="server-ready", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether there is an answer, or none will come."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        answer: dict[str, Any] = {}
        try:
            for path in self._recipe.ready:
                answer = fetch_json(self._recipe.url + path, self._recipe.answer_timeout, empty=True)
        except (OSError, ValueError):
            time.sleep(0.2)
            return
        self.answer = answer


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
