"""Numbers in the words of people."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """``1.5 GB``; decimal units, as disks are sold."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(nbytes) < 1000 or unit == "TB":
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1000
    raise AssertionError


def duration(seconds: float | None) -> str:
    """``2 h 05 min``, ``3 min 20 s``, ``12 s``."""
    if seconds is None:
        return "unknown"
    whole = round(seconds)
    if whole >= 86400:
        return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def printable(text: str, most: int = 200) -> str:
    """Text from outside, safe for a terminal: no control characters, no escape sequences, bounded."""
    kept = "".join(c if c.isprintable() else "·" for c in text[: most + 1])
    return kept if len(kept) <= most else kept[: most - 1] + "…"
