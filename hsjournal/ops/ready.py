"""A server that answers, and a run made ready by it, without a worker: for commands that need no more."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from hsjournal.mirror import SUPERVISOR, Mirror
from hsjournal.watch.alarm import Alarm
from hsjournal.watch.desk import Desk
from hsjournal.watch.notify import Notifier
from hsjournal.watch.onset import launch, prepare
from hsjournal.watch.supervisor import Job
from hsjournal.watch.view import View


@contextlib.contextmanager
def ready(job: Job, show: Callable[[View], None]) -> Iterator[str]:
    """Launch the job's server if it has one, prepare the run if it is new; the server's address. Stopped at the end.

    The caller holds the supervisor's lock.

    Args:
        job: as for the supervisor.
        show: draws how far it is.

    Raises:
        HsjournalError: when the server does not come up, or the run can't be made.
        StoppedError: when a signal comes.
    """
    mirror = Mirror(job.paths.mirror)
    mirror.create()
    view = View(run_dir=str(job.paths.run_dir), out_dir=str(job.out_dir), server=job.settings.server_url)
    desk = Desk(mirror, view, show)
    lifeline, held = os.pipe()
    try:
        desk.take_signals()
        try:
            if job.server is not None:
                launch(job.server, desk)
            url = job.server.url if job.server is not None else job.settings.server_url
            if job.request is not None:
                alarm = Alarm(
                    desk, Notifier(job.notify, desk.record, {"run_dir": view.run_dir, "host": os.uname().nodename})
                )
                prepare(job.request | {"server_url": url}, lifeline, desk, job.settings, alarm)
        finally:
            desk.give_signals_back()
        yield url
    finally:
        if job.server is not None:
            job.server.stop()
        with contextlib.suppress(OSError):
            mirror.write(SUPERVISOR, {"ended": time.time()})
        os.close(lifeline)
        os.close(held)
