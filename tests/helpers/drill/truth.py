"""What must be true, kept by the drill itself: outside the journal, from files, from the server's own record of rids."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sqlite3
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from tests.helpers.drill.stage import Stage, mask_of
from tests.helpers.reference import Reference, worst_row_error

TOLERANCE = 1e-4
_RID = re.compile(r"hsj-([0-9a-z]+)-([0-9]+)-([0-9]+)-([0-9]+)")


@dataclass(frozen=True, slots=True)
class Rid:
    """A sample's request id, taken apart by the drill's own rule."""

    run: str
    row: int
    attempt: int

    @classmethod
    def of(cls, text: str) -> Rid | None:
        """None for probes and for everything else."""
        match = _RID.fullmatch(text)
        return cls(match[1], int(match[2]), int(match[3])) if match else None


@dataclass(slots=True)
class Findings:
    """What a drill found; every list must be empty."""

    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    resent_needlessly: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Take in what another one found."""
        for name in self.__dataclass_fields__:
            getattr(self, name).extend(getattr(other, name))

    def counts(self) -> dict[str, int]:
        """How many of each."""
        return {name: len(getattr(self, name)) for name in self.__dataclass_fields__}

    def lines(self) -> list[str]:
        """All of them in words."""
        return [f"{name}: {item}" for name in self.__dataclass_fields__ for item in getattr(self, name)]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A finished file as it was when the drill first saw it; ``received`` is how many rids had come by then."""

    identity: tuple[int, int, str]
    """Inode, time of the last write (inodes are used again), digest."""
    received: int


class Truth:
    """The drill's own record. :meth:`look` whenever something was killed; :meth:`judge` at the end."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._files: dict[str, _Seen] = {}
        self._usable: dict[Rid, int] = {}
        self._verified: dict[int, str] = {}
        self._foreign: dict[str, tuple[object, ...]] = {}

    def seed_foreign(self) -> None:
        """Put things that belong to others beside what will be ours; they must survive untouched."""
        root, outputs = self._stage.root, self._stage.out_dir.parent
        root.mkdir(mode=0o700, exist_ok=True)
        treasure = self._stage.base / "treasure"
        treasure.mkdir()
        (treasure / "file").write_text("not to be deleted through a link")
        for place in (root, outputs):
            (place / "psm_x").write_bytes(os.urandom(512))
            for name in ("vllm_x", "req_7", "hsj-0therrun-3-1-20", "rows_0-2000"):
                (place / name).mkdir()
                (place / name / "done").touch()
                (place / name / "aux_0.bin").write_bytes(os.urandom(256))
            (place / ".hsjournal-hsj-0therrun-1-1-5-00000000.tmp").write_bytes(b"another run's temporary")
            (place / "link").symlink_to(treasure)
            (place / "hsj-0therrun-9-1-4").symlink_to(treasure)
        self._foreign = self._look_at_foreign()

    def seed_links(self) -> None:
        """Once the run's id is known: links under names of ours, which must neither be followed nor counted as dumps."""
        run = self.run_id
        for name in (f"hsj-{run}-999999-1-5", f".tmp-hsj-{run}-999998-1-5"):
            path = self._stage.root / name
            if not path.is_symlink():
                path.symlink_to(self._stage.base / "treasure")
                self._foreign[str(path)] = _look(path)

    @property
    def run_id(self) -> str:
        """Of the manifest."""
        found = re.search(
            r'^run_id = "([0-9a-z]+)"$', (self._stage.run_dir / "manifest.toml").read_text(), re.MULTILINE
        )
        assert found is not None
        return found[1]

    def struck(self) -> list[tuple[int, int]]:
        """Rows that have strikes, and how many."""
        return self._journal("SELECT row, strikes FROM sample WHERE strikes > 0")

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The details of the journal's events of one kind."""
        return [json.loads(d) for (d,) in self._journal(f"SELECT detail FROM event WHERE kind = '{kind}' ORDER BY id")]

    def times(self, kind: str) -> list[float]:
        """When the journal's events of one kind were, seconds since 1970."""
        return [at for (at,) in self._journal(f"SELECT at FROM event WHERE kind = '{kind}' ORDER BY id")]

    def finished(self) -> int:
        """How many files have their final name now."""
        with contextlib.suppress(FileNotFoundError):  # the output folder is not there yet, or is away
            return sum(1 for _ in self._stage.out_dir.glob("*/*.ckpt"))
        return 0

    def look(self) -> None:
        """Record usable dumps, finished files and verified rows: what may not be sent again or change from here on."""
        rids = self._stage.received()
        received = len(rids)
        run = self.run_id if (self._stage.run_dir / "manifest.toml").exists() else ""
        latest = self._latest(rids, run)
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._stage.root):
                rid = Rid.of(name)
                if (
                    rid is not None
                    and rid.run == run
                    and rid not in self._usable
                    and self._is_usable(self._stage.root / name, rid)
                    and not self._is_late(self._stage.root / name, rid, latest.get(rid.row, 0))
                ):
                    self._usable[rid] = received
        for path in self._stage.out_dir.glob("*/*.ckpt"):
            if str(path) not in self._files:
                self._files[str(path)] = _Seen(_identity(path), received)
        for row, digest in self._journal("SELECT row, output_xxh3 FROM sample WHERE state = 'verified'"):
            self._verified.setdefault(row, digest)

    def spoiled(self, name: str) -> None:
        """A dump that was usable, maybe, and is not any longer by the drill's own hand."""
        if (rid := Rid.of(name)) is not None:
            self._usable.pop(rid, None)

    @staticmethod
    def _latest(received: list[str], run: str) -> dict[int, int]:
        """By row the last attempt that was sent."""
        found: dict[int, int] = {}
        for text in received:
            if (rid := Rid.of(text)) is not None and rid.run == run:
                found[rid.row] = max(found.get(rid.row, 0), rid.attempt)
        return found

    def _is_late(self, folder: Path, rid: Rid, latest: int) -> bool:
        """Whether it came after its row had been sent again: then it is no longer the row's."""
        if latest <= rid.attempt:
            return False
        sent = self._journal(f"SELECT sent_at FROM sample WHERE row = {rid.row} AND attempt = {rid.attempt + 1}")
        try:
            done_at = (folder / "done").stat().st_mtime
        except FileNotFoundError:
            return True
        return not (sent and sent[0][0] is not None and done_at < sent[0][0])

    def judge(self, findings: Findings) -> Findings:
        """Hold the end against everything that was recorded."""
        self.look()
        rows = {r[0]: r[1:] for r in self._journal("SELECT row, state, output_path, output_xxh3, reason FROM sample")}
        by_row = self._check_files(findings, rows)
        for row in range(len(self._stage.prompts)):
            state, path, digest, reason = rows.get(row, ("absent", None, None, None))
            if state != "verified":
                findings.lost.append(f"row {row} is {state} ({reason})")
            elif row not in by_row:
                findings.lost.append(f"row {row} is verified, and no file holds it")
            else:
                file = self._stage.out_dir / path
                if by_row[row] != [file] or _digest(file) != digest:
                    findings.wrong.append(f"row {row}: the journal says {path} {digest}, there is {by_row[row]}")
                if self._verified.get(row, digest) != digest:
                    findings.wrong.append(f"row {row}: its digest changed after it was verified")
        self._check_sends(findings, by_row)
        for place, before in self._foreign.items():
            if (now := _look(Path(place))) != before:
                findings.wrong.append(f"a foreign thing changed: {place}: {before} -> {now}")
        return findings

    def check_left_over(self, findings: Findings) -> None:
        """After the last process has ended: what of ours is still there?"""
        stage, run = self._stage, self.run_id
        findings.left_over += [f"process {pid}: {command}" for pid, command in stage.processes().items()]
        for path in (*stage.root.iterdir(), *stage.shm.glob("hsjournal-*")):
            if str(path) not in self._foreign:
                findings.left_over.append(
                    f"{path}{'/ with ' + str(sorted(p.name for p in path.iterdir())) if path.is_dir() else ''}"
                )
        for path in stage.out_dir.parent.iterdir():
            if path != stage.out_dir and str(path) not in self._foreign:
                findings.left_over.append(str(path))
        for path in stage.out_dir.rglob("*"):
            if path.is_file() and path.suffix != ".ckpt":
                findings.left_over.append(str(path))
        known = {
            "journal.db",
            "journal.db-wal",
            "journal.db-shm",
            "manifest.toml",
            "settings.toml",
            "logs",
            "supervisor.lock",
            "worker.lock",
            "index.jsonl",
            "canary.npz",
        }
        findings.left_over += [str(path) for path in stage.run_dir.iterdir() if path.name not in known]
        with open("/proc/self/mountinfo") as mounts:
            findings.left_over += [
                f"mount {line.split()[4]}" for line in mounts if str(stage.base) in line or run in line
            ]

    def _check_files(self, findings: Findings, rows: dict[int, Any]) -> dict[int, list[Path]]:
        """Every file below the output, by the row whose token ids it holds."""
        reference, prompts = (
            Reference(self._stage.model),
            {tuple(ids): row for row, ids in enumerate(self._stage.prompts)},
        )
        by_row: dict[int, list[Path]] = {}
        for path in sorted(self._stage.out_dir.rglob("*.ckpt")):
            try:
                data = torch.load(path, weights_only=True)
                row = prompts[tuple(data["input_ids"].tolist())]
            except (RuntimeError, KeyError, OSError, EOFError) as error:
                findings.wrong.append(f"{path}: {error!r}")
                continue
            by_row.setdefault(row, []).append(path)
            if problem := _content_problem(data, row, self._stage.prompts[row], reference):
                findings.wrong.append(f"{path}: {problem}")
            seen = self._files.get(str(path))
            if seen is not None and seen.identity != _identity(path):
                findings.wrong.append(f"{path} changed after it was finished")
        findings.wrong += [f"{path} was finished and is gone" for path in self._files if not Path(path).exists()]
        findings.duplicated += [
            f"row {row} has {len(paths)} files: {paths}" for row, paths in by_row.items() if len(paths) > 1
        ]
        paths = [r[1] for r in rows.values() if r[1]]
        findings.duplicated += [f"{path} stands for two rows" for path in {p for p in paths if paths.count(p) > 1}]
        return by_row

    def _check_sends(self, findings: Findings, by_row: dict[int, list[Path]]) -> None:
        received = self._stage.received()
        if len(set(received)) != len(received):
            findings.resent_needlessly += [
                f"{rid} was received twice" for rid in {r for r in received if received.count(r) > 1}
            ]
        run = self.run_id
        sends = [(at, rid) for at, text in enumerate(received) if (rid := Rid.of(text)) is not None and rid.run == run]
        for usable, since in self._usable.items():
            for position, rid in sends:
                if position >= since and rid.row == usable.row and rid.attempt > usable.attempt:
                    findings.resent_needlessly.append(
                        f"{rid} was sent though {usable} was usable (rid {position}, since {since})"
                    )
                    break
        for row, paths in by_row.items():
            seen = self._files.get(str(paths[0]))
            for position, rid in sends:
                if seen is not None and position >= seen.received and rid.row == row:
                    findings.resent_needlessly.append(f"{rid} was sent though {paths[0].name} was finished")
                    break

    def _is_usable(self, folder: Path, rid: Rid) -> bool:
        """Whether a complete dump of the row's own token ids lies there, by the drill's own reading of the protocol."""
        try:
            if not (folder / "done").exists() or folder.is_symlink():
                return False
            meta = json.loads((folder / "meta.json").read_bytes())
            ids = self._stage.prompts[rid.row]
            digest = hashlib.sha256(struct.pack(f"<{len(ids)}q", *ids)).hexdigest()
            sizes = [(folder / t["file"]).stat().st_size for t in meta["tensors"]]
            return bool(
                meta["token_ids_sha256"] == digest and sizes == [len(ids) * meta["hidden_size"] * 4] * len(sizes)
            )
        except (OSError, KeyError, ValueError, IndexError):
            return False  # being deleted, or not whole

    def _journal(self, query: str) -> list[Any]:
        journal = self._stage.run_dir / "journal.db"
        if not journal.exists():
            return []
        try:
            with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True, timeout=20)) as connection:
                return connection.execute(query).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return []
            raise

    def _look_at_foreign(self) -> dict[str, tuple[object, ...]]:
        """Everything that lies in the root and beside the output, before the first process of ours."""
        paths: list[Path] = []
        for place in (self._stage.root, self._stage.out_dir.parent, self._stage.base / "treasure"):
            for folder, subfolders, files in os.walk(place):
                paths += [Path(folder, name) for name in (*subfolders, *files)]
        return {str(path): _look(path) for path in paths}


