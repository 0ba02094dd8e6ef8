"""What a stock SGLang server must be like so that its states can be captured, and what was decided at its start."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsjournal.capture.sglang_layers import ChosenLayers, check_family, check_layers, choose_layers, default_layers
from hsjournal.dump.protocol import BOOT_ID_VARIABLE, ITEM_SIZE, SCHEMA
from hsjournal.errors import UsageError

ROOT_VARIABLE = "HSJOURNAL_HANDOVER_ROOT"
LAYERS_VARIABLE = "HSJOURNAL_CAPTURE_LAYERS"
PRENORM_VARIABLE = "HSJOURNAL_CAPTURE_PRENORM"
GROUP_VARIABLE = "HSJOURNAL_GROUP_MODE"
FIRST_VERSION, LAST_VERSION = (0, 5, 17), (0, 5, 23)
_EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for; ``problem`` is why that can't be done, for whoever asks the server."""

    root: Path
    layers: tuple[int, ...] | None
    prenorm: bool
    group_mode: bool
    boot_id: str
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What was arranged with a loaded model."""

    chosen: ChosenLayers
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    dtype: str
    torch_dtype: Any
    device: Any
    pass_tokens: int
    has_experts: bool


def settings_from(environ: MutableMapping[str, str]) -> Settings | None:
    """The settings, or None when no hand-over root is named: then nothing is captured.

    The first process of a server makes the boot id and leaves it in its environment for the others. A variable that can't be
    read is a problem to be told through the server: its log is not where the client's user looks.
    """
    root = environ.get(ROOT_VARIABLE, "")
    if not root:
        return None
    boot_id = environ.setdefault(BOOT_ID_VARIABLE, uuid.uuid4().hex)
    text = environ.get(LAYERS_VARIABLE, "").strip()
    layers: tuple[int, ...] | None = None
    problem: str | None = None
    try:
        layers = tuple(int(part) for part in text.split(",")) if text else None
    except ValueError:
        problem = f"{LAYERS_VARIABLE} is {text!r} in its environment; write layer numbers, like 1,5,8"
    if not os.path.isabs(root):
        problem = f"{ROOT_VARIABLE} is {root!r} in its environment; write an absolute path"
    prenorm, group_mode = _is_on(environ, PRENORM_VARIABLE), _is_on(environ, GROUP_VARIABLE)
    return Settings(Path(root), layers, prenorm, group_mode, boot_id, problem)


def version_of(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``0.5.23.post1`` is (0, 5, 23)."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(int(part) for part in match.groups()) if match else ()


def refusal_of(version: str, args: Mapping[str, Any], parallel: Mapping[str, int]) -> str | None:
    """Why a server with these resolved settings can't capture, and what to change; None when it can.

    Args:
        version: SGLang's.
        args: SGLang's server arguments, resolved.
        parallel: sizes and ranks of the running process, as far as they are known.
    """
    if not FIRST_VERSION <= version_of(version) <= LAST_VERSION:
        known = f"{'.'.join(map(str, FIRST_VERSION))} to {'.'.join(map(str, LAST_VERSION))}"
        return f"SGLang {version} is not supported (known: {known}); install one of these"
    if parallel.get("pp_size", 1) > 1:
        return "pipeline parallelism spreads the layers over processes; start SGLang with --pp-size 1"
    if (
        parallel.get("attn_cp_size", 1) > 1
        or args.get("enable_prefill_cp")
        or args.get("enable_prefill_context_parallel")
    ):
        return "context parallelism shards the rows; start SGLang without it"
    if max(parallel.get("dcp_size", 1), int(args.get("dcp_size") or 1)) > 1:
        return "decode context parallelism is not supported; start SGLang with --dcp-size 1"
    if str(args.get("disaggregation_mode") or "null") != "null":
        return "prefill/decode disaggregation is not supported; start SGLang without --disaggregation-mode"
    if args.get("speculative_algorithm"):
        return "speculative decoding changes which states SGLang hands out; start it without --speculative-algorithm"
    for name, what in (
        ("enable_two_batch_overlap", "two-batch overlap splits the batch"),
        ("enable_layernorm_sp", "layer-norm sequence parallelism shards the rows"),
        ("enable_pdmux", "PD multiplexing is not supported"),
        ("enable_return_aux_hidden_states", "SGLang's own aux states overwrite the chosen layers"),
        ("is_embedding", "an embedding model has no logits processor"),
        ("encoder_only", "an encoder has no layers to capture"),
        ("dllm_algorithm", "a diffusion language model has no prefill"),
    ):
        if args.get(name):
            return f"{what}; start SGLang without --{name.replace('_', '-')}"
    return None


def prenorm_refusal(args: Mapping[str, Any], device_type: str) -> str | None:
    """Why the state before the final norm can't be had with these settings."""
    graphs = args.get("cuda_graph_config")
    prefill = graphs.get("prefill") if isinstance(graphs, Mapping) else getattr(graphs, "prefill", None)
    backend = prefill.get("backend") if isinstance(prefill, Mapping) else getattr(prefill, "backend", None)
    if device_type == "cuda" and not args.get("disable_cuda_graph") and backend not in (None, "disabled"):
        return f"the pre-norm state lies inside a CUDA graph; start SGLang with --cuda-graph-backend-prefill disabled, or unset {PRENORM_VARIABLE}"
    return None


