"""One index of all shards: each row once, in the order of the input."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hsjournal.catalogue.index import Entry, entries, write_entries
from hsjournal.config import Manifest, RunPaths
from hsjournal.errors import ExitCode, HsjournalError, UsageError, end_code
from hsjournal.fleet.members import Member, agreeing, counting, need, superseded
from hsjournal.journal.reading import JournalReader
from hsjournal.ops.custody import need_output
from hsjournal.states import INCOMPLETE, State


@dataclass(frozen=True, slots=True)
class Merged:
    """What was written.

    Args:
        index: its path.
        samples: its lines.
        rows: of the whole input, as far as the shards have them.
        failed: rows without a sample.
        incomplete: rows that are still to be done; 0 unless asked for.
        members: the run directories that count.
        passed_over: those of lower incarnations.
    """

    index: str
    samples: int
    rows: int
    failed: int
    incomplete: int
    members: tuple[str, ...]
    passed_over: tuple[str, ...]

    @property
    def exit_code(self) -> ExitCode:
        """3 when samples failed, or are still to be done."""
        return end_code(self.samples, self.failed + self.incomplete)

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return {name: getattr(self, name) for name in self.__slots__}


def merge(folders: Sequence[Path], to: Path, *, partial: bool = False) -> Merged:
    """Write the index of all shards, whole or not at all.

    Args:
        folders: run directories, or folders of them.
        to: the file; paths in it are absolute.
        partial: also when rows are still to be done.

    Raises:
        NoJournalError: when a folder can't be read.
        UsageError: when the shards are not those of one job, each once, and complete.
        HsjournalError: when rows overlap or are missing, or a file is not as large as its journal says.
        OSError: as the storage answers.
    """
    if to.is_dir():
        raise UsageError(f"{to} is a folder", remedy="Name a file with --to.")
    members = need(folders)
    best = counting(members)
    manifests = agreeing(best)
    readers = [JournalReader(RunPaths.of(member.run_dir).journal) for member in best]
    counts = [reader.counts() for reader in readers]
    for member, manifest in zip(best, manifests, strict=True):
        for folder in manifest.out_dirs:
            _need(folder, member)
    left = [sum(count[state].rows for state in INCOMPLETE) for count in counts]
    if any(left) and not partial:
        worst = max(range(len(left)), key=left.__getitem__)
        raise UsageError(
            f"{sum(left):,} rows are still to be done, {left[worst]:,} of them in {best[worst].run_dir}",
            remedy="Let `hsjournal fleet run` finish them (or `hsjournal verify` what was put off), or say --partial.",
        )
    rows = _refuse_gaps(best, readers)
    samples = write_entries(heapq.merge(*map(_entries, readers, manifests), key=lambda entry: entry.row), to)
    failed = sum(count[State.FAILED].rows for count in counts)
    passed_over = tuple(str(member.run_dir) for member in superseded(members, best))
    return Merged(str(to), samples, rows, failed, sum(left), tuple(str(m.run_dir) for m in best), passed_over)


def _need(folder: str, member: Member) -> None:
    try:
        need_output(Path(folder))
    except HsjournalError as error:
        raise HsjournalError(f"shard {member.shard}: {error.message}", remedy=error.remedy) from None


def _entries(reader: JournalReader, manifest: Manifest) -> Iterator[Entry]:
    """A shard's, with absolute paths; each file is looked at, and not read."""
    for entry in entries(reader):
        path = os.path.join(manifest.out_dir, entry.file)
        try:
            found = os.stat(path).st_size
        except FileNotFoundError:
            found = -1
        if found != entry.bytes:
            what = "is gone" if found < 0 else f"has {found:,} bytes, not {entry.bytes:,}"
            raise HsjournalError(
                f"row {entry.row}: {path} {what}", remedy=f"See: hsjournal verify {reader.path.parent} --repair"
            )
        yield replace(entry, file=path)


def _refuse_gaps(best: Sequence[Member], readers: Sequence[JournalReader]) -> int:
    """How many rows there are; each number from 0 must stand in exactly one journal.

    Raises:
        HsjournalError: naming the first that does not.
    """
    numbered = (((row["row"], at) for row in reader.all_rows()) for at, reader in enumerate(readers))
    expected, before = 0, -1
    for row, at in heapq.merge(*numbered):
        if row != expected:
            where = best[at].run_dir
            what = f"stands in {best[before].run_dir} and in {where}" if row < expected else "is in no shard"
            raise HsjournalError(f"row {min(row, expected)} {what}", remedy="The shards are not of one set of prompts.")
        expected, before = row + 1, at
    return expected
