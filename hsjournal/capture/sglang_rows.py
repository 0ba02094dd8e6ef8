"""Whose rows are where in a forward pass of stock SGLang, and which of them are ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hsjournal.dump.protocol import RequestId

OURS = "hsj-"


class RowsError(Exception):
    """A forward pass does not look as it should; the message says how."""


@dataclass(frozen=True, slots=True)
class RowSlice:
    """The rows of one request of ours in a packed pass.

    Args:
        rid: the request id.
        start: first row in the packed tensors.
        length: rows.
        prefix: tokens of the request that were computed before, or came from the prefix cache.
    """

    rid: RequestId
    start: int
    length: int
    prefix: int


def our_slices(batch: Any) -> list[RowSlice]:
    """The slices of our requests in a forward batch, in packed order; none on decode.

    Everybody else's rows are skipped by request id, and so are the rows that pad a graph replay: only lengths count.

    Raises:
        RowsError: when ids and lengths do not fit together.
    """
    rids = getattr(batch, "rids", None)
    lengths = getattr(batch, "extend_seq_lens_cpu", None)
    if not rids or lengths is None or not any(str(rid).startswith(OURS) for rid in rids):
        return []
    prefixes = getattr(batch, "extend_prefix_lens_cpu", None)
    if prefixes is None or len(lengths) < len(rids) or len(prefixes) < len(rids):
        raise RowsError(f"{len(rids)} requests, but lengths of {len(lengths)} and prefixes of {len(prefixes or ())}")
    slices, start = [], 0
    for rid, length, prefix in zip(rids, lengths, prefixes, strict=False):
        ours = RequestId.parse(str(rid))
        if ours is not None and int(length) > 0:
            slices.append(RowSlice(ours, start, int(length), int(prefix)))
        start += int(length)
    return slices


def split_tensors(hidden: Any, aux: Any, num_aux: int, hidden_size: int, dtype: Any, rows: int) -> list[Any]:
    """The tensors of a pass in the protocol's order, each ``[at least rows, hidden_size]``: aux ascending, then final.

    Args:
        hidden: the final state, packed.
        aux: a list of tensors, or one packed ``[tokens, num_aux * hidden_size]``.
        num_aux: layers that were asked for.
        hidden_size: columns of each.
        dtype: the torch dtype that all must have.
        rows: rows that are wanted.

    Raises:
        RowsError: naming what does not fit.
    """
    if aux is None:
        raise RowsError("the model handed out no aux states")
    if isinstance(aux, (list, tuple)):
        parts = list(aux)
    elif aux.dim() == 2 and aux.shape[1] == num_aux * hidden_size:
        parts = [aux[:, i * hidden_size : (i + 1) * hidden_size] for i in range(num_aux)]
    else:
        raise RowsError(f"aux states of shape {tuple(aux.shape)}, not [tokens, {num_aux} x {hidden_size}]")
    if len(parts) != num_aux:
        raise RowsError(f"{len(parts)} aux states, not {num_aux}")
    tensors = [*parts, hidden]
    for tensor in tensors:
        if tensor.dim() != 2 or tensor.shape[1] != hidden_size or tensor.shape[0] < rows:
            raise RowsError(f"states of shape {tuple(tensor.shape)}, not [{rows} or more, {hidden_size}]")
        if tensor.dtype != dtype:
            raise RowsError(f"states of {tensor.dtype}, where the model is of {dtype}")
    return tensors


def runs_of(slices: Sequence[RowSlice]) -> list[list[RowSlice]]:
    """Slices grouped so that each group's rows lie side by side: one group, one copy."""
    runs: list[list[RowSlice]] = []
    for item in slices:
        if runs and runs[-1][-1].start + runs[-1][-1].length == item.start:
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs
