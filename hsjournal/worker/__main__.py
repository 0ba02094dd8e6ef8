"""``python -m hsjournal.worker RUN_DIR --epoch N --settings JSON --parent-fd FD``: started by the supervisor, by exec."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import logging.handlers
import queue
import sys
import traceback

from hsjournal.config import Manifest, RunPaths, Settings
from hsjournal.errors import ExitCode, FencedError, HsjournalError
from hsjournal.events import Event
from hsjournal.lifeline import end_with_parent
from hsjournal.mirror import STDERR_BEFORE, Mirror
from hsjournal.worker.process import Worker

FENCED = 75
_MOST_WORDS = 1 << 16
log = logging.getLogger("hsjournal.worker")


def main(arguments: list[str]) -> int:
    """Run one worker; returns its exit code. An error of ours is one event and one line of the log."""
    parser = argparse.ArgumentParser(prog="hsjournal-worker")
    parser.add_argument("run_dir")
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--settings", required=True)
    parser.add_argument("--parent-fd", type=int, default=-1)
    options = parser.parse_args(arguments)
    end_with_parent(options.parent_fd)
    paths = RunPaths.of(options.run_dir)
    settings = Settings.from_json(options.settings)
    faulthandler.enable()  # a native crash says on standard error where it was
    listener = _log_to(paths, settings.log_level)
    _keep_last_words(paths)
    try:
        worker = Worker(paths, Manifest.load(paths.manifest), settings, options.epoch)
        code = int(asyncio.run(worker.run()))
    except FencedError as error:
        code = _end(paths, options.epoch, FENCED, error)
    except HsjournalError as error:
        code = _end(paths, options.epoch, int(error.exit_code), error)
    except Exception as error:  # noqa: BLE001 - typed event, traceback into the log, the supervisor decides
        log.error("the worker crashed\n%s", traceback.format_exc())
        code = _end(paths, options.epoch, int(ExitCode.ERROR), HsjournalError(f"{type(error).__name__}: {error}"))
    listener.stop()
    return code


def _end(paths: RunPaths, epoch: int, code: int, error: HsjournalError) -> int:
    log.error("%s", error)
    mirror = Mirror(paths.mirror)
    mirror.create()
    said = {"exit_code": code, "why": str(error), "message": error.message, "remedy": error.remedy}
    mirror.record(Event("worker_error", None, said, epoch=epoch))
    return code


def _keep_last_words(paths: RunPaths) -> None:
    """Put into the log what the worker before said on its standard error, which lies in tmpfs only."""
    said = paths.mirror / STDERR_BEFORE
    with contextlib.suppress(OSError):
        words = said.read_text(errors="replace").strip()
        said.unlink()
        if words:
            log.error("the worker before said on its standard error:\n%s", words[-_MOST_WORDS:])


def _log_to(paths: RunPaths, level: str) -> logging.handlers.QueueListener:
    """Log to RUN_DIR/logs from a thread of its own: a stuck disk must not stop who logs."""
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    paths.logs.mkdir(parents=True, exist_ok=True)
    target = logging.handlers.RotatingFileHandler(
        paths.logs / "worker.log", maxBytes=16 << 20, backupCount=3, delay=True
    )
    target.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    listener = logging.handlers.QueueListener(lines, target)
    root = logging.getLogger()
    root.addHandler(logging.handlers.QueueHandler(lines))
    root.setLevel(level)
    listener.start()
    return listener


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
