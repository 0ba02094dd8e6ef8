"""Run directories made without an engine: the journal, sink and manifest are real, only the states are random bits."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsjournal.config import Manifest, RunPaths
from hsjournal.dump.protocol import RequestId, token_ids_sha256
from hsjournal.dump.reader import Expectation, open_dump, open_root
from hsjournal.journal.migrate import migrate
from hsjournal.journal.store import Journal, Move, NewRow
from hsjournal.sink.output import Output
from hsjournal.states import Actor, State, Transition
from hsjournal.worker.recover import make_sample
from tests.helpers.dumps import random_ids, write_dump

RUN_ID = "test0run"
LAYERS = (1, 3, 5)
FORWARD = (State.PENDING, State.SENT, State.DUMPED, State.WRITTEN, State.VERIFIED)


@dataclass(frozen=True, slots=True)
class MadeRun:
    """A run directory with rows in chosen states."""

    paths: RunPaths
    manifest: Manifest
    ids: dict[int, array[int]]

    @property
    def out(self) -> Path:
        """The output folder."""
        return Path(self.manifest.out_dir)

    @property
    def root(self) -> Path:
        """The hand-over root."""
        return Path(self.manifest.options["handover_root"])

    def states(self) -> dict[int, str]:
        """Every row's state."""
        with closing(Journal(self.paths.journal)) as journal:
            return {r["row"]: r["state"] for state in State for r in journal.rows_in(state)}

    def row(self, row: int) -> dict[str, Any]:
        """All columns of one row."""
        with closing(Journal(self.paths.journal)) as journal:
            return journal.rows_of([row])[0]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The details of all events of one kind."""
        with closing(Journal(self.paths.journal)) as journal:
            return [e.detail for _, e in journal.events(most=100_000) if e.kind == kind]

    def outputs(self) -> dict[int, Path]:
        """Each file by its row."""
        return {int(p.stem.removeprefix("data_")): p for p in self.out.rglob("*.ckpt")}

    def bytes_of(self) -> dict[str, bytes]:
        """The journal's files, the outputs and the root, byte by byte (the journal is closed)."""
        files = [*self.paths.run_dir.rglob("*"), *self.root.rglob("*")]
        return {str(p): p.read_bytes() for p in files if p.is_file() and not p.name.endswith((".lock", "-shm"))}


def make_run(
    folder: Path,
    states: Sequence[State],
    *,
    tokens: Sequence[int] | None = None,
    hidden: int = 64,
    dtype: str = "bfloat16",
    ids: dict[int, array[int]] | None = None,
    keep_dumps: bool = False,
    out: Path | None = None,
) -> MadeRun:
    """A run whose row ``i`` is in ``states[i]``; rows from ``written`` on have their file.

    Args:
        folder: gets ``run`` and ``root``.
        states: of the rows.
        tokens: of the rows; 5 to 40 if not given.
        hidden: columns of a state.
        dtype: of the states.
        ids: token ids by row, where they matter.
        keep_dumps: whether the dumps of written rows stay in the root (those of dumped ones always do).
        out: the output folder; ``folder/run/out`` if not given.
    """
    paths, root = RunPaths.of(folder / "run"), folder / "root"
    manifest = make_manifest(paths, root, hidden=hidden, dtype=dtype, out=out)
    Path(manifest.out_dir).mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)
    migrate(paths.journal)
    counts = tokens or [5 + 7 * i % 36 for i in range(len(states))]
    given = ids or {}
    rows = {i: given.get(i, random_ids(counts[i], seed=1000 + i)) for i in range(len(states))}
    run = MadeRun(paths, manifest, rows)
    with Journal(paths.journal) as journal:
        journal.start_ingest(RUN_ID)
        journal.add_rows(
            [
                NewRow(
                    i,
                    f"sample {i}",
                    "prompts.jsonl",
                    i + 1,
                    rows[i] if state is not State.SKIPPED else array("I"),
                    mask_of(len(rows[i])) if state is not State.SKIPPED else (),
                    "empty: no tokens" if state is State.SKIPPED else None,
                )
                for i, state in enumerate(states)
            ]
        )
        journal.finish_ingest()
        epoch = journal.raise_epoch()
        with closing(Output(manifest, paths.rejects)) as output:
            for i, state in enumerate(states):
                _advance(run, journal, output, epoch, i, state, keep_dump=keep_dumps)
    return run


