"""Which requests may be at a v1 server together: pure bookkeeping over token counts, the only mark a v1 dump bears."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """Token counts at the server.

    Args:
        at_server: request id by count: at most one each.
        barred: request ids by count, that were given up while the server may still answer them.
        tells_load: whether the server says how much it has to do, so that its having drained can be seen.
    """

    at_server: dict[int, str] = field(default_factory=dict)
    barred: dict[int, list[str]] = field(default_factory=dict)
    tells_load: bool = True

    @property
    def is_draining(self) -> bool:
        """Whether nothing new is sent, so that the server drains and the bars fall."""
        return bool(self.barred) and self.tells_load

    def may_send(self, count: int) -> bool:
        """Whether a request of ``count`` tokens could be told from all others."""
        return count not in self.at_server and count not in self.barred and not self.is_draining

    def waits_for_restart(self, count: int) -> bool:
        """Whether a request of ``count`` tokens can't be sent before the server is started anew."""
        return count in self.barred and not self.tells_load

    def why_held(self, count: int) -> str:
        """What a request of ``count`` tokens waits for, for people."""
        until = "has drained" if self.tells_load else "is started anew, since it does not tell its load"
        if count in self.barred:
            return f"a request of {count:,} tokens was given up and may still be answered: others wait until the server {until}"
        if self.is_draining:
            return f"requests of {', '.join(map(str, sorted(self.barred)))} tokens were given up, and the server has not drained yet"
        return f"another request of {count:,} tokens is at the server, and their dumps could not be told apart"

    def send(self, count: int, rid: str) -> None:
        """It leaves now.

        Raises:
            ValueError: when it may not.
        """
        if not self.may_send(count):
            raise ValueError(f"a request of {count} tokens is at the server, or barred")
        self.at_server[count] = rid

    def answered(self, count: int) -> None:
        """Its dump was taken: the count is free again."""
        self.at_server.pop(count, None)

    def give_up(self, count: int) -> None:
        """Nobody waits for it any more, but its dump may still come: the count is barred."""
        rid = self.at_server.pop(count, None)
        if rid is not None:
            self.barred.setdefault(count, []).append(rid)

    def late(self, count: int) -> str | None:
        """Whose a dump of a barred count must be; None when it could be several requests'."""
        rids = self.barred.get(count, [])
        return rids[0] if len(rids) == 1 and count not in self.at_server else None

    def drained(self) -> None:
        """The server has nothing left to do, or is another one: whatever was given up never comes."""
        self.barred.clear()

    def to_json(self) -> str:
        """What a gateway that is started anew must know: all that this one sent and saw no end of."""
        open_ones = [*self.at_server.values(), *(rid for rids in self.barred.values() for rid in rids)]
        return json.dumps({"open": open_ones})

    @classmethod
    def from_open(cls, rids: Iterable[tuple[int, str]]) -> Counts:
        """After a restart of the gateway: every request that it left open is barred."""
        counts = cls()
        for count, rid in rids:
            counts.barred.setdefault(count, []).append(rid)
        return counts
