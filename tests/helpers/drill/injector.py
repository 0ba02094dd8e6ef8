"""What the product passes on its way, turned into faults by the test's own hand: in this process, at named points."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator

from hsjournal import faults

Act = Callable[[int | None], None]


class Injector:
    """Acts once for each armed fault, at its point and for its row (None: whichever row comes first)."""

    def __init__(self) -> None:
        self._armed: dict[str, list[tuple[int | None, Act, int]]] = defaultdict(list)
        self._number = 0
        self._reached: set[int] = set()
        self._lock = threading.Lock()
        self.fired: list[str] = []

    def begin(self) -> int:
        """The number of the next fault; whatever is armed from now on is part of it."""
        self._number += 1
        return self._number

    def arm(self, point: str, row: int | None, act: Act) -> None:
        """Act when the point is passed."""
        assert point in faults.POINTS
        self._armed[point].append((row, act, self._number))

    def disarm(self) -> set[int]:
        """Forget what did not fire; the numbers of the faults of which no part did."""
        with self._lock:
            left = {number for armed in self._armed.values() for _, _, number in armed}
            self._armed.clear()
            return left - self._reached

    def point(self, name: str, row: int | None = None) -> None:
        """In place of :func:`hsjournal.faults.point`."""
        with self._lock:
            due = [item for item in self._armed.get(name, ()) if item[0] in (None, row)][:1]
            for item in due:
                self._armed[name].remove(item)
                self.fired.append(name)
                self._reached.add(item[2])
        for _, act, _ in due:
            act(row)

    @contextlib.contextmanager
    def installed(self) -> Iterator[Injector]:
        """For the block, every fault point of this process comes here."""
        real = faults.point
        faults.point = self.point
        try:
            yield self
        finally:
            faults.point = real
