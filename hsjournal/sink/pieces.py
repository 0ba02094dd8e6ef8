"""What a container is composed of, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Rows:
    """A piece that whoever writes the file gathers from the dump: rows of ``sources``, interleaved.

    ``crc`` must be set before the next piece is asked for.
    """

    sources: tuple[int, ...]
    nbytes: int
    crc: int = 0
