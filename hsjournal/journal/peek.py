"""Read a journal without changing a byte of it: run by path, in a child with a deadline, standard library only.

A reader on a frozen disk hangs like any writer, so ``status`` and the supervisor never open the journal
themselves. ``python -I -S peek.py JOURNAL`` starts in a few hundredths of a second; it prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from typing import Any

TRIES = 3


def peek(journal: str, failed: int = 5, events: int = 8) -> dict[str, Any]:
    """Counts per state, epoch, some failed rows and the last events.

    Raises:
        sqlite3.Error: when the file is not a readable journal.
    """
    for _ in range(TRIES - 1):
        try:
            return _peek(journal, failed, events)
        except sqlite3.Error:  # a writer may have come or gone between the look at its WAL and the opening
            if not os.path.exists(journal):
                raise
            time.sleep(0.05)
    return _peek(journal, failed, events)


def _peek(journal: str, failed: int, events: int) -> dict[str, Any]:
    connection = sqlite3.connect(read_only(journal), uri=True, timeout=1.0, isolation_level=None)
    try:
        connection.execute("PRAGMA query_only=ON")
        counts = {
            state: {"rows": rows, "tokens": tokens, "bytes": nbytes}
            for state, rows, tokens, nbytes in connection.execute("SELECT state, rows, tokens, bytes FROM state_count")
        }
        run = _run(connection)
        bad = connection.execute(
            "SELECT row, sample_id, reason, strikes FROM sample WHERE state = 'failed' ORDER BY row LIMIT ?", (failed,)
        ).fetchall()
        failures, released, supervisor = _failures(connection), _released(connection), _supervisor(connection)
        # As hsjournal.states.DEFERRED; this file is run by itself.
        put_off = "SELECT count(*) FROM sample WHERE state = 'written' AND verify_method = 'deferred'"
        ((deferred,),) = connection.execute(put_off).fetchall()
        # Events come in batches, so the last ones by number need not be the last ones by time.
        recent = "SELECT at, kind, row, detail FROM event ORDER BY id DESC LIMIT 200"
        last = connection.execute(f"SELECT * FROM ({recent}) ORDER BY at DESC LIMIT ?", (events,)).fetchall()
    finally:
        connection.close()
    intake = (run or {}).pop("intake", None)
    return {
        "run": run,
        "intake": json.loads(intake) if intake else None,
        "counts": counts,
        "released": released,
        "deferred": deferred,
        "failed": [dict(zip(("row", "sample_id", "reason", "strikes"), r, strict=True)) for r in bad],
        "failures": failures,
        "supervisor": supervisor,
        "events": [dict(zip(("at", "kind", "row", "detail"), r, strict=True)) for r in reversed(last)],
    }


def _run(connection: sqlite3.Connection) -> dict[str, Any] | None:
    """The run's row; a journal of an earlier version has fewer columns."""
    found = connection.execute("SELECT * FROM run WHERE id = 1")
    names = [str(column[0]) for column in found.description]
    row = found.fetchone()
    return {name: value for name, value in zip(names, row, strict=True) if name != "id"} if row else None


def _supervisor(connection: sqlite3.Connection) -> dict[str, Any] | None:
    """The last start or end of a supervisor, among the last events: how a run ended whose mirror is gone."""
    recent = "SELECT id, at, kind, detail FROM event ORDER BY id DESC LIMIT 5000"
    found = connection.execute(
        f"SELECT at, kind, detail FROM ({recent}) WHERE kind IN ('supervisor_started', 'supervisor_ended') "
        "ORDER BY id DESC LIMIT 1"
    ).fetchone()
    return {"at": found[0], "kind": found[1], "detail": json.loads(found[2])} if found else None


def _released(connection: sqlite3.Connection) -> dict[str, int]:
    """Verified rows whose files were freed, and the bytes that they had."""
    statement = "SELECT count(*), coalesce(sum(output_bytes), 0) FROM sample WHERE released_at IS NOT NULL"
    try:
        rows, nbytes = connection.execute(statement).fetchone()
    except sqlite3.OperationalError:  # a journal of an earlier version
        rows = nbytes = 0
    return {"rows": rows, "bytes": nbytes}


def _failures(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    """Failed rows by kind of reason, each with its lengths modulo 64: a broken kernel tile shows as one bucket."""
    kind = (
        "CASE instr(reason, ':') WHEN 0 THEN substr(reason, 1, 60) ELSE substr(reason, 1, instr(reason, ':') - 1) END"
    )
    grouped: dict[str, dict[str, int]] = {}
    for name, rest, rows in connection.execute(
        f"SELECT {kind} AS kind, num_tokens % 64 AS rest, count(*) FROM sample WHERE state = 'failed' "
        "GROUP BY kind, rest ORDER BY count(*) DESC LIMIT 1000"
    ):
        grouped.setdefault(name, {})[str(rest)] = rows
    return [{"reason": name, "rows": sum(m.values()), "length_mod_64": m} for name, m in grouped.items()]


def read_only(journal: str) -> str:
    """The URI by which SQLite opens ``journal`` without changing a byte of it."""
    # Without a WAL there is no writer, and "immutable" keeps SQLite from making an empty one.
    how = "mode=ro" if os.path.exists(f"{journal}-wal") else "mode=ro&immutable=1"
    return f"file:{quote(journal)}?{how}"


def quote(path: str) -> str:
    """``path`` inside an SQLite URI."""
    return path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(peek(sys.argv[1])))
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None)  # what it means, hsjournal.journal.refusals knows
        sys.stdout.write(json.dumps({"error": str(error), "sqlite": code, "missing": not os.path.exists(sys.argv[1])}))
        sys.exit(1)
