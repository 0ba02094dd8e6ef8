"""Find run directories below a folder: run by path, in a child with a deadline, standard library only.

As :mod:`hsjournal.journal.peek`: the folder may lie on a stuck disk of another machine. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

NAME = "fleet.json"
"""The badge's file in a run directory."""
CLAIM = "claim-"
"""Before a number, in the store's folder of a shard."""
STARTS = ".starts"
"""The store's own folder, beside which run directories may lie."""
DEEPEST = 2
"""Run directories lie in the folder that is named, or so many folders below it: BASE/FLEET/SHARD."""


def look(folder: str) -> list[dict[str, Any]]:
    """What each run directory in or below ``folder`` says of itself.

    Raises:
        OSError: as the storage answers.
    """
    return [_describe(place) for place in sorted(_places(folder, DEEPEST))]


def _places(folder: str, deepest: int) -> Iterator[str]:
    if any(os.path.exists(os.path.join(folder, name)) for name in (NAME, "manifest.toml")):
        yield folder
    elif deepest:
        with os.scandir(folder) as entries:
            below = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name != STARTS]
        for place in below:
            yield from _places(place, deepest - 1)


def _describe(place: str) -> dict[str, Any]:
    badge, shard, problem = None, None, None
    try:
        with open(os.path.join(place, NAME), "rb") as file:
            badge = json.load(file)
        if not isinstance(badge, dict) or not isinstance(badge.get("incarnation"), int):
            badge, problem = None, f"{NAME} is none"
    except FileNotFoundError:
        pass
    except ValueError as error:
        problem = f"{NAME} can't be read: {error}"
    try:
        with open(os.path.join(place, "manifest.toml"), "rb") as file:
            shard = tomllib.load(file).get("options", {}).get("prompts.shard")
    except FileNotFoundError:
        problem = problem or "the run has not begun"
    except (tomllib.TOMLDecodeError, AttributeError) as error:
        problem = f"manifest.toml can't be read: {error}"
    newest = highest(os.path.join(badge.get("store", ""), *_own(badge))) if badge and badge.get("store") else None
    return {"run_dir": os.path.abspath(place), "badge": badge, "shard": shard, "problem": problem, "newest": newest}


def _own(badge: dict[str, Any]) -> tuple[str, str, str]:
    return STARTS, str(badge.get("fleet", "")), shard_name(str(badge.get("shard", "")))


def shard_name(shard: str) -> str:
    """``2/8`` as the name of a folder, so that all of them sort."""
    number, _, of = shard.partition("/")
    return f"shard-{number:0>5}-of-{of:0>5}"


def highest(folder: str) -> int | None:
    """The highest number that was claimed in the store's folder of a shard; None when it is not there."""
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    return max(
        (int(n.removeprefix(CLAIM)) for n in names if n.startswith(CLAIM) and n[len(CLAIM) :].isdigit()), default=0
    )


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps({"found": look(sys.argv[1])}))
    except OSError as error:
        sys.stdout.write(json.dumps({"error": f"{sys.argv[1]} can't be looked into: {error.strerror}"}))
        sys.exit(1)
