"""What a wait means that the worker itself names, and that ends by its own limit: pure."""

from __future__ import annotations

from hsjournal.errors import Trouble
from hsjournal.watch.sight import Look, Verdict

_BY_NAME = {
    "handover": Verdict.SHM_FULL,
    "no_room": Verdict.SHM_FULL,
    "root": Verdict.ROOT_GONE,
    "dumps": Verdict.ROOT_GONE,
    "server": Verdict.SERVER_DOWN,
    "failures": Verdict.FAILURES,
}
"""By the first word of a pause's name; a second one says which server, root or folder."""
_BY_TROUBLE: dict[str, Verdict] = {
    Trouble.FULL: Verdict.DISK_FULL,
    Trouble.FAILING: Verdict.DISK_FAILING,
    Trouble.BUSY: Verdict.WAITING,
}
"""Of the output's and the journal's pauses: their sentences hold paths, so no word in them means anything."""


def pause_of(look: Look) -> tuple[Verdict, str] | None:
    """The first pause that holds, with its sentence; None when there is none."""
    for name, sentence in look.pauses.items():
        first = name.partition(" ")[0]
        if first in ("output", "journal"):
            return of_trouble(look.troubles.get(name)), sentence
        verdict = _BY_NAME.get(first, Verdict.WAITING)
        if verdict is Verdict.SERVER_DOWN and look.asked and look.server is None:
            verdict = Verdict.SERVER_STALLED  # its front answers
        return verdict, sentence
    return None


def of_trouble(told: str | None) -> Verdict:
    """What it means that a disk is in a trouble, as :class:`hsjournal.errors.Trouble` names it."""
    return _BY_TROUBLE.get(told or "", Verdict.DISK_FAILING)
