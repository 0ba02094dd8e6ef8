"""Causal attention over several sequences packed behind each other, without a mask and without padding.

Registered with transformers under :data:`PACKED`. Each sequence attends to itself alone through torch's fused
kernel, so that a packed forward costs what its tokens cost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

PACKED = "hsjournal_packed"
_REFUSED = ("softcap", "s_aux", "position_bias")
"""Arguments that change what attention computes, and that this one does not know."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    hsjournal_lengths: tuple[int, ...] = (),
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each of the packed sequences.

    Args:
        module: the attention layer.
        query: [1, heads, tokens, head_dim].
        key: [1, kv_heads, tokens, head_dim].
        value: [1, kv_heads, tokens, value_dim].
        attention_mask: always None.
        dropout: not used, the model is never trained here.
        scaling: of the scores; None for 1/sqrt(head_dim).
        sliding_window: how many tokens back a token sees, itself included; None for all.
        hsjournal_lengths: tokens of each sequence, in order; their sum is ``tokens``.
        kwargs: what transformers passes besides.

    Returns:
        [1, tokens, heads, value_dim], and None for the weights.
    """
    del dropout
    unknown = [name for name in _REFUSED if kwargs.get(name) is not None]
    if unknown or attention_mask is not None or sum(hsjournal_lengths) != query.shape[2]:
        raise NotImplementedError(f"{type(module).__name__} can't run packed ({', '.join(unknown) or 'mask, lengths'})")
    grouped = query.shape[1] != key.shape[1]
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    start = 0
    for length in hsjournal_lengths:
        end = start + length
        window = _window_mask(length, sliding_window, query.device)
        part = scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            attn_mask=window,
            is_causal=window is None and length > 1,
            scale=scaling,
            enable_gqa=grouped,
        )
        out[:, start:end] = part.transpose(1, 2)
        start = end
    return out, None


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    if window is None or length <= window:
        return None
    position = torch.arange(length, device=device)
    back = position[:, None] - position[None, :]
    return (back >= 0) & (back < window)


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    return None


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _no_mask)
