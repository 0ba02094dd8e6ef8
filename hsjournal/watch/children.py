"""Throw-away children with a deadline: whatever may touch a stuck disk happens in one of these."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from hsjournal.errors import ExitCode, HsjournalError
from hsjournal.journal import peek
from hsjournal.journal.refusals import refusal_of_a_look

PEEK = Path(peek.__file__)
KILL_GRACE = 0.1
"""Seconds that a killed child is waited for; one that is stuck in the kernel is left to it."""


class StuckError(HsjournalError):
    """The child did not answer by its deadline: its storage hangs."""


class ChildError(HsjournalError):
    """The child answered with an error of ours; the exit code is its, and ``answer`` all that it said."""

    def __init__(self, message: str, remedy: str | None, exit_code: int, answer: dict[str, Any] | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.answer = answer or {}
        self.exit_code = ExitCode(exit_code) if exit_code in ExitCode.__members__.values() else ExitCode.ERROR


class DiedError(ChildError):
    """The child was killed, or crashed, before it could answer."""


def module(name: str, *arguments: str) -> list[str]:
    """The command line of one of our modules."""
    return [sys.executable, "-m", name, *arguments]


def start(
    command: Sequence[str], *, lifeline: int | None = None, stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int | IO[bytes] = subprocess.DEVNULL, environment: dict[str, str] | None = None, fds: tuple[int, ...] = (),
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a child by exec in a session of its own; ``lifeline`` and ``fds`` are the descriptors it inherits."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        pass_fds=fds if lifeline is None else (*fds, lifeline),
        env=None if environment is None else os.environ | environment,
    )


def ask(command: Sequence[str], deadline: float, lifeline: int | None = None) -> dict[str, Any]:
    """Run a child that prints one JSON object, and return it; ``lifeline`` is the descriptor it inherits.

    Raises:
        StuckError: when it does not end in time; it is killed, and left alone if even that does not end it.
        DiedError: when a signal ended it.
        ChildError: when it answers with an error.
    """
    child = start(command, lifeline=lifeline, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = child.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(KILL_GRACE)
        for pipe in (child.stdout, child.stderr):
            assert pipe is not None
            pipe.close()
        raise StuckError(f"no answer within {deadline:.1f} s: the storage hangs") from None
    return _answer(command, child.returncode, out, err)


def _answer(command: Sequence[str], returncode: int, out: bytes, err: bytes) -> dict[str, Any]:
    """The last line of a child that has ended, as :func:`ask` returns or raises it."""
    lines = out.decode(errors="replace").strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else {}
    except json.JSONDecodeError:
        answer = {}
    if not isinstance(answer, dict) or (returncode and "error" not in answer):
        words = (err.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        kind = DiedError if returncode < 0 else ChildError
        raise kind(
            f"{command[-1] if len(command) < 4 else command[2]} ended with {exit_words(returncode)}: {words}", None, 1
        )
    if "error" in answer:
        raise ChildError(str(answer["error"]), answer.get("remedy"), int(answer.get("exit_code", 1)), answer)
    return answer


class Patient:
    """A child that may take as long as its storage does: looked at from time to time, never waited for.

    It prints JSON lines: ``{"step": …}`` as often as it likes, then its answer.

    Args:
        command: its command line.
        lifeline: the descriptor that ends it with us.
        pass_fd: one more descriptor for it.
    """

    def __init__(self, command: Sequence[str], lifeline: int | None = None, pass_fd: int | None = None) -> None:
        self._command = command
        fds = tuple(fd for fd in (lifeline, pass_fd) if fd is not None)
        self.process = start(command, fds=fds, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.since = time.monotonic()
        self.step = ""
        """What it said last that it was doing."""
        self._step_since = self.since
        self._out = self._err = b""
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    @property
    def age(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self.since

    @property
    def step_age(self) -> float:
        """Seconds since it was seen to begin its step."""
        return time.monotonic() - self._step_since

    def look(self) -> dict[str, Any] | None:
        """Its answer once it has ended, else None.

        Raises:
            DiedError, ChildError: as :func:`ask`.
        """
        ended = self.process.poll() is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._out += self.process.stdout.read() or b""
        self._err += self.process.stderr.read() or b""
        before = self.step
        for line in self._out.splitlines():
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                self.step = str(said.get("step", self.step)) if isinstance(said, dict) else self.step
        if self.step != before:
            self._step_since = time.monotonic()
        if not ended:
            return None
        self.close()
        return _answer(self._command, self.process.returncode, self._out, self._err)

    def close(self) -> None:
        """Have nothing more to do with it: it is killed if it still runs, and left alone if even that does not end it."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(KILL_GRACE)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


def peek_at(journal: Path, deadline: float = 2.0) -> dict[str, Any]:
    """What the journal says, read by a child that changes nothing.

    Raises:
        StuckError: as :func:`ask`.
        ChildError: when it can't be read, with the exit code of what is the matter: missing 10, damaged 12, its disk 5.
    """
    try:
        return ask([sys.executable, "-I", "-S", str(PEEK), str(journal)], deadline)
    except ChildError as error:
        if "sqlite" not in error.answer:
            raise
        why = refusal_of_a_look(error.answer, journal)
        raise ChildError(why.message, why.remedy, why.exit_code, error.answer) from None


def exit_words(returncode: int | None) -> str:
    """A return code in words: ``exit code 3``, ``SIGBUS``."""
    if returncode is None:
        return "no exit code yet"
    if returncode < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-returncode).name
        return f"signal {-returncode}"
    return f"exit code {returncode}"
