"""The run's own limit of what the output may hold (``--max-out``): a pause until a trainer has released some of it."""

from __future__ import annotations

import time
from collections.abc import Callable

from hsjournal.errors import NoRoomError
from hsjournal.prompts.forecast import file_bytes
from hsjournal.states import State
from hsjournal.worker.context import Context

PAUSE = "max-out"
ASK_EVERY = 1.0
_WITH_FILE = (State.WRITTEN, State.VERIFIED)


class Ceiling:
    """Says whether one more sample would pass the limit.

    As with a full disk, the wait ends the run after ``--pause-limit`` (exit code 5, nothing lost): a trainer that
    died is noticed like that. Each release starts the clock anew, so a slow one is not.

    Args:
        context: of the worker.
        under_way: rows that were started and have not ended, and their tokens.
    """

    def __init__(self, context: Context, under_way: Callable[[], tuple[int, int]]) -> None:
        self._c, self._under_way = context, under_way
        self._limit = context.settings.max_out
        self._released = 0
        self._asked = float("-inf")

    async def holds(self, tokens: int) -> bool:
        """Whether a sample of ``tokens`` has to wait.

        Raises:
            NoRoomError: when it has waited longer than the pause limit, or could never fit.
        """
        nbytes = self._most(tokens, 1)
        if not self._limit or self._with(nbytes) <= self._limit:
            self._c.pauses.end(PAUSE)
            return False
        if time.monotonic() - self._asked >= ASK_EVERY:
            self._asked = time.monotonic()
            _, released = await self._c.journal.call(lambda journal: journal.released())
            if released > self._released:
                self._c.pauses.end(PAUSE)
            self._released = released
            if self._with(nbytes) <= self._limit:
                return False
        if self._with(0) == 0:
            raise NoRoomError(
                f"one sample of about {nbytes:,} bytes is more than --max-out {self._limit:,}", remedy="Allow more."
            )
        self._c.pauses.begin(
            PAUSE,
            f"the output holds {self._with(0):,} bytes, what is in flight included, and --max-out allows {self._limit:,}: "
            "free what the trainer has consumed with `hsjournal release`",
        )
        self._c.pauses.check(PAUSE, _waited_too_long)
        return True

    def _with(self, nbytes: int) -> int:
        """Bytes of the output when what is in flight has been written, and ``nbytes`` more."""
        tally = self._c.tally
        there = sum(int(tally.counts[state][2]) for state in _WITH_FILE) - self._released
        counted = [flight.tokens for flight in tally.flights.values() if flight.state in _WITH_FILE]
        rows, tokens = self._under_way()
        return there + self._most(max(0, tokens - sum(counted)), max(0, rows - len(counted))) + nbytes

    def _most(self, tokens: int, files: int) -> int:
        m = self._c.manifest
        return file_bytes(tokens, m.hidden_size, m.dtype, len(m.capture_layers), files=files)


def _waited_too_long(sentence: str) -> NoRoomError:
    return NoRoomError(
        f"nothing was released for longer than --pause-limit: {sentence}",
        remedy="Release some, or allow more with --max-out, then `hsjournal resume`; nothing is lost.",
    )
