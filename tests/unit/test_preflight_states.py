"""How far two captures are from each other, what they may differ by, and how big the question is put."""

from __future__ import annotations

import numpy as np
import pytest

from hsjournal.dump.protocol import Meta, tensor_entries
from hsjournal.server.preflight.agreement import BATCH_TOKENS, company_for
from hsjournal.server.preflight.facts import ServerFacts
from hsjournal.server.preflight.states import States, brief, differences, tolerance_for

TOKENS, HIDDEN = 500, 64


def states(seed: int, dtype: str = "bfloat16", *, noise: float = 0.0, tensors: int = 4) -> States:
    draw, shake = np.random.default_rng(seed), np.random.default_rng(99)
    found = []
    for _ in range(tensors):
        values = draw.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
        values += noise * shake.standard_normal(values.shape).astype(np.float32)
        bits = (values.view(np.uint32) >> 16).astype("<u2") if dtype == "bfloat16" else values.astype("<f4")
        found.append(bits)
    return States(dtype, tuple(found))


def spoilt(good: States, rows: slice, tensor: int = 1) -> States:
    """Rows of another prompt in one tensor."""
    tensors = [t.copy() for t in good.tensors]
    tensors[tensor][rows] = tensors[tensor][::-1][rows]
    return States(good.dtype, tuple(tensors))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_equal_states_do_not_differ(dtype: str) -> None:
    found = differences(states(1, dtype), states(1, dtype))
    assert [d.name for d in found] == ["aux_0", "aux_1", "aux_2", "final"]
    for d in found:
        assert (d.median_error, d.worst_error, d.flipped_share) == (0.0, 0.0, 0.0)
        assert d.median_cosine == pytest.approx(1.0, abs=1e-6)
    assert tolerance_for(dtype, has_experts=False).exceeded_by(found) == []


def test_rounding_passes_and_other_states_do_not() -> None:
    for has_experts in (False, True):
        bounds = tolerance_for("bfloat16", has_experts=has_experts)
        assert bounds.exceeded_by(differences(states(1, noise=0.01), states(1))) == []
        outside = bounds.exceeded_by(differences(states(2), states(1)))
        assert len(outside) == 4
        assert outside[0].startswith("aux_0 differs, its median row by 1")
        assert brief(outside) == f"{outside[0]}, and so do aux_1, aux_2, final"


def test_half_a_sum_is_seen_in_both_kinds_of_model() -> None:
    whole = states(1)
    half = States("bfloat16", tuple(t.copy() for t in whole.tensors))
    half.tensors[2][:] -= 0x80  # half of every value: the direction stays, so cosines say nothing
    for has_experts in (False, True):
        outside = tolerance_for("bfloat16", has_experts=has_experts).exceeded_by(differences(half, whole))
        assert [text.split()[0] for text in outside] == ["aux_2"]


def test_a_few_flipped_rows_are_allowed_to_a_mixture_of_experts_only() -> None:
    few = differences(spoilt(states(1), slice(0, 20)), states(1))
    assert few[1].flipped_share == pytest.approx(0.04)
    assert tolerance_for("bfloat16", has_experts=True).exceeded_by(few) == []
    (text,) = tolerance_for("bfloat16", has_experts=False).exceeded_by(few)
    assert "its worst row" in text
    assert "4.0% of its rows" in text
    many = differences(spoilt(states(1), slice(0, 100)), states(1))
    assert len(tolerance_for("bfloat16", has_experts=True).exceeded_by(many)) == 1


def test_calibration_widens_within_bounds_and_never_narrows() -> None:
    plain = tolerance_for("float32", has_experts=False)
    seen = differences(states(1, "float32", noise=0.005), states(1, "float32"))
    wide = tolerance_for("float32", has_experts=False, measured=seen)
    assert wide.median_error == pytest.approx(3 * max(d.median_error for d in seen))
    assert wide.median_error > plain.median_error
    assert wide.exceeded_by(seen) == []
    wild = tolerance_for("float32", has_experts=False, measured=differences(states(2, "float32"), states(1, "float32")))
    assert wild.median_error == 0.03
    assert wild.exceeded_by(differences(states(2, "float32"), states(1, "float32")))
    assert (
        tolerance_for("float32", has_experts=False, measured=differences(states(1, "float32"), states(1, "float32")))
        == plain
    )


def test_nan_is_outside() -> None:
    bad = states(1, "float32")
    bad.tensors[3][7, 5] = np.nan
    outside = tolerance_for("float32", has_experts=True).exceeded_by(differences(bad, states(1, "float32")))
    assert outside == []  # one row of a mixture may be anything; that it is finite is the probe's matter
    assert tolerance_for("float32", has_experts=False).exceeded_by(differences(bad, states(1, "float32")))


def facts(*, longest: int = 0, pool: int = 0, chunk: int = 0, engine: str = "sglang") -> ServerFacts:
    meta = Meta(
        rid="hsj-test-p1-4", num_tokens=4, hidden_size=8, dtype="bfloat16", capture_layers=(1, 2, 3), final_norm="post",
        token_ids_sha256="0" * 64, chunks=(0,), boot_id="b", engine=engine, versions={},
        tensors=tensor_entries(4, 8, "bfloat16", 3),
    )  # fmt: skip
    return ServerFacts("b", meta, 100_000, 1000, 8, chunk, longest_prompt=longest, pool_tokens=pool)


ROW = 8 * 2 * 4


@pytest.mark.parametrize(
    ("limits", "room", "tokens", "others", "note"),
    [
        ({}, 1 << 30, 500, 6, ""),
        ({"longest": 100}, 1 << 30, 100, 22, ""),
        ({"pool": 4096}, 1 << 30, 500, 6, ""),
        ({"pool": 2000}, 1 << 30, 500, 3, "the server's pool holds 2,000 tokens: a batch of 2,000 only"),
        ({"pool": 600}, 1 << 30, 500, 0, "the server's pool holds 600 tokens: not asked in company"),
        ({}, 199_936, 500, 3, "the room in the hand-over root holds 2,100 tokens: a batch of 2,000 only"),
        ({}, 70_000, 69, 0, "not asked in company"),
        ({}, 60_000, 0, 0, "no room for a single token"),
        ({"chunk": 512}, 1 << 30, 500, 6, "no batch of this server is bigger than its chunk of 512 tokens"),
        ({"engine": "embedded"}, 1 << 30, 64, 0, "embedded"),
    ],
)
def test_how_big_the_question_is_put(limits: dict[str, int], room: int, tokens: int, others: int, note: str) -> None:
    company = company_for(facts(**limits), room)  # type: ignore[arg-type]
    assert (company.tokens, company.others) == (tokens, others)
    assert note in company.note
    assert bool(note) == bool(company.note)
    assert (1 + others) * tokens * ROW <= room
    if not company.note:
        assert others * tokens > BATCH_TOKENS  # also if the first to come runs by itself
