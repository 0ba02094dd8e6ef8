"""A run whose dumps are all there: what the hand-over benchmarks let a worker, or the sink alone, write and verify.

All dumps of a scene share one set of tensors by hard links, so that any number of gigabytes passes through a small
/dev/shm; 348 MB do not fit into a processor's cache.
"""

from __future__ import annotations

import os
import secrets
import shutil
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Self

from journal import RUN, manifest

from hsjournal.config import Manifest, RunPaths
from hsjournal.dump.protocol import DONE, META, Meta, RequestId, payload_bytes, tensor_entries, token_ids_sha256
from hsjournal.journal.migrate import migrate
from hsjournal.journal.store import Journal, Move, NewRow
from hsjournal.sink.sample import OutputSample
from hsjournal.states import Actor, State, Transition

HIDDEN, LAYERS, DTYPE = 7168, (1, 30, 57), "bfloat16"
TOKENS = 6_065
"""Of the sample that the figures of this project speak of: 348 MB of states."""
BOOT = "bench-boot"
SENT = Transition(State.PENDING, State.SENT, Actor.WORKER, "")
DUMPED = Transition(State.SENT, State.DUMPED, Actor.WORKER, "")


def sample_bytes(tokens: int = TOKENS) -> int:
    """Bytes of the states of one sample."""
    return payload_bytes(tokens, HIDDEN, DTYPE, len(LAYERS))


def _ids(tokens: int) -> array[int]:
    return array("I", (7 * i % 1000 for i in range(tokens)))


class Scene:
    """Dumps in a folder of their own under /dev/shm.

    Args:
        tokens: of each sample.

    Attributes:
        tensors: folder with the tensors that all dumps share.
    """

    def __init__(self, tokens: int = TOKENS) -> None:
        self.tokens = tokens
        self.ids = _ids(tokens)
        self.root = Path("/dev/shm") / f"hsj-bench-{secrets.token_hex(4)}"  # noqa: S108 - what is measured lies in tmpfs
        self.root.mkdir(mode=0o700)
        self.tensors = self.root.with_name(self.root.name + "-tensors")
        self.tensors.mkdir(mode=0o700)
        for number, tensor in enumerate(tensor_entries(tokens, HIDDEN, DTYPE, len(LAYERS))):
            with (self.tensors / tensor.file).open("wb") as file:
                left = tensor.nbytes
                while left:
                    piece = bytearray(os.urandom(min(left, 1 << 22)))
                    piece[1::2] = bytes(len(piece[1::2]) - 1) + bytes([number])  # small, and so finite
                    left -= file.write(piece)

    @classmethod
    def at(cls, root: Path, tokens: int) -> Self:
        """The scene that another process made at ``root``; only to read from."""
        scene = cls.__new__(cls)
        scene.tokens, scene.root = tokens, root
        scene.ids = _ids(tokens)
        return scene

    def close(self) -> None:
        """Give the memory back."""
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.rmtree(self.tensors, ignore_errors=True)

    def publish(self, row: int, attempt: int = 1) -> RequestId:
        """Put a dump of ``row`` into the root."""
        rid = RequestId.sample(RUN, row, attempt, self.tokens)
        tensors = tensor_entries(self.tokens, HIDDEN, DTYPE, len(LAYERS))
        meta = Meta(
            rid=str(rid), num_tokens=self.tokens, hidden_size=HIDDEN, dtype=DTYPE, capture_layers=LAYERS,
            final_norm="post", token_ids_sha256=token_ids_sha256(self.ids), chunks=(0,), boot_id=BOOT,
            engine="embedded", versions={}, tensors=tensors,
        )  # fmt: skip
        folder = self.root / str(rid)
        folder.mkdir(mode=0o700)
        for tensor in tensors:
            os.link(self.tensors / tensor.file, folder / tensor.file)
        (folder / META).write_bytes(meta.to_json())
        (folder / DONE).touch()
        return rid

    def sample(self, row: int, rid: RequestId) -> OutputSample:
        """What the file of ``row`` must hold."""
        runs = array("I", [self.tokens // 2, self.tokens - self.tokens // 2]).tobytes()
        return OutputSample(
            row=row, sample_id=f"s{row}", run_id=RUN, rid=rid, input_ids=self.ids, loss_mask=runs, hidden_size=HIDDEN,
            dtype=DTYPE, capture_layers=LAYERS, final_norm="post", model="m",
        )  # fmt: skip

    def manifest(self, out_dir: Path) -> Manifest:
        """Of a run over these dumps."""
        return replace(manifest(), hidden_size=HIDDEN, capture_layers=LAYERS, dtype=DTYPE, out_dir=str(out_dir))

    def run(self, folder: Path, rows: int) -> tuple[RunPaths, int]:
        """A run directory whose rows are all dumped, as a worker that was killed leaves it; returns its epoch."""
        paths = RunPaths.of(folder)
        paths.default_out.mkdir(parents=True)
        migrate(paths.journal)
        runs = [self.tokens // 2, self.tokens - self.tokens // 2]
        with Journal(paths.journal) as journal:
            journal.start_ingest(RUN)
            journal.add_rows([NewRow(n, f"s{n}", "prompts.jsonl", n + 1, self.ids, runs) for n in range(rows)])
            journal.finish_ingest()
            epoch = journal.raise_epoch()
            journal.apply([Move(n, 0, SENT, {"attempt": 1, "boot_id": BOOT}) for n in range(rows)], epoch)
            journal.apply([Move(n, 1, DUMPED, {"boot_id": BOOT}) for n in range(rows)], epoch)
            epoch = journal.raise_epoch()
        paths.manifest.write_text(self.manifest(paths.default_out).to_toml())
        for row in range(rows):
            self.publish(row)
        return paths, epoch
