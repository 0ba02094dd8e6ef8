"""``status`` and ``diagnose`` as people call them in the middle of the incident: in time, and with the right verdict."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.drill.stage import REPOSITORY, Stage

WITHIN_S = 2.0
"""Seconds that an answer may take beyond what an interpreter needs to start, measured just before it."""
COMMANDS = ("status", "diagnose")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Args:
        command: that was called.
        when: in words.
        verdict: as its JSON has it; empty when there is none.
        sentence: of the verdict.
        beyond_s: seconds that it took beyond an interpreter's start, other work on the machine not counted.
    """

    command: str
    when: str
    verdict: str
    sentence: str
    beyond_s: float


@dataclass(slots=True)
class Asking:
    """Asks, and keeps all answers.

    Args:
        stage: of the run.
    """

    stage: Stage
    answers: list[Answer] = field(default_factory=list)

    def ask(self, when: str) -> list[Answer]:
        """Both commands, one after the other."""
        found = []
        for command in COMMANDS:
            start, _ = self._timed("-c", "pass")
            took, out = self._timed("-m", "hsjournal.cli.main", command, str(self.stage.run_dir), "--json")
            verdict, sentence = _verdict(out)
            found.append(Answer(command, when, verdict, sentence, round(max(0.0, took - start), 2)))
        self.answers += found
        return found

    def worst(self) -> Answer:
        """The slowest answer of all."""
        return max(self.answers, key=lambda answer: answer.beyond_s)

    def _timed(self, *arguments: str) -> tuple[float, str]:
        """Seconds that a process took, without those in which it was ready to run and other work had all processors."""
        begin = time.monotonic()
        with subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=self.stage.environment(), cwd=REPOSITORY,
        ) as child:  # fmt: skip
            assert child.stdout is not None
            out = child.stdout.read()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            took = time.monotonic() - begin
            waited = int(Path(f"/proc/{child.pid}/schedstat").read_text().split()[1]) / 1e9
        return took - waited, (out.strip().splitlines() or [""])[-1]


def _verdict(line: str) -> tuple[str, str]:
    """Of ``status --json`` (an object, or null) or of ``diagnose --json`` (a word, and a sentence beside it)."""
    try:
        said: dict[str, Any] = json.loads(line)
    except ValueError:
        return "", f"no JSON: {line[:200]}"
    verdict = said.get("verdict") or {}
    if isinstance(verdict, dict):
        return str(verdict.get("verdict", "")), str(verdict.get("sentence", ""))
    return str(verdict), str(said.get("sentence", ""))


def faults_of(answers: Sequence[Answer], wanted: dict[str, set[str]], named: Sequence[Sequence[str]]) -> list[str]:
    """What is wrong with answers, in words.

    Args:
        answers: to one question.
        wanted: the verdicts that are right, by command.
        named: the sentence must hold one of each.
    """
    found = []
    for a in answers:
        what = f"{a.when}: {a.command}"
        if a.verdict not in wanted[a.command]:
            found.append(f"{what} says {a.verdict!r}, not {' or '.join(sorted(wanted[a.command]))}: {a.sentence}")
        if a.beyond_s > WITHIN_S:
            found.append(f"{what} took {a.beyond_s} s beyond an interpreter's start")
        missing = [names for names in named if not any(name in a.sentence for name in names)]
        found += [f"{what} names none of {', '.join(names)}: {a.sentence}" for names in missing]
    return found


def wchans(pid: int) -> list[str]:
    """Where in the kernel the threads of a process hang."""
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                place = Path(f"/proc/{pid}/task/{task}")
                if place.joinpath("stat").read_text().rsplit(")", 1)[1].split()[0] == "D":
                    found.add(place.joinpath("wchan").read_text().strip())
    return sorted(found - {"", "0"})
