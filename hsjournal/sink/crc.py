"""CRC-32 as zip wants it: by ISA-L where it is installed (3 to 4 times faster), else by zlib.

torch itself does not check it, but zip tools do, and it is the dearest part of writing a file with zlib.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def _fastest() -> Callable[[ReadableBuffer, int], int]:
    try:
        found: Callable[[ReadableBuffer, int], int] = importlib.import_module("isal.isal_zlib").crc32
    except ImportError:
        return zlib.crc32
    return found


_crc32 = _fastest()


def crc32(data: ReadableBuffer, value: int = 0) -> int:
    """CRC-32 of what came before (``value``) followed by ``data``."""
    return _crc32(data, value)
