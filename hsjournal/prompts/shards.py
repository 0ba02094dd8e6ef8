"""Which rows a shard of a larger run has: by a stable hash of the sample's id, so that the union of all is the whole."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import Self

from hsjournal.errors import PromptsError

MOST = 100_000


@dataclass(frozen=True, slots=True)
class Shard:
    """The ``number``-th (from 1) of ``of`` shards. Row numbers and file names are those of the whole: they never collide."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """From ``2/8``.

        Raises:
            PromptsError: when it is none.
        """
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MOST:
            raise PromptsError(f"not a shard: {text!r}", remedy="Write the second of eight as --shard 2/8.")
        return cls(int(match[1]), int(match[2]))

    def has(self, sample_id: str | None, line: int) -> bool:
        """Whether a row is this shard's; one that has no id of its own goes by its line number."""
        return shard_of(sample_id if sample_id is not None else f"line {line}", self.of) == self.number


def shard_of(key: str, of: int) -> int:
    """The shard of a key, from 1: BLAKE2b (8 bytes, little-endian) of its UTF-8, modulo ``of``; never to be changed."""
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % of + 1
