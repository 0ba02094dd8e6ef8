"""Files in the output folder that no row owns. They are listed, never touched."""

from __future__ import annotations

import os
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

MOST_NAMED = 10_000


@dataclass(frozen=True, slots=True)
class Strangers:
    """What was found; ``paths`` are relative to the folder, the first ``MOST_NAMED`` in order, ``count`` is all of them."""

    paths: tuple[str, ...]
    count: int

    def and_those_of(self, folder: Path, more: Strangers) -> Strangers:
        """These, and those of a further folder, absolute."""
        paths = self.paths + tuple(str(folder / path) for path in more.paths)
        return Strangers(paths[:MOST_NAMED], self.count + more.count)


def find_strangers(out_dir: Path, owned: Container[str]) -> Strangers:
    """Everything below ``out_dir`` that is no folder and not in ``owned``; links are listed, not followed.

    Args:
        out_dir: the output folder.
        owned: paths relative to it.
    """
    paths: list[str] = []
    count = 0
    for folder, subfolders, files in os.walk(out_dir):
        subfolders.sort()
        links = [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
        for name in sorted((*files, *links)):
            path = os.path.relpath(os.path.join(folder, name), out_dir)
            if path not in owned:
                count += 1
                if len(paths) < MOST_NAMED:
                    paths.append(path)
    return Strangers(tuple(paths), count)
