"""Which files are read back as soon as they are written, for storage where that is dear."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash


@dataclass(frozen=True, slots=True)
class ReadBackPolicy:
    """``full``: every file; ``sample:P``: a share of them, drawn by row; ``deferred``: none, until ``hsjournal verify``.

    Args:
        share: of the rows, 0 to 1.
    """

    share: float

    @classmethod
    def parse(cls, text: str) -> ReadBackPolicy:
        """As on the command line; P is a share (``0.05``) or a percentage (``5%``).

        Raises:
            ValueError: in words for the user.
        """
        if text in ("full", "deferred"):
            return cls(1.0 if text == "full" else 0.0)
        head, _, share = text.partition(":")
        try:
            value = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
        except ValueError:
            value = -1.0
        if head != "sample" or not 0 < value <= 1:
            raise ValueError(f"{text!r} is none of full, deferred, sample:5% (or sample:0.05)")
        return cls(value)

    def reads(self, run_id: str, row: int) -> bool:
        """Whether the file of ``row`` is read back at once; the same answer every time."""
        if self.share >= 1:
            return True
        return xxhash.xxh3_64_intdigest(f"{run_id}/{row}".encode()) < self.share * 2**64
