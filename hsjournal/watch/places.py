"""Which storage a stall is about: by the threads that hang and by what the row was at; in one place for all who say it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hsjournal.mirror import Phase

_OF_JOURNAL = ("journal",)
"""Threads, by the beginning of their names, that touch nothing but the run directory."""
_OF_OUTPUT = ("block-writer", "read-back")
"""Those that touch nothing but the output."""


def output_of(out_dir: str, volumes: Sequence[Mapping[str, Any]]) -> str:
    """The output folder for people; of several those that hang, where that is known, else all of them.

    Args:
        out_dir: the first.
        volumes: as a worker's snapshot tells them: ``path`` and ``problem`` of each.
    """
    if len(volumes) < 2:
        return out_dir
    stuck = [str(volume["path"]) for volume in volumes if volume.get("problem") == "stuck"]
    return " and ".join(stuck) if stuck else " or ".join(str(volume["path"]) for volume in volumes)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a run keeps its things, as paths for people; empty where it isn't known.

    Args:
        run_dir: with the journal, the manifest and the logs.
        out_dir: the output folder.
        root: the hand-over root.
    """

    run_dir: str = ""
    out_dir: str = ""
    root: str = ""

    def of_phase(self, phase: Phase | None) -> str:
        """The storage that a row's step works on."""
        if phase is Phase.COMMITTING:
            return self.run_dir
        return self.root if phase in (Phase.CHECKING, Phase.DELETING) else self.out_dir

    def of(self, phase: Phase | None, threads: Iterable[str] = ()) -> str:
        """The storage that hangs, both where two do; empty where it isn't known.

        Args:
            phase: of the row that stands still, None when no row is known.
            threads: those that hang, as names or as ``name: state wchan``.
        """
        names = list(threads)
        found = [self._of_thread(name, phase) for name in names] or [self.of_phase(phase)]
        return " and ".join(dict.fromkeys(filter(None, found)))

    def _of_thread(self, name: str, phase: Phase | None) -> str:
        if name.startswith(_OF_JOURNAL):
            return self.run_dir
        return self.out_dir if name.startswith(_OF_OUTPUT) else self.of_phase(phase)
