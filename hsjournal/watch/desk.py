"""The supervisor's desk: what it says, what it records, and the signals that it has been given."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from hsjournal.birth import own_create_time
from hsjournal.errors import ExitCode
from hsjournal.events import Event
from hsjournal.mirror import SUPERVISOR, Mirror
from hsjournal.watch.figures import read_worker
from hsjournal.watch.systemd import Systemd
from hsjournal.watch.view import RECENT, View, event_words

DRAW_EVERY = 0.25
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Each drains, the second of any stops now. SIGUSR1 is what Slurm's ``--signal=B:USR1@300`` sends before the time is up."""


class StoppedError(Exception):
    """A signal asked to stop; carries the exit code."""

    def __init__(self, code: ExitCode) -> None:
        super().__init__(code)
        self.code = code


def words_of(error: Exception) -> str:
    """An error that nobody foresaw, with the place in the program, on one line."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in last)
    return f"{type(error).__name__}: {error}{where}"


class Desk:
    """Says, records, draws, and remembers signals.

    Args:
        mirror: of the run.
        view: what is drawn.
        show: draws it.
    """

    def __init__(self, mirror: Mirror, view: View, show: Callable[[View], None]) -> None:
        self.mirror, self.view, self._show = mirror, view, show
        self.signals: list[int] = []
        self.owns_run = True
        """Whether we hold the run's lock; without it the mirror is somebody else's."""
        self.systemd = Systemd()
        self._is_blind = False
        self._before: dict[int, Any] = {}
        self._create_time = own_create_time()

    def take_signals(self) -> None:
        """From here on :data:`STOP_SIGNALS` are remembered, not obeyed at once."""
        self._before = {n: signal.signal(n, self._on_signal) for n in STOP_SIGNALS}

    def give_signals_back(self) -> None:
        """The inverse of :meth:`take_signals`."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def stop_code(self) -> ExitCode:
        """The exit code of the first signal."""
        return ExitCode.INTERRUPTED if self.signals[0] == signal.SIGINT else ExitCode.TERMINATED

    def check_stop(self) -> None:
        """Raise if a signal came.

        Raises:
            StoppedError: with the exit code.
        """
        if self.signals:
            raise StoppedError(self.stop_code)

    def sleep(self, seconds: float) -> None:
        """Wait, drawing.

        Raises:
            StoppedError: when a signal comes.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.check_stop()
            time.sleep(min(DRAW_EVERY, max(0.0, end - time.monotonic())))
            self.draw()

    def record(self, event: Event) -> None:
        """Keep an event in the mirror; the journal gets it when it can be written."""
        if self.owns_run:
            with contextlib.suppress(OSError):
                self.mirror.record(event)

    def say(self, stage: str, sentence: str) -> None:
        """What is going on now, in words."""
        self.view.stage, self.view.sentence = stage, sentence
        self.draw()

    def draw(self) -> None:
        """Write who we are and how it stands into the mirror, and draw the view."""
        view = self.view
        if self.owns_run:
            view.events = [event_words(event) for _, event in self.mirror.events(RECENT)]
            view.worker = read_worker(self.mirror.folder)
            self._tell_mirror()
        self.systemd.tell(view)
        self._try_to_show()

    def _try_to_show(self) -> None:
        """A screen that can't draw costs the screen: the run goes on, and the event says why, once."""
        try:
            self._show(self.view)
        except Exception as error:  # noqa: BLE001 - told as an event
            if not self._is_blind:
                self._is_blind = True
                self.record(Event("screen_failed", None, {"why": words_of(error)}))

    def _tell_mirror(self) -> None:
        view = self.view
        with contextlib.suppress(OSError):
            self.mirror.write(
                SUPERVISOR,
                {
                    "pid": os.getpid(),
                    "create_time": self._create_time,
                    "run_dir": view.run_dir,
                    "beat": time.time(),
                    "monotonic": time.monotonic(),
                    "stage": view.stage,
                    "sentence": view.sentence,
                    "lives": view.lives,
                    "worker_pid": view.worker_pid,
                    "server": view.server,
                    "out_dir": view.out_dir,
                    "verdict": view.verdict,
                    "gpus": view.gpus,
                },
            )

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.signals.append(number)
