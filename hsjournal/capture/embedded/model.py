"""A causal language model of transformers: loaded, checked, and run once over token ids with its states captured."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers

from hsjournal.capture.embedded.attention import PACKED
from hsjournal.capture.embedded.layers import choose_layers
from hsjournal.capture.embedded.loading import (
    UnsupportedModelError,
    choose_context_length,
    choose_device,
    choose_dtype,
    load_config,
    load_weights,
    model_sizes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

_PACKABLE = {"full_attention", "sliding_attention"}
_MODEL_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""What a model raises that is called in a way it does not know."""
_TOLERANCE = 0.05
"""Of the self-check's medians: far above rounding in bfloat16, far below what a wrong mask or layer does."""


@dataclass(frozen=True, slots=True)
class States:
    """What one forward pass left: rows of all its sequences behind each other, on the CPU.

    Args:
        tensors: ``aux_0`` … ``aux_{k-1}``, ``final``; each [tokens, hidden_size].
        next_tokens: the likeliest next token of each sequence that asked for one, else None.
    """

    tensors: tuple[torch.Tensor, ...]
    next_tokens: tuple[int | None, ...]


class TargetModel:
    """The model whose hidden states are wanted.

    Args:
        folder: the model's folder, as ``save_pretrained`` leaves it.
        dtype: ``auto`` or a key of :data:`hsjournal.dump.protocol.ITEM_SIZE`.
        device: ``auto``, ``cpu``, ``cuda``, …
        layers: the layers to capture, None for the default choice.
        context_length: fewer tokens than the model allows, None for all.
        prenorm: whether the final state is the residual stream at the entry of the model's last norm.

    Raises:
        UsageError: when the folder can't be loaded, or the layers can't be captured.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        layers: Sequence[int] | None = None,
        context_length: int | None = None,
        prenorm: bool = False,
    ) -> None:
        self.folder = folder
        self.prenorm = prenorm
        self.device = choose_device(device)
        self.dtype = choose_dtype(dtype, self.device.type)
        config = load_config(folder)
        text_config = config.get_text_config(decoder=True)
        self.architectures: list[str] = list(getattr(config, "architectures", None) or [])
        self.model_type: str = config.model_type
        self.num_layers, self.hidden_size, self.vocab_size = model_sizes(text_config, folder)
        self.context_length = choose_context_length(text_config, context_length)
        self.capture_layers = choose_layers(layers, self.num_layers)
        self._model = load_weights(folder, getattr(torch, self.dtype), self.device)
        self._decoder, self._layers, self._norm = _find_parts(self._model, self.num_layers)
        self._packed = False
        self._copy_at_once = False
        self._seen: dict[int, torch.Tensor] = {}
        self._hook()
        self._check_capture()
        self._packed = _may_pack(text_config) and self._try_packing()
        log.info("%s", "packing requests" if self._packed else "running requests one by one: this model can't pack")

    @property
    def versions(self) -> dict[str, str]:
        """Of the libraries that compute the states."""
        return {"torch": str(torch.__version__), "transformers": str(transformers.__version__)}

    @property
    def packs(self) -> bool:
        """Whether several requests share a forward pass."""
        return self._packed

    def prefill(self, sequences: Sequence[Sequence[int]], want_token: Sequence[bool]) -> States:
        """Run the sequences, each alone with its own positions, and capture their states.

        Args:
            sequences: token ids; more than one only if :attr:`packs`.
            want_token: for each, whether its next token is wanted.
        """
        lengths = tuple(len(ids) for ids in sequences)
        flat = torch.tensor([token for ids in sequences for token in ids], device=self.device)
        positions = torch.cat([torch.arange(length, device=self.device) for length in lengths])
        extra: dict[str, Any] = {"hsjournal_lengths": lengths} if self._packed else {}
        with torch.inference_mode():
            states = self._forward(flat, positions, extra)
            ends = torch.tensor(lengths).cumsum(0).tolist()
            tokens = tuple(
                self._next_token(states[-1][end - 1]) if wanted else None
                for end, wanted in zip(ends, want_token, strict=True)
            )
            return States(tuple(state.cpu() for state in states), tokens)

    def _forward(self, flat: torch.Tensor, positions: torch.Tensor, extra: dict[str, Any]) -> list[torch.Tensor]:
        self._seen.clear()
        try:
            self._decoder(input_ids=flat[None], position_ids=positions[None], use_cache=False, **extra)
            return [self._seen[key][0].contiguous() for key in (*self.capture_layers, self.num_layers)]
        finally:
            self._seen.clear()

    def _next_token(self, final_row: torch.Tensor) -> int:
        return int(self._model.get_output_embeddings()(self._normed(final_row)).argmax())

    def _normed(self, final: torch.Tensor) -> torch.Tensor:
        """The captured final state after the last norm."""
        normed: torch.Tensor = self._norm(final) if self.prenorm else final
        return normed

    def _hook(self) -> None:
        """Keep references to the chosen outputs as they pass; nothing is copied here."""

        def see(key: int, tensor: torch.Tensor) -> None:
            self._seen[key] = tensor.clone() if self._copy_at_once else tensor

        def keep(key: int) -> Any:
            def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
                see(key, output[0] if isinstance(output, tuple) else output)

            return hook

        for layer in self.capture_layers:
            self._layers[layer].register_forward_hook(keep(layer))
        if self.prenorm:
            self._norm.register_forward_pre_hook(lambda _module, inputs: see(self.num_layers, inputs[0]))
        else:
            self._norm.register_forward_hook(keep(self.num_layers))

    def _check_capture(self) -> None:
        """Compare the hooks with transformers' own ``hidden_states`` on a few tokens.

        The hooks keep references: a model that later changes such a tensor in place shows here, and is copied from.
        """
        ids = self._some_ids(12)
        positions = torch.arange(len(ids), device=self.device)
        problem = "they are not the outputs of its layers"
        try:
            with torch.no_grad():
                whole = self._decoder(input_ids=ids[None], use_cache=False, output_hidden_states=True)
                reference = [whole.hidden_states[layer + 1][0] for layer in self.capture_layers]
                reference.append(whole.last_hidden_state[0])
                for self._copy_at_once in (False, True):
                    states = self._forward(ids, positions, {})
                    states[-1] = self._normed(states[-1])
                    if all(_distance(a, b) < _TOLERANCE for a, b in zip(states, reference, strict=True)):
                        return
        except _MODEL_ERRORS as error:
            problem = " ".join(str(error).split())[:300]
        raise UnsupportedModelError(
            f"The states of {self.folder} ({self.model_type}) can't be captured: {problem}",
            remedy="The embedded engine does not support this architecture; serve it with SGLang.",
        )

    def _try_packing(self) -> bool:
        """Whether two packed sequences get the states that each gets alone."""
        first, second = self._some_ids(9).tolist(), self._some_ids(21)[7:].tolist()
        alone = [self.prefill([ids], [False]).tensors for ids in (first, second)]
        before = self._model.config._attn_implementation  # noqa: SLF001 (transformers has no public reader)
        try:
            self._model.set_attn_implementation(PACKED)
            self._packed = True
            together = self.prefill([first, second], [False, False]).tensors
        except _MODEL_ERRORS as error:
            log.info("packing is not possible: %s", error)
        else:
            expected = [torch.cat(pair) for pair in zip(*alone, strict=True)]
            if all(_distance(a, b) < _TOLERANCE for a, b in zip(together, expected, strict=True)):
                return True
            log.warning("packed states differ from those of requests alone")
        self._packed = False
        self._model.set_attn_implementation(before)
        return False

    def _some_ids(self, count: int) -> torch.Tensor:
        count = min(count, self.context_length)
        return (torch.arange(count, device=self.device) * 7919 + 3) % self.vocab_size


def _find_parts(model: Any, num_layers: int) -> tuple[Any, torch.nn.ModuleList, torch.nn.Module]:
    """The decoder, its layers and its final norm."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    lists = [m for m in decoder.children() if isinstance(m, torch.nn.ModuleList) and len(m) == num_layers]
    named = dict(decoder.named_children())
    norms = [named[name] for name in ("norm", "final_layernorm", "final_layer_norm", "ln_f") if name in named]
    if len(lists) != 1 or not norms or model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no decoder layers and final norm where the embedded engine looks for them",
            remedy="Serve this model with SGLang.",
        )
    return decoder, lists[0], norms[0]


def _may_pack(text_config: Any) -> bool:
    kinds = set(getattr(text_config, "layer_types", None) or ())
    return kinds <= _PACKABLE and not getattr(text_config, "attention_chunk_size", None)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Median over rows of the relative difference: one row that a router sends elsewhere is no fault."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.float(), b.float()
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-30)).median())
