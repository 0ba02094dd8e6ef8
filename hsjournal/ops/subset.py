"""Which rows to look at, when not all: ``1/5``, ``2%`` or ``50GiB``."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hsjournal.errors import UsageError
from hsjournal.units import parse_bytes

_PART = re.compile(r"(\d{1,6})/(\d{1,6})")
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%")


@dataclass(frozen=True, slots=True)
class Subset:
    """A choice of rows.

    Args:
        part: the n-th (from 1) of m parts: over m calls every row is looked at once.
        share: of all rows, drawn at random.
        nbytes: of output, drawn at random.
    """

    part: tuple[int, int] | None = None
    share: float | None = None
    nbytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> Subset:
        """From the command line's words; empty for all rows.

        Raises:
            UsageError: when it is none of the three forms, or out of bounds.
        """
        if not text:
            return cls()
        if match := _PART.fullmatch(text):
            number, parts = int(match[1]), int(match[2])
            if 1 <= number <= parts:
                return cls(part=(number, parts))
        elif match := _SHARE.fullmatch(text):
            if 0 < float(match[1]) <= 100:
                return cls(share=float(match[1]) / 100)
        elif not text.strip().isdigit():  # a bare number could mean rows as well
            with contextlib.suppress(ValueError):
                if (nbytes := parse_bytes(text)) > 0:
                    return cls(nbytes=nbytes)
        raise UsageError(
            f"not a subset: {text!r}",
            remedy="Give a part as 1/5, a share as 2%, or a size as 50GiB (--subset).",
        )

    def choose(self, rows: Iterable[tuple[int, int]], seed: int) -> Sequence[int]:
        """The chosen of ``rows`` (row and bytes of its output), ascending; at least one if there is any.

        Args:
            rows: all that could be looked at.
            seed: of the draw; the same seed chooses the same of the same rows.
        """
        if self.part is not None:
            number, parts = self.part
            return sorted(row for row, _ in rows if row % parts == number - 1)
        every = sorted(rows)
        if self.share is None and self.nbytes is None:
            return [row for row, _ in every]
        random.Random(seed).shuffle(every)  # noqa: S311 - a sample, no secret
        if self.share is not None:
            return sorted(row for row, _ in every[: max(1, round(len(every) * self.share))])
        return sorted(_up_to(every, self.nbytes or 0))


def _up_to(rows: Sequence[tuple[int, int]], budget: int) -> list[int]:
    chosen: list[int] = []
    for row, nbytes in rows:
        if chosen and nbytes > budget:
            break
        chosen.append(row)
        budget -= nbytes
    return chosen
