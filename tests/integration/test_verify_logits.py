"""`verify --logits`: states of the model pass; a shifted layer, a swapped sample and a wrong norm are found and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from transformers import AutoModelForCausalLM

from hsjournal.config import Manifest, RunPaths
from hsjournal.data.hidden_states import HiddenStates
from hsjournal.data.logits import examine
from hsjournal.errors import HsjournalError, UsageError
from hsjournal.journal.store import Journal
from hsjournal.ops.logits import examine as in_a_child
from hsjournal.states import State
from tests.helpers.cli import hsjournal
from tests.helpers.reference import Reference
from tests.helpers.tiny_models import make_tiny_model

ROWS = (12, 12, 20, 7)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("model"), seed=5)
    with_weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.nn.init.uniform_(with_weights.model.norm.weight, 0.2, 2.0)  # one of ones is the same when it is applied twice
    with_weights.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run over token ids."""
    folder = tmp_path_factory.mktemp("logits")
    lines = []
    for row, count in enumerate(ROWS):
        ids = [(7 + 31 * row + 13 * place) % 200 + 1 for place in range(count)]
        lines.append(json.dumps({"id": f"sample {row}", "input_ids": ids, "loss_mask": [0] + [1] * (count - 1)}))
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    done = hsjournal(
        "run", folder / "run", "--prompts", folder / "prompts.jsonl", "--model", model, "--dtype", "float32",
        "--layers", "1,3,4",
    )  # fmt: skip
    assert done.code == 0, done
    return folder / "run"


class Faulty:
    """A copy of the run, whose files a faulty server would have made: digests and journal agree with them."""

    def __init__(self, made: Path, folder: Path, model: Path) -> None:
        shutil.copytree(made, folder / "run", ignore=shutil.ignore_patterns("*.lock"))
        self.run_dir, self.model = folder / "run", model
        self.paths = RunPaths.of(self.run_dir)
        self.manifest = replace(Manifest.load(self.paths.manifest), out_dir=str(self.run_dir / "out"))
        self.paths.manifest.write_text(self.manifest.to_toml())
        self.reference = Reference(model)

    def path(self, row: int) -> Path:
        return self.run_dir / "out" / "rows_0-2000" / f"data_{row}.ckpt"

    def load(self, row: int) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(self.path(row), weights_only=True)
        return loaded

    def put(self, row: int, **changed: torch.Tensor) -> None:
        torch.save(self.load(row) | changed, self.path(row))
        values: dict[str, Any] = {
            "output_bytes": self.path(row).stat().st_size,
            "output_xxh3": xxhash.xxh3_128_hexdigest(self.path(row).read_bytes()),
        }
        with Journal(self.paths.journal) as journal:
            journal.touch(row, State.VERIFIED, journal.epoch, **values)

    def layer(self, row: int, layer: int) -> torch.Tensor:
        return self.reference.states(self.load(row)["input_ids"], [layer])[0]

    def found(self, rows: Sequence[int] = range(len(ROWS))) -> dict[int, list[tuple[str, str, str]]]:
        answer = examine(HiddenStates(self.run_dir, check=True), rows, self.model)
        faults: dict[int, list[tuple[str, str, str]]] = {}
        for fault in answer["faults"]:
            faults.setdefault(fault["row"], []).append((fault["state"], fault["kind"], fault["detail"]))
        return faults


@pytest.fixture
def faulty(made: Path, model: Path, tmp_path: Path) -> Faulty:
    return Faulty(made, tmp_path, model)


def test_a_sound_run_passes(made: Path) -> None:
    told = hsjournal("verify", made, "--logits", "3", "--json")
    assert told.code == 0, told
    report = told.json()
    assert (report["checked"], report["faults"]) == (3, [])
    assert report["worst_gap"] < 1e-3
    assert "the states are the model's" in hsjournal("verify", made, "--logits", "99").out


@pytest.mark.parametrize("number", [0, 2])
def test_a_shifted_layer(faulty: Faulty, number: int) -> None:
    """As if the server counted a layer's input for its output: aux holds the next layer's."""
    layer = faulty.manifest.capture_layers[number]
    aux = faulty.load(2)["aux_hidden_state"].clone()
    aux[0, :, number * 64 : (number + 1) * 64] = faulty.layer(2, layer + 1)
    faulty.put(2, aux_hidden_state=aux)
    text = f"it is the output of layer {layer + 1}, not of layer {layer}"
    assert faulty.found() == {2: [(f"aux_{number}", "shifted_layer", text)]}


def test_a_final_state_of_another_layer(faulty: Faulty) -> None:
    norm = faulty.reference._model.model.norm
    with torch.no_grad():
        faulty.put(0, hidden_state=norm(faulty.layer(0, 5))[None])
    ((name, kind, detail),) = faulty.found()[0]
    assert (name, kind) == ("final", "shifted_layer")
    assert "layer 5" in detail


def test_swapped_samples(faulty: Faulty) -> None:
    """Two of equal length came back for each other: ids, mask and provenance are right, the states are not."""
    first, second = faulty.load(0), faulty.load(1)
    names = ("aux_hidden_state", "hidden_state")
    faulty.put(0, **{name: second[name] for name in names})
    faulty.put(1, **{name: first[name] for name in names})
    found = faulty.found()
    assert sorted(found) == [0, 1]
    for row, other in ((0, 1), (1, 0)):
        assert [fault[:2] for fault in found[row]] == [
            (name, "swapped_sample") for name in ("aux_0", "aux_1", "aux_2", "final")
        ]
        assert all(f"row {other} (sample {other})" in fault[2] for fault in found[row])
    assert faulty.found([1]) == {1: found[1]}  # the partner needs not be drawn


def test_a_wrong_norm(faulty: Faulty) -> None:
    ids = faulty.load(3)["input_ids"]
    faulty.put(3, hidden_state=faulty.reference.before_norm(ids)[None])
    norm = faulty.reference._model.model.norm
    with torch.no_grad():
        faulty.put(2, hidden_state=norm(faulty.load(2)["hidden_state"]))
    found = faulty.found()
    assert sorted(found) == [2, 3]
    assert [fault[:2] for fault in found[3]] == [("final", "wrong_norm")]
    assert "before the last norm, where the run says post-norm" in found[3][0][2]
    assert [fault[:2] for fault in found[2]] == [("final", "wrong_norm")]
    assert "twice" in found[2][0][2]


def test_noise_is_like_nothing(faulty: Faulty) -> None:
    data = faulty.load(1)
    faulty.put(1, hidden_state=torch.randn(data["hidden_state"].shape, generator=torch.Generator().manual_seed(1)))
    assert [fault[:2] for fault in faulty.found()[1]] == [("final", "unlike")]


def test_the_child_tells_and_the_command_ends_with_3(faulty: Faulty) -> None:
    faulty.put(3, hidden_state=faulty.reference.before_norm(faulty.load(3)["input_ids"])[None])
    told = hsjournal("verify", faulty.run_dir, "--logits", "9")
    assert told.code == 3, told
    assert "FAULT row 3 (sample 3) final: wrong_norm" in told.out


def test_what_stands_in_the_way_is_told(faulty: Faulty, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be loaded"):
        in_a_child(faulty.paths, 1, seed=1, model=str(tmp_path / "nowhere"))
    faulty.path(0).write_bytes(faulty.path(0).read_bytes()[:-1])
    with pytest.raises(HsjournalError, match="wrong_size"):
        in_a_child(faulty.paths, 4, seed=1)
