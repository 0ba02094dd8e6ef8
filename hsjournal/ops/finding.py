"""Samples in a folder that other tools filled: found, looked into, and given to the rows that want them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hsjournal.config import Manifest
from hsjournal.ops.foreign import ForeignError, Refused, is_sample_folder, read_foreign
from hsjournal.ops.matching import Fate, Rows
from hsjournal.ops.takein import check

SUFFIXES = (".ckpt", ".pt", ".pth", ".safetensors", ".ckpt.gz", ".pt.gz")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A file that can't be taken over, and why. ``reason`` is a value of :class:`hsjournal.ops.foreign.Refused`."""

    path: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Task:
    """A file, and the row that it is to be the output of. ``proven`` when the file itself states its layers."""

    path: Path
    row: int
    attempt: int
    num_tokens: int
    proven: bool


@dataclass(slots=True)
class Findings:
    """What lies in the folder.

    Args:
        files: samples looked at.
        ignored: files of other kinds, or of other things.
        tasks: to be done, in the files' order.
        fates: how many of each.
        unmatched: whose token ids no row has.
        refused: which can't be taken.
    """

    files: int = 0
    ignored: int = 0
    tasks: list[Task] = field(default_factory=list)
    fates: Counter[Fate] = field(default_factory=Counter)
    unmatched: list[str] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)


def find(
    outputs: Path, manifest: Manifest, rows: Rows, *, in_place: bool, tell: Callable[[int, int], None]
) -> Findings:
    """Look into every sample below ``outputs`` and match it; nothing is changed.

    Args:
        outputs: the folder.
        manifest: of the run.
        rows: of the run.
        in_place: the folder is the run's output.
        tell: called with samples looked at and samples in all.
    """
    found = Findings()
    paths = list(_samples(outputs, found))
    for number, path in enumerate(paths):
        tell(number, len(paths))
        place = os.path.relpath(path, outputs) if in_place else None
        try:
            foreign = read_foreign(path)
            fate, row = rows.match(foreign, place)
            if fate is Fate.TAKEN and row is not None:
                try:
                    check(foreign, manifest)
                except ForeignError:
                    rows.give_back(row)
                    raise
                said = foreign.said is not None
                found.tasks.append(Task(path, row, rows.attempt(row), foreign.num_tokens, said))
        except ForeignError as error:
            if error.reason is Refused.NO_STATES:
                found.ignored += 1
                continue
            found.refused.append(Refusal(str(path), error.reason.value, error.detail))
        else:
            found.fates[fate] += 1
            if fate is Fate.UNMATCHED:
                found.unmatched.append(str(path))
        found.files += 1
    tell(len(paths), len(paths))
    return found


def _samples(outputs: Path, found: Findings) -> Iterator[Path]:
    """Files and folders that may be a sample, in the order of their paths; hidden ones and other kinds are left out."""
    for folder, subfolders, files in os.walk(outputs):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        if is_sample_folder(files):
            subfolders.clear()
            yield Path(folder)
            continue
        for name in sorted(files):
            if name.endswith(SUFFIXES) and not name.startswith("."):
                yield Path(folder) / name
            else:
                found.ignored += 1
