"""From a model's folder to weights in memory, with a refusal in words where that can't be done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hsjournal.errors import HsjournalError, UsageError

_BF16_UNITS = ("avx512_bf16", "amx_bf16", "bf16")


class UnsupportedModelError(UsageError):
    """A model whose states this engine can't capture."""


def choose_dtype(asked: str, device: str) -> str:
    """``auto`` is bfloat16 where the hardware computes with it, else float32 (bf16 is many times slower there)."""
    if asked != "auto":
        return asked
    if device == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "float32"
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return "bfloat16" if any(unit in flags for unit in _BF16_UNITS) else "float32"


def choose_device(asked: str) -> torch.device:
    """The device to compute on; ``auto`` is CUDA if there is one.

    Raises:
        UsageError: when it can't be used.
    """
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {asked} can't be used: {reason}", remedy="Use --device cpu.") from None
    return device


def load_config(folder: Path) -> Any:
    """The model's configuration.

    Raises:
        UsageError: when it can't be read.
    """
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise _bad_folder(folder, error) from error


def load_weights(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The model, ready to compute.

    Raises:
        UsageError: when it can't be loaded, or lacks weights.
    """
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        raise _bad_folder(folder, error) from error
    if missing := sorted(loaded["missing_keys"]):
        # transformers fills them with random numbers and only warns.
        raise _bad_folder(folder, ValueError(f"it lacks {len(missing)} weights, among them {missing[0]}"))
    return model.eval().requires_grad_(requires_grad=False).to(device)


def _bad_folder(folder: Path, error: Exception) -> HsjournalError:
    reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
    return UsageError(
        f"The model in {folder} can't be loaded: {reason}",
        remedy="Name a folder with config.json and safetensors of a causal language model.",
    )


def model_sizes(text_config: Any, folder: Path) -> tuple[int, int, int]:
    """Layers, hidden size and vocabulary size.

    Raises:
        UnsupportedModelError: when the model is none of a language.
    """
    names = ("num_hidden_layers", "hidden_size", "vocab_size")
    sizes = [getattr(text_config, name, None) for name in names]
    whole = [size for size in sizes if type(size) is int and size > 0]
    if len(whole) != len(names):
        raise UnsupportedModelError(
            f"The model in {folder} ({text_config.model_type}) is no causal language model: "
            f"its config.json has {', '.join(f'{n} {s}' for n, s in zip(names, sizes, strict=True))}",
            remedy="Name the folder of one.",
        )
    return whole[0], whole[1], whole[2]


def choose_context_length(text_config: Any, asked: int | None) -> int:
    """The longest prompt.

    Raises:
        UsageError: when ``asked`` is more than the model allows.
    """
    allowed = getattr(text_config, "max_position_embeddings", None)
    if asked is None:
        return int(allowed) if allowed else 1 << 20
    if asked < 1 or (allowed and asked > allowed):
        raise UsageError(
            f"--context-length {asked} is not between 1 and the model's {allowed}", remedy="Leave it out or lower it."
        )
    return asked