def _look(path: Path) -> tuple[object, ...]:
    """What a thing is: kind, inode, mode, time, content or target."""
    try:
        found = path.lstat()
    except OSError as error:
        return (type(error).__name__,)
    what = os.readlink(path) if path.is_symlink() else _digest(path) if path.is_file() else sorted(os.listdir(path))
    return (found.st_ino, found.st_mode, found.st_mtime_ns if not path.is_dir() else 0, what)


def _identity(path: Path) -> tuple[int, int, str]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, _digest(path)


def _digest(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


def _content_problem(data: dict[str, Any], row: int, ids: list[int], reference: Reference) -> str:
    """What is wrong with a file's content; empty when nothing is."""
    said = data["hsjournal"]
    aux, final = reference.states(data["input_ids"], said["capture_layers"])
    if (data["aux_hidden_state"].shape, data["hidden_state"].shape) != ((1, *aux.shape), (1, *final.shape)):
        return f"shapes {data['aux_hidden_state'].shape}, {data['hidden_state'].shape}"
    errors = (worst_row_error(data["aux_hidden_state"][0], aux), worst_row_error(data["hidden_state"][0], final))
    if max(errors) > TOLERANCE:
        return f"states differ by {max(errors):.2e} from plain transformers"
    if data["loss_mask"].tolist() != mask_of(ids):
        return "another loss mask"
    if said["row"] != row or said["sample_id"] != f"s{row}":
        return f"it says that it is row {said['row']}, {said['sample_id']}"
    return ""
