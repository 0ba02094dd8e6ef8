"""Takes published dumps away as a client would, reading nothing: ``python -m gpu.consumer plugin|incident ROOT STATUS``.

STATUS is a JSON file with the number of dumps and bytes so far, and the failures.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hsjournal.dump.reader import list_root, open_root, read_failure
from hsjournal.dump.reap import remove_dump

_PAUSE_S = 0.02


@dataclass(slots=True)
class Taken:
    """What was taken so far."""

    dumps: int = 0
    bytes: int = 0
    failures: list[str] = field(default_factory=list)


def take_plugins(root_fd: int, taken: Taken) -> bool:
    """Take every dump of the package's plugin; whether there was one."""
    before = taken.dumps + len(taken.failures)
    for entry in list_root(root_fd):
        if entry.kind == "dump":
            taken.bytes += remove_dump(root_fd, entry.name)
            taken.dumps += 1
        elif entry.kind == "failure" and entry.rid is not None:
            failure = read_failure(root_fd, entry.rid)
            taken.failures.append(f"{failure.reason.value}: {failure.detail}" if failure else entry.name)
            remove_dump(root_fd, entry.name)
    return taken.dumps + len(taken.failures) > before


def take_incidents(root: Path, taken: Taken) -> bool:
    """Take every finished ``req_N``; whether there was one."""
    before = taken.dumps
    for done in root.glob("req_*/done"):
        taken.bytes += sum(file.stat().st_size for file in done.parent.iterdir())
        shutil.rmtree(done.parent)
        taken.dumps += 1
    return taken.dumps > before


def main() -> None:
    """Take dumps until the process is ended."""
    way, root, status = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    root_fd = open_root(root)
    taken = Taken()
    while True:
        found = take_plugins(root_fd, taken) if way == "plugin" else take_incidents(root, taken)
        new = status.with_suffix(".new")
        new.write_text(json.dumps(asdict(taken)))
        os.replace(new, status)
        if not found:
            time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
