"""Which waiting requests go into the next forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def next_batch(lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Indices into ``lengths`` (the waiting requests, oldest first) of the next batch.

    The oldest request always goes, however long it is, so none starves; others join as they fit.
    """
    chosen: list[int] = []
    room = max_tokens
    for index, length in enumerate(lengths):
        if not chosen or length <= room:
            chosen.append(index)
            room -= length
            if room <= 0:
                break
    return chosen
