"""The end proves that every row of the input is there. The real worker, a scripted server."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest

from hsjournal.errors import ExitCode
from tests.helpers.fake_server import FakeServer
from tests.helpers.worker_runs import Run, collected  # noqa: F401


@pytest.mark.parametrize(
    ("statement", "word"),
    [
        ("DELETE FROM sample WHERE row = 2", "4 were read from the input, and {journal} holds 3"),
        ("UPDATE state_count SET rows = rows + 1 WHERE state = 'skipped'", "skipped: 0 rows, 1 by its counter"),
    ],
)
async def test_the_end_proves_that_no_row_is_missing(tmp_path: Path, statement: str, word: str) -> None:
    async with FakeServer(tmp_path / "root") as server:
        run = Run(
            tmp_path, (20, 33, 7, 12), url=server.url, manifest={"options": {"handover_root": str(tmp_path / "root")}}
        )
        with run.journal() as journal:
            journal.finish_ingest(json.dumps({"rows": 4}))
        with contextlib.closing(sqlite3.connect(run.paths.journal)) as other, other:
            other.execute(statement)
        end = await run.work()
    assert end.code == ExitCode.ERROR
    assert word.format(journal=run.paths.journal) in end.sentence
    with run.journal() as journal:
        assert "finished" not in [event.kind for _, event in journal.events()]
