"""Before a command itself looks at storage: does it answer at all? A child finds out."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hsjournal.watch.children import Patient

TELL_AFTER_S, TELL_EVERY_S = 2.0, 10.0
_LOOK = """
import os, sys
os.path.isdir(sys.argv[1])
try:
    open(os.path.join(sys.argv[1], "manifest.toml"), "rb").read()
except OSError:
    pass
print("{}")
"""


def await_answer(run_dir: Path, say: Callable[[str], None]) -> None:
    """Return once the storage of ``run_dir`` answers, however (a folder that is missing is an answer).

    A read that hangs would keep the caller in the kernel, deaf to Ctrl-C; here only the child hangs.

    Args:
        run_dir: the run directory.
        say: told that it is waited for, and how long by now.
    """
    ask_patiently([sys.executable, "-I", "-S", "-c", _LOOK, str(run_dir)], f"the storage of {run_dir}", say)


def ask_patiently(command: Sequence[str], what: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Run a child that prints one JSON object, however long its storage takes, and return the object.

    Args:
        command: its command line.
        what: it waits for, for people.
        say: as in :func:`await_answer`.

    Raises:
        DiedError, ChildError: as :func:`hsjournal.watch.children.ask`.
    """
    child = Patient(command)
    next_word = TELL_AFTER_S
    try:
        while (answer := child.look()) is None:
            if child.age >= next_word:
                next_word = child.age + TELL_EVERY_S
                say(f"waiting: {what} has not answered for {child.age:.0f} s (Ctrl-C stops)")
            time.sleep(0.01 if child.age < TELL_AFTER_S else 0.2)
        return answer
    finally:
        child.close()
