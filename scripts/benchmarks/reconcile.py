"""Bar 7, second figure: 10,000 orphan directories in the hand-over root, from the first look to the last deletion."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from array import array
from dataclasses import replace
from pathlib import Path

from bars import Bar, medians, say, work_folder
from journal import RUN, make_run, manifest

from hsjournal.config import RunPaths
from hsjournal.dump.protocol import DONE, META, TMP_PREFIX, Meta, RequestId, tensor_entries, token_ids_sha256
from hsjournal.dump.reader import open_root
from hsjournal.journal.store import Journal, Move
from hsjournal.reconcile.apply import apply
from hsjournal.reconcile.gather import gather
from hsjournal.reconcile.plan import plan
from hsjournal.states import Actor, State, Transition

TOKENS, HIDDEN, LAYERS = 16, 16, (1, 3, 5)
SENT = Transition(State.PENDING, State.SENT, Actor.WORKER, "")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of this benchmark."""
    parser.add_argument("--directories", type=int, default=10_000, help="in the hand-over root [default: 10,000]")


def run(options: argparse.Namespace) -> list[Bar]:
    """One figure: half of the directories are usable dumps, the rest is to be removed."""
    with work_folder(options.folder, on_disk=True) as folder:
        scene = _Scene(folder, options.directories)
        found = medians({"reconcile_10k_s": scene.measure}, options.rounds, say)
    note = f"{options.directories:,} directories: half adopted, half removed; journal on disk, root in /dev/shm"
    return [Bar("reconcile_10k_s", found["reconcile_10k_s"], 10, "lower", note)]


class _Scene:
    def __init__(self, folder: Path, directories: int) -> None:
        self._folder, self._directories, self._round = folder, directories, 0
        self._manifest = replace(manifest(), hidden_size=HIDDEN, capture_layers=LAYERS)

    def measure(self) -> float:
        """Seconds from the first look to the last deletion; planning again must then find nothing to do."""
        self._round += 1
        paths, epoch = make_run(self._folder / str(self._round), self._directories, TOKENS)
        root = Path(tempfile.mkdtemp(prefix="hsj-bench-root-", dir="/dev/shm"))
        root_fd = open_root(root)
        try:
            self._litter(paths, epoch, root)
            with Journal(paths.journal) as journal:
                begin = time.monotonic()
                made = plan(gather(journal, [root_fd], self._manifest))
                apply(made, journal, epoch, [root_fd], paths.rejects, self._folder)
                seconds = time.monotonic() - begin
                again = plan(gather(journal, [root_fd], self._manifest))
                assert again.is_empty
                assert len(again.kept) == self._directories // 2 == journal.counts()[State.DUMPED].rows
                assert len(os.listdir(root)) == self._directories // 2
        finally:
            os.close(root_fd)
            shutil.rmtree(root)
        return seconds

    def _litter(self, paths: RunPaths, epoch: int, root: Path) -> None:
        """Even rows: a complete dump of the attempt that was sent. Odd rows: an older attempt's, half of them unpublished."""
        with Journal(paths.journal) as journal:
            for start in range(0, self._directories, 1000):
                rows = range(start, min(start + 1000, self._directories))
                journal.apply([Move(row, 0, SENT, {"attempt": 2}) for row in rows if row % 2 == 0], epoch)
        for row in range(self._directories):
            rid = RequestId.sample(RUN, row, 2 if row % 2 == 0 else 1, TOKENS)
            _dump(root / (f"{TMP_PREFIX}{rid}" if row % 4 == 3 else str(rid)), rid, row)


def _dump(folder: Path, rid: RequestId, row: int) -> None:
    tensors = tensor_entries(TOKENS, HIDDEN, "bfloat16", len(LAYERS))
    ids = array("I", range(row % 1000, row % 1000 + TOKENS))
    meta = Meta(
        rid=str(rid), num_tokens=TOKENS, hidden_size=HIDDEN, dtype="bfloat16", capture_layers=LAYERS, final_norm="post",
        token_ids_sha256=token_ids_sha256(ids), chunks=(0,), boot_id="b", engine="embedded", versions={}, tensors=tensors,
    )  # fmt: skip
    folder.mkdir()
    for tensor in tensors:
        (folder / tensor.file).write_bytes(bytes(tensor.nbytes))
    (folder / META).write_bytes(meta.to_json())
    (folder / DONE).touch()
