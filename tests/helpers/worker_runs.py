"""A run directory that is ready for a worker, the worker in this process, and what it left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import subprocess
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from hsjournal.config import Manifest, RunPaths, Settings
from hsjournal.dump.protocol import RequestId
from hsjournal.errors import HsjournalError
from hsjournal.events import Event
from hsjournal.journal.migrate import migrate
from hsjournal.journal.store import Journal, Move, NewRow
from hsjournal.mirror import Mirror
from hsjournal.sink.formats import layout_named
from hsjournal.states import Actor, State, Transition
from hsjournal.worker.process import Worker
from tests.helpers.dumps import random_ids

RUN_ID = "fa017run"
HIDDEN, LAYERS, DTYPE = 8, (1, 3, 5), "bfloat16"
BYTES_PER_TOKEN = HIDDEN * 2 * (len(LAYERS) + 1)
WORKER_TIMEOUT_S = 60.0


@pytest.fixture(autouse=True, scope="module")
def collected() -> Iterator[None]:
    """Import it where workers run in this process: their threads' connections go before another test counts them."""
    yield
    gc.collect()


@dataclass(frozen=True, slots=True)
class End:
    """How a worker ended: its exit code, and what it said if that was an error."""

    code: int
    error: HsjournalError | None

    @property
    def sentence(self) -> str:
        """The error in words; empty without one."""
        return "" if self.error is None else str(self.error)


