"""The whole examination: each part by itself and in time, so that one stuck disk hides nothing of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsjournal.config import RunPaths, Settings
from hsjournal.errors import HsjournalError
from hsjournal.ops.doctor import handover, machine, runs, server
from hsjournal.ops.doctor.lines import Line, fail
from hsjournal.watch.children import ChildError, StuckError, ask, module

DEADLINE = 12.0
"""Seconds for what writes to a disk."""
QUICK = 5.0
_BUDGET = Settings("", "").handover_budget


@dataclass(frozen=True, slots=True)
class Subject:
    """What to examine.

    Args:
        paths: of the run that is, or is to be; None looks at the machine only.
        out: output folders; empty takes the run's own.
        handover_root: None takes the run's own.
        budget: bytes that the run may have in a hand-over root; 0 takes what its last start said.
        largest: bytes of the largest sample; 0 takes it from the run's journal.
        servers: addresses; empty takes those that the run attaches to.
        api_key: for them.
    """

    paths: RunPaths | None = None
    out: tuple[Path, ...] = ()
    handover_root: Path | None = None
    budget: int = 0
    largest: int = 0
    servers: tuple[str, ...] = ()
    api_key: str = ""


def examine(subject: Subject) -> list[Line]:
    """All lines, in a fixed order."""
    found, facts = _facts(subject.paths)
    out = subject.out or tuple(map(Path, facts.get("out_dirs", ())))
    if not out and subject.paths is not None:
        out = (subject.paths.default_out,)
    endpoints = _endpoints(subject, facts)
    roots = list(dict.fromkeys(root for _, root in endpoints))
    budget = subject.budget or int(facts.get("budget", 0)) or _BUDGET
    largest = subject.largest or int(facts.get("largest", 0))
    need = int(facts.get("to_come", 0)) // max(1, len(out))
    disks = [("journal", subject.paths.run_dir, 0)] if subject.paths is not None else []
    disks += [("output", folder, need) for folder in out]
    parts: list[Callable[[], Iterable[Line]]] = [
        machine.examine,
        lambda: [line for disk in disks for line in _on_disk(*disk)],  # by turns, or they would slow each other
        lambda: [line for root in roots for line in handover.examine(root, budget, largest)],
        lambda: [line for url, root in endpoints if url for line in server.examine(url, root, subject.api_key)],
        runs.examine,
    ]
    with ThreadPoolExecutor(len(parts)) as pool:
        for lines in pool.map(lambda part: list(part()), parts):
            found += lines
    return found


def _endpoints(subject: Subject, facts: dict[str, Any]) -> list[tuple[str, Path]]:
    """Address, empty for one to be started, and hand-over root of every server: as asked, else as the run has it."""
    known = [(str(url), Path(root)) for url, root in facts.get("endpoints", ())]
    default = subject.paths.default_handover_root if subject.paths else Path("/dev/shm")  # noqa: S108
    first = known[0][1] if known else default
    roots = dict(known)
    found = [(url, roots.get(url, first)) for url in subject.servers] or known or [("", default)]
    return [(url, subject.handover_root or root) for url, root in found]


def _facts(paths: RunPaths | None) -> tuple[list[Line], dict[str, Any]]:
    if paths is None:
        return [], {}
    try:
        return [], ask(module("hsjournal.ops.doctor.facts", str(paths.run_dir)), QUICK)
    except StuckError:
        return [fail(f"run {paths.run_dir}", f"its disk does not answer in {QUICK:.0f} s", _LOOK)], {}
    except ChildError as error:
        return [fail(f"run {paths.run_dir}", error.message, error.remedy or _LOOK)], {}


def _on_disk(kind: str, folder: Path, need: int) -> list[Line]:
    try:
        answer = ask(module("hsjournal.ops.doctor.storage", kind, str(folder), str(need)), DEADLINE)
    except StuckError:
        return [fail(f"{kind} {folder}", f"its disk does not answer in {DEADLINE:.0f} s: it hangs", _LOOK)]
    except HsjournalError as error:
        return [fail(f"{kind} {folder}", f"can't be examined: {error.message}", _LOOK)]
    return [Line.from_json(line) for line in answer["lines"]]


_LOOK = "Look at the disk (dmesg, mount); nothing is lost, the run goes on when it answers again."
