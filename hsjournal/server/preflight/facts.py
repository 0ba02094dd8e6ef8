"""What one life of a server was seen to be, and whether that is what the run was made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hsjournal.config import Manifest
from hsjournal.dump.protocol import Meta
from hsjournal.errors import ServerError
from hsjournal.server.preflight.settings import draft_config


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What one life of a server was seen to do.

    Args:
        boot_id: of this life.
        meta: of a probe's dump; it tells layers, hidden size, dtype, norm, engine and versions.
        context_length: positions of the model, in tokens.
        vocab_size: 0 when the server does not say.
        num_layers: 0 when the server does not say.
        chunk_size: of the chunked prefill, 0 when prompts are never split.
        model_path: what the server says it serves; empty when it does not say.
        longest_prompt: taken whole, in tokens; 0 when the server does not say.
        pool_tokens: tokens that the server holds at once; 0 when it does not say.
        has_experts: whether the model is a mixture of experts, or may be one.
        draft_layer_ids: with which SGLang hands out the captured layers of this model; empty when not known.
        their_root: what the server calls the hand-over root; empty when it does not say.
    """

    boot_id: str
    meta: Meta
    context_length: int
    vocab_size: int
    num_layers: int
    chunk_size: int
    model_path: str = ""
    longest_prompt: int = 0
    pool_tokens: int = 0
    has_experts: bool = True
    draft_layer_ids: tuple[int, ...] = ()
    their_root: str = ""

    @property
    def draft_config(self) -> str:
        """The line for the draft model's ``config.json``; empty when it can't be known."""
        return draft_config(self.draft_layer_ids)

    def to_json(self) -> dict[str, Any]:
        """For an event: what a later reader of the journal may ask about this server."""
        return {
            "model": self.model_path,
            "boot_id": self.boot_id,
            "engine": self.meta.engine,
            "versions": dict(self.meta.versions),
            "dtype": self.meta.dtype,
            "capture_layers": list(self.meta.capture_layers),
            "final_norm": self.meta.final_norm,
            "hidden_size": self.meta.hidden_size,
            "num_layers": self.num_layers,
            "context_length": self.context_length,
            "longest_prompt": self.longest_prompt,
            "chunk_size": self.chunk_size,
            "draft_config": self.draft_config,
        }


def check_facts(facts: ServerFacts, manifest: Manifest) -> None:
    """Hold a server against what the run was made for.

    Raises:
        ServerError: listing every difference, and what of the server's command line would mend it.
    """
    meta = facts.meta
    pairs: dict[str, tuple[object, object]] = {
        "capture layers": (list(manifest.capture_layers), list(meta.capture_layers)),
        "hidden size": (manifest.hidden_size, meta.hidden_size),
        "dtype": (manifest.dtype, meta.dtype),
        "final norm": (manifest.final_norm, meta.final_norm),
        "engine": (manifest.engine, meta.engine),
        "chunk size": (manifest.chunk_size, facts.chunk_size),
    }
    if facts.vocab_size and manifest.vocab_size:
        pairs["vocabulary size"] = (manifest.vocab_size, facts.vocab_size)
    if facts.num_layers and manifest.num_layers:
        pairs["number of layers"] = (manifest.num_layers, facts.num_layers)
    served = manifest.options.get("model_path")
    if served and facts.model_path:
        pairs["model"] = (served, facts.model_path)
    different = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if facts.context_length and facts.context_length < manifest.context_length:
        different["context length"] = (manifest.context_length, facts.context_length)
    if different:
        words = (f"{name} is {got}, the run was made with {want}" for name, (want, got) in different.items())
        raise ServerError(
            "the server serves something else than this run was made for: " + "; ".join(words),
            remedy=_remedy(manifest, different),
        )


def _remedy(manifest: Manifest, different: Mapping[str, object]) -> str:
    """The part of SGLang's command line that would mend the differences; for other engines a hint."""
    layers = ",".join(map(str, manifest.capture_layers))
    says = {
        "capture layers": f"HSJOURNAL_CAPTURE_LAYERS={layers} in its environment",
        "final norm": f"HSJOURNAL_CAPTURE_PRENORM={int(manifest.final_norm == 'pre')} in its environment",
        "dtype": f"--dtype {manifest.dtype}",
        "chunk size": f"--chunked-prefill-size {manifest.chunk_size or -1}",
        "context length": f"--context-length {manifest.context_length}",
        "model": f"--model-path {manifest.options.get('model_path')}",
    }
    options = [text for name, text in says.items() if name in different]
    if manifest.engine != "sglang" or len(options) < len(different):
        return "Start it with the run's settings (see manifest.toml), or start a new run directory."
    return f"Start it with {', '.join(options)}; or start a new run directory."
