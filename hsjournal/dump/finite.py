"""NaN and infinity in raw rows, found by their bits: numpy has no bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BITS: dict[str, tuple[type[np.unsignedinteger[Any]], type[np.signedinteger[Any]], int]] = {
    "bfloat16": (np.uint16, np.int16, 0x7F80),
    "float16": (np.uint16, np.int16, 0x7C00),
    "float32": (np.uint32, np.int32, 0x7F800000),
}
"""Unsigned and signed view, and the bits of +infinity: from there on, sign aside, nothing is finite."""


def is_finite(data: bytes | memoryview | npt.NDArray[np.uint8], dtype: str) -> bool:
    """Whether every value is finite: two maxima over the bits, without a temporary.

    As signed integers the positive values keep their order and the negative ones are below them; as unsigned
    integers the negative values are on top, in the order of their size.
    """
    unsigned, signed, infinity = BITS[dtype]
    bits = np.frombuffer(data, dtype=unsigned)
    sign = 1 << (bits.itemsize * 8 - 1)
    return bool(np.maximum.reduce(bits.view(signed)) < infinity and np.maximum.reduce(bits) < sign | infinity)