def mask_of(count: int) -> tuple[int, ...]:
    """Run lengths: the last third of the tokens counts for the loss."""
    return (count - max(1, count // 3), max(1, count // 3))


def make_manifest(
    paths: RunPaths, root: Path, *, hidden: int = 64, dtype: str = "bfloat16", out: Path | None = None
) -> Manifest:
    """Write and return the manifest of a run that never saw a server."""
    paths.run_dir.mkdir(parents=True)
    manifest = Manifest(
        run_id=RUN_ID,
        created="2026-01-01T00:00:00+00:00",
        version="test",
        model="a model",
        model_sha256="",
        tokenizer_sha256="",
        hidden_size=hidden,
        num_layers=9,
        vocab_size=32_000,
        context_length=4096,
        capture_layers=LAYERS,
        dtype=dtype,
        final_norm="post",
        format="specforge",
        out_dir=str(out or paths.default_out),
        engine="embedded",
        chunk_size=0,
        options={"server": "", "handover_root": str(root), "model_path": ""},
    )
    paths.manifest.write_text(manifest.to_toml())
    return manifest


def _advance(
    run: MadeRun, journal: Journal, output: Output, epoch: int, row: int, state: State, *, keep_dump: bool
) -> None:
    """Move a fresh row to ``state`` as a worker would."""
    if state in (State.PENDING, State.SKIPPED):
        return
    m, ids, attempt = run.manifest, run.ids[row], 1
    rid = RequestId.sample(m.run_id, row, attempt, len(ids))

    def move(source: State, target: State, **values: Any) -> None:
        at = attempt - 1 if target is State.SENT else attempt
        journal.apply([Move(row, at, Transition(source, target, Actor.WORKER, ""), values)], epoch)

    move(State.PENDING, State.SENT, attempt=attempt, sent_at=time.time(), server="http://test", boot_id="boot-0")
    if state is State.SENT:
        return
    if state is State.FAILED:
        move(State.SENT, State.FAILED, strikes=3, reason="wrong_count: 3 of 5 rows", suspect=0)
        return
    made = write_dump(
        run.root, rid, ids, len(m.capture_layers), m.hidden_size, m.dtype, seed=row, capture_layers=m.capture_layers
    )
    move(State.SENT, State.DUMPED)
    if state is State.DUMPED:
        return
    claim = journal.claim_of(row)
    sample = make_sample(m, row, claim.sample_id, rid, claim.input_ids, claim.loss_mask)
    expect = Expectation(rid, len(ids), m.hidden_size, m.dtype, m.capture_layers, m.final_norm, token_ids_sha256(ids))
    root_fd = open_root(run.root)
    with open_dump(root_fd, rid, expect) as dump:
        written = output.write(dump, sample, lambda _phase, _nbytes: None)
    os.close(root_fd)
    values = {
        "output_path": written.path,
        "output_bytes": written.nbytes,
        "output_xxh3": written.output_xxh3,
        "source_xxh3": written.source_xxh3,
    }
    move(State.DUMPED, State.WRITTEN, **values)
    if not keep_dump:
        for file in made.path.iterdir():
            file.unlink()
        made.path.rmdir()
    if state is State.VERIFIED:
        move(State.WRITTEN, State.VERIFIED, verify_method="direct", verified_at=time.time(), suspect=0)


def bits(count: int, width: int, seed: int, dtype: str = "bfloat16") -> npt.NDArray[Any]:
    """Random finite states ``[count, width]`` as raw bits."""
    from tests.helpers.dumps import finite_bits

    return finite_bits(np.random.default_rng(seed), (count, width), dtype)
