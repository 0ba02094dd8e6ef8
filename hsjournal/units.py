"""Sizes and times as people write them: ``64GiB``, ``5TB``, ``1h30m``, ``500ms``; plain numbers are bytes and seconds."""

from __future__ import annotations

import re

_NUMBER = r"([0-9]{1,15}(?:\.[0-9]{1,6})?)"
_SIZE = re.compile(rf"{_NUMBER}\s*(?:([kKMGTP]?)(i?)B?)")
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SECONDS = {"ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(rf"{_NUMBER}\s*(ms|sec|s|min|m|h|d)")


def parse_bytes(text: str) -> int:
    """``1000``, ``64GiB`` (powers of 1,024), ``5TB`` or ``5T`` (powers of 1,000), as bytes.

    Raises:
        ValueError: when it is none of these.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"not a size: {text!r}; write it as 64GiB, 5TB or a number of bytes")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** _POWER[match[2].upper()])


def parse_seconds(text: str) -> float:
    """``90``, ``500ms``, ``20min``, ``1h30m``, ``2d``, as seconds.

    Raises:
        ValueError: when it is none of these.
    """
    compact = text.strip()
    if re.fullmatch(_NUMBER, compact):
        return float(compact)
    total, end = 0.0, 0
    for match in _TIME.finditer(compact):
        if compact[end : match.start()].strip():
            break
        total, end = total + float(match[1]) * _SECONDS[match[2]], match.end()
    if not end or compact[end:]:
        raise ValueError(f"not a time: {text!r}; write it as 90, 500ms, 20min or 1h30m")
    return total
