"""In which order rows run, and which of them: ``--shuffle-seed`` and ``--limit``."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence

from hsjournal.errors import PromptsError
from hsjournal.prompts.readers import Line, Source
from hsjournal.prompts.spec import Reading


class Order:
    """Row numbers for the lines of the sources, which are always read in the files' order.

    Shuffled, each line's place is drawn first (4 bytes a line); an id that stands twice is still refused where it
    stands the second time in the files.

    Args:
        sources: of the run.
        reading: with seed and limit.

    Raises:
        PromptsError: when a source can't be read through.
    """

    def __init__(self, sources: Sequence[Source], reading: Reading) -> None:
        self._sources, self._limit = sources, reading.limit
        seed = reading.shuffle_seed
        self._places = None if seed is None else drawn(sum(source.count() for source in sources), seed)

    def rows(self) -> Iterator[tuple[int, int, Line]]:
        """Row number, number of the source, and line, of each line that is taken. Every source is read to its end.

        Raises:
            PromptsError: when a source can't be read on, or has other rows than it had at first.
        """
        n, places = 0, self._places
        for index, source in enumerate(self._sources):
            for line in source:
                if places is not None and n >= len(places):
                    raise _changed()
                row = n if places is None else places[n]
                n += 1
                if self._limit is None or row < self._limit:
                    yield row, index, line
        if places is not None and n != len(places):
            raise _changed()


def drawn(count: int, seed: int) -> array[int]:
    """The numbers from 0 in an order that depends on count and seed alone, in every version of Python."""
    places = array("I", range(count))
    draw = random.Random(seed).random  # noqa: S311 - the one method whose sequence Python promises to keep
    for n in range(count - 1, 0, -1):
        other = int(draw() * (n + 1))
        places[n], places[other] = places[other], places[n]
    return places


def _changed() -> PromptsError:
    return PromptsError(
        "the prompts changed while they were read", remedy="Wait until they are whole, then begin again."
    )