class Run:
    """One run directory.

    Args:
        folder: everything lies in it.
        lengths: tokens of each row.
        url: of the server.
        manifest: fields of the manifest that are to be different.
        settings: fields of the settings that are to be different; times are short by default.
    """

    def __init__(
        self,
        folder: Path,
        lengths: Sequence[int],
        *,
        url: str = "http://127.0.0.1:9",
        manifest: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.paths = RunPaths.of(folder / "run")
        self.paths.run_dir.mkdir()
        self.root = folder / "root"
        self.root.mkdir(mode=0o700)
        self.paths.shm.parent.parent.mkdir(parents=True, exist_ok=True)
        self.ids = [random_ids(length, seed=row + 1) for row, length in enumerate(lengths)]
        fields: dict[str, Any] = {"out_dir": str(self.paths.default_out)} | (manifest or {})
        self.manifest = replace(_MANIFEST, **fields)
        self.paths.manifest.write_text(self.manifest.to_toml())
        self.settings = replace(_SETTINGS, server_url=url, handover_root=str(self.root), **settings)
        Path(self.manifest.out_dir).mkdir()  # the gate does it
        shutil.copyfile(_migrated(), self.paths.journal)
        with Journal(self.paths.journal) as journal:
            journal.start_ingest(RUN_ID)
            journal.add_rows([_row(number, ids) for number, ids in enumerate(self.ids)])
            journal.finish_ingest()

    async def work(self, **settings: Any) -> End:
        """Run one worker in this process until it ends."""
        with self.journal() as journal:
            epoch = journal.raise_epoch()
        worker = Worker(self.paths, self.manifest, replace(self.settings, **settings), epoch)
        async with asyncio.timeout(WORKER_TIMEOUT_S):
            try:
                return End(int(await worker.run()), None)
            except HsjournalError as error:
                return End(int(error.exit_code), error)
            finally:
                with self.journal() as journal:
                    journal.add_events(Mirror(self.paths.mirror).events())

    def start_process(self, url: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start one worker by exec, as the supervisor does."""
        with self.journal() as journal:
            epoch = journal.raise_epoch()
        command = [sys.executable, "-m", "hsjournal.worker", str(self.paths.run_dir), "--epoch", str(epoch)]
        return subprocess.Popen(
            [*command, "--settings", replace(self.settings, server_url=url).to_json()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
        )

    def journal(self) -> Journal:
        """The journal, to be closed by the caller."""
        return Journal(self.paths.journal)

    def rows(self) -> list[dict[str, Any]]:
        """All columns of all rows."""
        with self.journal() as journal:
            return journal.rows_of(range(len(self.ids)))

    def row(self, number: int) -> dict[str, Any]:
        """All columns of one row."""
        return self.rows()[number]

    def states(self) -> list[str]:
        """The state of each row."""
        return [str(row["state"]) for row in self.rows()]

    def events(self, kind: str | None = None, row: int | None = None) -> list[Event]:
        """What was recorded, in the journal and in the mirror; of one kind, of one row if asked."""
        with self.journal() as journal:
            journal.add_events(Mirror(self.paths.mirror).events())
            found = [event for _, event in journal.events(most=100_000)]
        found.sort(key=lambda event: event.at)
        return [e for e in found if kind in (None, e.kind) and row in (None, e.row)]

    def leave_sent(self, row: int, boot_id: str) -> RequestId:
        """Bring a pending row to ``sent`` as a worker that was killed would have left it; its request id."""
        with self.journal() as journal:
            epoch = journal.raise_epoch()
            move = Transition(State.PENDING, State.SENT, Actor.WORKER, "request sent")
            values = {"attempt": 1, "sent_at": 0.0, "boot_id": boot_id}
            journal.apply([Move(row, 0, move, values)], epoch)
        return RequestId.sample(RUN_ID, row, 1, len(self.ids[row]))

    def in_root(self) -> list[str]:
        """The names in the hand-over root."""
        return sorted(os.listdir(self.root))

    def outputs(self) -> list[str]:
        """Every file in the output folder, hidden ones too."""
        out = Path(self.manifest.out_dir)
        return sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())

    def assert_whole(self, row: int) -> None:
        """The row is verified, and its file holds exactly what the fake server makes of the row's ids."""
        import torch

        found = self.row(row)
        assert found["state"] == "verified", found
        path = Path(self.manifest.out_dir) / layout_named("specforge").path_of(row, found["sample_id"])
        held = torch.load(path, weights_only=True)
        arrays = states_of(self.ids[row])
        aux = np.concatenate([a for name, a in arrays.items() if name != "final"], axis=1)
        assert held["input_ids"].tolist() == list(self.ids[row])
        assert (held["hidden_state"][0].view(torch.uint16).numpy() == arrays["final"]).all()
        assert (held["aux_hidden_state"][0].view(torch.uint16).numpy() == aux).all()

    def assert_all_verified(self, *, but: Sequence[int] = ()) -> None:
        """All rows but these are verified, one file each with the right content, and the root is empty."""
        good = [row for row in range(len(self.ids)) if row not in but]
        for row in good:
            self.assert_whole(row)
        assert len(self.outputs()) == len(good)
        assert self.in_root() == []

    def strikes(self) -> list[int]:
        """The strikes of each row."""
        return [int(row["strikes"]) for row in self.rows()]

    def attempts(self) -> list[int]:
        """The attempt that each row is at."""
        return [int(row["attempt"]) for row in self.rows()]


def states_of(ids: Sequence[int], noise: int = 0) -> dict[str, Any]:
    """The rows that the fake server makes of ``ids``, as bits by tensor name: each depends on its token and place."""
    base = (np.asarray(ids, dtype=np.uint64) * 2654435761 + np.arange(len(ids), dtype=np.uint64) * 97) % 4096
    columns = np.arange(HIDDEN, dtype=np.uint64) * 13
    found = {}
    for number, name in enumerate([*(f"aux_{i}" for i in range(len(LAYERS))), "final"]):
        bits = (base[:, None] + columns[None, :] + 501 * number + noise) % 8192
        found[name] = (bits + 0x3000).astype(np.uint16)  # finite bfloat16
    return found


@cache
def _migrated() -> Path:
    """An empty journal of the current schema: migrating takes a second, copying does not."""
    import atexit

    folder = Path(mkdtemp(prefix="hsj-empty-journal-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    migrate(folder / "journal.db")
    Journal(folder / "journal.db").close()  # folds the WAL in
    return folder / "journal.db"


def _row(number: int, ids: array[int]) -> NewRow:
    return NewRow(number, f"sample-{number}", "prompts.jsonl", number + 1, ids, (1, len(ids) - 1))


_MANIFEST = Manifest(
    run_id=RUN_ID,
    created="2026-01-01T00:00:00+00:00",
    version="0",
    model="/models/fake",
    model_sha256="",
    tokenizer_sha256="",
    hidden_size=HIDDEN,
    num_layers=8,
    vocab_size=32_000,
    context_length=4096,
    capture_layers=LAYERS,
    dtype=DTYPE,
    final_norm="post",
    format="specforge",
    out_dir="",
    engine="embedded",
    chunk_size=0,
)
_SETTINGS = Settings(
    server_url="",
    handover_root="",
    max_in_flight=4,
    connect_timeout=1.0,
    read_timeout=10.0,
    sample_timeout=10.0,
    dump_timeout=1.0,
    pause_limit=20.0,
    retry_pause=0.05,
    canary_every=0,
)
