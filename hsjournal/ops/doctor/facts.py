"""What a run needs of the machine, read from its manifest and journal; run as a child, since their disk may be stuck.

``python -m hsjournal.ops.doctor.facts RUN_DIR`` prints one JSON object, empty when there is no run yet.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import tomllib
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hsjournal.config import Manifest, RunPaths
from hsjournal.dump.protocol import payload_bytes
from hsjournal.errors import HsjournalError, NoJournalError
from hsjournal.journal.peek import read_only


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one run.

    Args:
        out_dirs: its output folders.
        largest: bytes of its largest sample still to come, or of its largest at all when all are done.
        to_come: bytes that its incomplete rows will take on the output's disk.
        engine: ``embedded`` or ``sglang``.
        endpoints: address and hand-over root of each server; no address where the run starts its own.
        budget: bytes that it may have in a hand-over root, as its last start said; 0 when it said nothing.
    """

    out_dirs: tuple[str, ...]
    largest: int
    to_come: int
    engine: str
    endpoints: tuple[tuple[str, str], ...]
    budget: int


def facts(paths: RunPaths) -> Facts:
    """Read them; nothing is changed.

    Raises:
        NoJournalError: when there is no run.
        sqlite3.Error: when the journal can't be read.
    """
    manifest = Manifest.load(paths.manifest)
    with closing(sqlite3.connect(read_only(str(paths.journal)), uri=True, timeout=1.0)) as connection:
        connection.execute("PRAGMA query_only=ON")
        to_come, largest_to_come = connection.execute(
            "SELECT coalesce(sum(num_tokens), 0), coalesce(max(num_tokens), 0) FROM sample "
            "WHERE state IN ('pending', 'sent', 'dumped')"
        ).fetchone()
        largest = largest_to_come or connection.execute(
            "SELECT coalesce(max(num_tokens), 0) FROM sample WHERE state <> 'skipped'"
        ).fetchone()[0]  # fmt: skip
    largest_bytes, bytes_to_come = (
        payload_bytes(tokens, manifest.hidden_size, manifest.dtype, len(manifest.capture_layers))
        for tokens in (largest, to_come)
    )
    endpoints = tuple((endpoint.url, endpoint.handover_root) for endpoint in manifest.endpoints)
    return Facts(
        tuple(manifest.out_dirs), largest_bytes, bytes_to_come, manifest.engine, endpoints, _budget(paths.settings)
    )


def _budget(settings: Path) -> int:
    try:
        return int(tomllib.loads(settings.read_text())["handover-budget"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def main(run_dir: str) -> dict[str, Any]:
    """See the module."""
    try:
        return asdict(facts(RunPaths.of(run_dir)))
    except NoJournalError:
        return {}
    except HsjournalError as error:
        return {"error": error.message, "remedy": error.remedy, "exit_code": int(error.exit_code)}
    except sqlite3.Error as error:
        return {"error": f"the journal can't be read: {error}", "remedy": None, "exit_code": 12}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1])))
