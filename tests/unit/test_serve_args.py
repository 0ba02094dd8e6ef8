"""The recommended command line of a stock SGLang server, from config.json alone."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from hsjournal.capture.sglang_layers import FAMILIES, LayersError
from hsjournal.cli.serve_args import KNOWN, serve_args
from hsjournal.errors import UsageError
from hsjournal.server.recipe import stock, value_of
from tests.helpers.cli import hsjournal

LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096, "torch_dtype": "bfloat16"}
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": {"num_hidden_layers": 61, "hidden_size": 7168, "dtype": "bfloat16", "max_position_embeddings": 262144},
}  # fmt: skip


def folder(tmp_path: Path, config: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_layers_are_those_that_a_run_chooses(tmp_path: Path) -> None:
    found = serve_args(folder(tmp_path, LLAMA), (), "/shm/r")
    assert found.layers == (1, 15, 28)
    assert found.environment == {"HSJOURNAL_HANDOVER_ROOT": "/shm/r", "HSJOURNAL_CAPTURE_LAYERS": "1,15,28"}
    assert "--disable-radix-cache" in found.argv
    assert value_of(found.argv, "--chunked-prefill-size") == "8192"


def test_a_wrapped_model(tmp_path: Path) -> None:
    found = serve_args(folder(tmp_path, KIMI), (29, 2, 57), "/shm/r", prenorm=True)
    assert found.layers == (2, 29, 57)
    assert found.environment["HSJOURNAL_CAPTURE_PRENORM"] == "1"
    text = found.text()
    assert "61 layers, hidden size 7,168" in text
    assert "57,344 bytes in bfloat16" in text  # (3 + 1) x 7168 x 2
    assert "before the last norm" in text


def test_what_is_printed_is_what_run_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda word, path=None: word)
    found = serve_args(folder(tmp_path, LLAMA), (), "/shm/r")
    lines = [line.removesuffix("\\") for line in found.text().splitlines() if not line.startswith("#")]
    recipe = stock(" ".join(lines), "/shm/r")
    assert recipe.argv[: len(found.argv)] == found.argv
    assert dict(recipe.environment) == found.environment


def test_tensor_parallelism_by_the_weights(tmp_path: Path) -> None:
    model = folder(tmp_path, LLAMA)
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(200_000_000_000)
    assert "add --tp-size 4" in serve_args(model, (), "/r").text()
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(16_000_000_000)
    assert "one GPU of 80 GB is enough" in serve_args(model, (), "/r").text()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LLAMA | {"architectures": ["Gemma3ForCausalLM"]}, "without the residual stream"),
        (LLAMA | {"architectures": ["BertModel"]}, "BertModel is not a model class"),
        (LLAMA | {"architectures": []}, "names no architectures"),
        ([], "not a JSON object"),
        ({"architectures": ["LlamaForCausalLM"]}, "no num_hidden_layers"),
    ],
)
def test_what_is_refused(tmp_path: Path, config: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        serve_args(folder(tmp_path, config), (), "/r")
    assert error.value.remedy


def test_layers_that_the_model_has_not(tmp_path: Path) -> None:
    with pytest.raises(LayersError):
        serve_args(folder(tmp_path, LLAMA), (1, 31), "/r")  # the last one can't be captured


def test_a_class_that_needs_a_version(tmp_path: Path) -> None:
    found = serve_args(folder(tmp_path, LLAMA | {"architectures": ["Gemma4ForCausalLM"]}), (), "/r")
    assert any("Only with SGLang 0.5.23" in note for note in found.notes)


def test_the_command(tmp_path: Path) -> None:
    model = folder(tmp_path, LLAMA)
    said = hsjournal("serve-args", model, "--layers", "2,8")
    assert said.code == 0
    assert "HSJOURNAL_CAPTURE_LAYERS=2,8" in said.out
    assert shlex.split(said.out, comments=True)
    assert hsjournal("serve-args", model, "--json").json()["capture_layers"] == [1, 15, 28]
    nothing = hsjournal("serve-args", tmp_path / "nothing")
    assert nothing.code == 2
    assert "there is no model" in nothing.err


def test_the_table_is_of_classes_that_a_model_may_name() -> None:
    assert len(KNOWN) > len(FAMILIES)
    assert not [name for name in KNOWN if name.endswith(("NextN", "MTP", "Eagle", "Eagle3"))]  # drafts, not targets
