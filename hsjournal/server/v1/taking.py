"""Which directory answers which request: only where there is one candidate on either side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hsjournal.server.v1.dumps import Found

CLOCK_SLACK_S = 0.05
"""A file's time comes from a clock that ticks a few hundred times a second."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """A request that is at the server, or was given up.

    Args:
        rid: of it.
        count: its tokens.
        ids_sha256: over the ids sent.
        sent_at: seconds since 1970.
        before: names and inodes of everything that lay in the root when it was sent.
    """

    rid: str
    count: int
    ids_sha256: str
    sent_at: float
    before: frozenset[tuple[str, int]]

    def may_be(self, found: Found) -> bool:
        """Whether ``found`` could be its answer: not older than the send, of its length, and of no other identity."""
        return (
            found.num_tokens == self.count
            and (found.name, found.inode) not in self.before
            and found.began >= self.sent_at - CLOCK_SLACK_S
            and found.rid in (None, self.rid)
            and found.ids_sha256 in (None, self.ids_sha256)
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done with what was found.

    Args:
        taken: directory by request.
        refused: requests whose answer can't be told, and why.
        foreign: directories that are nobody's, and why: left alone.
    """

    taken: tuple[tuple[Awaited, Found], ...]
    refused: tuple[tuple[Awaited, str], ...]
    foreign: tuple[tuple[Found, str], ...]


def decide(found: Sequence[Found], awaited: Iterable[Awaited], given_up: Iterable[Awaited]) -> Decision:
    """Match complete directories with requests; a late one goes to its own, given-up request or to nobody."""
    waiting = list(awaited)
    late = list(given_up)
    taken: list[tuple[Awaited, Found]] = []
    refused: dict[str, tuple[Awaited, str]] = {}
    foreign: list[tuple[Found, str]] = []
    by_request: dict[str, list[Found]] = {}
    for item in found:
        for request in _candidates(item, (*waiting, *late)):
            by_request.setdefault(request.rid, []).append(item)
    for item in found:
        candidates = _candidates(item, (*waiting, *late))
        if not candidates:
            foreign.append((item, _why_nobodys(item, waiting, late)))
        elif len(candidates) > 1 or len(by_request[candidates[0].rid]) > 1:
            names = sorted({f.name for c in candidates for f in by_request[c.rid]})
            why = f"{', '.join(names)} could be the answer to {', '.join(c.rid for c in candidates)}: ambiguous"
            foreign.append((item, why))
            refused |= {c.rid: (c, why) for c in candidates}
        else:
            taken.append((candidates[0], item))
    return Decision(tuple(taken), tuple(refused.values()), tuple(foreign))


def _candidates(item: Found, requests: Sequence[Awaited]) -> list[Awaited]:
    return [request for request in requests if request.may_be(item)]


def _why_nobodys(item: Found, waiting: Sequence[Awaited], late: Sequence[Awaited]) -> str:
    same = [r for r in (*waiting, *late) if r.count == item.num_tokens]
    if not same:
        return f"{item.name} has {item.num_tokens:,} rows, and no request of so many tokens is awaited"
    if any((item.name, item.inode) in r.before or item.began < r.sent_at - CLOCK_SLACK_S for r in same):
        return f"{item.name} is older than the request of {item.num_tokens:,} tokens"
    return f"{item.name} says that it is another request's"


def open_requests(state: Mapping[str, object]) -> list[tuple[int, str]]:
    """Token counts and ids of the requests that an earlier gateway left open; what is no such list is none."""
    rids = state.get("open")
    found = []
    for rid in rids if isinstance(rids, list) else ():
        count = str(rid).rpartition("-")[2]
        if count.isdigit():
            found.append((int(count), str(rid)))
    return found
