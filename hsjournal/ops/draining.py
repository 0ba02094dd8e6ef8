"""``adopt --dumps``: complete ``req_N`` directories of a v1 server into the rows that they match without ambiguity.

A row that gets one is ``dumped``, and the next run writes, reads back and verifies it like any other. The directory
itself stays until then: a later call removes it when its row is verified and its bytes are those that were written.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from hsjournal.config import Manifest, RunPaths
from hsjournal.drift import READING
from hsjournal.dump.protocol import ITEM_SIZE, RequestId, token_ids_sha256
from hsjournal.dump.reader import DIRECTORY_FLAGS, FILE_FLAGS, open_root
from hsjournal.dump.reap import remove_dump
from hsjournal.errors import DumpRejectedError, UsageError
from hsjournal.events import Event
from hsjournal.journal.store import Move
from hsjournal.ops.custody import Custody, custody
from hsjournal.server.v1 import dumps, handing_on
from hsjournal.server.v1.dumps import Found
from hsjournal.states import Actor, State, Transition

ADOPTED = "dump_adopted"
_TO_DUMPED = Transition(State.PENDING, State.DUMPED, Actor.ADOPT, "")
_LEAVE_FREE = 64 << 20
_PIECE = 4 << 20


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row that has no dump yet. ``ids_sha256`` over the token ids that are to be sent."""

    row: int
    sample_id: str
    state: State
    attempt: int
    num_tokens: int
    ids_sha256: str


@dataclass(frozen=True, slots=True)
class Drained:
    """What became of every directory.

    Args:
        taken: row by directory.
        removed: directories whose rows are verified, with the bytes freed.
        refused: why, by directory; these are left alone.
        dry_run: whether nothing was done.
    """

    taken: dict[str, int]
    removed: dict[str, int]
    refused: dict[str, str]
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "taken": self.taken,
            "removed": self.removed,
            "freed_bytes": sum(self.removed.values()),
            "refused": self.refused,
            "dry_run": self.dry_run,
        }


