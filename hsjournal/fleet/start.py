"""One start of a shard on this node: claim a number, put on the badge, run ``hsjournal run`` as a child to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hsjournal.config import RunPaths
from hsjournal.errors import ExitCode, HsjournalError, JournalLockedError, UsageError
from hsjournal.fleet.badge import Badge
from hsjournal.fleet.look import shard_name
from hsjournal.fleet.numbers import Numbers
from hsjournal.fleet.order import Order, expanded
from hsjournal.fleet.telling import Telling
from hsjournal.journal.locks import Lock
from hsjournal.mirror import SUPERVISOR, Mirror
from hsjournal.watch.children import exit_words, module, peek_at
from hsjournal.watch.figures import read_figures

POLL, TELL_EVERY, LOOK_EVERY = 0.2, 2.0, 10.0
LOCK_PATIENCE = 120.0
"""Seconds for an earlier start on the same node to end; its processes end with it, unless a disk holds them."""
END_PATIENCE = 60.0
"""Seconds for a child to drain before it is killed."""
LOCK, LOG = "fleet.lock", "run.log"


class Start:
    """One start; :meth:`run` once, the rest from any thread meanwhile.

    Args:
        order: the fleet's.
        number: of the shard, from 1.
        numbers: where incarnations come from.
        tell: called every two seconds and at the end.
        log: whether the run's lines go to a file beside the run directory, instead of our own output.
    """

    def __init__(
        self, order: Order, number: int, numbers: Numbers, tell: Callable[[Telling], None] = lambda _t: None, *, log: bool = True,
    ) -> None:  # fmt: skip
        self._order, self._numbers, self._tell, self._log = order, numbers, tell, log
        self.shard, self._number = order.shard(number), number
        self.telling = Telling(self.shard, host=socket.gethostname(), sentence="starting")
        self._child: subprocess.Popen[bytes] | None = None
        self._signals: list[int] = []
        self._ended = False

    def run(self) -> Telling:
        """To the end: of the run, or of our right to it. Errors of ours are told, not raised."""
        try:
            run_dir = self._order.run_dir(self._number)
            self._say(run_dir=str(run_dir))
            with _alone(run_dir):
                code = self._run(RunPaths(run_dir))
        except HsjournalError as error:
            self._say(sentence=str(error), code=int(error.exit_code))
        except OSError as error:
            self._say(sentence=f"{error.filename or self._order.base}: {error.strerror}", code=int(ExitCode.ERROR))
        else:
            self._say(code=code)
        return self.telling

    def stop(self, number: int = signal.SIGUSR1) -> None:
        """Have the run drain; the second time it stops at once. Safe in a signal handler."""
        self._signals.append(number)
        child = self._child
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)

    def stop_and_wait(self, patience: float) -> bool:
        """The same, and wait for the child's end; kill it when that takes too long, and say False. Safe in a signal handler."""
        self.stop()
        child, end = self._child, time.monotonic() + patience
        while child is not None and not _has_ended(child.pid):
            if time.monotonic() > end:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
                return False
            time.sleep(POLL)
        return True

    def look(self) -> Telling:
        """How it stands now, from the mirror: no disk is touched."""
        if self.telling.run_dir and self.telling.code is None:
            mirror = Mirror(RunPaths(Path(self.telling.run_dir)).mirror)
            snapshot, supervisor = read_figures(mirror), mirror.read(SUPERVISOR)
            if snapshot is not None:
                counts = {state: int(count["rows"]) for state, count in snapshot["counts"].items()}
                self.telling = replace(
                    self.telling, counts=counts, rate=float((snapshot["rates"] or {}).get("samples_per_s", 0.0))
                )
            if supervisor is not None and "stage" in supervisor and self._child is not None:
                self.telling = replace(self.telling, sentence=f"{supervisor['stage']}: {supervisor['sentence']}")
        return self.telling

    def _run(self, paths: RunPaths) -> int:
        had = Badge.read(paths.run_dir)
        if had is not None and (had.fleet, had.shard) != (self._order.fleet, self.shard):
            raise UsageError(
                f"{paths.run_dir} belongs to shard {had.shard} of fleet {had.fleet}",
                remedy="Name another folder with --base, or another fleet with --name.",
            )
        number = self._numbers.claim(self.shard, had.incarnation if had else 0)
        badge = Badge(
            self._order.fleet, self.shard, number, self.telling.host, self._out(had, number), self._numbers.place
        )
        badge.write(paths.run_dir)
        self._say(incarnation=number, sentence="starting")
        lifeline, held = os.pipe()
        try:
            end = time.monotonic() + LOCK_PATIENCE
            while True:
                code = self._child_to_its_end(paths, badge, lifeline)
                if code != ExitCode.LOCKED or time.monotonic() > end or self._signals:
                    return self._final(paths, code)
                time.sleep(1.0)
        finally:
            os.close(held)
            os.close(lifeline)

    def _out(self, had: Badge | None, number: int) -> str | None:
        if had is not None:
            return had.out
        if self._order.out is None:
            return None
        return str(expanded(self._order.out) / self._order.fleet / f"{shard_name(self.shard)}.{number:06d}")

    def _child_to_its_end(self, paths: RunPaths, badge: Badge, lifeline: int) -> int:
        command = [*module("hsjournal.cli.main", "run", str(paths.run_dir), *self._order.words, "--plain")]
        command += ["--shard", self.shard, "--parent-fd", str(lifeline)]
        command += ["--out", badge.out] if badge.out is not None else []
        for folder in self._earlier(paths, badge):
            command += ["--adopt-from", str(folder)]
        cwd = self._order.cwd if os.path.isdir(self._order.cwd) else None
        with _log_of(paths, wanted=self._log) as log:
            child = self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=None if log is None else subprocess.STDOUT,
                start_new_session=True, pass_fds=(lifeline,), cwd=cwd,
            )  # fmt: skip
            for number in self._signals:  # that came before there was a child
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, number)
            self._attend(child, badge)
        self._child = None
        return child.returncode

    def _attend(self, child: subprocess.Popen[bytes], badge: Badge) -> None:
        told = looked = time.monotonic()
        while child.poll() is None:
            time.sleep(POLL)
            now = time.monotonic()
            if now - told >= TELL_EVERY:
                told = now
                self._tell(self.look())
            if now - looked >= LOOK_EVERY:
                looked = now
                if (newest := self._newest()) > badge.incarnation:
                    self.stop_and_wait(END_PATIENCE)
                    child.wait()
                    raise HsjournalError(
                        f"incarnation {newest} of shard {self.shard} was started elsewhere; this one, {badge.incarnation}, "
                        "counts no more and has stopped",
                        remedy="Nothing is lost; `hsjournal fleet status` shows the one that counts.",
                    )

    def _newest(self) -> int:
        try:
            return self._numbers.highest(self.shard)
        except HsjournalError:
            return 0  # a store that is away now decides nothing; the badge does, when all is read

    def _earlier(self, paths: RunPaths, badge: Badge) -> Iterator[Path]:
        """Outputs of earlier starts of this shard that can be reached from here."""
        places = [*self._order.adopt_from, *([self._order.out] if self._order.out else [])]
        mine = {badge.out or str(paths.default_out)}
        for place in map(expanded, places):
            name = shard_name(self.shard)
            found = [*place.glob(f"{name}*"), *place.glob(f"{self._order.fleet}/{name}*")]
            for folder in sorted(
                {*found} or ({place} if place.is_dir() and str(place) != str(self._order.out) else set())
            ):
                outputs = folder / "out" if (folder / "manifest.toml").exists() else folder
                if str(outputs) not in mine and outputs.is_dir():
                    yield outputs

    def _final(self, paths: RunPaths, code: int) -> int:
        with contextlib.suppress(HsjournalError):
            counts = {state: int(count["rows"]) for state, count in peek_at(paths.journal)["counts"].items()}
            self.telling = replace(self.telling, counts=counts, rate=0.0)
        words = {ExitCode.DONE: "done", ExitCode.FAILED_SAMPLES: "done, with failed samples"}
        if code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
            sentence = "stopped; nothing is lost"
        else:
            sentence = words[ExitCode(code)] if code in words else f"{exit_words(code)}: {self._last_line(paths)}"
        self._say(sentence=sentence)
        return code if code >= 0 else int(ExitCode.ERROR)

    def _last_line(self, paths: RunPaths) -> str:
        with contextlib.suppress(OSError):
            lines = _log_path(paths).read_text(errors="replace").strip().splitlines()
            return lines[-1][:500] if lines else "it said nothing"
        return "see its output"

    def _say(self, **changes: Any) -> None:
        self.telling = replace(self.telling, **changes)
        self._tell(self.telling)


@contextlib.contextmanager
def _alone(run_dir: Path) -> Iterator[None]:
    """One start at a time in a run directory, so that its badge is always the last start's.

    Raises:
        JournalLockedError: when an earlier one does not end.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    lock, end = Lock(run_dir / LOCK), time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            lock.acquire()
            break
        except JournalLockedError:
            if time.monotonic() > end:
                raise
            time.sleep(1.0)
    try:
        yield
    finally:
        lock.release()


def _log_path(paths: RunPaths) -> Path:
    return paths.run_dir.with_name(f"{paths.run_dir.name}.{LOG}")


@contextlib.contextmanager
def _log_of(paths: RunPaths, *, wanted: bool) -> Iterator[Any]:
    if not wanted:
        yield None
        return
    with _log_path(paths).open("ab") as file:
        yield file


def _has_ended(pid: int) -> bool:
    """Whether our child has ended; it is left to be reaped by whoever waits for it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
