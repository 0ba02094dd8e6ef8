"""What a person sees of a run from outside, with nothing but the screen, ``status`` and ``diagnose``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsjournal.config import SHM_VARIABLE, RunPaths
from hsjournal.ui.frame import frame
from hsjournal.ui.history import History
from hsjournal.watch.onlooker import Onlooker
from tests.helpers.cli import Result, hsjournal

WIDTH, HEIGHT = 80, 24


@dataclass(frozen=True, slots=True)
class Outside:
    """Somebody who knows the run directory and nothing else.

    Args:
        run_dir: of the run.
        shm: the tmpfs folder that the run was started with.
    """

    run_dir: Path
    shm: Path

    def screen(self) -> list[str]:
        """The lines of ``status --watch`` on a terminal of 80 by 24, none when nothing is there to show."""
        with _environment(self.shm):
            view = Onlooker(RunPaths.of(self.run_dir)).view()
            lines = [line.plain for line in frame(view, History(), WIDTH, HEIGHT - 1)] if view else []
        assert len(lines) < HEIGHT
        assert all(len(line) <= WIDTH for line in lines)
        return lines

    def asks(self, command: str, *options: str) -> Result:
        """``status`` or ``diagnose``."""
        return hsjournal(command, self.run_dir, *options, HSJOURNAL_SHM=str(self.shm))

    def finds(self, verdicts: str | tuple[str, ...], place: str, way_out: str, within: float = 20.0) -> dict[str, Any]:
        """The screen, and then ``diagnose`` alone, name cause, place and way out; the report of ``diagnose``.

        Args:
            verdicts: any of them is right.
            place: path or address that must be named.
            way_out: words that must be among those on what to do, without regard to case.
            within: seconds until the screen shows it.
        """
        wanted = (verdicts,) if isinstance(verdicts, str) else verdicts
        end = time.monotonic() + within
        while not any(_has(self.screen(), f"{verdict.replace('_', ' ')}:") for verdict in wanted):
            assert time.monotonic() < end, "\n".join(self.screen())
            time.sleep(0.1)
        lines = self.screen()
        assert _has(lines, place), (place, "\n".join(lines))
        assert _has(lines, way_out), (way_out, "\n".join(lines))
        report = self.asks("diagnose", "--json").json()
        assert report["verdict"] in wanted, report["sentence"]
        assert report["exit_code"] != 0
        said = f"{report['sentence']} {report['next_step']} {report['server']}"
        assert _has([said], place), (place, said)
        assert _has([said], way_out), (way_out, said)
        return report


def _has(lines: list[str], words: str) -> bool:
    """Whether a screen holds some words, wherever it may have broken them."""
    return "".join(words.lower().split()) in "".join("".join(lines).lower().split())


@contextmanager
def _environment(shm: Path) -> Iterator[None]:
    before = os.environ.get(SHM_VARIABLE)
    os.environ[SHM_VARIABLE] = str(shm)
    try:
        yield
    finally:
        if before is None:
            del os.environ[SHM_VARIABLE]
        else:
            os.environ[SHM_VARIABLE] = before