def is_writer(parallel: Mapping[str, int]) -> bool:
    """Whether this process hands over the states of its requests.

    Each group of attention-tensor-parallel ranks holds its own requests whole: under DP attention every DP rank is
    rank 0 of its group, and so is each of the servers that ``--dp-size`` starts.
    """
    if parallel.get("attn_tp_rank", 0) or parallel.get("attn_cp_rank", 0):
        return False
    return parallel.get("pp_rank", 0) == parallel.get("pp_size", 1) - 1


def arrange(runner: Any, settings: Settings, version: str, args: Mapping[str, Any]) -> Arrangement:
    """Choose the layers on a loaded model runner.

    Raises:
        UsageError: when the model can't be captured.
    """
    config = runner.model_config
    num_layers = int(config.num_hidden_layers)
    layers = check_layers(settings.layers if settings.layers is not None else default_layers(num_layers), num_layers)
    dtype = str(runner.dtype).removeprefix("torch.")
    if dtype not in ITEM_SIZE:
        raise UsageError(f"states of {dtype} have no place in a dump", remedy=f"Use one of {', '.join(ITEM_SIZE)}.")
    check_family(runner.model, version_of(version))
    chosen = choose_layers(runner.model, layers)
    if settings.prenorm and not hasattr(chosen.inner, "norm"):
        raise UsageError(
            f"{type(runner.model).__name__} has no final norm where hsjournal looks for it",
            remedy="Start the server without HSJOURNAL_CAPTURE_PRENORM: this model's final state is kept post-norm only.",
        )
    chunk = args.get("chunked_prefill_size")
    longest = int(args.get("max_prefill_tokens") or config.context_len)
    return Arrangement(
        chosen=chosen,
        num_layers=num_layers,
        hidden_size=int(config.hidden_size),
        vocab_size=int(config.vocab_size),
        context_length=int(config.context_len),
        dtype=dtype,
        torch_dtype=runner.dtype,
        device=next(runner.model.parameters()).device,
        pass_tokens=chunk if isinstance(chunk, int) and chunk > 0 else longest,
        has_experts=has_experts(config),
    )


def has_experts(config: Any) -> bool:
    """Whether the model is a mixture of experts, where near ties send a row to another expert from batch to batch."""
    text = getattr(config, "hf_text_config", None) or getattr(config, "hf_config", None)
    counts = (getattr(text, name, None) for name in _EXPERT_COUNTS)
    return any(isinstance(count, int) and count > 1 for count in counts)


def describe(settings: Settings, arrangement: Arrangement | None, refusal: str | None) -> dict[str, Any]:
    """What ``/server_info`` says under ``hsjournal``; ``refusal`` is None when the server captures."""
    about: dict[str, Any] = {
        "protocol": SCHEMA,
        "boot_id": settings.boot_id,
        "final_norm": "pre" if settings.prenorm else "post",
        "handover_root": str(settings.root),
        "engine": "sglang",
        "refusal": refusal,
    }
    if arrangement is not None:
        about |= {
            "capture_layers": list(arrangement.chosen.layers),
            "eagle_aux_hidden_state_layer_ids": list(arrangement.chosen.ids),
            "num_layers": arrangement.num_layers,
            "hidden_size": arrangement.hidden_size,
            "vocab_size": arrangement.vocab_size,
            "context_length": arrangement.context_length,
            "dtype": arrangement.dtype,
            "has_experts": arrangement.has_experts,
        }
    return about


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")
