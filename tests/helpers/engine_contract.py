"""What every engine must do that a run can use: asked through our own client, and looked at in the hand-over root.

A test module makes a class of :class:`EngineContract` and gives it a fixture ``engine``.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hsjournal.dump.protocol import SCHEMA, FailureReason, RequestId, token_ids_sha256
from hsjournal.dump.reader import open_dump, open_root, read_failure
from hsjournal.errors import HsjournalError
from hsjournal.server.client import RefusedError, Reply, ServerClient
from hsjournal.server.preflight import ask_agreement, preflight
from hsjournal.server.preflight.states import States, read_states
from tests.helpers.fake_server import until
from tests.helpers.sglang_models import HIDDEN, LAYERS, VOCAB_SIZE, load_reference, reference_states

RUN = "contract"
TOLERANCE = 1e-4
ARRIVAL_S = 20.0
_rows = itertools.count()


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine over a tiny Llama of :mod:`tests.helpers.sglang_models`, in float32, with default layers.

    Args:
        url: of it.
        root: its hand-over root, which holds nothing else.
        model: the folder that it serves.
        longest: prompt that it takes whole.
    """

    url: str
    root: Path
    model: Path
    longest: int


@cache
def reference(folder: Path) -> Any:
    """The model in transformers, loaded once."""
    return load_reference(folder)


def draw(tokens: int, seed: int = 0) -> list[int]:
    """A prompt."""
    source = random.Random(seed * 100_000 + tokens)
    return [source.randrange(1, VOCAB_SIZE) for _ in range(tokens)]


def fresh(tokens: int) -> RequestId:
    """A request id that was never used."""
    return RequestId.sample(RUN, next(_rows), 1, tokens)


async def send(
    engine: Engine, requests: Sequence[tuple[RequestId | str, Sequence[int]]]
) -> list[Reply | HsjournalError]:
    """All at once; an answer that is an error stands in its place."""
    async with ServerClient(engine.url) as client:
        answers = await asyncio.gather(*(client.generate(str(r), ids) for r, ids in requests), return_exceptions=True)
    assert all(isinstance(answer, Reply | HsjournalError) for answer in answers), answers
    return list(answers)  # type: ignore[arg-type]


async def arrived(engine: Engine, rid: RequestId | str) -> None:
    """Wait until something is published under this name."""
    await until((engine.root / str(rid)).is_dir, ARRIVAL_S)


async def taken(engine: Engine, rid: RequestId, ids: Sequence[int]) -> States:
    """The dump of ``rid``, checked as a worker does, and removed."""
    await arrived(engine, rid)
    fd = open_root(engine.root)
    try:
        with open_dump(fd, rid, None) as dump:
            assert dump.meta.rid == str(rid)
            assert dump.meta.token_ids_sha256 == token_ids_sha256(ids)
            assert (dump.meta.num_tokens, dump.meta.hidden_size, dump.meta.dtype) == (len(ids), HIDDEN, "float32")
            assert (dump.meta.capture_layers, dump.meta.final_norm) == ((1, 3, 4), "post")
            found = read_states(dump)
    finally:
        os.close(fd)
    shutil.rmtree(engine.root / str(rid))
    return found


async def failed(engine: Engine, rid: RequestId) -> FailureReason:
    """Why ``rid`` was not captured; the failure is removed."""
    await arrived(engine, rid)
    fd = open_root(engine.root)
    try:
        failure = read_failure(fd, rid)
    finally:
        os.close(fd)
    assert failure is not None
    assert failure.rid == str(rid)
    assert os.listdir(engine.root / str(rid)) == ["error"]
    shutil.rmtree(engine.root / str(rid))
    return failure.reason


def assert_is(model: Path, ids: Sequence[int], states: States) -> None:
    """Every row is the reference's, and no other row is near."""
    wanted, _ = reference_states(reference(model), ids, (1, 3, 4))
    for mine, theirs in zip(states.tensors, wanted, strict=True):
        error = abs(mine - theirs.numpy()).max(axis=1) / abs(theirs.numpy()).max(axis=1)
        assert error.max() < TOLERANCE
    other = abs(states.tensors[0] - wanted[1].numpy()).max(axis=1) / abs(wanted[1].numpy()).max(axis=1)
    assert other.min() > 100 * TOLERANCE


