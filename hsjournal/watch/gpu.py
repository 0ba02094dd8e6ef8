"""Utilisation of the GPUs, where NVIDIA's library is there: shown beside a verdict, never needed for one.

A call into a stuck driver may hang for good, so the library lives in a child: ``python -m hsjournal.watch.gpu`` prints
one JSON line every few seconds, ``[{"gpu": 0, "name": …, "busy_percent": 97, "memory_used": …, "memory_total": …}]``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from hsjournal.lifeline import end_with_parent
from hsjournal.watch.children import KILL_GRACE, module, start

EVERY_S = 5.0
SILENT_S = 20.0
"""Seconds after which an old figure is no longer shown."""
DRIVER = Path("/dev/nvidiactl")


class Gpus:
    """The child that looks at them, and what it said last."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        self._child, self._out = child, child.stdout
        self._pending = b""
        self._last: list[dict[str, Any]] = []
        self._at = time.monotonic()

    @classmethod
    def start(cls, lifeline: int) -> Self | None:
        """Start looking; None where there is no such GPU, or no ``pynvml`` (the extra ``gpu``)."""
        if not DRIVER.exists() or importlib.util.find_spec("pynvml") is None:
            return None
        command = module("hsjournal.watch.gpu", str(lifeline))
        return cls(start(command, lifeline=lifeline, stdout=subprocess.PIPE))

    def look(self) -> list[dict[str, Any]]:
        """What was said last; empty when it is too old. Never blocks."""
        self._pending += self._out.read() or b""
        *lines, self._pending = self._pending.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                self._last, self._at = json.loads(line), time.monotonic()
        return self._last if time.monotonic() - self._at < SILENT_S else []

    def close(self) -> None:
        """End the child."""
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(KILL_GRACE)
        self._out.close()


def figures() -> list[dict[str, Any]]:
    """One look at every GPU; blocks as the driver does."""
    import pynvml

    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name = pynvml.nvmlDeviceGetName(handle)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        found.append(
            {
                "gpu": index,
                "name": name.decode() if isinstance(name, bytes) else str(name),
                "busy_percent": int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
                "memory_used": int(memory.used),
                "memory_total": int(memory.total),
            }
        )
    return found


def main(parent_fd: int) -> int:
    """Print a line every few seconds until the parent ends, or the library fails."""
    end_with_parent(parent_fd)
    import pynvml

    try:
        pynvml.nvmlInit()
        while True:
            sys.stdout.write(json.dumps(figures()) + "\n")
            sys.stdout.flush()
            time.sleep(EVERY_S)
    except (pynvml.NVMLError, OSError):
        return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
