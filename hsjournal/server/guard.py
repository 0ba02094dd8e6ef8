"""Starts a server of our own, takes its log, and outlives it: ``python -m hsjournal.server.guard SPEC_FD PARENT_FD``.

A process between the supervisor and the server, because only such a one can promise that no process of the server's
remains: it is the subreaper of the whole tree, so that a child that made a session of its own, or whose parent died,
is still found below it; and it sees the end of the supervisor, however that ends, by the end of a pipe. It exits as the
server did. The command, its environment and what must not get into the log come over a pipe, and so stand in no list of
processes. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from hsjournal.server.logring import LogRing
from hsjournal.server.shm import Leftovers
from hsjournal.server.tree import Member, descendants, kill_all, member_of

RECORD = "server.json"
"""In the ring's folder: who the server's processes are, for whoever must end them when this process is gone."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_EVERY_S, _MAPS_EVERY_S = 1.0, 5.0
_PIPE_BYTES = 1 << 20
NOT_STARTED = 127


@dataclass(frozen=True, slots=True)
class Spec:
    """What to start.

    Args:
        argv: the command line.
        environment: the whole of it.
        folder: of the log ring, in tmpfs.
        secrets: what must not get into the log.
        grace_s: seconds between SIGTERM and SIGKILL.
    """

    argv: list[str]
    environment: dict[str, str]
    folder: str
    secrets: list[str]
    grace_s: float

    def to_json(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self))


class Guard:
    """One life of a server.

    Args:
        spec: what to start.
        parent_fd: a pipe whose end means that nobody wants the server any more.
    """

    def __init__(self, spec: Spec, parent_fd: int) -> None:
        self._spec, self._parent_fd = spec, parent_fd
        self._folder = Path(spec.folder)
        self._log = LogRing(self._folder, spec.secrets)
        self._leftovers = Leftovers()
        self._stopping = False
        self._status: int | None = None
        self._looked = self._mapped = 0.0
        self._ending = False
        self._known: set[Member] = set()
        self._wake, wake_in = os.pipe()
        for fd in (self._wake, wake_in):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._libc = libc

    def run(self) -> int:
        """Until the server and all that it started are gone; the server's wait status, or the exit code 127."""
        try:
            child = subprocess.Popen(
                self._spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._spec.environment,
                preexec_fn=self._tie,  # noqa: PLW1509 - this process has one thread only
            )
        except OSError as error:
            self._log.write(f"hsjournal: {self._spec.argv[0]} can't be started: {error.strerror}\n".encode())
            self._log.close()
            return NOT_STARTED << 8
        assert child.stdout is not None
        self._pid, self._pipe = child.pid, child.stdout.fileno()
        os.set_blocking(self._pipe, False)
        self._leader = member_of(child.pid) or Member(child.pid, 0)
        self._look()
        while not (self._is_over or self._stopping):
            self._turn(_LOOK_EVERY_S)
        self._end()
        removed = self._leftovers.remove()
        if removed:
            self._log.write(f"hsjournal: removed what it left in /dev/shm: {', '.join(removed)}\n".encode())
        self._log.close()
        with contextlib.suppress(OSError):
            (self._folder / RECORD).unlink()
        child.returncode = 0  # reaped here
        return self._status if self._status is not None else signal.SIGKILL

    @property
    def _is_over(self) -> bool:
        """Whether the server itself has ended."""
        return self._status is not None

    def _turn(self, timeout: float) -> None:
        """One round: log, signals, reaping, looking."""
        watched = [fd for fd in (self._pipe, self._parent_fd, self._wake) if fd >= 0]
        ready, _, _ = select.select(watched, [], [], timeout)
        if self._pipe in ready:
            self._pump()
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        if self._parent_fd in ready and not os.read(self._parent_fd, 4096):
            self._stopping, self._parent_fd = True, -1
        self._reap()
        if time.monotonic() - self._looked >= _LOOK_EVERY_S:
            self._look()

    def _pump(self) -> None:
        try:
            data = os.read(self._pipe, _PIPE_BYTES)
        except BlockingIOError:
            return
        if data:
            self._log.write(data)
        else:
            self._pipe = -1

    def _reap(self) -> None:
        """The server, and the orphans that were given to us."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._pid:
                    self._status = status

    def _look(self) -> None:
        self._looked = now = time.monotonic()
        members = descendants(os.getpid())
        # Reading a process's maps holds its memory lock for a moment: not every second.
        if members != self._known or now - self._mapped >= _MAPS_EVERY_S or self._ending:
            self._mapped = now
            self._leftovers.look(member.pid for member in members)
        if members != self._known:
            self._known = members
            record = {"leader": asdict(self._leader), "members": [asdict(member) for member in sorted(members)]}
            fresh = self._folder / f".{RECORD}"
            with contextlib.suppress(OSError):
                fresh.write_text(json.dumps(record))
                fresh.replace(self._folder / RECORD)

    def _end(self) -> None:
        """SIGTERM to the server's session and time to heed it, then SIGKILL to everything below us."""
        self._ending = True
        self._look()  # what the tree uses is to be known before it is felled
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGTERM)
            deadline = time.monotonic() + self._spec.grace_s
            while not self._is_over and time.monotonic() < deadline:
                self._turn(0.05)
        left = kill_all(lambda: descendants(os.getpid()), lambda: self._turn(0))
        for _ in range(64):
            if self._pipe >= 0:
                self._pump()
        self._reap()
        if left:
            numbers = ", ".join(str(member.pid) for member in sorted(left))
            self._log.write(f"hsjournal: processes that SIGKILL does not end: {numbers}\n".encode())

    def _tie(self) -> None:
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def _stop(self, *_: object) -> None:
        self._stopping = True


def main(arguments: list[str]) -> None:
    """See the module."""
    with os.fdopen(int(arguments[0]), "rb") as pipe:
        spec = Spec(**json.loads(pipe.read()))
    status = Guard(spec, int(arguments[1])).run()
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1:])
