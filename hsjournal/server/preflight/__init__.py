"""What must be true of a server before the first sample, and what to change in its command line where it is not.

:mod:`~hsjournal.server.preflight.settings` looks at the server's resolved settings, :mod:`~hsjournal.server.preflight.probe`
sends prompts through the real hand-over, :mod:`~hsjournal.server.preflight.agreement` compares a prompt alone and in
company, :mod:`~hsjournal.server.preflight.facts` holds the server against the run.
"""

from __future__ import annotations

from pathlib import Path

from hsjournal.dump.protocol import Meta
from hsjournal.server.client import RefusedError, ServerClient
from hsjournal.server.preflight.agreement import Agreement, ask_agreement
from hsjournal.server.preflight.facts import ServerFacts, check_facts
from hsjournal.server.preflight.probe import (
    PROBE_TIMEOUT,
    Look,
    NoDumpError,
    ProbeError,
    ProbeHeldError,
    no_access,
    of_free_length,
    probe,
    probe_ids,
    refused,
)
from hsjournal.server.preflight.settings import (
    check_settings,
    chunk_size,
    context_length,
    count,
    draft_layer_ids,
    longest_prompt,
    ours,
)

__all__ = [
    "PROBE_TIMEOUT", "Agreement", "Look", "NoDumpError", "ProbeError", "ProbeHeldError", "ServerFacts", "ask_agreement", "check_facts",
    "no_access", "of_free_length", "preflight", "probe",
]  # fmt: skip

_PROBE_TOKENS = 16


async def preflight(client: ServerClient, root: Path, run_id: str, *, timeout: float = PROBE_TIMEOUT) -> ServerFacts:
    """The cheap part: the server's resolved settings, and two equal prompts which must both give all their rows.

    Raises:
        ServerError: naming what is wrong and what to change.
        ProbeError, UnreachableError, TimedOutError: what may pass.
    """
    try:
        info = await client.server_info()
    except RefusedError as error:
        raise refused(client.url, "a look at its settings", error) from None
    check_settings(client.url, info)
    about = ours(info)
    vocab, their_root = count(about.get("vocab_size")), str(about.get("handover_root") or "")

    async def twice(tokens: int) -> list[Meta]:
        ids = probe_ids(tokens, vocab)
        return [await probe(client, root, run_id, ids, timeout=timeout, their_root=their_root) for _ in range(2)]

    metas = await of_free_length(min(_PROBE_TOKENS, longest_prompt(info)), twice)
    said = about.get("boot_id")
    if said is not None and said != metas[-1].boot_id:
        raise ProbeError(  # it may have been started anew between the two answers
            f"{client.url} says that it is {said!r}, and its dumps say {metas[-1].boot_id!r}: another server writes "
            f"into {root}",
            remedy="Give each server a hand-over root of its own, and see that the address is the right server's.",
        )
    return ServerFacts(
        boot_id=metas[-1].boot_id,
        meta=metas[-1],
        context_length=context_length(info),
        vocab_size=vocab,
        num_layers=count(about.get("num_layers")),
        chunk_size=chunk_size(info),
        model_path=str(info.get("model_path") or ""),
        longest_prompt=longest_prompt(info),
        pool_tokens=count(info.get("max_total_num_tokens")),
        has_experts=about.get("has_experts") is not False,
        draft_layer_ids=draft_layer_ids(info),
        their_root=their_root,
    )
