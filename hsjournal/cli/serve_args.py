"""``hsjournal serve-args``: the command line of a stock SGLang server whose states can be captured, for one model."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsjournal.capture.sglang_layers import REFUSED, SINCE, check_layers, default_layers
from hsjournal.dump.protocol import ITEM_SIZE, payload_bytes
from hsjournal.errors import UsageError

CHUNK = 8192
"""Said, and not left to SGLang, which derives it from the GPU's memory: a resume must find the same one."""
_GPU_BYTES = 80e9
_WEIGHTS_SHARE = 0.7
# Classes of config.json and the module of sglang.srt.models that hands out their states, read in 0.5.23.
_LLAMA = (
    "LlamaForCausalLM", "MistralForCausalLM", "Ministral3ForCausalLM", "Phi3ForCausalLM", "InternLM3ForCausalLM",
    "IQuestCoderForCausalLM", "TeleFLMForCausalLM", "Llama4ForCausalLM",
)  # fmt: skip
_OTHERS = (
    "ApertusForCausalLM", "BailingMoEForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM",
    "SarvamMoEForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM", "MistralLarge3ForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM",
    "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "Glm5NextForConditionalGeneration", "GptOssForCausalLM",
    "LongcatFlashForCausalLM", "MiniMaxM2ForCausalLM", "MiniMaxM3SparseForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MellumForCausalLM",
    "Qwen3NextForCausalLM", "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration", "KimiK25ForConditionalGeneration", "Llama4ForConditionalGeneration",
)  # fmt: skip
KNOWN = frozenset((*_LLAMA, *_OTHERS))
_BY_VERSION = {
    "Gemma4ForCausalLM": "gemma4_causal", "Gemma4ForConditionalGeneration": "gemma4_mm",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_mm",
}  # fmt: skip
_REFUSED = {"Gemma3ForCausalLM": "gemma3_causal", "Gemma3ForConditionalGeneration": "gemma3_mm"}


