"""``scripts/demo``, the first thing that anybody runs, with few prompts: its last line, its exit code, its second call."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.helpers.cli import REPOSITORY

pytestmark = pytest.mark.timeout(900)  # the first run prepares the model
ROWS, REFUSED = 3, 2


def demo(run_dir: Path) -> tuple[dict[str, object], str]:
    done = subprocess.run(
        [REPOSITORY / "scripts/demo", run_dir, str(ROWS)], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1]), done.stdout


def test_it_extracts_real_states_and_finds_them_done(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    said, screen = demo(run_dir)
    out_dir = run_dir / "output"
    counts = {"rows": ROWS + REFUSED, "verified": ROWS, "skipped": REFUSED, "failed": 0}
    assert {key: said[key] for key in counts} == counts
    assert (said["run_dir"], said["out_dir"]) == (str(run_dir), str(out_dir))
    assert int(str(said["tokens"])) > 100
    assert f"output: {out_dir}" in screen
    files = {path: path.stat().st_mtime_ns for path in out_dir.rglob("*.ckpt")}
    assert len(files) == ROWS

    again, its_screen = demo(run_dir)
    assert {**again, "seconds": 0} == {**said, "seconds": 0}
    assert ("preparing: starting" in screen, "preparing" in its_screen) == (True, False)  # no engine is started again
    assert {path: path.stat().st_mtime_ns for path in out_dir.rglob("*.ckpt")} == files
