"""`verify --logits N --logits-server URL`: final states held against a stock SGLang server's own log-probabilities."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hsjournal.data import head as head_module
from hsjournal.data.head import Head
from hsjournal.errors import UsageError
from tests.helpers.cli import Result, hsjournal
from tests.helpers.engine import running_engine
from tests.helpers.sglang_models import VOCAB_SIZE, make_sglang_model
from tests.helpers.sglang_server import SglangServer, running_sglang
from tests.helpers.tiny_models import make_tiny_model
from tests.integration.test_verify_logits import Faulty

pytestmark = pytest.mark.timeout(900)
ROWS = (12, 12, 70, 2, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_sglang_model("llama", tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[SglangServer]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="hsjournal-test-"))
    try:
        with running_sglang(model, folder / "root", "--chunked-prefill-size", "48") as server:
            yield server
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def made(model: Path, server: SglangServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over token ids, by that server."""
    folder = tmp_path_factory.mktemp("run")
    rows = [[(7 + 31 * row + 13 * place) % (VOCAB_SIZE - 1) + 1 for place in range(n)] for row, n in enumerate(ROWS)]
    lines = [
        {"id": f"sample {n}", "input_ids": ids, "loss_mask": [0] * (len(ids) - 1) + [1]} for n, ids in enumerate(rows)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = hsjournal(
        "run", folder / "run", "--prompts", folder / "prompts.jsonl", "--model", model,
        "--server", server.url, "--handover-root", server.root,
    )  # fmt: skip
    assert done.code == 0, done
    return folder / "run"


def verify(run_dir: Path, server: str, rows: int = 99) -> Result:
    return hsjournal("verify", run_dir, "--logits", str(rows), "--logits-server", server, "--json")


def test_a_sound_run_passes_and_nothing_is_captured_for_it(made: Path, server: SglangServer) -> None:
    told = verify(made, server.url)
    assert told.code == 0, told
    report = told.json()
    assert (report["checked"], report["faults"], report["server"]) == (5, [], server.url)
    assert report["worst_gap"] < 1e-3
    assert list(server.root.iterdir()) == []
    words = hsjournal("verify", made, "--logits", "2", "--logits-server", server.url).out
    assert "aux layers were not looked at" in words


def test_what_is_not_the_models_is_named(made: Path, model: Path, server: SglangServer, tmp_path: Path) -> None:
    faulty = Faulty(made, tmp_path, model)
    first, second = (faulty.load(row)["hidden_state"] for row in (0, 1))
    faulty.put(0, hidden_state=second)
    faulty.put(1, hidden_state=first)
    faulty.put(2, hidden_state=faulty.reference.before_norm(faulty.load(2)["input_ids"])[None])
    noise = torch.randn(faulty.load(3)["hidden_state"].shape, generator=torch.Generator().manual_seed(1))
    faulty.put(3, hidden_state=noise)
    told = verify(faulty.run_dir, server.url)
    assert told.code == 3, told
    found = {fault["row"]: (fault["state"], fault["kind"], fault["detail"]) for fault in told.json()["faults"]}
    assert {row: fault[:2] for row, fault in found.items()} == {
        0: ("final", "swapped_sample"),
        1: ("final", "swapped_sample"),
        2: ("final", "wrong_norm"),
        3: ("final", "unlike"),
    }
    assert "row 1 (sample 1)" in found[0][2]
    assert "before the last norm, where the run says post-norm" in found[2][2]


def test_a_server_that_tells_none_is_told_with_the_remedy(made: Path, tmp_path: Path) -> None:
    tiny = make_tiny_model("llama", tmp_path / "tiny", seed=5)
    with running_engine(tiny, tmp_path / "root", layers="1,3,4") as engine:
        told = verify(made, engine.url)
    assert told.code == 13
    assert "does not tell the log-probabilities of a prompt: it answered 400" in told.err
    assert "Name a stock SGLang server" in told.err
    gone = verify(made, engine.url)
    assert gone.code == 13
    assert "can't be asked" in gone.err
    alone = hsjournal("verify", made, "--logits-server", engine.url)
    assert alone.code == 2
    assert "--logits N" in alone.err


@pytest.mark.parametrize("tied", [False, True])
def test_rebuilt_by_rows_as_by_the_whole_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tied: bool,
) -> None:
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(3)
    whole = AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
    torch.nn.init.uniform_(whole.model.norm.weight, 0.2, 2.0)
    whole.save_pretrained(tmp_path, max_shard_size="20KB")  # in several files, with an index
    monkeypatch.setattr(head_module, "_ROWS", 10)
    monkeypatch.setattr(head_module, "_TOKENS", 7)
    state, ids = torch.randn(23, 32), torch.randint(0, 97, (23,))
    head = Head(tmp_path)
    with torch.no_grad():
        normed = whole.model.norm(state)
        wanted = whole.lm_head(normed)[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    got = head.norm(state)
    assert got is not None
    assert torch.allclose(got, normed, atol=1e-5)
    assert torch.allclose(head.log_probabilities(normed, ids), wanted, atol=1e-4)
    with pytest.raises(UsageError, match="wide"):
        head.log_probabilities(normed[:, :8], ids)


def test_a_folder_without_output_embeddings_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json can't be read"):
        Head(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"holds lm_head\.weight"):
        Head(tmp_path)
