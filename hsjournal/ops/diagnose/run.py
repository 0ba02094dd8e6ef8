"""``diagnose RUN_DIR``: what an examination found, as a report with one verdict."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from hsjournal.config import RunPaths
from hsjournal.mirror import Mirror, read_heartbeat
from hsjournal.ops.diagnose.conclude import Facts, conclude
from hsjournal.ops.diagnose.examination import Examination
from hsjournal.ops.diagnose.looks import begin_of_process
from hsjournal.ops.diagnose.rows import directories, next_request, requests
from hsjournal.states import INCOMPLETE, State
from hsjournal.watch.places import Places, output_of
from hsjournal.watch.presence import Presence, silence
from hsjournal.watch.verdict import Finding, Limits, Row, Verdict

VERSION = 1
"""Of the JSON form; fields are only ever added."""
_FRESH_S = 5.0
"""Seconds for which the supervisor's word counts."""


def diagnose(run_dir: Path) -> dict[str, Any]:
    """What is the matter with a run, JSON-able; ``exit_code`` is the command's.

    Raises:
        NoJournalError: when there is no run.
    """
    examination = Examination(RunPaths.of(run_dir), begin_of_process())
    examination.examine()
    return _report(examination, Mirror(examination.paths.mirror))


def _progress_at(e: Examination) -> float | None:
    """Monotonic seconds of the last progress: by the worker's own account, else by the journal's."""
    if "progress_age_s" in e.snapshot:
        return float(e.snapshot["monotonic"]) - float(e.snapshot["progress_age_s"])
    changed = e.answers["journal"].get("last_change")
    return time.monotonic() - (time.time() - float(changed)) if changed else None


def _limits(e: Examination) -> Limits:
    return Limits(stall_timeout=e.settings.stall_timeout) if e.settings else Limits()


def _report(e: Examination, mirror: Mirror) -> dict[str, Any]:
    a, now = e.answers, time.time()
    found = directories(a.get("root", {}), e.run_id(), a["journal"].get("rows", {}), now)
    progress = _progress_at(e)
    facts = _facts(e, progress, requests(found))
    verdict = conclude(facts)
    return {
        "version": VERSION,
        "run_dir": str(e.paths.run_dir),
        "took_s": round(time.monotonic() - e.begin, 2),
        "verdict": verdict.verdict,
        "sentence": verdict.sentence,
        "next_step": verdict.next_step,
        "exit_code": int(verdict.exit_code),
        "row": verdict.row,
        "threads": list(verdict.threads),
        "progress": {"age_s": round(time.monotonic() - progress, 1) if progress is not None else None,
                     "source": "mirror" if "progress_age_s" in e.snapshot else "journal"},
        "worker": _worker(e),
        "supervisor": _supervisor(e),
        "counts": e.counts(),
        "in_flight": [_flight(e, row) for row in (e.looks[-1].rows if e.looks else ())],
        "log": {"path": str(e.paths.logs / "worker.log")} | aged(a["log"], now),
        "handover": {"root": e.root(), "problem": a.get("root", {}).get("error"), "directories": found,
                     "waited_for": facts.dumps, "bytes": sum(d["bytes"] for d in found)},
        "next_request": next_request(a["journal"], e.run_id()) if e.run_id() else None,
        "server": {"url": e.server()} | server_of(a),
        "gpus": a["gpu"].get("gpus", []),
        "gpu_problem": a["gpu"].get("problem") or a["gpu"].get("error"),
        "room": _rooms(e),
        "journal": {"problem": a["journal"].get("error"), "epoch": a["journal"].get("epoch")},
        "hangs": list(facts.hangs),
        "events": [{"at": v.at, "kind": v.kind, "row": v.row, "detail": v.detail} for _, v in mirror.events(8)],
    }  # fmt: skip


def _facts(e: Examination, progress: float | None, dumps: int) -> Facts:
    counts, server = e.counts(), server_of(e.answers)
    later = int(e.answers["journal"].get("deferred", e.snapshot.get("deferred", 0)))
    open_rows = sum(counts.get(state, 0) for state in INCOMPLETE) - later
    silent = str(server.get("problem")) if server["answers"] is False else None
    outputs = e.out_rooms()
    silent_outputs = [folder for key, folder in outputs.items() if e.answers.get(key, {}).get("hangs")]
    output = " and ".join(silent_outputs) or output_of(e.out_dir(), e.snapshot.get("volumes") or ())
    places, who = Places(str(e.paths.run_dir), output, e.root()), e.watched()
    looks = [replace(look, server=silent, asked=server["answers"] is not None, places=places) for look in e.looks]
    if e.worker is not None and e.worker.is_unkillable:
        looks = [replace(look, killed_at=looks[0].at - _limits(e).kill_wait) for look in looks]
    named = {"manifest": "the manifest", "journal": "the journal", "log": "the log", "run_room": places.run_dir,
             **outputs, "root": places.root}  # fmt: skip
    of_place = outputs | {"root": places.root}
    hung = [key for key in named if e.answers.get(key, {}).get("hangs")]
    return Facts(
        run_dir=str(e.paths.run_dir),
        looks=looks,
        progress_at=progress,
        limits=_limits(e),
        supervisor=_supervisor_state(e),
        stage=str(e.said.get("stage", "")),
        said=str(e.said.get("sentence", "")),
        complete=bool(counts) and not open_rows,
        failed=counts.get(State.FAILED, 0),
        open_rows=open_rows if counts else None,
        hangs=tuple(named[key] for key in hung),
        hung=" and ".join(dict.fromkeys(of_place.get(key, places.run_dir) for key in hung)),
        silence=silence(who) if who.pid is not None else "the supervisor lives and does not run",
        ending=who.ending if _supervisor_state(e) == "ended" else None,
        refused=server.get("problem") if server.get("kind") in ("refused", "broken") else None,
        places=places,
        dumps=dumps,
        told=_told(e),
    )


