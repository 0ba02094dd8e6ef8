"""Which failed tests get a second look: ``python -m tests.helpers.second_look CACHE_DIR…`` prints one node id a line.

A test of a whole program that runs beside the other lane may wait seconds for a core. A test that fails then, and passes when it
runs alone, tells of a race or of impatience, to be mended; it is no reason to hold everything else up. What does not depend on the
clock gets no second look, nor does a run in which much fails. Exits with 1 when there is nothing to look at again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

TIERS = ("drills", "integration", "contract")
"""Their tests run whole programs, or the whole worker, and wait for them."""
MOST = 5
"""More failures than that are no coincidence."""


def failed(cache_dir: Path) -> list[str]:
    """Node ids that pytest's cache calls failed; none when it has none."""
    try:
        return sorted(json.loads((cache_dir / "v" / "cache" / "lastfailed").read_text()))
    except FileNotFoundError:
        return []


def worth_it(node_ids: Iterable[str]) -> list[str]:
    """All of them, or none: a failure that stays one decides by itself."""
    found = list(node_ids)
    of_whole_programs = all(node.startswith(tuple(f"tests/{tier}/" for tier in TIERS)) for node in found)
    return found if of_whole_programs and len(found) <= MOST else []


def main(cache_dirs: list[str]) -> int:
    """Print them."""
    found = worth_it(node for folder in cache_dirs for node in failed(Path(folder)))
    sys.stdout.writelines(f"{node}\n" for node in found)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
