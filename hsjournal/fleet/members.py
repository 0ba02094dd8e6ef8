"""Which of many run directories count: of each shard the one of the highest incarnation, if all were made for the same."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsjournal.config import Manifest, RunPaths
from hsjournal.drift import READING
from hsjournal.errors import HsjournalError, NoJournalError, PromptsError, UsageError
from hsjournal.fleet import look
from hsjournal.prompts.shards import Shard
from hsjournal.watch.children import ask

DEADLINE = 30.0
AT_ONCE = 8
SHARD = READING + "shard"


@dataclass(frozen=True, slots=True)
class Member:
    """One run directory, as it says itself.

    Args:
        run_dir: its path.
        fleet: the fleet's name; empty for a run that was started by hand.
        shard: ``i/n``; empty when it has none.
        incarnation: 0 for a run that was started by hand.
        host: where it was started last.
        newest: the highest number that was claimed for the shard, where the store can be read; else None.
        problem: what keeps it from being read, if anything.
    """

    run_dir: Path
    fleet: str
    shard: str
    incarnation: int
    host: str
    newest: int | None
    problem: str | None

    @classmethod
    def of(cls, found: dict[str, Any]) -> Member:
        """From what :mod:`hsjournal.fleet.look` says."""
        badge = found["badge"] or {}
        return cls(
            run_dir=Path(found["run_dir"]),
            fleet=str(badge.get("fleet", "")),
            shard=str(badge.get("shard") or found["shard"] or ""),
            incarnation=int(badge.get("incarnation", 0)),
            host=str(badge.get("host", "")),
            newest=found["newest"],
            problem=found["problem"],
        )


def find(folders: Sequence[Path], deadline: float = DEADLINE) -> tuple[list[Member], dict[str, str]]:
    """The run directories in or below each of the folders, each once, and which folders don't answer, and why."""
    problems: dict[str, str] = {}

    def one(folder: Path) -> list[dict[str, Any]]:
        try:
            return list(ask([sys.executable, "-I", "-S", look.__file__, os.path.abspath(folder)], deadline)["found"])
        except HsjournalError as error:
            problems[str(folder)] = error.message
            return []

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = [each for some in pool.map(one, folders) for each in some]
    unique = {os.path.realpath(each["run_dir"]): Member.of(each) for each in found}
    return sorted(
        unique.values(), key=lambda m: (m.fleet, m.shard.rpartition("/")[2], _number(m), m.incarnation)
    ), problems


def need(folders: Sequence[Path]) -> list[Member]:
    """The same where every folder must answer.

    Raises:
        NoJournalError: when one does not, or holds no run.
    """
    members, problems = find(folders)
    for folder, why in problems.items():
        raise NoJournalError(f"{folder}: {why}", remedy="Name folders that can be read from here.")
    if not members:
        raise NoJournalError(
            f"there is no run in {', '.join(map(str, folders))}", remedy="Name run directories, or the folder of many."
        )
    return members


def counting(members: Iterable[Member]) -> list[Member]:
    """Of each shard the member that counts, in the shards' order; all shards of one fleet, every one there.

    Raises:
        UsageError: naming the run directories, when that is not to be told, or one is missing.
    """
    of: dict[str, list[Member]] = defaultdict(list)
    for member in members:
        if not member.shard:
            raise UsageError(f"{member.run_dir} is no shard", remedy="Leave it out; a run by itself needs no merge.")
        _parsed(member)
        of[member.shard].append(member)
    _refuse_mixture(of)
    best = [_highest(shard, some) for shard, some in of.items()]
    missing = [shard for shard in _all_of(best) if shard not in of]
    if missing:
        named = ", ".join(missing[:8]) + (" …" if len(missing) > 8 else "")
        raise UsageError(f"{len(missing)} shards are missing: {named}", remedy="Name their run directories too.")
    for member in best:
        if member.problem is not None:
            raise UsageError(
                f"{member.run_dir} has the highest incarnation of shard {member.shard}, {member.incarnation}, but {member.problem}",
                remedy="Let `hsjournal fleet run` finish it first.",
            )
    return sorted(best, key=_number)


