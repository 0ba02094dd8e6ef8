"""Stock SGLang, as pip installs it, captures by our plugin: compared row by row with transformers.

Tolerances, never equality: whether two computations agree to the last bit depends on how many rows share a pass. A row of
another layer, request or position differs by half its length or more.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hsjournal.dump.protocol import DONE, ERROR, META, CaptureFailure, FailureReason, Meta, RequestId, token_ids_sha256
from tests.helpers.cli import hsjournal
from tests.helpers.sglang_models import (
    VOCAB_SIZE,
    load_reference,
    make_sglang_model,
    reference_states,
    text_folder,
)
from tests.helpers.sglang_server import SglangServer, running_sglang

pytestmark = pytest.mark.timeout(900)
TOLERANCE = 1e-4
CHUNK = 16
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 50, 64, 77, 100)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sglang_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="hsjournal-test-"))
    try:
        yield folder / "root"
    finally:
        shutil.rmtree(folder)


def prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(VOCAB_SIZE) for _ in range(length)]


def sample(row: int, tokens: int) -> str:
    return str(RequestId.sample("test0", row, 1, tokens))


async def post(
    session: aiohttp.ClientSession, server: SglangServer, rid: str, ids: Sequence[int], new: int = 1
) -> dict[str, Any]:
    body = {"rid": rid, "input_ids": list(ids), "sampling_params": {"max_new_tokens": new, "temperature": 0}}
    async with session.post(f"{server.url}/generate", json=body, timeout=aiohttp.ClientTimeout(120)) as answer:
        return {"status": answer.status, **await answer.json()}


def send(server: SglangServer, requests: Sequence[tuple[str, Sequence[int], int]]) -> list[dict[str, Any]]:
    """All at once; the answers in order."""

    async def go() -> list[dict[str, Any]]:
        async with aiohttp.ClientSession(trust_env=False) as session:
            return list(await asyncio.gather(*(post(session, server, *request) for request in requests)))

    return asyncio.run(go())


def arrived(server: SglangServer, rid: str) -> Path:
    folder, deadline = server.root / rid, time.monotonic() + 20
    while not folder.is_dir():
        assert time.monotonic() < deadline, f"no dump of {rid}:\n{server.tail()}"
        time.sleep(0.02)
    return folder


def failure(server: SglangServer, rid: str) -> CaptureFailure:
    folder = arrived(server, rid)
    assert not (folder / DONE).exists()
    return CaptureFailure.from_json((folder / ERROR).read_bytes())


def states(folder: Path) -> tuple[Meta, list[Any]]:
    import torch

    assert (folder / DONE).exists(), (folder / ERROR).read_text()
    meta = Meta.from_json((folder / META).read_bytes())
    dtype = getattr(torch, meta.dtype)
    return meta, [
        torch.frombuffer(bytearray((folder / t.file).read_bytes()), dtype=dtype).view(t.shape) for t in meta.tensors
    ]


def worst_row(got: Any, wanted: Any) -> float:
    return float(((got - wanted).norm(dim=1) / wanted.norm(dim=1)).max())


def assert_equals_reference(server: SglangServer, model: Any, rid: str, ids: Sequence[int]) -> Meta:
    meta, got = states(arrived(server, rid))
    assert meta.token_ids_sha256 == token_ids_sha256(ids)
    wanted, before_norm = reference_states(model, ids, meta.capture_layers)
    if meta.final_norm == "pre":
        wanted[-1] = before_norm
    for tensor, mine, theirs in zip(meta.tensors, got, wanted, strict=True):
        assert mine.shape == theirs.shape
        assert worst_row(mine, theirs) < TOLERANCE, (rid, tensor.name)
    # The comparison itself must be able to fail: neighbouring layers and positions are far apart.
    assert worst_row(got[0], wanted[1]) > 100 * TOLERANCE
    if len(ids) > 1:
        assert worst_row(got[0][1:], wanted[0][:-1]) > 100 * TOLERANCE
    return meta


def test_llama_rows_match_and_foreign_requests_are_served_as_without_us(
    llama: Path, root: Path, tmp_path: Path
) -> None:
    model, draw = load_reference(llama), random.Random(0)
    ours = [(sample(row, n), prompt(draw, n), 1) for row, n in enumerate(LENGTHS)]
    foreign = [(f"somebody-{i}", prompt(draw, 20 + i), 6) for i in range(4)]
    mixed = [*ours, *foreign]
    draw.shuffle(mixed)
    options = ("--chunked-prefill-size", str(CHUNK), "--enable-mixed-chunk")
    with running_sglang(llama, root, *options) as server:
        answers = dict(zip((r[0] for r in mixed), send(server, mixed), strict=True))
        assert all(answer["status"] == 200 for answer in answers.values())
        metas = [assert_equals_reference(server, model, rid, ids) for rid, ids, _ in ours]
        assert max(len(meta.chunks) for meta in metas) > len(LENGTHS) // 3, "nothing was chunked"
        assert all(meta.capture_layers == (1, 3, 4) and meta.final_norm == "post" for meta in metas)
        assert sorted(p.name for p in root.iterdir()) == sorted(rid for rid, _, _ in ours)

        about = server.info()["hsjournal"]
        assert about["refusal"] is None
        assert {about["boot_id"]} == {meta.boot_id for meta in metas}
        assert (about["hidden_size"], about["num_layers"], about["context_length"]) == (256, 8, 2048)
        assert server.info()["internal_states"][0]["hsjournal"] == about

        # A request id that promises another number of tokens, either way.
        send(server, [(sample(90, 9), prompt(draw, 40), 1), (sample(91, 60), prompt(draw, 40), 1)])
        assert {failure(server, sample(row, n)).reason for row, n in ((90, 9), (91, 60))} == {FailureReason.MISMATCH}

        # Decoding after the prefill adds no rows; the same id serves again once its dump is gone.
        ids = prompt(draw, 35)
        for _ in range(2):
            send(server, [(sample(92, 35), ids, 8)])
            assert_equals_reference(server, model, sample(92, 35), ids)
            shutil.rmtree(root / sample(92, 35))

        _abort_in_the_middle(server, sample(93, 1500), prompt(draw, 1500))
        send(server, [(sample(94, 40), ids := prompt(draw, 40), 1)])
        assert_equals_reference(server, model, sample(94, 40), ids)
        assert "Traceback" not in server.log.read_text()

    with running_sglang(llama, None, *options) as plain:
        assert "hsjournal" not in plain.info()
        assert "runs without hsjournal's capture plugin" in run_refused(replace(plain, root=root), tmp_path)
        for (rid, _, _), answer in zip(foreign, send(plain, foreign), strict=True):
            assert answer["output_ids"] == answers[rid]["output_ids"]


def _abort_in_the_middle(server: SglangServer, rid: str, ids: Sequence[int]) -> None:
    async def go() -> None:
        async with aiohttp.ClientSession(trust_env=False) as session:
            running = asyncio.create_task(post(session, server, rid, ids))
            tmp, deadline = server.root / f".tmp-{rid}", time.monotonic() + 20
            while not tmp.exists():
                assert time.monotonic() < deadline, "the prefill never began"
                await asyncio.sleep(0.005)
            await session.post(f"{server.url}/abort_request", json={"rid": rid})
            await asyncio.wait([running], timeout=60)

    asyncio.run(go())
    assert failure(server, rid).reason is FailureReason.ABORTED


def run_refused(server: SglangServer, folder: Path) -> str:
    """What ``hsjournal run`` says to this server, before a single sample is sent."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}))
    end = hsjournal("run", folder / "run", "--prompts", prompts, "--server", server.url, "--handover-root", server.root)
    assert end.code == 13, end
    assert "Traceback" not in end.err
    assert server.process.poll() is None
    return end.err


