"""Several servers of one run must give the same states, as far as they tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hsjournal.errors import ServerError
from hsjournal.server.preflight.facts import ServerFacts


def agreed(facts: Mapping[str, ServerFacts]) -> ServerFacts:
    """What the servers, by address, have in common: the first one's facts, with the shortest limits of all.

    Raises:
        ServerError: naming what differs, and where; or two addresses of one server.
    """
    (first_url, first), *others = facts.items()
    for url, other in others:
        if other.boot_id == first.boot_id:
            raise ServerError(f"{first_url} and {url} are one and the same server", remedy="Name each server once.")
        pairs = {
            "model": (first.model_path, other.model_path),
            "capture layers": (list(first.meta.capture_layers), list(other.meta.capture_layers)),
            "hidden size": (first.meta.hidden_size, other.meta.hidden_size),
            "dtype": (first.meta.dtype, other.meta.dtype),
            "final norm": (first.meta.final_norm, other.meta.final_norm),
            "engine": (first.meta.engine, other.meta.engine),
            "chunk size": (first.chunk_size, other.chunk_size),
            "number of layers": (first.num_layers, other.num_layers),
            "vocabulary size": (first.vocab_size, other.vocab_size),
        }
        different = [f"{name}: {a} and {b}" for name, (a, b) in pairs.items() if a != b]
        if different:
            raise ServerError(
                f"{first_url} and {url} do not serve the same: " + "; ".join(different),
                remedy="Start them with the same settings, or name only those that agree (--server).",
            )
    shortest = [f.context_length for f in facts.values() if f.context_length]
    prompts = [f.longest_prompt for f in facts.values() if f.longest_prompt]
    return replace(first, context_length=min(shortest, default=0), longest_prompt=min(prompts, default=0))
