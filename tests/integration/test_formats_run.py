"""Runs in other formats than SpecForge's: what is captured for them, what lies beside, what is refused at the start."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from hsjournal.config import Manifest
from hsjournal.data import HiddenStates
from tests.helpers.cli import hsjournal
from tests.helpers.engine import running_engine
from tests.helpers.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"), seed=5)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"id": f"s/{r}", "input_ids": [1 + r, 2, 3, 4, 5 + r], "loss_mask": [0, 0, 1, 1, 1]} for r in range(3)]
    path.write_text("\n".join([json.dumps(rows[0]), "no JSON", *map(json.dumps, rows[1:])]))
    return path


@pytest.fixture
def root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="hsjournal-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_speculators_from_end_to_end(model: Path, prompts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = hsjournal(
        "run", run, "--prompts", prompts, "--model", model, "--format", "speculators", "--dtype", "float32"
    )
    assert made.code == 0, made
    assert Manifest.load(run / "manifest.toml").final_norm == "pre"
    out = run / "out"
    assert sorted(p.name for p in (out / "hidden_states").iterdir()) == [f"hs_{r}.safetensors" for r in (0, 2, 3)]
    assert {"state.json", "dataset_info.json", "data-00000-of-00001.arrow"} <= {p.name for p in out.iterdir()}
    with safe_open(out / "hidden_states" / "hs_2.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "final_norm": "pre", "capture_layers": "1,3,4"}
        assert file.get_tensor("token_ids").tolist() == [2, 2, 3, 4, 6]
    index = [json.loads(line) for line in (run / "index.jsonl").read_text().splitlines()]
    assert [(e["row"], e["id"], e["tokens"], e["loss_tokens"]) for e in index] == [
        (0, "s/0", 5, 3), (2, "s/1", 5, 3), (3, "s/2", 5, 3),
    ]  # fmt: skip
    checked = hsjournal("verify", run, "--json").json()
    assert (checked["checked"], checked["damaged"], checked["unowned"]["count"]) == (3, [], 0)
    assert hsjournal("verify", run, "--logits", "3").code == 0
    data = HiddenStates(run, check=True)
    assert [item["loss_mask"].tolist() for item in (data[i] for i in range(3))] == [[0, 0, 1, 1, 1]] * 3
    (run / "index.jsonl").unlink()
    assert hsjournal("index", run).code == 0
    assert len((run / "index.jsonl").read_text().splitlines()) == 3


def test_a_server_that_gives_the_other_norm_is_refused_before_the_run_is_made(
    model: Path, prompts: Path, root: Path, tmp_path: Path
) -> None:
    with running_engine(model, root) as engine:
        told = hsjournal(
            "run", tmp_path / "run", "--prompts", prompts, "--server", engine.url, "--model", model,
            "--handover-root", root, "--format", "speculators",
        )  # fmt: skip
    assert told.code == 2, told
    assert "before the model's last norm" in told.err
    assert "--capture-prenorm" in told.err
    assert not (tmp_path / "run" / "manifest.toml").exists()


def test_what_contradicts_itself_is_refused_at_once(model: Path, prompts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    told = hsjournal("run", run, "--prompts", prompts, "--model", model, "--capture-prenorm")
    assert (told.code, "specforge" in told.err, run.exists()) == (2, True, False), told
    made = hsjournal("run", run, "--prompts", prompts, "--model", model, "--format", "modelopt", "--dtype", "float32")
    assert made.code == 0, made
    assert sorted(p.suffix for p in (run / "out").iterdir()) == [".pt"] * 3
    drift = hsjournal("run", run, "--prompts", prompts, "--model", model, "--capture-prenorm")
    assert (drift.code, "final norm" in drift.err) == (2, True), drift
