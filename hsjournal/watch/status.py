"""What ``status`` tells: the journal as a child reads it, else the mirror; who lives; nothing is changed."""

from __future__ import annotations

from typing import Any

from hsjournal.config import DRAFT_CONFIG, Manifest, RunPaths
from hsjournal.errors import HsjournalError, NoJournalError
from hsjournal.mirror import SUPERVISOR, Mirror
from hsjournal.watch.children import ChildError, StuckError, peek_at
from hsjournal.watch.figures import read_figures, read_worker
from hsjournal.watch.presence import Watched, verdict_on, watched

VERSION = 1
"""Of the JSON form; fields are only ever added."""
DEADLINE = 1.0
"""Seconds for the journal: with the start and the end of both processes it stays under two."""
ALONE_DEADLINE = 5.0
"""The same where nothing else tells of the run: a child that got no core yet is no storage that hangs."""

FIELDS = {
    "version": "1; fields are only ever added to it",
    "run_dir": "absolute",
    "out_dir": "the output folder, the first if there are several",
    "more_out": "the other output folders",
    "draft_config": "the line for the draft model's config that makes SGLang serve the same layers",
    "run": "run_id, epoch (workers so far), created_at, ingested_at, finished_at: seconds since 1970, UTC; null from the mirror",
    "rows": "of the input, refused lines included",
    "complete": "every row verified, failed, skipped or deferred",
    "deferred": "written rows whose read-back was put off (`--verify`)",
    "counts": "by state: rows, tokens, bytes",
    "released": "rows and bytes that `release` has freed",
    "source": "journal, or mirror while its disk does not answer",
    "problem": "why it is the mirror; else null",
    "supervisor": "alive, state, beat_age_s, pid, stage, sentence, lives (workers it started), server; of one that ended by itself: ended_at, exit_code, sentence, remedy",
    "worker": "alive, pid, epoch, phase, beat_age_s",
    "verdict": "verdict, sentence, way_out, and more; null when there is none",
    "gpus": "utilisation of each, where it can be told",
    "rates": "samples, tokens and bytes per second, of the last minute and overall; null when nothing runs, or the worker has been silent for 15 s",
    "eta_s": "seconds to the last row",
    "in_flight": "each row under way: row, sample_id, attempt, tokens, phase, age_s, server",
    "pauses": "what the run waits for, each with a sentence",
    "servers": "url, up, problem, in_flight, verified, and its hand-over root's room",
    "prompts": "what ingestion found: rows, usable, skipped by reason, methods of loss masks",
    "failed": "the first failed rows: row, sample_id, reason, strikes",
    "failures": "failed rows by reason, each with its lengths modulo 64",
    "events": "the last ones: at, kind, row, detail",
}
"""The JSON form, field by field; null or empty where nothing is known yet."""


def status(paths: RunPaths) -> dict[str, Any]:
    """The state of a run, JSON-able, with every one of :data:`FIELDS`.

    Raises:
        NoJournalError: when neither a journal nor a mirror of it is there.
    """
    mirror = Mirror(paths.mirror)
    told, supervisor = read_figures(mirror), mirror.read(SUPERVISOR) or {}
    journal: dict[str, Any] = {}
    problem = None
    try:
        nothing_else = told is None and "pid" not in supervisor
        journal = peek_at(paths.journal, ALONE_DEADLINE if nothing_else else DEADLINE)
    except StuckError as error:
        problem = f"the journal does not answer ({error}); what follows is from the mirror"
    except ChildError as error:
        problem = str(error)
    if not journal and told is None:
        if "pid" not in supervisor:
            raise NoJournalError(
                f"there is no readable journal in {paths.run_dir}" + (f" ({problem})" if problem else ""),
                remedy="Start a run with `hsjournal run RUN_DIR --prompts FILE`.",
            )
        problem = None  # the prompts are being read: there is none yet
    figures = told or {}
    who, manifest = watched(supervisor, journal.get("supervisor")), _manifest(paths, problem)
    counts = journal.get("counts") or figures.get("counts") or {}
    rows = sum(c["rows"] for c in counts.values())
    done = sum(counts[s]["rows"] for s in ("verified", "failed", "skipped") if s in counts)
    deferred = int(journal["deferred"] if "deferred" in journal else figures.get("deferred", 0))
    complete = rows > 0 and done + deferred == rows
    live = figures if who.is_alive else {}
    return {
        "version": VERSION,
        "run_dir": str(paths.run_dir),
        "out_dir": manifest.out_dir if manifest else supervisor.get("out_dir"),
        "more_out": list(manifest.out_dirs[1:]) if manifest else [],
        "draft_config": (manifest.options.get(DRAFT_CONFIG) or None) if manifest else None,
        "run": journal.get("run"),
        "rows": rows,
        "complete": complete,
        "deferred": deferred,
        "counts": counts,
        "released": journal.get("released"),
        "source": "journal" if journal else "mirror",
        "problem": problem,
        "supervisor": _supervisor(supervisor, who),
        "worker": read_worker(mirror.folder),
        "verdict": verdict_on(who, complete=complete) or (supervisor.get("verdict") if who.is_alive else None),
        "gpus": supervisor.get("gpus", []) if who.is_alive else [],
        "rates": live.get("rates"),
        "eta_s": live.get("eta_s"),
        "in_flight": live.get("in_flight", []),
        "pauses": live.get("pauses", {}),
        "servers": live.get("servers", []),
        "prompts": journal.get("intake"),
        "failed": journal.get("failed", []),
        "failures": journal.get("failures", []),
        "events": [{"at": e.at, "kind": e.kind, "row": e.row, "detail": e.detail} for _, e in mirror.events(8)]
        or journal.get("events", []),
    }


def _supervisor(record: dict[str, Any], who: Watched) -> dict[str, Any]:
    found = {"alive": who.is_alive, "state": str(who.presence)}
    if who.ending is not None:
        ending = who.ending.facts()
        return found | {"ended_at": ending.pop("ended")} | ending
    told = {k: v for k, v in record.items() if k in ("pid", "stage", "sentence", "lives", "server")}
    return found | told | ({"beat_age_s": who.beat_age_s} if who.is_alive else {})


def _manifest(paths: RunPaths, problem: str | None) -> Manifest | None:
    if problem is not None:  # the disk may be stuck
        return None
    try:
        return Manifest.load(paths.manifest)
    except HsjournalError:
        return None
