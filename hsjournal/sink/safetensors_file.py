"""A safetensors file of one sample, composed piece by piece without the library.

An 8-byte little-endian length, a JSON header padded with spaces, then the tensors without gaps: so the library's own
check holds (``safetensors/src/tensor.rs``: offsets ascend without holes and end with the file). Text and flags stand
in ``__metadata__``. Provenance can't: it holds digests of the rows, known only when they have been written, and the
header comes first. It is the last tensor instead, JSON as bytes, whose length is known beforehand.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hsjournal.sink.layouts import Tensor, Value
from hsjournal.sink.pieces import Rows

ALIGN = 64
"""Where the first tensor begins, so that a mapped file holds aligned elements."""
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int64": "I64"}


def compose(entries: Sequence[Tensor | Value], provenance: Callable[[], dict[str, Any]]) -> Iterator[bytes | Rows]:
    """The file's pieces, in order: header, tensors in the order of their keys, provenance.

    Args:
        entries: the keys; tensors of wider elements first, or later ones would be misaligned.
        provenance: called twice: before the first :class:`Rows` piece for its length, and after the last one.
    """
    tensors = [entry for entry in entries if isinstance(entry, Tensor)]
    texts = {
        entry.name: _text(entry.value) for entry in entries if isinstance(entry, Value) and entry.value is not None
    }
    said = next((entry.name for entry in entries if isinstance(entry, Value) and entry.value is None), None)
    length = len(_said(provenance())) if said is not None else 0
    yield _header(tensors, {"format": "pt", **texts}, said, length)
    for tensor in tensors:
        yield tensor.content if isinstance(tensor.content, bytes) else Rows(tensor.content, tensor.nbytes)
    if said is not None:
        data = _said(provenance())
        if len(data) != length:
            raise ValueError(f"the provenance grew from {length} to {len(data)} bytes while the rows were written")
        yield data


def _header(tensors: Sequence[Tensor], texts: dict[str, str], said: str | None, length: int) -> bytes:
    described: dict[str, Any] = {"__metadata__": texts}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        described[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    if said is not None:
        described[said] = {"dtype": "U8", "shape": [length], "data_offsets": [end, end + length]}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    return struct.pack("<Q", len(text)) + text


def _said(provenance: dict[str, Any]) -> bytes:
    return json.dumps(provenance, separators=(",", ":"), ensure_ascii=True).encode()


def _text(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()
