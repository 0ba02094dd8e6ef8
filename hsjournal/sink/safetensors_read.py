"""What a safetensors file holds and where, read without the library; nothing read is trusted.

The second opinion on :mod:`hsjournal.sink.safetensors_file`: it shares no code with it.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

from hsjournal.dump.protocol import strict_json
from hsjournal.sink.torch_read import UNREADABLE, FormatError, ReadAt, StoredTensor

_MOST_HEADER = 16 << 20
_MOST_SAID = 1 << 20
_DTYPES = {
    "BF16": ("bfloat16", 2), "F16": ("float16", 2), "F32": ("float32", 4), "I64": ("int64", 8), "I32": ("int32", 4),
    "BOOL": ("bool", 1), "U8": ("uint8", 1),
}  # fmt: skip


def read_safetensors_file(read_at: ReadAt, size: int) -> dict[str, Any]:
    """The keys in the order of their bytes, then the text of ``__metadata__`` (but for ``format``).

    Tensors come as :class:`StoredTensor`; one of bytes that holds a JSON table, as ours keep provenance in, as that table.

    Raises:
        FormatError: naming what is wrong.
    """
    try:
        return _read(read_at, size)
    except FormatError:
        raise
    except UNREADABLE as error:
        raise FormatError(f"no readable safetensors file: {str(error) or type(error).__name__}") from None


def _read(read_at: ReadAt, size: int) -> dict[str, Any]:
    (length,) = struct.unpack("<Q", read_at(0, 8))
    if length > min(_MOST_HEADER, max(size - 8, 0)):
        raise FormatError(f"its header is {length:,} bytes long, the file {size:,}")
    header = strict_json(read_at(8, length))
    texts = header.pop("__metadata__", {})
    tensors = sorted(
        ((name, _tensor(name, entry, 8 + length)) for name, entry in header.items()), key=lambda item: item[1].offset
    )
    at = 8 + length
    for name, tensor in tensors:
        if tensor.offset != at or at + tensor.nbytes > size:
            raise FormatError(f"{name!r} does not lie where it is due within the file: it was cut short")
        at += tensor.nbytes
    if at != size:
        raise FormatError("something follows the last tensor")
    found: dict[str, Any] = {}
    for name, tensor in tensors:
        said = _said(read_at, tensor) if tensor.dtype == "uint8" else None
        found[name] = tensor if said is None else said
    return found | {str(name): text for name, text in texts.items() if name != "format"}


def _tensor(name: str, entry: Any, start: int) -> StoredTensor:
    try:
        dtype, item = _DTYPES.get(entry["dtype"], (str(entry["dtype"]), 0))
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise FormatError(f"{name!r} is not described as a tensor") from None
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise FormatError(f"{name!r} has a shape or a place that is none")
    if item and end - begin != math.prod(shape) * item:
        raise FormatError(f"{name!r} is {end - begin:,} bytes, not {math.prod(shape):,} x {item}")
    return StoredTensor(dtype, shape, start + begin, end - begin)


def _said(read_at: ReadAt, tensor: StoredTensor) -> dict[str, Any] | None:
    if tensor.nbytes > _MOST_SAID:
        return None
    try:
        value = json.loads(read_at(tensor.offset, tensor.nbytes))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