def agreeing(members: Sequence[Member]) -> list[Manifest]:
    """The members' manifests, which must be of the same job.

    Raises:
        UsageError: naming every difference from the first.
    """
    manifests = [Manifest.load(RunPaths.of(member.run_dir).manifest) for member in members]
    for member, manifest in zip(members, manifests, strict=True):
        if manifest.options.get(SHARD) != member.shard:
            raise UsageError(
                f"{member.run_dir} wears the badge of shard {member.shard}, but its run is of {manifest.options.get(SHARD)}",
                remedy="Leave it out; it was copied or mixed up.",
            )
    first = _made_for(manifests[0])
    for member, manifest in zip(members[1:], manifests[1:], strict=True):
        other = _made_for(manifest)
        different = [
            f"{name}: {first.get(name)} and {other.get(name)}"
            for name in first | other
            if first.get(name) != other.get(name)
        ]
        if different:
            raise UsageError(
                f"{members[0].run_dir} and {member.run_dir} were made for different jobs. {'; '.join(different)}",
                remedy="Name the shards of one job only.",
            )
    return manifests


def superseded(members: Iterable[Member], best: Iterable[Member]) -> list[Member]:
    """Those that don't count."""
    chosen = {member.run_dir for member in best}
    return [member for member in members if member.run_dir not in chosen]


def _made_for(manifest: Manifest) -> dict[str, object]:
    m = manifest
    reading = {name: value for name, value in m.options.items() if name.startswith(READING) and name != SHARD}
    return {
        "model": m.model_sha256 or m.model, "tokenizer": m.tokenizer_sha256, "layers": m.capture_layers, "dtype": m.dtype,
        "hidden size": m.hidden_size, "decoder layers": m.num_layers, "final norm": m.final_norm, "format": m.format,
        "engine": m.engine, "chunk size": m.chunk_size, "prompts": [(s.nbytes, s.sha256) for s in m.sources],
    } | reading  # fmt: skip


def _refuse_mixture(of: dict[str, list[Member]]) -> None:
    fleets = {member.fleet: member for some in of.values() for member in some}
    counts = {_parsed(member).of: member for some in of.values() for member in some}
    for what, found in (("fleets", fleets), ("numbers of shards", counts)):
        if len(found) > 1:
            named = ", ".join(f"{value or 'none'} ({member.run_dir})" for value, member in found.items())
            raise UsageError(f"the run directories are of different {what}: {named}", remedy="Name those of one.")


def _highest(shard: str, some: list[Member]) -> Member:
    best = max(member.incarnation for member in some)
    found = [member for member in some if member.incarnation == best]
    if len(found) > 1:
        named = " and ".join(str(member.run_dir) for member in found)
        raise UsageError(
            f"shard {shard} has incarnation {best} twice: {named}", remedy="One is a copy: leave one of them out."
        )
    (only,) = found
    if only.newest is not None and only.newest > best:
        raise UsageError(
            f"incarnation {only.newest} of shard {shard} was started, and the highest one here is {best} ({only.run_dir})",
            remedy="Name its run directory too; if that is lost, `hsjournal fleet run` makes the shard whole again.",
        )
    return only


def _all_of(members: Sequence[Member]) -> list[str]:
    return [f"{number}/{of}" for of in {_parsed(member).of for member in members} for number in range(1, of + 1)]


def _parsed(member: Member) -> Shard:
    try:
        return Shard.parse(member.shard)
    except PromptsError:
        raise UsageError(
            f"{member.run_dir} is of shard {member.shard!r}, which is none", remedy="Leave it out."
        ) from None


def _number(member: Member) -> int:
    number = member.shard.partition("/")[0]
    return int(number) if number.isdigit() else 0
