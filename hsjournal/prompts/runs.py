"""A loss mask as run lengths: alternately how many tokens don't count and how many do, from those that don't on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby


def run_lengths(flags: Iterable[int]) -> tuple[int, ...]:
    """Run lengths of flags, the first run counting zeros (0 when the flags start with a one)."""
    runs = [(flag, sum(1 for _ in group)) for flag, group in groupby(flags)]
    lengths = tuple(length for _, length in runs)
    return (0, *lengths) if runs and runs[0][0] else lengths


def cut_runs(lengths: Sequence[int], most: int) -> tuple[int, ...]:
    """Run lengths of the first ``most`` flags."""
    kept: list[int] = []
    for length in lengths:
        if most <= 0:
            break
        kept.append(min(length, most))
        most -= length
    return tuple(kept)


def last_run(lengths: Sequence[int]) -> tuple[int, ...]:
    """Run lengths in which only the last stretch of ones is left."""
    last = next((n for n in range(len(lengths) - 1, 0, -1) if n % 2 and lengths[n]), None)
    if last is None:
        return tuple(lengths)
    after = sum(lengths[last + 1 :])
    return (sum(lengths[:last]), lengths[last], *((after,) if after else ()))