def _told(e: Examination) -> Finding | None:
    """The supervisor's last verdict, if it lives and has just spoken."""
    told, beat = e.said.get("verdict"), e.said.get("monotonic")
    if not isinstance(told, dict) or _supervisor_state(e) != "alive" or time.monotonic() - float(beat or 0) > _FRESH_S:
        return None
    verdict = Verdict(told["verdict"])
    if verdict is Verdict.WORKER_DEAD:
        return None
    silent = float(told.get("silent_s") or 0.0)
    return Finding(verdict, str(told["sentence"]), silent, told.get("row"), tuple(told.get("threads") or ()))


def _supervisor_state(e: Examination) -> str:
    presence = e.watched().presence
    last = e.supervisor.last if e.supervisor is not None else None
    if e.supervisor is None or last is None:
        if presence is Presence.ENDED:  # the lock's file names it still, or a command that came after it
            return "ended"
        return "dead" if e.supervisor is not None or presence is Presence.DEAD else "none"
    stuck = last.is_stopped or (bool(last.stuck) and e.supervisor.is_still) or presence is Presence.SILENT
    return "stuck" if stuck else "alive"


def _worker(e: Examination) -> dict[str, Any]:
    if e.worker is None:
        return {"alive": False}
    beat = read_heartbeat(e.paths.mirror)
    words = e.worker.summary()
    if beat is not None:
        words |= {
            "epoch": beat.epoch,
            "phase": beat.phase.name.lower(),
            "beat_age_s": round(time.monotonic() - beat.beat, 2),
        }
    return words


def _supervisor(e: Examination) -> dict[str, Any]:
    told = {k: v for k, v in e.said.items() if k in ("stage", "sentence", "lives", "server", "verdict")}
    if _supervisor_state(e) == "ended":
        ending = e.watched().ending
        return {"alive": False, "state": "ended"} | ({} if ending is None else ending.facts())
    if e.supervisor is None:
        return {"alive": False}
    beat = e.said.get("monotonic")
    age = round(time.monotonic() - float(beat), 2) if beat is not None else None
    return e.supervisor.summary() | told | {"state": _supervisor_state(e), "beat_age_s": age}


def _flight(e: Examination, row: Row) -> dict[str, Any]:
    beat = read_heartbeat(e.paths.mirror)
    since = [s.since for s in beat.slots if s.row == row.row] if beat is not None else []
    told = [f["age_s"] for f in e.snapshot.get("in_flight", ()) if f["row"] == row.row]
    stale = time.monotonic() - float(e.snapshot.get("monotonic", time.monotonic()))
    age = time.monotonic() - max(since) if since else told[0] + stale if told else None
    return {"row": row.row, "attempt": row.attempt, "tokens": row.tokens, "phase": row.phase.name.lower(),
            "bytes": row.nbytes, "since_s": round(age, 1) if age is not None else None}  # fmt: skip


def _rooms(e: Examination) -> list[dict[str, Any]]:
    outputs = [("output", key) for key in e.out_rooms()]
    rooms = [("run directory", "run_room"), *outputs, ("shared memory", "mirror_room")]
    found = [{"what": what} | e.answers[key] for what, key in rooms if key in e.answers]
    root = e.answers.get("root", {})
    return [*found, {"what": "hand-over root"} | root["room"]] if "room" in root else found


def server_of(answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is known of the server: ``answers`` is None when it was not asked."""
    answer = answers.get("server", {"answers": None})
    return answer if "answers" in answer else {"answers": False, "problem": answer["error"], "kind": "silent"}


def aged(answer: dict[str, Any], now: float) -> dict[str, Any]:
    """The answer about a log, with its age."""
    age = round(now - answer["mtime"], 1) if "mtime" in answer else None
    return {"age_s": age, "problem": answer.get("error")} | {
        k: v for k, v in answer.items() if k in ("size", "last_line", "missing")
    }
