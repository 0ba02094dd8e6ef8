"""The facts of a report, read in one go from the journal; run as a child, since its disk may be stuck.

``python -m hsjournal.ops.report.gather RUN_DIR`` prints one JSON object, the fields of :class:`Facts`.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from hsjournal.config import Manifest, RunPaths
from hsjournal.errors import HsjournalError
from hsjournal.journal.peek import peek, read_only

BUCKETS = 120
"""Steps of the time line."""
MOST_EVENTS = 400
"""Of those that are drawn; all are counted."""
DRAWN = {
    "stall": "stall", "worker_died": "death", "server_died": "death", "gate_died": "death", "gate_closed": "stall",
    "paused": "pause", "resumed": "recovery", "recovered": "recovery", "server_rebooted": "recovery",
    "worker_started": "start", "supervisor_started": "start", "sample_failed": "failure", "worker_error": "failure",
}  # fmt: skip
"""Kinds of events on the time line, and how they are drawn."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything a report shows, JSON-able.

    Args:
        manifest: the frozen settings.
        run: ids, epoch and times, as ``status`` has them.
        counts: rows, tokens and bytes by state.
        failures: failed rows by reason, each with its lengths modulo 64.
        failed: some failed rows.
        steps: equal steps of time: ``at`` (start, seconds since 1970), ``seconds``, and ``rows``, ``tokens``, ``bytes`` verified in it.
        lengths: ``[from, to, rows]``: tokens of rows that are not skipped, bounds doubling.
        latencies: ``[from, to, rows]``: seconds from the last send to ``verified``, bounds doubling.
        latency_quantiles: of the same, by name (``p50``, ``p90``, ``p99``, ``max``).
        prompts: what ingestion found: loss masks by method, refused and cut rows; None for runs of earlier versions.
        methods: verified rows by how they were read back.
        kinds: events by kind.
        events: the last :data:`MOST_EVENTS` of those that are drawn.
    """

    manifest: dict[str, Any]
    run: dict[str, Any]
    counts: dict[str, dict[str, int]]
    failures: list[dict[str, Any]]
    failed: list[dict[str, Any]]
    steps: list[dict[str, float]]
    lengths: list[tuple[float, float, int]]
    latencies: list[tuple[float, float, int]]
    latency_quantiles: dict[str, float]
    prompts: dict[str, Any] | None
    methods: dict[str, int]
    kinds: dict[str, int]
    events: list[dict[str, Any]]


def gather(paths: RunPaths) -> Facts:
    """Read them.

    Raises:
        NoJournalError: when there is no run.
        sqlite3.Error: when the journal can't be read.
    """
    manifest = asdict(Manifest.load(paths.manifest))
    found = peek(str(paths.journal), failed=20)
    with closing(sqlite3.connect(read_only(str(paths.journal)), uri=True, timeout=1.0)) as connection:
        connection.execute("PRAGMA query_only=ON")
        return Facts(
            manifest=manifest,
            run=found["run"] or {},
            counts=found["counts"],
            failures=found["failures"],
            failed=found["failed"],
            steps=_steps(connection),
            lengths=_doubling(connection, "num_tokens", "state <> 'skipped' AND num_tokens > 0"),
            latencies=_doubling(connection, "verified_at - sent_at", _TIMED),
            latency_quantiles=_quantiles(connection, "verified_at - sent_at", _TIMED),
            prompts=found["intake"],
            methods=dict(
                _rows(connection, "SELECT verify_method, count(*) FROM sample WHERE state = 'verified' GROUP BY 1")
            ),
            kinds=dict(_rows(connection, "SELECT kind, count(*) FROM event GROUP BY 1 ORDER BY 2 DESC")),
            events=_events(connection),
        )


_TIMED = "state = 'verified' AND sent_at IS NOT NULL AND verified_at >= sent_at"


def _rows(connection: sqlite3.Connection, sql: str, *values: object) -> list[tuple[Any, ...]]:
    return connection.execute(sql, values).fetchall()


def _steps(connection: sqlite3.Connection) -> list[dict[str, float]]:
    ((first, last),) = _rows(
        connection, "SELECT min(verified_at), max(verified_at) FROM sample WHERE state = 'verified'"
    )
    if first is None:
        return []
    width = max((last - first) / BUCKETS, 1.0)
    sql = (
        "SELECT CAST((verified_at - ?) / ? AS INTEGER) AS step, count(*), sum(num_tokens), sum(output_bytes) "
        "FROM sample WHERE state = 'verified' GROUP BY step"
    )
    found = {step: sums for step, *sums in _rows(connection, sql, first, width)}
    return [
        {"at": first + step * width, "seconds": width}
        | dict(zip(("rows", "tokens", "bytes"), found.get(step, (0, 0, 0)), strict=True))
        for step in range(max(found) + 1)
    ]


def _doubling(connection: sqlite3.Connection, value: str, where: str) -> list[tuple[float, float, int]]:
    """A histogram whose bounds double, without the empty ends."""
    ((least, most),) = _rows(connection, f"SELECT min({value}), max({value}) FROM sample WHERE {where}")
    if least is None:
        return []
    low, bounds = 0.125, []
    while low <= most:
        bounds.append((low, low * 2))
        low *= 2
    bounds = [(a, b) for a, b in bounds if b > least] or [(0.0, 0.125)]
    bounds[0] = (min(bounds[0][0], max(0.0, float(least))), bounds[0][1])
    sums = ", ".join(f"sum({value} >= {a} AND {value} < {b})" for a, b in bounds)
    (numbers,) = _rows(connection, f"SELECT {sums} FROM sample WHERE {where}")
    return [(a, b, int(n or 0)) for (a, b), n in zip(bounds, numbers, strict=True)]


def _quantiles(connection: sqlite3.Connection, value: str, where: str) -> dict[str, float]:
    ((count,),) = _rows(connection, f"SELECT count(*) FROM sample WHERE {where}")
    if not count:
        return {}
    ranks = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {
        name: _rows(
            connection, f"SELECT {value} AS v FROM sample WHERE {where} ORDER BY v LIMIT 1 OFFSET ?",
            min(count - 1, int(count * rank)),
        )[0][0]
        for name, rank in ranks.items()
    }  # fmt: skip


def _events(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    marks = ",".join("?" * len(DRAWN))
    found = _rows(
        connection, f"SELECT at, kind, row, detail FROM event WHERE kind IN ({marks}) ORDER BY at DESC LIMIT ?",
        *DRAWN, MOST_EVENTS,
    )  # fmt: skip
    return [
        {"at": at, "kind": kind, "row": row, "detail": json.loads(detail), "drawn": DRAWN[kind]}
        for at, kind, row, detail in reversed(found)
    ]


def main(run_dir: str) -> dict[str, Any]:
    """See the module."""
    try:
        return asdict(gather(RunPaths.of(run_dir)))
    except HsjournalError as error:
        return {"error": error.message, "remedy": error.remedy, "exit_code": int(error.exit_code)}
    except sqlite3.Error as error:
        return {"error": f"the journal of {run_dir} can't be read: {error}", "remedy": None, "exit_code": 12}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1])))
