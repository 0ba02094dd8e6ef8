"""The supervisor: one per run directory. Starts the worker by exec, starts it anew when it dies, ends it with itself.

It holds the lock, the pipe whose end ends the worker, and the view; everything that may touch a stuck disk happens
in children (:mod:`hsjournal.watch.children`), the taking of the lock too (:mod:`hsjournal.watch.holding`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hsjournal.config import RunPaths, Settings
from hsjournal.errors import ExitCode, GaveUpError, HsjournalError
from hsjournal.events import Event
from hsjournal.mirror import STDERR, Mirror
from hsjournal.server.own import OwnServer
from hsjournal.watch import gpu
from hsjournal.watch.alarm import Alarm
from hsjournal.watch.children import ChildError, exit_words, module
from hsjournal.watch.companions import Companions
from hsjournal.watch.deeds import meaning
from hsjournal.watch.desk import Desk, StoppedError, words_of
from hsjournal.watch.farewell import Farewell
from hsjournal.watch.gatekeeper import Gatekeeper, Passed, give_up_when_stuck
from hsjournal.watch.health import Health
from hsjournal.watch.holding import Holding
from hsjournal.watch.life import End, Life, Watch, end_now
from hsjournal.watch.lives import Lives, is_crash, is_final, oom_kill_count
from hsjournal.watch.notify import Addressees, Notifier
from hsjournal.watch.onset import launch, prepare, take
from hsjournal.watch.places import Places
from hsjournal.watch.presence import STARTED
from hsjournal.watch.server_care import ServerCare, ask_server
from hsjournal.watch.verdict import Judge, Limits, Verdict
from hsjournal.watch.view import View
from hsjournal.watch.watcher import Watcher


@dataclass(frozen=True, slots=True)
class Job:
    """What to supervise.

    Args:
        paths: of the run.
        settings: for the worker; ``server_url`` is filled in when a server is launched.
        out_dir: the output folder.
        server: a server of our own, or None when one is attached to.
        request: for :mod:`hsjournal.prepare` as JSON-able fields, None when the run is already made ready.
        notify: who is told of stalls and ends.
        beside: command lines of processes that go along, such as the metrics' endpoint; they get ``--parent-fd``.
    """

    paths: RunPaths
    settings: Settings
    out_dir: Path
    server: OwnServer | None = None
    request: dict[str, Any] | None = None
    notify: Addressees = field(default_factory=Addressees)
    beside: tuple[tuple[str, ...], ...] = ()


class Supervisor:
    """Runs one job to its end.

    Args:
        job: what to supervise.
        show: draws the view; called about four times a second.
    """

    def __init__(self, job: Job, show: Callable[[View], None]) -> None:
        self.job, self._draw = job, show
        view = View(run_dir=str(job.paths.run_dir), out_dir=str(job.out_dir), server=job.settings.server_url)
        self._desk = desk = Desk(Mirror(job.paths.mirror), view, self._show)
        self._settings = settings = job.settings
        self._notifier = Notifier(job.notify, desk.record, {"run_dir": view.run_dir, "host": os.uname().nodename})
        self._alarm = Alarm(desk, self._notifier)
        self._lives = Lives(most=settings.max_restarts)
        self._server_lives = Lives(most=settings.max_restarts)
        self._care = ServerCare(job.server, desk, self._server_lives, job.paths.logs / "server.log")
        limits = Limits.of(settings.stall_timeout, settings.poll_interval)
        self._places = Places(
            view.run_dir, view.out_dir, " or ".join(dict.fromkeys(e.handover_root for e in settings.endpoints))
        )
        self._judge = Judge(limits, time.monotonic())
        self._gpus: gpu.Gpus | None = None
        self._is_ready = job.request is None
        self._companions = Companions(desk)
        self._life: Life | None = None
        self._farewell = Farewell(job.paths, job.out_dir, desk, self._alarm, self._notifier)
        self._lifeline, self._held = os.pipe()

    def run(self) -> ExitCode:
        """Supervise until the end; the exit code of DESIGN 12.

        Raises:
            HsjournalError: with its exit code; nothing is lost by it.
        """
        desk, job = self._desk, self.job
        lock = Holding(job.paths.supervisor_lock)
        desk.owns_run = False
        desk.take_signals()
        try:
            take(lock, job.paths.supervisor_lock, desk, self._settings, self._alarm)
            code = self._own()
            self._farewell.by_code(code)
        except StoppedError as stop:
            code = stop.code
            self._farewell.by_code(code)
        except HsjournalError as error:
            self._farewell.by_error(error)
            raise
        except Exception as error:
            unforeseen = HsjournalError(
                f"an error that nobody foresaw: {words_of(error)}",
                remedy="Please report it. Nothing is lost: `hsjournal resume` goes on.",
            )
            self._farewell.by_error(unforeseen)
            raise unforeseen from error
        finally:
            if self._life is not None:
                end_now(self._life.worker)
            if job.server is not None:
                job.server.stop()
            self._notifier.wait()
            desk.give_signals_back()
            self._close(lock)
            if desk.owns_run and not self._is_ready:
                tidy(job.paths)  # it never began
        if code in (ExitCode.DONE, ExitCode.FAILED_SAMPLES):
            tidy(job.paths)
        return code

    def _own(self) -> ExitCode:
        """All that is done while the run is ours."""
        desk, job = self._desk, self.job
        desk.mirror.create()
        self._alarm.take_over()
        desk.record(Event(STARTED, None, {"pid": os.getpid()}))
        desk.say("preparing", "starting")
        self._gpus = gpu.Gpus.start(self._lifeline)
        self._companions.start(job.beside, self._lifeline)
        if job.server is not None:
            launch(job.server, desk)
            self._settings = replace(self._settings, server_url=job.server.url)
        if job.request is not None:
            request = job.request | {"server_url": self._settings.server_url}
            prepare(request, self._lifeline, desk, self._settings, self._alarm)
            self._is_ready = True
        return self._supervise()

    def _supervise(self) -> ExitCode:
        gate = Gatekeeper(
            self.job.paths, self._places, self._settings, self._desk, self._alarm, self._lives, self._lifeline
        )
        after, killed = "end", False
        while True:
            passed = gate.wait_open(after)
            fenced = {"in_flight": passed.in_flight[:20], "after": after}
            self._desk.record(Event("fence", None, fenced, epoch=passed.epoch))
            self._tell_poison(passed)
            suspicious = killed and self._lives.repeated_kill(passed.in_flight)
            kills = oom_kill_count()
            end = self._one_life(passed.epoch)
            if end.returncode is None or self._desk.signals or (is_final(end.returncode) and not end.by_us):
                return self._final(end.returncode)
            crashed = not end.by_us and is_crash(end.returncode, oom_kill_count() - kills)
            killed = not end.by_us and not crashed
            crashed = crashed or (killed and suspicious)
            after = "crash" if crashed else "end"
            self._wait_for_next_life(end, passed.epoch, crashed=crashed)

    def _one_life(self, epoch: int) -> End:
        command = module(
            "hsjournal.worker", str(self.job.paths.run_dir), "--epoch", str(epoch),
            "--settings", self._settings.to_json(), "--parent-fd", str(self._lifeline),
        )  # fmt: skip
        watch = Watch(
            self._judge, self._watcher, self._alarm, self._care, self._settings.poll_interval,
            lambda words, seconds: give_up_when_stuck(self._settings, seconds, words),
        )  # fmt: skip
        self._life = Life(command, self._lifeline, epoch, self._desk, watch, self._progressed)
        end = self._life.run()
        self._life = None  # ended, or stuck in the kernel with a SIGKILL pending: nothing more can be done to it
        return end

    def _watcher(self, pid: int, epoch: int) -> Watcher:
        server, health = self.job.server, Health([e.url for e in self._settings.endpoints], ask_server)
        of_engine = (lambda: server.pid) if server is not None else (lambda: None)
        return Watcher(self._judge, self._desk.mirror, pid, epoch, health, self._places, of_engine)

    def _show(self, view: View) -> None:
        self._companions.look()
        self._draw(view)

    def _progressed(self, verified: int) -> None:
        for lives in (self._lives, self._server_lives):
            lives.progressed(verified)
        if self._gpus is not None:
            self._desk.view.gpus = self._gpus.look()

    def _wait_for_next_life(self, end: End, epoch: int, *, crashed: bool) -> None:
        pause = self._lives.died()
        words = exit_words(end.returncode)
        how = {"how": words, "crash": crashed, "by_us": end.by_us, "next_in_s": pause, "stderr": self._stderr()}
        self._desk.record(Event("worker_died", None, how, epoch=epoch))
        asked = end.returncode == ExitCode.INTERRUPTED  # not by us: a signal from outside
        who = "the worker was ended" if end.by_us else "the worker was asked to stop" if asked else "the worker died"
        if pause is None:
            raise GaveUpError(
                f"{who} {self._lives.deaths} times without finishing a sample (last: {words}; {self._last_words()[0]})",
                remedy=f"See {self.job.paths.logs / 'worker.log'}; `hsjournal resume` tries again.",
            )
        self._desk.say("waiting", f"{who} ({words}); starting it again in {pause:.1f} s")
        self._desk.sleep(pause)

    def _tell_poison(self, passed: Passed) -> None:
        """What the gate made of a crash: one row that was alone has a strike, several are suspects."""
        if len(passed.blamed) != 1:
            return
        ((row, strikes),) = passed.blamed.items()
        said = f"the worker died with row {row} alone in flight: strike {strikes} of {self._settings.max_strikes}"
        facts = {"verdict": str(Verdict.POISON), "sentence": said, "way_out": meaning(Verdict.POISON).way_out}
        self._desk.record(Event("poison", row, facts, epoch=passed.epoch))
        self._desk.view.verdict = facts | {"row": row, "overdue": True}
        self._desk.say("waiting", said)

    def _final(self, returncode: int | None) -> ExitCode:
        if returncode in (ExitCode.DONE, ExitCode.FAILED_SAMPLES):
            return ExitCode(returncode)
        if self._desk.signals:
            return self._desk.stop_code
        raise ChildError(*self._last_words(), returncode or ExitCode.ERROR)

    def _last_words(self) -> tuple[str, str | None]:
        """What the last worker said of its end, and what it advised."""
        for _, event in reversed(self._desk.mirror.events(50)):
            if event.kind == "worker_error":
                return str(event.detail.get("message", "")), event.detail.get("remedy")
        lines = self._stderr().splitlines()
        if lines and lines[0].startswith("Fatal Python error"):  # a native crash, whose stack comes after it
            return lines[0], None
        return (lines[-1] if lines else "it said nothing"), None

    def _stderr(self) -> str:
        """Begin and end of what the last worker said on its standard error; all of it goes into the next one's log."""
        with contextlib.suppress(OSError):
            text = (self._desk.mirror.folder / STDERR).read_text(errors="replace").strip()
            return text if len(text) < 1000 else f"{text[:500]} … {text[-500:]}"
        return ""

    def _close(self, lock: Holding) -> None:
        if self._desk.owns_run:
            self._farewell.leave()
        if self._gpus is not None:
            self._gpus.close()
        self._companions.close()
        self._desk.systemd.stopping()
        os.close(self._lifeline)
        os.close(self._held)
        lock.release()


def tidy(paths: RunPaths) -> None:
    """A finished run leaves nothing in tmpfs: the journal has it all."""
    shutil.rmtree(paths.mirror, ignore_errors=True)
    for folder in (paths.default_handover_root, paths.shm, paths.shm.parent):
        with contextlib.suppress(OSError):
            folder.rmdir()
