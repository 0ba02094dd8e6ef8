"""A real worker, watched from inside: how long its threads wait for the interpreter, and when its rows began.

Prints one JSON object at its end. Its arguments are those of ``hsjournal.worker``.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time

from hsjournal.worker import __main__ as worker
from hsjournal.worker.schedule import Schedule

_NAP = 0.002
_seen = {"began": 0.0, "waited": 0.0, "worst": 0.0, "naps": 0.0}


def _probe() -> None:
    """Sleep and come back: what it takes beyond the sleep is the wait for the interpreter's lock, or for a core."""
    while True:
        begin = time.perf_counter()
        time.sleep(_NAP)
        late = time.perf_counter() - begin - _NAP
        if _seen["began"]:
            _seen["waited"] += late
            _seen["worst"] = max(_seen["worst"], late)
            _seen["naps"] += 1


_run = Schedule.run


async def _noted(self: Schedule) -> None:
    _seen["began"] = time.time()
    await _run(self)


Schedule.run = _noted  # type: ignore[method-assign]

if __name__ == "__main__":
    threading.Thread(target=_probe, daemon=True).start()
    code = worker.main(sys.argv[1:])
    own, lanes = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    told = {
        "code": code, "began": _seen["began"],
        "lock_wait_ms": 1000 * _seen["waited"] / max(_seen["naps"], 1), "lock_worst_ms": 1000 * _seen["worst"],
        "user_s": own.ru_utime, "system_s": own.ru_stime, "rss_mb": own.ru_maxrss / 1024,
        "lanes_user_s": lanes.ru_utime, "lanes_system_s": lanes.ru_stime, "lanes_rss_mb": lanes.ru_maxrss / 1024,
    }  # fmt: skip
    print(json.dumps(told))
