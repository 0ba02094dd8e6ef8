"""The main job through the command line: real engine, real models, every output held against plain transformers."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import pytest

from hsjournal.config import Manifest, RunPaths
from tests.helpers.cli import Result, hsjournal
from tests.helpers.reference import Reference, check_outputs
from tests.helpers.tiny_models import KINDS, make_tiny_model

WORDS = "The quick brown fox jumps over the lazy dog and runs away from all that was ever asked of it. "


@dataclass(frozen=True)
class Finished:
    """A run that was made once for this module."""

    kind: str
    model: Path
    prompts: Path
    run_dir: Path
    result: Result


def write_prompts(path: Path) -> int:
    """Every row shape, mixed lengths, and three lines that are refused; the number of lines."""
    rows: list[object] = [
        {
            "id": f"c{i}",
            "conversations": [
                {"role": "user", "content": WORDS[: 5 + 7 * i]},
                {"role": "assistant", "content": WORDS * (1 + i % 3)},
            ],
        }
        for i in range(9)
    ]
    rows += [
        {"id": "from/value ☃", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": WORDS}]},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Why?"},
                {"role": "assistant", "content": "So."},
            ]
        },
        {"id": "t", "text": "already templated " + WORDS},
        {"id": "ids", "input_ids": list(range(3, 40)), "loss_mask": [0] * 10 + [1] * 27},
        {"id": "one-token", "input_ids": [7], "loss_mask": [1]},
        {"id": "no answer", "conversations": [{"role": "user", "content": "Hello?"}]},
        {"id": "c0", "text": "an id that stands twice"},
    ]
    lines = [json.dumps(row) for row in rows] + ["{broken"]
    path.write_text("\n".join(lines) + "\n")
    return len(lines)


@pytest.fixture(scope="module", params=KINDS)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    kind = str(request.param)
    folder = tmp_path_factory.mktemp(kind)
    model = make_tiny_model(kind, folder / "model")
    write_prompts(folder / "prompts.jsonl")
    run_dir = folder / "run"
    result = hsjournal("run", run_dir, "--prompts", folder / "prompts.jsonl", "--model", model, "--dtype", "float32")
    return Finished(kind, model, folder / "prompts.jsonl", run_dir, result)


def test_every_row_is_verified_or_skipped_with_a_reason(finished: Finished) -> None:
    assert finished.result.code == 0, finished.result
    status = hsjournal("status", finished.run_dir, "--json").json()
    assert status["complete"]
    assert status["rows"] == 17
    assert {state: c["rows"] for state, c in status["counts"].items() if c["rows"]} == {"verified": 14, "skipped": 3}
    with sqlite3.connect(f"file:{finished.run_dir / 'journal.db'}?mode=ro", uri=True) as journal:
        skipped = dict(journal.execute("SELECT line, reason FROM sample WHERE state = 'skipped'"))
        methods = {m for (m,) in journal.execute("SELECT DISTINCT verify_method FROM sample WHERE state = 'verified'")}
    assert {line: reason.partition(":")[0] for line, reason in skipped.items()} == {
        15: "no_loss_tokens",
        16: "duplicate_id",
        17: "broken_json",
    }
    assert methods <= {"direct", "dropped", "memory"}
    assert methods


def test_outputs_equal_plain_transformers(finished: Finished) -> None:
    found = check_outputs(finished.run_dir / "out", Reference(finished.model))
    assert sorted(found) == list(range(14))
    assert found[9]["hsjournal"]["sample_id"] == "from/value ☃"
    assert found[12]["input_ids"].tolist() == list(range(3, 40))
    assert found[12]["loss_mask"].tolist() == [0] * 10 + [1] * 27
    assert found[12]["loss_mask"].dtype == found[12]["input_ids"].dtype


def test_a_forecast_is_printed_before_the_work(finished: Finished) -> None:
    lines = finished.result.out.splitlines()
    forecast = next(i for i, line in enumerate(lines) if "forecast: 14 samples" in line)
    assert any("free" in line and "output" in line for line in lines[forecast : forecast + 5])
    assert any("running" in line for line in lines[forecast:])
    assert "\x1b" not in finished.result.out


def test_the_manifest_freezes_what_the_run_was_made_for(finished: Finished) -> None:
    manifest = Manifest.load(finished.run_dir / "manifest.toml")
    assert manifest.capture_layers == (1, 3, 4)
    assert (manifest.dtype, manifest.final_norm, manifest.format, manifest.engine) == (
        "float32",
        "post",
        "specforge",
        "embedded",
    )
    assert manifest.sources[0].nbytes == finished.prompts.stat().st_size


def test_run_and_resume_again_change_nothing(finished: Finished) -> None:
    def look() -> dict[str, tuple[int, int]]:
        files = (finished.run_dir / "out").rglob("*")
        return {str(p): (p.stat().st_ino, p.stat().st_mtime_ns) for p in files if p.is_file()}

    before = look()
    for command in (("run", finished.run_dir, "--prompts", finished.prompts), ("resume", finished.run_dir)):
        again = hsjournal(*command)
        assert again.code == 0, again
    assert look() == before


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--layers", "0,1,2", "layers"),
        ("--dtype", "bfloat16", "dtype"),
        ("--format", "other", "format"),
        ("--out", "/tmp/elsewhere", "output folder"),
    ],
)
def test_a_resume_with_other_settings_is_refused_with_the_difference(
    finished: Finished, option: str, value: str, named: str
) -> None:
    refused = hsjournal("run", finished.run_dir, option, value)
    assert refused.code == 2
    assert named in refused.err
    assert value.partition(",")[0] in refused.err


def test_a_resume_with_other_prompts_is_refused(finished: Finished, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(finished.prompts.read_text().replace("Why?", "Who?"))
    refused = hsjournal("run", finished.run_dir, "--prompts", other)
    assert refused.code == 2
    assert "prompts" in refused.err
    assert "sha256" in refused.err


def test_a_finished_run_leaves_nothing_in_shared_memory(finished: Finished) -> None:
    assert finished.result.code == 0
    assert not RunPaths.of(finished.run_dir).shm.exists()


def test_the_longest_prompt_that_the_server_takes_is_sent_and_one_more_is_skipped(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model", context_length=64)
    rows = [{"id": f"{n}", "input_ids": [5] * n, "loss_mask": [1] * n} for n in (63, 64, 65)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_dir = tmp_path / "run"
    done = hsjournal("run", run_dir, "--prompts", tmp_path / "p.jsonl", "--model", model, "--dtype", "float32")
    assert done.code == 0, done
    with sqlite3.connect(f"file:{run_dir / 'journal.db'}?mode=ro", uri=True) as journal:
        found = journal.execute("SELECT state, reason FROM sample ORDER BY row").fetchall()
    assert [state for state, _ in found] == ["verified", "verified", "skipped"]
    assert found[2][1] == "too_long: 65 tokens, more than 64 (the longest prompt that the server takes whole)"
