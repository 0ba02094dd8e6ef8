"""What the embedded engine hands over equals plain transformers on the same token ids."""

from __future__ import annotations

import http.client
import json
import random
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hsjournal.dump.protocol import Meta, RequestId
from tests.helpers.engine import Engine, running_engine
from tests.helpers.tiny_models import KINDS, VOCAB_SIZE, make_tiny_model

TOLERANCE = 1e-4
LENGTHS = (1, 2, 3, 7, 16, 16, 31, 64, 65, 128, 200, 333)


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Any]]:
    folder = make_tiny_model(request.param, tmp_path_factory.mktemp("model"), seed=3)
    torch.set_num_threads(1)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    root = Path(tempfile.mkdtemp(prefix="hsjournal-test-", dir="/dev/shm"))
    try:
        with running_engine(folder, root, max_batch_tokens=400) as engine:
            yield engine, reference
    finally:
        shutil.rmtree(root, ignore_errors=True)


def prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def send(engine: Engine, rid: str, ids: Sequence[int]) -> int:
    connection = http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=60)
    body = {"rid": rid, "input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
    connection.request("POST", "/generate", json.dumps(body))
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    assert response.status == 200, answer
    return int(answer["output_ids"][0])


def dumped(engine: Engine, rid: str) -> list[torch.Tensor]:
    folder = engine.root / rid
    meta = Meta.from_json((folder / "meta.json").read_bytes())
    assert meta.dtype == "float32"
    return [
        torch.frombuffer(bytearray((folder / t.file).read_bytes()), dtype=torch.float32).view(t.shape)
        for t in meta.tensors
    ]


def worst_row(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert got.shape == wanted.shape
    return float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def check(engine: Engine, reference: Any, rid: str, ids: Sequence[int], token: int) -> None:
    with torch.no_grad():
        out = reference(torch.tensor([ids]), output_hidden_states=True)
    layers = Meta.from_json((engine.root / rid / "meta.json").read_bytes()).capture_layers
    assert layers == (1, 3, 4)
    wanted = [*(out.hidden_states[layer + 1][0] for layer in layers), out.hidden_states[-1][0]]
    got = dumped(engine, rid)
    assert len(got) == len(wanted)
    for name, ours, theirs in zip((*map(str, layers), "final"), got, wanted, strict=True):
        assert worst_row(ours, theirs) <= TOLERANCE, f"{name} of {len(ids)} tokens"
    assert token == int(out.logits[0, -1].argmax())


def test_one_by_one(served: tuple[Engine, Any]) -> None:
    engine, reference = served
    for row, ids in enumerate(prompts(1)):
        rid = str(RequestId.sample("alone", row, 1, len(ids)))
        check(engine, reference, rid, ids, send(engine, rid, ids))


def test_batched_with_mixed_lengths(served: tuple[Engine, Any]) -> None:
    engine, reference = served
    wanted = {str(RequestId.sample("batch", row, 1, len(ids))): ids for row, ids in enumerate(prompts(2))}
    tokens: dict[str, int] = {}

    def work(rid: str, ids: Sequence[int]) -> None:
        tokens[rid] = send(engine, rid, ids)

    threads = [threading.Thread(target=work, args=item) for item in wanted.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(tokens) == set(wanted)
    for rid, ids in wanted.items():
        check(engine, reference, rid, ids, tokens[rid])


def test_a_list_of_prompts_in_one_request(served: tuple[Engine, Any]) -> None:
    engine, reference = served
    chosen = prompts(3)[2:8]
    rids = [str(RequestId.sample("list", row, 1, len(ids))) for row, ids in enumerate(chosen)]
    connection = http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=60)
    body = {"rid": rids, "input_ids": chosen, "sampling_params": {"max_new_tokens": 1}}
    connection.request("POST", "/generate", json.dumps(body))
    answers = json.loads(connection.getresponse().read())
    connection.close()
    for rid, ids, answer in zip(rids, chosen, answers, strict=True):
        check(engine, reference, rid, ids, answer["output_ids"][0])


def test_the_comparison_would_notice(served: tuple[Engine, Any]) -> None:
    """The models are made so that a lost mask, a shifted position or a neighbouring layer shows."""
    _, reference = served
    ids = torch.tensor([prompts(4)[7]])
    with torch.no_grad():
        right = reference(ids, output_hidden_states=True)
        unmasked = reference(torch.cat([ids.flip(1), ids], dim=1), output_hidden_states=True).hidden_states[4]
    assert worst_row(unmasked[0, ids.shape[1] :], right.hidden_states[4][0]) > 100 * TOLERANCE
    assert worst_row(right.hidden_states[3][0], right.hidden_states[4][0]) > 100 * TOLERANCE


def test_before_the_last_norm_on_demand(tmp_path: Path) -> None:
    """`--capture-prenorm`: the residual stream at the norm's entry; the token that follows is the model's all the same."""
    model = make_tiny_model("llama", tmp_path, seed=3)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    entered: list[torch.Tensor] = []
    reference.model.norm.register_forward_pre_hook(lambda _module, inputs: entered.append(inputs[0][0].clone()))
    with running_engine(model, tmp_path / "root", layers="1,3,4", capture_prenorm=True) as engine:
        ids = prompts(5)[6]
        rid = str(RequestId.sample("prenorm", 0, 1, len(ids)))
        token = send(engine, rid, ids)
        assert Meta.from_json((engine.root / rid / "meta.json").read_bytes()).final_norm == "pre"
        with torch.no_grad():
            out = reference(torch.tensor([ids]), output_hidden_states=True)
        *_, final = dumped(engine, rid)
        assert worst_row(final, entered[0]) <= TOLERANCE
        assert worst_row(final, out.hidden_states[-1][0]) > 100 * TOLERANCE
        assert token == int(out.logits[0, -1].argmax())