# [1, ...] is where SGLang's method adds 1 for this architecture, [2, ...] and [0, ...] are where it does not.
# The wrapper of Kimi-K2.5 hands the ids to its language model, of the same architecture.
@pytest.mark.parametrize(
    ("kind", "layers"), [("deepseek_v3", (1, 3, 4)), ("deepseek_v3", (0, 2, 5)), ("kimi_k25", (2, 3, 5))]
)
def test_deepseek_v3_rows_match_whatever_the_first_layer_is(
    tmp_path: Path, root: Path, kind: str, layers: tuple[int, ...]
) -> None:
    folder, draw = make_sglang_model(kind, tmp_path / "model"), random.Random(1)
    model = load_reference(text_folder(kind, folder))
    ours = [(sample(row, n), prompt(draw, n), 1) for row, n in enumerate(LENGTHS)]
    chosen = {"HSJOURNAL_CAPTURE_LAYERS": ",".join(map(str, layers))}
    options = ["--chunked-prefill-size", str(CHUNK), *(["--trust-remote-code"] if kind == "kimi_k25" else [])]
    with running_sglang(folder, root, *options, environment=chosen) as server:
        send(server, ours)
        for rid, ids, _ in ours:
            assert assert_equals_reference(server, model, rid, ids).capture_layers == layers
        about = server.info()["hsjournal"]
        assert about["has_experts"] is True
        # What a draft model's configuration must say, as this architecture's method reads it.
        known: dict[tuple[int, ...], list[int]] = {(1, 3, 4): [1, 3, 4], (0, 2, 5): [3, 6, 1], (2, 3, 5): [3, 4, 6]}
        assert about["eagle_aux_hidden_state_layer_ids"] == known[layers]


def test_prenorm_states_match_and_a_prefix_hit_is_refused(llama: Path, root: Path, tmp_path: Path) -> None:
    model, draw = load_reference(llama), random.Random(2)
    ids = prompt(draw, 60)
    with running_sglang(llama, root, environment={"HSJOURNAL_CAPTURE_PRENORM": "1"}, radix_cache=True) as server:
        send(server, [(sample(0, 60), ids, 1)])
        assert assert_equals_reference(server, model, sample(0, 60), ids).final_norm == "pre"
        answer = send(server, [(sample(1, 60), ids, 1)])[0]
        assert answer["status"] == 200
        refused = failure(server, sample(1, 60))
        assert refused.reason is FailureReason.PREFIX_HIT
        assert "--disable-radix-cache" in refused.detail
        said = run_refused(server, tmp_path)
        assert "keeps a prefix cache" in said
        assert "Start it with --disable-radix-cache" in said


def test_a_server_that_cannot_capture_says_why_and_serves(llama: Path, root: Path, tmp_path: Path) -> None:
    draw = random.Random(3)
    with running_sglang(llama, root, environment={"HSJOURNAL_CAPTURE_LAYERS": "1,3,7"}) as server:
        answers = send(server, [(sample(0, 30), prompt(draw, 30), 1), ("somebody", prompt(draw, 30), 4)])
        assert [answer["status"] for answer in answers] == [200, 200]
        refused = failure(server, sample(0, 30))
        assert refused.reason is FailureReason.UNSUPPORTED
        about = server.info()["hsjournal"]
        assert refused.detail == about["refusal"]
        assert "0 to 6" in about["refusal"]
        assert json.loads((root / sample(0, 30) / ERROR).read_text())["boot_id"] == about["boot_id"]
        assert f"{server.url} can't capture: {about['refusal']}" in run_refused(server, tmp_path)
