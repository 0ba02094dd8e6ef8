"""doctor beside a stuck disk: it answers, names the disk, and hides nothing of the rest."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hsjournal.states import State
from tests.helpers.cli import hsjournal
from tests.helpers.mounts import ext4
from tests.helpers.runs import make_run


def test_it_reads_the_run_and_changes_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path, [State.VERIFIED, State.PENDING, State.SKIPPED], tokens=[5, 700, 3])
    before = run.bytes_of()
    done = hsjournal("doctor", run.paths.run_dir, "--json", HSJOURNAL_SHM=str(tmp_path / "shm"))
    lines = done.json()["lines"]
    assert {f"hand-over {run.root}"} == {line["subject"] for line in lines if line["subject"].startswith("hand-over")}
    assert done.code == 0, lines
    largest = 700 * 64 * 2 * (len(run.manifest.capture_layers) + 1)
    assert any(f"largest sample has {largest / 1000:,.1f} kB" in line["words"] for line in lines)
    assert any(line["subject"] == f"output {run.out}" and "needed" in line["words"] for line in lines)
    assert run.bytes_of() == before


@pytest.mark.root
def test_a_frozen_output_is_named_and_the_rest_is_told(tmp_path: Path) -> None:
    with ext4(tmp_path / "disk", 64) as disk:
        run = make_run(tmp_path, [State.PENDING], out=disk.mount / "out")
        with disk.frozen():
            begun = time.monotonic()
            done = hsjournal("doctor", run.paths.run_dir, "--json", HSJOURNAL_SHM=str(tmp_path / "shm"))
            seconds = time.monotonic() - begun
        lines = done.json()["lines"]
        assert done.code == 1
        assert seconds < 30
        assert [line["subject"] for line in lines if line["level"] == "fail"] == [f"output {run.out}"]
        assert {f"journal {run.paths.run_dir}", "versions", "runs"} <= {line["subject"] for line in lines}
        assert not list(disk.mount.rglob("*doctor*"))
