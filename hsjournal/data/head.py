"""A model's output embeddings and last norm, read from its folder by rows: log-probabilities without loading the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hsjournal.errors import UsageError

_ROWS, _TOKENS = 8192, 512
"""Rows of the vocabulary and tokens of the sample in one product: 16 MB of logits, and 117 MB of bfloat16 weights at 7168."""
_HEADS = ("lm_head.weight", "embed_tokens.weight")
_FLOATING = (torch.bfloat16, torch.float16, torch.float32)


class Head:
    """The last steps of a model.

    Args:
        folder: of the model: ``config.json`` and safetensors files.

    Raises:
        UsageError: when the folder holds no output embeddings that can be read so.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            config = json.loads((folder / "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise self._refusal(f"config.json can't be read ({error})") from None
        self._config: dict[str, Any] = config.get("text_config") or config
        self._files = self._list()
        tied = self._config.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
        head = self._find(_HEADS[bool(tied)])
        if head is None:
            raise self._refusal(f"no safetensors file there holds {_HEADS[bool(tied)]}")
        self._head = head

    def norm(self, state: torch.Tensor) -> torch.Tensor | None:
        """A state ``[N, H]`` after the last norm; None where that is no plain RMS norm of the folder."""
        name, epsilon = self._find("norm.weight", layers=False), self._config.get("rms_norm_eps")
        plain = not str(self._config.get("model_type", "")).startswith(("gemma", "recurrent_gemma"))  # they add 1
        if name is None or epsilon is None or not plain or self._find("norm.bias", layers=False):
            return None
        wide = state.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + float(epsilon))
        with safe_open(self._files[name], "pt") as file:
            weight: torch.Tensor = file.get_tensor(name).float()
        return scaled * weight

    def log_probabilities(self, state: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """Of each token that follows, by a final state ``[N, H]`` after the last norm and ids ``[N]``: ``[N - 1]``.

        Raises:
            UsageError: when the output embeddings are of another width, or quantised.
        """
        state, following = state[:-1], input_ids[1:]
        total = torch.full((len(state),), -torch.inf)
        chosen = torch.full((len(state),), -torch.inf)
        with safe_open(self._files[self._head], "pt") as file:
            part = file.get_slice(self._head)
            count, width = part.get_shape()
            if width != state.shape[-1]:
                raise self._refusal(f"{self._head} is {width} wide, the states {state.shape[-1]}")
            for first in range(0, count, _ROWS):
                weights = part[first : first + _ROWS]
                if weights.dtype not in _FLOATING:
                    raise self._refusal(f"{self._head} is quantised ({weights.dtype})")
                for at in range(0, len(state), _TOKENS):
                    rows = slice(at, at + _TOKENS)
                    logits = self._shaped(state[rows].float() @ weights.float().T)
                    total[rows] = torch.logaddexp(total[rows], logits.logsumexp(-1))
                    here = following[rows] - first
                    mine = (here >= 0) & (here < len(weights))
                    picked = logits.gather(1, here.clamp(0, len(weights) - 1)[:, None])[:, 0]
                    chosen[rows] = torch.where(mine, picked, chosen[rows])
        return chosen - total

    def _shaped(self, logits: torch.Tensor) -> torch.Tensor:
        """As some families scale and cap them."""
        c = self._config
        logits = logits / c["logits_scaling"] if c.get("logits_scaling") else logits
        logits = logits * c["logit_scale"] if c.get("logit_scale") else logits
        cap = c.get("final_logit_softcapping")
        return torch.tanh(logits / cap) * cap if cap else logits

    def _list(self) -> dict[str, Path]:
        """Each tensor's file."""
        found: dict[str, Path] = {}
        try:
            for index in self._folder.glob("*.safetensors.index.json"):
                named = json.loads(index.read_bytes())["weight_map"]
                found |= {name: self._folder / file for name, file in named.items()}
            if not found:
                for path in self._folder.glob("*.safetensors"):
                    with safe_open(path, "pt") as file:
                        found |= dict.fromkeys(file.keys(), path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise self._refusal(f"its safetensors files can't be read ({error})") from None
        return found

    def _find(self, ending: str, *, layers: bool = True) -> str | None:
        """The shortest name of a tensor that ends so, perhaps behind a wrapper's prefix."""
        names = [n for n in self._files if n == ending or n.endswith(f".{ending}")]
        names = [n for n in names if layers or ".layers." not in n]
        return min((n for n in names if not n.startswith(("vision", "visual"))), key=len, default=None)

    def _refusal(self, why: str) -> UsageError:
        return UsageError(
            f"the output embeddings of the model {self._folder} can't be used: {why}",
            remedy="Name the folder of an unquantised copy by --model, or use --logits without --logits-server.",
        )
