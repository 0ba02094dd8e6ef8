"""--dry-run: says what would be done, refuses what the command itself would refuse, and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hsjournal.states import State
from tests.helpers.cli import hsjournal
from tests.helpers.runs import MadeRun, make_run


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path, [State.VERIFIED, State.PENDING, State.DUMPED, State.FAILED, State.FAILED])


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*") if not p.name.endswith(".lock")}


def test_a_new_run(tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(
        "".join(json.dumps({"input_ids": [5] * n, "loss_mask": [1] * n}) + "\n" for n in (3, 40)) + "{broken\n"
    )
    before = everything(tmp_path)
    served = ("--server", "http://127.0.0.1:1")  # which nobody asks
    done = hsjournal("run", tmp_path / "run", "--prompts", prompts, *served, "--dry-run")
    assert done.code == 0, done.err
    assert "2 usable, 1 refused" in done.out
    assert str(tmp_path / "run" / "out") in done.out
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ([], 2, "--prompts"),
        (["--prompts", "none.jsonl"], 2, "none.jsonl"),
        (["--prompts", "p.jsonl", "--format", "nonsense"], 2, "nonsense"),
        (["--prompts", "p.jsonl", "--out", "."], 2, "is not empty"),
    ],
)
def test_a_new_run_that_would_be_refused(arguments: list[str], code: int, word: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"input_ids": [1, 2], "loss_mask": [0, 1]}) + "\n")
    words = [str(tmp_path / a) if a in ("none.jsonl", "p.jsonl", ".") else a for a in arguments]
    done = hsjournal("run", tmp_path / "run", *words, "--dry-run")
    assert (done.code, word in done.err) == (code, True), done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["run", "resume"])
def test_an_old_run(command: str, run: MadeRun) -> None:
    before = run.bytes_of()
    done = hsjournal(command, run.paths.run_dir, "--handover-root", run.root, "--dry-run")
    assert done.code == 0, done.err
    assert "1 rows are verified; 2 are not complete" in done.out
    assert run.bytes_of() == before


def test_an_old_run_that_has_drifted(run: MadeRun) -> None:
    done = hsjournal("run", run.paths.run_dir, "--layers", "0,1", "--dry-run")
    assert done.code == 2
    assert "layers" in done.err


def test_resume_makes_nothing(tmp_path: Path) -> None:
    assert hsjournal("resume", tmp_path / "run", "--dry-run").code == 10
    assert list(tmp_path.iterdir()) == []


def test_retry(run: MadeRun) -> None:
    states = run.states()
    done = hsjournal("retry", run.paths.run_dir, "--all", "--dry-run", "--json").json()
    assert done == {"retried": 0, "rows": [3, 4]}
    assert "2 rows would be pending again: 3, 4" in hsjournal("retry", run.paths.run_dir, "--all", "--dry-run").out
    assert run.states() == states