def match(
    found: Sequence[Found], rows: Sequence[Candidate], lengths: Mapping[int, int], manifest: Manifest
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Directories with the rows that they are, and why the others are nobody's. Pure.

    Token ids in ``meta.json`` decide where they are; else the number of tokens does, if it is one row's only and one
    directory's only.

    Args:
        found: the directories.
        rows: those that have no dump yet.
        lengths: how many rows of the whole input have so many tokens, whatever became of them: a directory may be left
            of one that is long verified, for a retry or a client that died leaves such.
        manifest: of the run.
    """
    refused = {item.name: why for item in found if (why := _unlike(item, manifest))}
    usable = [item for item in found if item.name not in refused]
    by_ids: dict[str, list[Candidate]] = defaultdict(list)
    by_count: dict[int, list[Candidate]] = defaultdict(list)
    for row in rows:
        by_ids[row.ids_sha256].append(row)
        by_count[row.num_tokens].append(row)
    claims: dict[int, list[Found]] = defaultdict(list)
    matched: dict[str, Candidate] = {}
    for item in usable:
        if item.ids_sha256 is not None:
            candidates, what, doubt = by_ids[item.ids_sha256], "these token ids", ""
        else:
            candidates, what = by_count[item.num_tokens], f"{item.num_tokens:,} tokens"
            doubt = _doubt(lengths[item.num_tokens], what, manifest) if candidates else ""
        if len(candidates) != 1 or doubt:
            some = ", ".join(str(c.row) for c in candidates[:3]) + (", …" if len(candidates) > 3 else "")
            count = (
                f"{len(candidates):,} rows without a dump have" if len(candidates) != 1 else "1 row without a dump has"
            )
            refused[item.name] = (
                f"{count} {what} ({some}){doubt}: which one it is can't be told"
                if candidates else f"no row without a dump has {what}"
            )  # fmt: skip
            continue
        matched[item.name] = candidates[0]
        claims[candidates[0].row].append(item)
    for row_number, items in claims.items():
        if len(items) > 1:
            names = ", ".join(item.name for item in items)
            for item in items:
                del matched[item.name]
                refused[item.name] = f"{names} could all be row {row_number}'s"
    return matched, refused


def _doubt(same: int, what: str, manifest: Manifest) -> str:
    """Why a number of tokens says nothing though rows without a dump have it; empty when it may."""
    if same > 1:
        return f", and {same:,} rows of the input have {what}"
    shard = manifest.options.get(f"{READING}shard")
    return f", and other shards than {shard} may have rows of {what}" if shard else ""


def _unlike(item: Found, manifest: Manifest) -> str:
    """What tells a dump from this run's; empty when nothing does."""
    if item.hidden_size != manifest.hidden_size:
        return f"it is {item.hidden_size:,} wide, the run's states are {manifest.hidden_size:,}"
    if item.dtype != manifest.dtype:
        return f"it holds {item.dtype}, the run's states are {manifest.dtype}"
    if len(item.files) - 1 != len(manifest.capture_layers):
        return f"it holds {len(item.files) - 1} aux layers, the run has {len(manifest.capture_layers)}"
    return ""


def drain(paths: RunPaths, root: Path, *, dry_run: bool) -> Drained:
    """Hand every directory on that matches a row, and remove those whose rows are verified.

    Args:
        paths: of the run.
        root: where the v1 server wrote.
        dry_run: only say what would be done.

    Raises:
        UsageError: when ``root`` is no folder.
        NoJournalError: when there is no run.
        JournalLockedError: when the run is going on.
    """
    try:
        root_fd = open_root(root)
    except OSError as error:
        raise UsageError(f"{root} can't be opened: {error.strerror}", remedy="Name the folder with req_N.") from None
    try:
        with custody(paths) as held:
            return _drain(held, root, root_fd, dry_run=dry_run)
    finally:
        os.close(root_fd)


def _drain(held: Custody, root: Path, root_fd: int, *, dry_run: bool) -> Drained:
    found, refused = _look(root_fd)
    removed: dict[str, int] = {}
    adopted = _adopted_before(held, root)
    rest = []
    for item in found:
        row = adopted.get((item.name, item.inode))
        if row is None:
            rest.append(item)
        elif _is_safe(held, row, item, root_fd):
            removed[item.name] = item.nbytes if dry_run else dumps.remove(root_fd, item)
        else:
            refused[item.name] = f"it was handed on to row {row}, which is not verified yet: resume the run first"
    lengths = Counter(row["num_tokens"] for row in held.journal.all_rows()) if rest else Counter()
    matched, unlike = match(rest, list(_candidates(held)), lengths, held.manifest)
    refused |= unlike
    taken: dict[str, int] = {}
    if matched and not dry_run:
        target = Path(held.manifest.options["handover_root"])
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        target_fd = open_root(target)
        epoch = held.take_epoch("adopt --dumps")
        try:
            for item in rest:
                if item.name in matched:
                    if why := _hand_on(held, epoch, root, (root_fd, target_fd), item, matched[item.name]):
                        refused[item.name] = why
                    else:
                        taken[item.name] = matched[item.name].row
        finally:
            os.close(target_fd)
    else:
        taken = {name: row.row for name, row in matched.items()}
    return Drained(taken, removed, refused, dry_run)


def _look(root_fd: int) -> tuple[list[Found], dict[str, str]]:
    found, refused = [], {}
    for name in sorted(dumps.names(root_fd), key=lambda n: int(n.removeprefix("req_"))):
        if not dumps.is_complete(root_fd, name):
            refused[name] = "it is not complete: done is missing"
            continue
        try:
            found.append(dumps.look(root_fd, name))
        except DumpRejectedError as error:
            refused[name] = str(error)
    return found, refused


def _candidates(held: Custody) -> Iterable[Candidate]:
    """Rows that wait for states; one that is dumped already has its own."""
    for state in (State.PENDING, State.SENT):
        for row in held.journal.rows_in(state):
            claim = held.journal.claim_of(row["row"])
            digest = token_ids_sha256(claim.input_ids)
            yield Candidate(row["row"], row["sample_id"], state, row["attempt"], row["num_tokens"], digest)


def _hand_on(held: Custody, epoch: int, root: Path, fds: tuple[int, int], item: Found, row: Candidate) -> str:
    """Make the row dumped; why not, if it can't be."""
    root_fd, target_fd = fds
    m = held.manifest
    room = os.fstatvfs(target_fd)
    if room.f_bavail * room.f_frsize < item.nbytes + _LEAVE_FREE:
        return f"no room for a copy in {m.options['handover_root']}: resume the run first, then adopt again"
    attempt = row.attempt + (row.state is State.PENDING)
    rid = RequestId.sample(m.run_id, row.row, attempt, row.num_tokens)
    try:
        meta = handing_on.meta_of(item, str(rid), row.ids_sha256, m.capture_layers, m.final_norm, "adopted")
        remove_dump(target_fd, str(rid), m.run_id)  # of a call that was cut short before its commit
        handing_on.publish(root_fd, item, meta, target_fd)
    except (DumpRejectedError, OSError) as error:
        return f"it could not be handed on: {error}"
    told = {"name": item.name, "inode": item.inode, "root": str(root), "rid": str(rid)}
    told |= {"by": "token ids" if item.ids_sha256 else "token count alone: not proven"}
    event = Event(ADOPTED, row.row, told)
    if row.state is State.PENDING:
        values = {"attempt": attempt, "boot_id": "adopted", "reason": None}
        held.journal.apply([Move(row.row, row.attempt, _TO_DUMPED, values, event)], epoch)
    else:  # sent: the next start finds the dump that it waits for
        held.journal.touch(row.row, State.SENT, epoch, event, boot_id="adopted")
    return ""


def _adopted_before(held: Custody, root: Path) -> dict[tuple[str, int], int]:
    """Rows by the directories that were handed on to them by earlier calls."""
    found: dict[tuple[str, int], int] = {}
    after = 0
    while events := held.journal.events(after):
        for number, event in events:
            after = number
            if event.kind == ADOPTED and event.row is not None and event.detail.get("root") == str(root):
                found[(str(event.detail["name"]), int(event.detail["inode"]))] = event.row
    return found


def _is_safe(held: Custody, row: int, item: Found, root_fd: int) -> bool:
    """Whether the row is verified with these very bytes."""
    (known,) = held.journal.rows_of([row])
    return bool(known["state"] == State.VERIFIED and known["source_xxh3"] == _digests(item, root_fd))


def _digests(item: Found, root_fd: int) -> str:
    """xxh3_128 per tensor over its rows, as the sink enters them into the journal."""
    nbytes = item.num_tokens * item.hidden_size * ITEM_SIZE[item.dtype]
    folder = os.open(item.name, DIRECTORY_FLAGS, dir_fd=root_fd)
    try:
        return ",".join(_digest(folder, f, o, nbytes) for f, o in zip(item.files, item.offsets, strict=True))
    finally:
        os.close(folder)


def _digest(folder: int, file: str, offset: int, nbytes: int) -> str:
    fd = os.open(file, FILE_FLAGS, dir_fd=folder)
    try:
        digest, end = xxhash.xxh3_128(), offset + nbytes
        while offset < end and (piece := os.pread(fd, min(_PIECE, end - offset), offset)):
            digest.update(piece)
            offset += len(piece)
        return digest.hexdigest()
    finally:
        os.close(fd)
