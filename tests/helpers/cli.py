"""Run ``hsjournal`` as an operator does: as a process, looking at its exit code and its words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        """The last line of its output, parsed."""
        value = json.loads(self.out.strip().splitlines()[-1])
        assert isinstance(value, dict)
        return value


def hsjournal(*arguments: str | Path, timeout: float = 240.0, **environment: str) -> Result:
    """Run one command to its end; its standard input is empty."""
    done = subprocess.run(
        [sys.executable, "-m", "hsjournal.cli.main", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=REPOSITORY,
        env=os.environ | environment,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def started(*arguments: str | Path, log: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start one command and return at once; its output goes to ``log``."""
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "hsjournal.cli.main", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            env=os.environ | environment,
        )
