"""Run directories of shards, made without an engine: journals, files and badges are real, only the states are random."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from hsjournal.config import RunPaths
from hsjournal.fleet.badge import Badge
from hsjournal.journal.migrate import migrate
from hsjournal.journal.store import Journal, NewRow
from hsjournal.sink.output import Output
from hsjournal.states import State
from tests.helpers import runs
from tests.helpers.dumps import random_ids


def make_shard(
    folder: Path,
    shard: str,
    rows: Sequence[int],
    *,
    incarnation: int | None = 1,
    fleet: str = "f",
    store: str = "",
    state: State = State.VERIFIED,
    manifest: dict[str, Any] | None = None,
) -> Path:
    """A run directory with these rows of the whole, each in ``state``; without an incarnation it wears no badge."""
    paths, root = RunPaths.of(folder / "run"), folder / "root"
    made = runs.make_manifest(paths, root)
    options = made.options | {"prompts.shard": shard}
    made = dataclasses.replace(made, **{"options": options} | (manifest or {}))
    paths.manifest.write_text(made.to_toml())
    Path(made.out_dir).mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700)
    migrate(paths.journal)
    ids = {row: random_ids(5 + row % 7, seed=row) for row in rows}
    run = runs.MadeRun(paths, made, ids)
    with Journal(paths.journal) as journal:
        journal.start_ingest(runs.RUN_ID)
        journal.add_rows(
            [NewRow(r, f"s{r}", "p", r + 1, array("I", ids[r]), runs.mask_of(len(ids[r])), None) for r in rows]
        )
        journal.finish_ingest()
        epoch = journal.raise_epoch()
        with closing(Output(made, paths.rejects)) as output:
            for row in rows:
                runs._advance(run, journal, output, epoch, row, state, keep_dump=False)
    if incarnation is not None:
        Badge(fleet, shard, incarnation, "node", None, store).write(paths.run_dir)
    return paths.run_dir
