"""``hsjournal status --watch``: the run's own screen from another shell; closing it changes nothing."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path

from hsjournal.cli.quick import show_status
from hsjournal.config import RunPaths
from hsjournal.ui.screens import screen_for
from hsjournal.watch.onlooker import Onlooker
from hsjournal.watch.status import status

_DRAW_EVERY = 0.25
_JSON_EVERY = 2.0


def keep_watching(run_dir: Path, *, as_json: bool, plain: bool) -> None:
    """Draw until Ctrl-C, or until nothing of the run is left in shared memory: then once more what the journal says.

    Raises:
        NoJournalError: when there is no run.
    """
    paths = RunPaths.of(run_dir)
    if as_json:
        _lines(paths)
        return
    onlooker = Onlooker(paths)
    screen = screen_for(plain=plain, quiet=False)
    left = threading.Event()
    # Remembered, not raised: an exception in the middle of a frame would leave the terminal without its cursor.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: left.set())
    try:
        while not left.is_set() and (view := onlooker.view()) is not None:
            screen.show(view)
            left.wait(_DRAW_EVERY)
    finally:
        screen.close()
    if not left.is_set():
        show_status(run_dir, as_json=False)


def _lines(paths: RunPaths) -> None:
    """One JSON object a line, every two seconds, while the run goes on."""
    while True:
        state = status(paths)
        sys.stdout.write(json.dumps(state) + "\n")
        sys.stdout.flush()
        if not state["supervisor"]["alive"]:
            return
        time.sleep(_JSON_EVERY)
