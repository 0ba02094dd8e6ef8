"""The servers of a run: which one takes the next row, and where a row that was sent before belongs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from hsjournal.dump.protocol import RequestId
from hsjournal.errors import ServerError
from hsjournal.worker.context import Context
from hsjournal.worker.handover import Handover


class Station:
    """One server, and the rows that are under way there.

    Args:
        context: what a row passes through that goes to this server.
        under_way: is kept here: tokens of each row that is at the server.
    """

    def __init__(self, context: Context, under_way: dict[int, int]) -> None:
        self.c = context
        self.tells = True
        """Whether the server tells which requests it has, so that a row left as sent is really there."""
        self.done = 0
        self._under_way = under_way
        self._since = time.monotonic()

    @property
    def in_flight(self) -> int:
        """Rows under way."""
        return len(self._under_way)

    @property
    def load(self) -> int:
        """Tokens under way."""
        return sum(self._under_way.values())

    def enter(self, row: int, tokens: int) -> None:
        """A row starts here."""
        self._under_way[row] = tokens

    def leave(self, row: int, *, done: bool) -> None:
        """A row has ended here, or goes back."""
        self._under_way.pop(row, None)
        self.done += done

    def takes(self) -> bool:
        """Whether one more row may start.

        Raises:
            NoRoomError, ServerError: when what is wrong here has lasted longer than the pause limit.
        """
        c = self.c
        if not c.outage.is_up or c.handover.is_gone or c.canary.holds:
            return False
        if self.in_flight >= c.settings.max_in_flight:
            return False
        return c.brake.allows(self.in_flight)

    def told(self) -> dict[str, Any]:
        """How it is, JSON-able."""
        c = self.c
        room: dict[str, Any] = {"root": str(c.handover.path), "reserved": c.handover.room.reserved}
        with contextlib.suppress(OSError):
            room["available"] = c.handover.room.available()
        return {
            "url": c.client.url,
            "up": c.outage.is_up,
            "problem": c.outage.problem or next(iter(c.brake.sentences), None),
            "boot_id": c.outage.boot_id,
            "in_flight": self.in_flight,
            "tokens_in_flight": self.load,
            "verified": self.done,
            "samples_per_s": self.done / max(1e-3, time.monotonic() - self._since),
            "handover": room,
        }


class Stations:
    """All servers of a run.

    Args:
        stations: in the order of the command line.
    """

    def __init__(self, stations: Sequence[Station]) -> None:
        self._all = tuple(stations)
        self._last: dict[int, Station] = {}

    def __iter__(self) -> Iterator[Station]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def handovers(self) -> tuple[Handover, ...]:
        """Every hand-over root once."""
        return tuple(dict.fromkeys(station.c.handover for station in self._all))

    def under_way(self) -> tuple[int, int]:
        """Rows under way, and their tokens."""
        return sum(station.in_flight for station in self._all), sum(station.load for station in self._all)

    @property
    def any_up(self) -> bool:
        """Whether a request may be sent anywhere."""
        return any(station.c.outage.is_up for station in self._all)

    @property
    def is_braked(self) -> bool:
        """Whether every server takes rows one at a time only."""
        return all(station.c.brake.is_pressed for station in self._all)

    @property
    def are_asked(self) -> bool:
        """Whether a probe is under way."""
        return any(station.c.outage.asking.locked() for station in self._all)

    def choose(self, row: int, nbytes: int) -> Station | None:
        """The least loaded server that takes a row, with ``nbytes`` reserved in its root; None while there is none.

        One where rows fail comes last. The one that sent this row back is not asked again while another one works,
        even if that is full just now: the row's strikes are to come from more than one server.

        Raises:
            NoRoomError, ServerError: when what is wrong has lasted longer than the pause limit.
        """
        ready = [station for station in self._all if station.takes()]
        last = self._last.get(row)
        if last is not None and any(s is not last and s.c.outage.is_up and not s.c.brake.is_pressed for s in self._all):
            ready = [station for station in ready if station is not last]
        ready.sort(key=lambda station: (station.c.brake.is_pressed, station is last, station.load))
        for station in ready:
            with contextlib.suppress(OSError):  # its root is gone just now
                if station.c.handover.room.reserve(str(row), nbytes):
                    return station
        return None

    def sent_back(self, row: int, station: Station) -> None:
        """The row did not get through there: another server tries it next, if there is one."""
        self._last[row] = station

    def ended(self, row: int) -> None:
        """The row is done, or failed for good."""
        self._last.pop(row, None)

    def owner_of(self, rid: RequestId, boot_id: str | None, url: str | None) -> Station:
        """Where a row belongs that an earlier worker sent: where its dump lies, else where its request is."""

        def likeness(station: Station) -> tuple[bool, bool, bool]:
            c = station.c
            return c.handover.holds(rid), boot_id is not None and c.outage.boot_id == boot_id, c.client.url == url

        return max(self._all, key=likeness)

    def refuse_doubles(self) -> None:
        """Two addresses of one server would be sent twice what it may have in flight.

        Raises:
            ServerError: naming them.
        """
        seen: dict[str, str] = {}
        for station in self._all:
            boot_id, url = station.c.outage.boot_id, station.c.client.url
            if boot_id is not None and boot_id in seen:
                raise ServerError(
                    f"{seen[boot_id]} and {url} are one and the same server",
                    remedy="Name each server once (--server).",
                )
            if boot_id is not None:
                seen[boot_id] = url
