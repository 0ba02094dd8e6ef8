"""Tiny random models in bfloat16, and big shapes that a server fills with dummy weights.

Run as a program (``python -m gpu.models KIND FOLDER``): it needs torch and transformers, its caller does not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DENSE = ("llama", "qwen3")
MOE = ("qwen3_moe", "deepseek_v3", "kimi_k25")
KINDS = DENSE + MOE
VOCAB_SIZE = 131_072  # more than the tokens of all prompts together: every row then has a token of its own
CONTEXT = 16_384
_MEDIA_TOKEN = 100
_YARN = {
    "rope_type": "yarn", "type": "yarn", "factor": 1.0, "original_max_position_embeddings": CONTEXT, "rope_theta": 50000.0,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def is_moe(kind: str) -> bool:
    """Whether rows may differ because a near tie sent a token to another expert."""
    return kind in MOE


def make_model(kind: str, folder: Path, seed: int = 0) -> None:
    """Save a random model; for ``kimi_k25`` also ``FOLDER-text``, its language model alone, for the reference.

    Args:
        kind: one of :data:`KINDS`.
        folder: made.
        seed: of the weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_config(kind))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(
            5
        )  # as long as what the layers add: rows stay far apart at every depth
    model = model.to(torch.bfloat16)
    if kind == "kimi_k25":
        text = reference_folder(kind, folder)
        model.save_pretrained(text)
        wrap_in_kimi(text, folder)
    else:
        model.save_pretrained(folder)


def reference_folder(kind: str, folder: Path) -> Path:
    """The folder that transformers loads for the reference."""
    return folder.with_name(folder.name + "-text") if kind == "kimi_k25" else folder


def _config(kind: str) -> Any:
    from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config, Qwen3MoeConfig

    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
        "num_attention_heads": 8, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    if kind == "llama":
        return LlamaConfig(**common, num_key_value_heads=2, head_dim=64)
    if kind == "qwen3":
        return Qwen3Config(**common, num_key_value_heads=2, head_dim=128)
    if kind == "qwen3_moe":
        return Qwen3MoeConfig(
            **common, num_key_value_heads=2, head_dim=128, num_experts=32, num_experts_per_tok=4,
            moe_intermediate_size=256, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        )  # fmt: skip
    common |= {"num_attention_heads": 16, "num_key_value_heads": 16}  # the latent attention's kernels want 16 heads
    return DeepseekV3Config(
        **common, kv_lora_rank=512, q_lora_rank=256, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        n_routed_experts=32, n_shared_experts=1, num_experts_per_tok=4, n_group=1, topk_group=1, first_k_dense_replace=1,
        moe_intermediate_size=256, routed_scaling_factor=1.5, norm_topk_prob=True, rope_scaling=dict(_YARN),
        moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc",
    )  # fmt: skip


def wrap_in_kimi(text: Path, folder: Path) -> None:
    """The same language model as ``KimiK25ForConditionalGeneration``, with a small random vision tower's configuration.

    SGLang builds the multimodal processor at start, so the folder needs a tokenizer and a processor. The tower's
    weights are left out: no prompt has an image.
    """
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    tensors: dict[str, Any] = {}
    for part in sorted(text.glob("*.safetensors")):
        tensors |= {f"language_model.{name}": tensor for name, tensor in load_file(part).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    inner = json.loads((text / "config.json").read_text())
    vision = {
        "patch_size": 14, "init_pos_emb_height": 8, "init_pos_emb_width": 8, "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed", "num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 256,
        "intermediate_size": 512, "merge_kernel_size": [2, 2], "video_attn_type": "spatial_temporal",
        "merge_type": "sd2_tpool", "mm_projector_type": "patchmerger", "mm_hidden_size": 256,
        "vt_hidden_size": 256, "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5, "text_hidden_size": inner["hidden_size"],
    }  # fmt: skip
    inner |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    outer = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "bfloat16",
        "text_config": inner, "vision_config": vision, "media_placeholder_token_id": _MEDIA_TOKEN, "pad_token_id": 0,
        "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(outer, indent=1))
    _save_processor(folder)


def _save_processor(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {f"<{i}>": i for i in range(_MEDIA_TOKEN)} | {"<|media_pad|>": _MEDIA_TOKEN}
    vocabulary |= {character: len(vocabulary) + i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|media_pad|>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    (folder / "tiny_kimi_processor.py").write_text(_PROCESSOR)
    classes = {"AutoProcessor": "tiny_kimi_processor.TinyKimiProcessor"}
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "TinyKimiProcessor", "auto_map": classes})
    )
    cfg = {
        "patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 16384, "patch_limit_on_one_side": 512,
        "fixed_output_tokens": None, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": cfg, "auto_map": classes}))


_PROCESSOR = '''"""As much of Kimi-K2.5's processor as a server asks for when no prompt has an image."""
import json
from pathlib import Path

from transformers import AutoTokenizer, ProcessorMixin


class _Media:
    def __init__(self, cfg):
        self.media_proc_cfg = cfg


class TinyKimiProcessor(ProcessorMixin):
    attributes = ["tokenizer"]
    tokenizer_class = "AutoTokenizer"

    def __init__(self, tokenizer=None, media_proc_cfg=None, **kwargs):
        self.tokenizer = tokenizer
        self.media_processor = self.image_processor = _Media(media_proc_cfg)
        self.chat_template = None

    @classmethod
    def from_pretrained(cls, folder, *args, **kwargs):
        cfg = json.loads((Path(folder) / "preprocessor_config.json").read_text())["media_proc_cfg"]
        return cls(AutoTokenizer.from_pretrained(folder), cfg)
'''


def write_shape(shape: str, folder: Path) -> dict[str, Any]:
    """Write the ``config.json`` of a big model, to be served with ``--load-format dummy``; its content.

    Args:
        shape: ``8b`` (Qwen3-8B's), ``7168`` (Kimi's hidden size, Llama-like, as many layers as give 1 to 2 GB/s of states),
            or ``tiny`` (for a rehearsal).
        folder: made.
    """
    config: dict[str, Any] = {
        "dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1, "attention_bias": False, "initializer_range": 0.02, "use_cache": True,
    }  # fmt: skip
    if shape == "8b":
        config |= {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
            "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
        }  # fmt: skip
    elif shape == "7168":
        config |= {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 7168,
            "intermediate_size": 18432, "num_hidden_layers": 14, "num_attention_heads": 56, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
        }  # fmt: skip
    elif shape == "tiny":
        config |= {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
            "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 64, "vocab_size": 131072, "max_position_embeddings": 4096, "rope_theta": 10000.0,
        }  # fmt: skip
    else:
        raise ValueError(f"no shape {shape!r}")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return config


if __name__ == "__main__":
    make_model(sys.argv[1], Path(sys.argv[2]))
