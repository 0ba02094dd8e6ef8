"""Is a prompt the same alone and in company? One prompt by itself, again by itself, then inside a big batch.

Kernels that are chosen by the size of a batch may leave partial sums in the states (all-reduce fusion under tensor
parallelism is the known case): finite, of the right shape, and wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hsjournal.dump.protocol import payload_bytes
from hsjournal.errors import ServerError
from hsjournal.server.client import ServerClient
from hsjournal.server.preflight.facts import ServerFacts
from hsjournal.server.preflight.probe import PROBE_TIMEOUT, probe, probe_ids
from hsjournal.server.preflight.states import (
    Difference,
    States,
    Tolerance,
    brief,
    differences,
    read_states,
    tolerance_for,
)

PAIR_TOKENS = 500
EMBEDDED_TOKENS = 64
BATCH_TOKENS = 2048
"""All-reduce fusion ends at this size of a batch: company must make it bigger."""
_SLACK = 1 << 16


@dataclass(frozen=True, slots=True)
class Company:
    """How the question is put.

    Args:
        tokens: of the prompt; 0 when there is no room even for one.
        others: prompts of the same length that are sent beside it; 0 when it is not asked in company.
        note: why it is less than it should be, in words; empty when it is not.
    """

    tokens: int
    others: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What came of it.

    Args:
        company: how it was asked.
        ids: of the prompt.
        states: of the prompt alone.
        tolerance: what its captures may differ by from now on.
        differences: alone again, then in company, each against alone.
    """

    company: Company
    ids: tuple[int, ...]
    states: States
    tolerance: Tolerance
    differences: tuple[tuple[Difference, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """For an event."""
        names = ("alone", "in_company")
        return {
            "tokens": self.company.tokens,
            "others": self.company.others,
            "note": self.company.note,
            "tolerance": self.tolerance.to_json(),
            **{name: worst(found) for name, found in zip(names, self.differences, strict=False)},
        }


def worst(found: Sequence[Difference]) -> dict[str, float]:
    """The worst figure of each kind over all tensors."""
    tables = [asdict(d) for d in found]
    return {
        "median_cosine": round(min(t["median_cosine"] for t in tables), 6),
        **{
            name: round(min(max(t[name] for t in tables), 1e9), 6)
            for name in ("median_error", "worst_error", "flipped_share")
        },
    }


def company_for(facts: ServerFacts, room: int) -> Company:
    """How big prompt and batch may be, by the server's limits and the room in the hand-over root.

    Args:
        facts: of the server.
        room: bytes that the dumps may take.
    """
    meta = facts.meta
    row = payload_bytes(1, meta.hidden_size, meta.dtype, len(meta.capture_layers))
    limits = {
        "the longest prompt that the server takes": facts.longest_prompt or facts.context_length,
        "the server's pool": facts.pool_tokens or 1 << 30,
        "the room in the hand-over root": max(0, room - _SLACK) // row,
    }
    wanted = EMBEDDED_TOKENS if meta.engine == "embedded" else PAIR_TOKENS
    tokens = min(wanted, *limits.values())
    if tokens < 1:
        return Company(0, 0, "no room for a single token in the hand-over root")
    if meta.engine == "embedded":
        return Company(tokens, 0, "not asked in company: the embedded engine has one way of computing a batch")
    # The first to arrive may run by itself while the others gather: they are enough without it.
    needed = BATCH_TOKENS // tokens + 2
    del limits["the longest prompt that the server takes"]
    scarce = min(limits, key=lambda name: limits[name])
    others = max(0, min(needed, limits[scarce] // tokens - 1))
    notes = []
    if others < needed:
        notes.append(
            f"{scarce} holds {limits[scarce]:,} tokens: "
            + (f"a batch of {(1 + others) * tokens:,} only" if others else "not asked in company")
        )
    if 0 < facts.chunk_size <= BATCH_TOKENS:
        notes.append(f"no batch of this server is bigger than its chunk of {facts.chunk_size:,} tokens")
    return Company(tokens, others, "; ".join(notes))


async def ask_agreement(
    client: ServerClient, root: Path, run_id: str, facts: ServerFacts, room: int, *, timeout: float = PROBE_TIMEOUT
) -> Agreement | None:
    """Ask, and calibrate by the answers; None when there is no room at all.

    Raises:
        ServerError: when the prompt's states depend on its company, or are not the same twice.
        ProbeError, UnreachableError, TimedOutError: as :func:`hsjournal.server.preflight.probe.probe`.
    """
    company = company_for(facts, room)
    if not company.tokens:
        return None
    ids = probe_ids(company.tokens, facts.vocab_size)

    async def capture() -> States:
        kept: list[States] = []
        await probe(client, root, run_id, ids, timeout=timeout, look=lambda dump: kept.append(read_states(dump)))
        return kept[0]

    async def beside(seed: int) -> None:
        await probe(client, root, run_id, probe_ids(company.tokens, facts.vocab_size, seed), timeout=timeout)

    alone = await capture()
    again = differences(await capture(), alone)
    found = [again]
    bounds = tolerance_for(facts.meta.dtype, has_experts=facts.has_experts)
    _judge(client.url, "the same prompt, sent twice by itself,", bounds, again, "See the server's log.")
    if company.others:
        half = company.others // 2
        first = [asyncio.ensure_future(beside(seed)) for seed in range(1, half + 1)]
        middle = asyncio.ensure_future(capture())
        rest = [asyncio.ensure_future(beside(seed)) for seed in range(half + 1, company.others + 1)]
        done = await asyncio.gather(middle, *first, *rest, return_exceptions=True)
        for answer in done:
            if isinstance(answer, BaseException):
                raise answer
        assert isinstance(done[0], States)
        found.append(differences(done[0], alone))
        _judge(
            client.url,
            f"a prompt of {company.tokens:,} tokens, alone and in a batch of {(1 + company.others) * company.tokens:,},",
            bounds,
            found[-1],
            "Start it with --enforce-disable-flashinfer-allreduce-fusion; if that does not help, with --tp-size 1 or "
            "another --attention-backend.",
        )
    measured = [d for part in found for d in part]
    calibrated = tolerance_for(facts.meta.dtype, has_experts=facts.has_experts, measured=measured)
    return Agreement(company, tuple(ids), alone, calibrated, tuple(found))


def _judge(url: str, what: str, bounds: Tolerance, found: Sequence[Difference], remedy: str) -> None:
    outside = bounds.exceeded_by(found)
    if outside:
        raise ServerError(f"{what} gets other states from {url}: {brief(outside)}", remedy=remedy)
