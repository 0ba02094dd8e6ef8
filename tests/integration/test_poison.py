"""A sample that the server dies of, each time: the real engine under the real supervisor."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from hsjournal.errors import ExitCode
from tests.helpers.cli import hsjournal
from tests.helpers.tiny_models import make_tiny_model

ROWS, POISON = 5, 2


def test_a_sample_that_crashes_the_engine_fails_and_its_neighbours_do_not(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"s{n}", "input_ids": [5 + n] * (10 + n), "loss_mask": [1] * (10 + n)} for n in range(ROWS)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_dir = tmp_path / "run"
    result = hsjournal(
        "run", run_dir, "--prompts", prompts, "--model", model, "--plain",
        HSJOURNAL_FAULTS=f"capture.publishing=segv,row:{POISON}",
    )  # fmt: skip
    assert result.code == ExitCode.FAILED_SAMPLES, result.out + result.err
    with closing(sqlite3.connect(run_dir / "journal.db")) as journal:
        found = journal.execute("SELECT state, strikes, reason FROM sample ORDER BY row").fetchall()
        kinds = [kind for (kind,) in journal.execute("SELECT kind FROM event ORDER BY at")]
    assert found[POISON][:2] == ("failed", 3)
    assert found[POISON][2] == "the connection to the server broke with this sample alone in flight"
    assert [row[:2] for n, row in enumerate(found) if n != POISON] == [("verified", 0)] * (ROWS - 1)
    assert kinds.count("server_death_strike") == 3
    assert kinds.count("server_died") == kinds.count("server_rebooted") >= 3
