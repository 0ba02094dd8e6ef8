"""Tiny random models of real architectures, with a byte-level tokenizer and a chat template.

Weights are drawn wide enough that attention, positions and masks matter: a wrong mask moves the states far more
than the tolerance of a test does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 320
CONTEXT_LENGTH = 2048
KINDS = ("llama", "qwen3", "deepseek_v3")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}GEN{{ message['content'] + '<|im_end|>' }}ENDGEN"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_model(
    kind: str,
    folder: Path,
    seed: int = 0,
    layers: int = 8,
    hidden: int = 64,
    *,
    context_length: int = CONTEXT_LENGTH,
    generation_markers: bool = False,
) -> Path:
    """Save a random float32 model of architecture ``kind`` and its tokenizer into ``folder``.

    Args:
        kind: one of :data:`KINDS`.
        folder: made if it is missing.
        seed: of the weights.
        layers: decoder layers; at least 7 give distinct default aux layers.
        hidden: hidden size, a multiple of 32.
        context_length: the model's ``max_position_embeddings``.
        generation_markers: whether the chat template marks the assistant's words with ``{% generation %}``.

    Returns:
        ``folder``.
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(_config(kind, layers, hidden, context_length))
        model = model.to(torch.float32)
        if kind == "deepseek_v3":
            _separate_experts(model, seed)
        model.save_pretrained(folder, safe_serialization=True)
    finally:
        torch.random.set_rng_state(generator_state)
    _save_tokenizer(folder, context_length, generation_markers)
    return folder


def _config(kind: str, layers: int, hidden: int, context_length: int) -> Any:
    from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config

    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": context_length,
        "initializer_range": 0.15,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "pad_token_id": 256,
        "tie_word_embeddings": False,
    }
    if kind == "llama":
        return LlamaConfig(**common, num_key_value_heads=2)
    if kind == "qwen3":
        return Qwen3Config(**common, num_key_value_heads=2, head_dim=32)
    if kind == "deepseek_v3":
        return DeepseekV3Config(
            **common,
            num_key_value_heads=4,
            moe_intermediate_size=hidden // 2,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            routed_scaling_factor=1.0,
        )
    raise ValueError(f"no tiny model of kind {kind!r}; there are {', '.join(KINDS)}")


def _separate_experts(model: Any, seed: int) -> None:
    """Let three features of the token alone choose the experts, by wide margins.

    A mixture of experts with random routers has near ties, where rounding alone picks other experts and the states
    of a batch differ from those of a request alone. Here features 0..2 of the embedding are ±2, stay as they
    are through all layers, and each router reads the expert's number from their signs.
    """
    import torch

    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        signs = torch.randint(0, 2, (embedding.shape[0], 3), generator=draw) * 2.0 - 1.0
        embedding[:, :3] = 2.0 * signs
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter[:3] = 0.0
            elif name.endswith("experts.down_proj"):
                parameter[:, :3, :] = 0.0
            elif name.endswith("mlp.gate.weight"):
                parameter.mul_(0.1)
                for expert in range(parameter.shape[0]):
                    for bit, weight in enumerate((1.2, 0.7, 0.35)):
                        parameter[expert, bit] = weight if expert >> bit & 1 else -weight


def _save_tokenizer(folder: Path, context_length: int, generation_markers: bool) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    marks = ("{% generation %}", "{% endgeneration %}") if generation_markers else ("", "")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=context_length,
        chat_template=_CHAT_TEMPLATE.replace("ENDGEN", marks[1]).replace("GEN", marks[0]),
    )
    fast.save_pretrained(folder)
    generation = {"bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 256}
    (folder / "generation_config.json").write_text(json.dumps(generation))