@dataclass(frozen=True, slots=True)
class ServeArgs:
    """What was worked out.

    Args:
        argv: SGLang's command line.
        environment: of our plugin.
        layers: outputs that are captured, 0-based.
        notes: what else to know, one sentence each.
    """

    argv: tuple[str, ...]
    environment: dict[str, str]
    layers: tuple[int, ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        """To be pasted into a shell; the notes are comments."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        program, options = shlex.join(self.argv[:3]), self.argv[3:]
        lines = [*(f"# {note}" for note in self.notes), f"{' '.join(variables)} \\", f"{program} \\"]
        groups: list[list[str]] = []
        for word in options:
            if word.startswith("--") or not groups:
                groups.append([word])
            else:
                groups[-1].append(word)
        lines += [f"  {shlex.join(group)} \\" for group in groups]
        return "\n".join(lines).removesuffix(" \\")

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "argv": list(self.argv),
            "environment": self.environment,
            "capture_layers": list(self.layers),
            "notes": list(self.notes),
        }


def serve_args(model: Path, layers: Sequence[int], handover_root: str, *, prenorm: bool = False) -> ServeArgs:
    """The recommended command line for the model in the folder ``model``.

    Raises:
        UsageError: when there is no such model, or SGLang does not hand out its states.
    """
    config = _config(model)
    classes = config.get("architectures") or []
    name = str(classes[0]) if isinstance(classes, list) and classes else ""
    versions = _check_class(name, model)
    nested = config.get("text_config")
    inner: dict[str, Any] = nested if isinstance(nested, dict) else config
    count, hidden = _number(inner, "num_hidden_layers", model), _number(inner, "hidden_size", model)
    chosen = check_layers(layers or default_layers(count), count)
    dtype = str(inner.get("dtype") or inner.get("torch_dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = dtype.removeprefix("torch.")
    context = int(inner.get("max_position_embeddings") or 0)
    argv = (
        "python", "-m", "sglang.launch_server", "--model-path", str(model), "--disable-radix-cache",
        "--skip-tokenizer-init", "--chunked-prefill-size", str(CHUNK),
    )  # fmt: skip
    environment = {"HSJOURNAL_HANDOVER_ROOT": handover_root, "HSJOURNAL_CAPTURE_LAYERS": ",".join(map(str, chosen))}
    if prenorm:
        environment["HSJOURNAL_CAPTURE_PRENORM"] = "1"
    norm = "before" if prenorm else "after"
    notes = [
        (
            f"{name}: {count} layers, hidden size {hidden:,}. Captured: the outputs of layers {', '.join(map(str, chosen))} "
            f"(counted from 0), and the final state {norm} the last norm."
            " Layer ids for the draft model's config are printed by `hsjournal run`: SGLang's rule differs from model to model."
        )
    ]
    if versions:
        notes.append(versions)
    if dtype in ITEM_SIZE:
        per_token = payload_bytes(1, hidden, dtype, len(chosen))
        notes.append(
            f"One token's states are {per_token:,} bytes in {dtype}"
            + (f", a prompt of {context:,} tokens {per_token * context:,}" if context else "")
            + f"; {handover_root} must hold those of all prompts in flight."
        )
    notes += [*_parallel_notes(model), *_MEMORY_NOTES]
    return ServeArgs(argv, environment, chosen, tuple(notes))


_MEMORY_NOTES = (
    (
        "If it runs out of memory: a lower --mem-fraction-static, or a smaller --chunked-prefill-size. Keep the latter for "
        "the whole run: a resume with another one is refused."
    ),
    (
        "Leave out: --speculative-algorithm, --pp-size, --enable-two-batch-overlap, --enable-return-aux-hidden-states; they "
        "shard or change the states. Install hsjournal into SGLang's environment, and leave SGLANG_PLUGINS unset."
    ),
)


def _parallel_notes(model: Path) -> list[str]:
    """Tensor parallelism by the size of the weights."""
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    if not weights:
        return []
    gpus = max(1, 1 << math.ceil(math.log2(max(1.0, weights / (_WEIGHTS_SHARE * _GPU_BYTES)))))
    if gpus == 1:
        return [f"The weights are {weights / 1e9:,.1f} GB: one GPU of 80 GB is enough."]
    return [
        (
            f"The weights are {weights / 1e9:,.1f} GB: on GPUs of 80 GB add --tp-size {gpus}, and "
            "--enforce-disable-flashinfer-allreduce-fusion (fused all-reduces have left partial sums in captured states)."
        )
    ]


def _check_class(name: str, model: Path) -> str:
    """What must be said of the class's support; empty when nothing must."""
    if not name:
        raise UsageError(
            f"{model / 'config.json'} names no architectures", remedy="Name a folder as Hugging Face has it."
        )
    if name in KNOWN:
        return ""
    if name in _BY_VERSION:
        (*_, last), reason = SINCE[_BY_VERSION[name]]
        return f"Only with SGLang 0.5.{last}: {reason}."
    if name in _REFUSED:
        raise UsageError(f"{name} can't be captured from SGLang: {REFUSED[_REFUSED[name]]}", remedy=_EMBEDDED)
    raise UsageError(f"{name} is not a model class whose capture from SGLang is known", remedy=_EMBEDDED)


_EMBEDDED = "The embedded engine runs many more: `hsjournal run RUN_DIR --prompts FILE --model MODEL`."


def _config(model: Path) -> dict[str, Any]:
    try:
        config = json.loads((model / "config.json").read_text())
    except OSError as error:
        raise UsageError(
            f"there is no model in {model} (config.json: {error.strerror})", remedy="Name the model's folder."
        ) from None
    except ValueError as error:
        raise UsageError(f"{model / 'config.json'} is not JSON: {error}", remedy="Download the model again.") from None
    if not isinstance(config, dict):
        raise UsageError(f"{model / 'config.json'} is not a JSON object", remedy="Download the model again.")
    return config


def _number(config: dict[str, Any], name: str, model: Path) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise UsageError(f"{model / 'config.json'} has no {name}", remedy="Name the folder of a language model.")
    return value
