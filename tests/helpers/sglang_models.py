"""Tiny models in the shapes that SGLang's CPU path can serve, and their states by transformers."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCAB_SIZE, LAYERS, HIDDEN = 320, 8, 256
_GPU_MODELS = Path(__file__).resolve().parents[2] / "scripts" / "gpu" / "models.py"


def make_sglang_model(kind: str, folder: Path, seed: int = 0) -> Path:
    """Save a random float32 model into ``folder``: ``llama``, ``deepseek_v3``, or that in Kimi-K2.5's wrapper, ``kimi_k25``."""
    if kind == "kimi_k25":
        wrap = runpy.run_path(str(_GPU_MODELS))["wrap_in_kimi"]
        wrap(make_sglang_model("deepseek_v3", text_folder(kind, folder), seed), folder)
        outer = folder / "config.json"
        outer.write_text(json.dumps(json.loads(outer.read_text()) | {"dtype": "float32"}))
        return folder
    import torch
    from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

    from tests.helpers.tiny_models import _separate_experts

    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "max_position_embeddings": 2048, "initializer_range": 0.1, "tie_word_embeddings": False,
    }  # fmt: skip
    config: Any
    if kind == "llama":
        config = LlamaConfig(**common, num_key_value_heads=2, head_dim=64)
    else:
        yarn = {"rope_type": "yarn", "type": "yarn", "factor": 1.0, "original_max_position_embeddings": 2048,
                "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
        config = DeepseekV3Config(
            **common, num_key_value_heads=4, moe_intermediate_size=64, n_routed_experts=8, n_shared_experts=1,
            num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=32, q_lora_rank=48,
            qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, routed_scaling_factor=1.0, rope_scaling=yarn,
            moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc",
        )  # fmt: skip
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(config).to(torch.float32)
        if kind == "deepseek_v3":
            _separate_experts(model, seed)
        model.save_pretrained(folder)
    finally:
        torch.random.set_rng_state(state)
    return folder


def text_folder(kind: str, folder: Path) -> Path:
    """The folder that transformers loads for the reference: of a wrapped model the language model alone."""
    return folder.with_name(f"{folder.name}-text") if kind == "kimi_k25" else folder


def load_reference(folder: Path) -> Any:
    """The same model in transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference_states(model: Any, ids: Sequence[int], layers: Sequence[int]) -> tuple[list[Any], Any]:
    """Outputs of ``layers`` then the post-norm final state, each ``[tokens, hidden]``; and the last state before the norm."""
    import torch

    seen: list[Any] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _m, args: seen.append(args[0][0].clone()))
    try:
        with torch.no_grad():
            out = model.model(torch.tensor([list(ids)]), output_hidden_states=True)
    finally:
        hook.remove()
    return [*(out.hidden_states[k + 1][0] for k in layers), out.last_hidden_state[0]], seen[0]