class EngineContract:
    """The tests."""

    @pytest.fixture(autouse=True)
    def _leaves_nothing(self, engine: Engine) -> Any:
        yield
        assert [p.name for p in engine.root.iterdir() if p.name.startswith(".")] == []

    async def test_it_tells_what_it_captures_and_passes_the_preflight(self, engine: Engine) -> None:
        async with ServerClient(engine.url) as client:
            about = (await client.server_info())["hsjournal"]
            facts = await preflight(client, engine.root, RUN)
            agreement = await ask_agreement(client, engine.root, RUN, facts, 1 << 30)
        assert about["protocol"] == SCHEMA
        assert about["capture_layers"] == [1, 3, 4]
        assert (about["num_layers"], about["hidden_size"], about["vocab_size"]) == (LAYERS, HIDDEN, VOCAB_SIZE)
        assert about["handover_root"] == str(engine.root)
        assert facts.boot_id == about["boot_id"]
        assert facts.longest_prompt == engine.longest
        assert facts.meta.versions["torch"]
        assert agreement is not None
        assert all(d.worst_error < TOLERANCE for part in agreement.differences for d in part)
        assert list(engine.root.iterdir()) == []

    async def test_every_row_of_mixed_lengths_at_once_is_its_own(self, engine: Engine) -> None:
        lengths = (1, 2, 15, 16, 17, 31, 33, 64, 65, 100, 150, 16, 16, 200, 3, 47)
        requests = [(fresh(n), draw(n, seed)) for seed, n in enumerate(lengths)]
        for (_, ids), reply in zip(requests, await send(engine, requests), strict=True):
            assert isinstance(reply, Reply)
            assert (reply.prompt_tokens, reply.finish_reason) == (len(ids), "length")
        for rid, ids in requests:
            assert_is(engine.model, ids, await taken(engine, rid, ids))
        assert list(engine.root.iterdir()) == []

    @pytest.mark.parametrize(
        "rid", ["somebody", "hsj-../evil", "../../evil", "hsj-contract-01-1-4", "HSJ-contract-1-1-4"]
    )
    async def test_foreign_requests_are_served_and_leave_nothing(self, engine: Engine, rid: str) -> None:
        (reply,) = await send(engine, [(rid, draw(4))])
        assert isinstance(reply, Reply)
        assert reply.prompt_tokens == 4
        await asyncio.sleep(0.1)
        assert list(engine.root.iterdir()) == []
        assert not (engine.root.parent / "evil").exists()

    @pytest.mark.parametrize("sent", [5, 40])
    async def test_another_number_of_tokens_than_the_id_promises(self, engine: Engine, sent: int) -> None:
        rid = fresh(20)
        await send(engine, [(rid, draw(sent))])
        assert await failed(engine, rid) is FailureReason.MISMATCH

    async def test_an_id_serves_again_once_its_dump_is_gone(self, engine: Engine) -> None:
        rid, ids = fresh(30), draw(30)
        for _ in range(2):
            await send(engine, [(rid, ids)])
            assert_is(engine.model, ids, await taken(engine, rid, ids))

    async def test_the_longest_prompt_is_taken_whole_and_one_more_is_not_cut(self, engine: Engine) -> None:
        rid, ids = fresh(engine.longest), draw(engine.longest)
        (reply,) = await send(engine, [(rid, ids)])
        assert isinstance(reply, Reply), reply
        assert reply.prompt_tokens == engine.longest
        await taken(engine, rid, ids)
        too_long = fresh(engine.longest + 1)
        (answer,) = await send(engine, [(too_long, draw(engine.longest + 1))])
        assert isinstance(answer, RefusedError)
        assert answer.status == 400
        await asyncio.sleep(0.3)
        if (engine.root / str(too_long)).exists():  # SGLang ends it as it ends an aborted one
            assert await failed(engine, too_long) is FailureReason.ABORTED

    async def test_aborting_what_is_not_there_is_no_error(self, engine: Engine) -> None:
        async with ServerClient(engine.url) as client:
            await client.abort("never seen")
            await client.abort(str(fresh(9)))

    async def test_a_client_that_leaves_gets_no_half_dump(self, engine: Engine) -> None:
        rid, ids = fresh(700), draw(700)
        async with ServerClient(engine.url) as client:
            request = asyncio.create_task(client.generate(str(rid), ids))
            await asyncio.sleep(0.05)
            request.cancel()
            await client.abort(str(rid))
        published, unpublished = engine.root / str(rid), engine.root / f".tmp-{rid}"
        await until(lambda: published.is_dir() or not unpublished.is_dir(), ARRIVAL_S)
        if not published.is_dir():
            return  # it was stopped before its first row
        if (published / "error").exists():
            assert await failed(engine, rid) is FailureReason.ABORTED
        else:
            await taken(engine, rid, ids)
