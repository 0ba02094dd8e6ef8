"""Every format from one SmolLM2 run, read by the trainers' own loaders, equal to plain transformers; and trained on."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.cli import REPOSITORY, hsjournal
from tests.helpers.reference import Reference, worst_row_error
from tests.integration.conftest import RealRun

pytestmark = pytest.mark.timeout(900)  # the first run builds the trainers' environment

MAX_LEN = 4096
TOLERANCE = 1e-4
ON_CPU = {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
KEYS = {
    # format: what its loader gives as ids, aux states and final state
    "specforge": ("input_ids", "hidden_state", "target"),
    "specforge-dflash": ("input_ids", "hidden_states", None),
    "specforge-dspark": ("input_ids", "hidden_states", "target_last_hidden_states"),
    "speculators": ("input_ids", "hidden_states", "verifier_last_hidden_states"),
    "modelopt": ("input_ids", "aux_hidden_states", "base_model_hidden_states"),
    "angelslim": ("input_ids", "hidden_states", "target_hiddens"),
}


@pytest.fixture(scope="module")
def reference(smollm2_run: RealRun) -> Reference:
    return Reference(smollm2_run.model)


@pytest.fixture(scope="module")
def folders(smollm2_run: RealRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each format: exported from the one run; before the norm, from its twin that captures there."""
    base = tmp_path_factory.mktemp("formats")
    prompts = base / "prompts.jsonl"
    lines = (smollm2_run.run_dir.parent / "prompts.jsonl").read_text().splitlines()
    prompts.write_text("\n".join([*lines[:2], "{no JSON", *lines[2:]]))  # a refused row: a gap in the numbers
    made = hsjournal(
        "run", base / "pre", "--prompts", prompts, "--model", smollm2_run.model, "--dtype", "float32",
        "--format", "speculators", "--out", base / "speculators",
    )  # fmt: skip
    assert made.code == 0, made
    found = {"speculators": base / "speculators"}
    for name in (
        "specforge",
        "specforge-dflash",
        "specforge-dspark",
        "modelopt",
        "angelslim",
        "torchspec",
        "safetensors",
    ):
        found[name] = base / name
        done = hsjournal("export", smollm2_run.run_dir, "--format", name, "--out", found[name], "--json")
        assert (done.code, done.json()["written"]) == (0, 6), done
    return found


@pytest.fixture(scope="module")
def read(folders: dict[str, Path], trainers_python: str) -> dict[str, list[dict[str, Any]]]:
    """What the loaders give, by format."""
    tasks = [f"{name}={folders[name]}" for name in KEYS]
    # -P: the script's own folder holds modules with the names of real packages.
    command = [trainers_python, "-P", str(REPOSITORY / "tests/helpers/trainers_read.py"), str(MAX_LEN), *tasks]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800, env=os.environ | ON_CPU)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: torch.load(f"{folders[name]}.read", weights_only=True) for name in KEYS}


@pytest.mark.parametrize("name", KEYS)
def test_its_own_loader_gives_what_transformers_computes(
    name: str, read: dict[str, list[dict[str, Any]]], reference: Reference, smollm2_run: RealRun
) -> None:
    ids_key, aux_key, final_key = KEYS[name]
    ours = {tuple(d["input_ids"].tolist()): d for d in outputs(smollm2_run)}
    samples = read[name]
    assert {tuple(sample[ids_key].flatten().tolist()) for sample in samples} == set(ours)
    for sample in samples:
        ids = sample[ids_key].flatten()
        aux, final = reference.states(ids, [1, 14, 26])
        assert worst_row_error(sample[aux_key].reshape(len(ids), -1), aux) <= TOLERANCE
        if final_key is not None:
            wanted = reference.before_norm(ids) if name == "speculators" else final
            assert worst_row_error(sample[final_key].reshape(len(ids), -1), wanted) <= TOLERANCE
        mask = ours[tuple(ids.tolist())]["loss_mask"].clone()
        if name == "specforge":
            mask[-1] = 0  # its normaliser leaves the last token out
        assert sample["loss_mask"].flatten().tolist() == mask.tolist()
        assert int(mask.sum()) > 0


def outputs(run: RealRun) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=True) for path in run.out_dir.rglob("*.ckpt")]


def test_formats_of_which_only_the_rules_were_read(folders: dict[str, Path], reference: Reference) -> None:
    """TorchSpec's package on PyPI is empty: its OfflineDataset's checks, as they were read, and our own safetensors."""
    root = folders["torchspec"]
    assert json.loads((root / "dataset.json").read_text()) == {"version": 1, "last_hidden_states_prenorm": False}
    lines = [json.loads(line) for line in (root / "manifest.jsonl").read_text().splitlines()]
    assert len({line["data_id"] for line in lines}) == len(lines) == 6
    samples = []
    for line in lines:
        assert line["split"] == "train"
        data = torch.load(root / line["file"], map_location="cpu", weights_only=True, mmap=True)
        assert data["data_id"] == line["data_id"]
        runs = [int(number) for number in data["packed_loss_mask"].split(",")]
        assert sum(runs) == data["input_ids"].shape[1]
        samples.append((data["input_ids"][0], data["hidden_states"][0], data["last_hidden_states"][0]))
    for path in folders["safetensors"].rglob("*.safetensors"):
        held = load_file(path)
        samples.append((held["input_ids"], held["aux_hidden_states"].flatten(1), held["last_hidden_states"]))
    assert len(samples) == 12
    for ids, got_aux, got_final in samples:
        aux, final = reference.states(ids, [1, 14, 26])
        assert worst_row_error(got_aux, aux) <= TOLERANCE
        assert worst_row_error(got_final, final) <= TOLERANCE


def test_a_draft_head_is_trained_by_specforges_own_code(smollm2_run: RealRun, trainers_python: str) -> None:
    """As `scripts/train-draft` does it."""
    assert Path(trainers_python).exists()
    command = [str(REPOSITORY / "scripts/train-draft"), str(smollm2_run.run_dir), "8"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=800, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    assert summary["steps"] == len(summary["losses"]) == 8
    assert summary["last_quarter"] < 0.95 * summary["first_quarter"]
