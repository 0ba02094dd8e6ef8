"""``diagnose --pid PID --log FILE --root DIR``: the same for a pipeline of the incident's kind, which has no journal.

A server writes ``req_N/`` with ``done`` at the end, a client reads and deletes them and writes a log. The server's
counter counts probes and retries too, so it says nothing of the backlog: only the directories that are there do. A new
directory is a sign of the server alone, a health probe's perhaps; the client's are its log and what it removes.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsjournal.errors import ExitCode
from hsjournal.ops.diagnose.asking import Asking
from hsjournal.ops.diagnose.conclude import Conclusion
from hsjournal.ops.diagnose.examination import LOOK_EVERY_S, MOST_S, SPAN_S
from hsjournal.ops.diagnose.looks import Looks, begin_of_process
from hsjournal.ops.diagnose.run import VERSION, aged, server_of
from hsjournal.ui.words import duration
from hsjournal.watch.verdict import Verdict

_REQUEST = re.compile(r"req_(0|[1-9][0-9]{0,11})")
DONE = "done"
_APART_S = 0.5
"""Seconds between two changes that are two, by the coarsest clock of a file system that matters."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline that isn't ours. Empty where nothing is known."""

    pid: int
    log: Path | None = None
    root: Path | None = None
    server: str = ""
    stall_timeout: float = 300.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What the verdict is made from.

    Args:
        pipeline: which.
        client: ``summary`` of the looks at its process.
        still: whether none of its threads ran between the first look and the last.
        log_age_s: since the log was last written to; None when unknown.
        removed_age_s: since a directory went; None when unknown.
        unread: complete directories, newest last.
        hangs: places that did not answer in time.
        server: why the server does not answer, None when it does or was not asked.
    """

    pipeline: Pipeline
    client: dict[str, Any]
    still: bool
    log_age_s: float | None = None
    removed_age_s: float | None = None
    unread: tuple[dict[str, Any], ...] = ()
    hangs: tuple[str, ...] = ()
    server: str | None = None


def diagnose_foreign(pipeline: Pipeline) -> dict[str, Any]:
    """What is the matter with a pipeline that isn't ours, JSON-able; ``exit_code`` is the command's."""
    begin = begin_of_process()
    client = Looks(pipeline.pid)
    client.look(time.monotonic())
    asking = Asking()
    asking.ask(_questions(pipeline, client))
    answers = asking.answers(begin + MOST_S)
    while client.last is not None and client.seen[-1][0] - client.seen[0][0] < SPAN_S:
        time.sleep(LOOK_EVERY_S)
        client.look(time.monotonic())
    now = time.time()
    found = [_directory(entry, now) for entry in answers.get("root", {}).get("entries", ())]
    found.sort(key=lambda d: (d["number"] is None, d["number"] or 0, d["name"]))
    server = server_of(answers)
    seen = Seen(
        pipeline=pipeline,
        client=client.summary(),
        still=client.is_still,
        log_age_s=_age(answers.get("log", {}), now),
        removed_age_s=_removed_age(answers.get("root", {}), now),
        unread=tuple(d for d in found if d["complete"]),
        hangs=tuple(str(pipeline.log if k == "log" else pipeline.root) for k in ("log", "root") if _hangs(answers, k)),
        server=str(server.get("problem")) if server["answers"] is False else None,
    )
    verdict = conclude_foreign(seen)
    numbers = [d["number"] for d in found if d["number"] is not None]
    rooms = [("working directory", "cwd_room"), ("log", "log_room"), ("shared memory", "shm_room")]
    root = answers.get("root", {})
    return {
        "version": VERSION,
        "foreign": {"pid": pipeline.pid, "log": str(pipeline.log or ""), "root": str(pipeline.root or "")},
        "took_s": round(time.monotonic() - begin, 2),
        "verdict": verdict.verdict,
        "sentence": verdict.sentence,
        "next_step": verdict.next_step,
        "exit_code": int(verdict.exit_code),
        "row": None,
        "threads": list(verdict.threads),
        "progress": {"age_s": verdict.silent_s, "source": "log" if seen.log_age_s is not None else "root"},
        "worker": seen.client,
        "log": {"path": str(pipeline.log or "")} | aged(answers.get("log", {}), now),
        "handover": {"root": str(pipeline.root or ""), "problem": root.get("error"), "directories": found,
                     "waited_for": len(seen.unread), "bytes": sum(d["bytes"] for d in found),
                     "highest_number": max(numbers, default=None)},
        "next_request": None,
        "server": {"url": pipeline.server} | server,
        "gpus": answers["gpu"].get("gpus", []),
        "gpu_problem": answers["gpu"].get("problem") or answers["gpu"].get("error"),
        "room": [{"what": what} | answers[key] for what, key in rooms if key in answers]
        + ([{"what": "hand-over root"} | root["room"]] if "room" in root else []),
        "hangs": list(seen.hangs),
        "events": [],
    }  # fmt: skip


def conclude_foreign(seen: Seen) -> Conclusion:
    """One verdict from what was seen of a foreign pipeline: pure."""
    client, pid = seen.client, seen.pipeline.pid
    silent = _silence(seen)
    quiet = f"no sign of progress for {duration(silent)}" if silent is not None else "nothing tells when it last moved"
    backlog = f"; {len(seen.unread):,} complete dump(s) lie unread" if seen.unread else ""
    step = _rescue(seen)
    if not client["alive"]:
        words = f"process {pid} is gone{backlog}; {quiet}"
        return Conclusion(Verdict.WORKER_DEAD, words, f"Start it again.{step}", ExitCode.ERROR, silent)
    stuck = tuple(f"{t['name']}: {t['state']} {t['wchan']}".strip() for t in client["threads"] if t["stuck"])
    if client["kill_pending"]:
        words = (
            f"process {pid} does not die of SIGKILL: it waits in the kernel ({', '.join(stuck) or 'unknown'}){backlog}"
        )
        words_step = f"Mend the storage; only its return, or a reboot, ends the process.{step}"
        return Conclusion(Verdict.UNKILLABLE, words, words_step, ExitCode.ERROR, silent, threads=stuck)
    if client["stopped"]:
        words = f"process {pid} is stopped by a signal or a debugger; {quiet}{backlog}"
        return Conclusion(Verdict.WORKER_STOPPED, words, f"kill -CONT {pid}", ExitCode.ERROR, silent)
    limit = seen.pipeline.stall_timeout
    idle = max((t["idle_s"] or 0.0 for t in client["threads"] if t["stuck"]), default=0.0)
    since = idle if silent is None else max(silent, 0.0)
    if ((stuck or seen.hangs) and max(since, 0.0) >= limit) or idle >= limit:
        what = (
            f"{len(stuck)} thread(s) of process {pid} in uninterruptible sleep ({', '.join(stuck)})"
            if stuck
            else ", ".join(seen.hangs) + " hangs"
        )
        asleep = f", for about {duration(idle)}" if idle else ""
        words = f"{quiet}: the storage is stuck; {what}{asleep}{backlog}"
        words_step = f"Look at the storage that it writes to (dmesg, mount, the file server).{step}"
        return Conclusion(Verdict.STORAGE_STALLED, words, words_step, ExitCode.ERROR, silent, threads=stuck)
    if silent is None or silent < limit:
        words = quiet
        if stuck:
            words += (
                f"; {len(stuck)} thread(s) hang in the kernel ({stuck[0]}), which counts as a stall after {limit:.0f} s"
            )
        verdict = Verdict.HEALTHY if silent is not None and silent < limit / 2 else Verdict.SLOW
        return Conclusion(verdict, words + backlog, "Nothing to do yet.", ExitCode.DONE, silent, threads=stuck)
    if seen.server is not None:
        words = f"{quiet}: the server does not answer ({seen.server}){backlog}"
        return Conclusion(Verdict.SERVER_DOWN, words, f"Start the server again.{step}", ExitCode.SERVER, silent)
    if client["io_bytes_moved"] or client["cpu_percent"] >= 5:
        words = f"{quiet}, though process {pid} works ({client['cpu_percent']:.0f}% CPU){backlog}"
        return Conclusion(Verdict.SLOW, words, "Look again in a minute.", ExitCode.DONE, silent)
    if not seen.unread and seen.pipeline.root is not None:
        words = f"{quiet}: process {pid} waits, and no dump is there to read: the server sends nothing"
        return Conclusion(
            Verdict.SERVER_STALLED, words, "Look at the server's log and its GPUs.", ExitCode.SERVER, silent
        )
    words = f"{quiet}: process {pid} lives and does nothing{backlog}"
    return Conclusion(
        Verdict.WORKER_STUCK, words, f"End process {pid} and start it again.{step}", ExitCode.ERROR, silent
    )


def _silence(seen: Seen) -> float | None:
    """Seconds since the client's last sign of progress; None when nothing tells.

    Where it has no other, complete dumps that it lets lie tell; and a process that has not run has not moved, whoever
    wrote to its log.
    """
    ages = [age for age in (seen.log_age_s, seen.removed_age_s) if age is not None]
    if not ages:
        ages = [max((d.get("age_s") or 0.0 for d in seen.unread), default=0.0)] if seen.unread else []
    silent = min(ages) if ages else None
    idle = [t["idle_s"] for t in seen.client.get("threads", ())] if seen.still else []
    asleep = min(idle) if idle and None not in idle else 0.0
    return max(silent or 0.0, asleep) if asleep >= seen.pipeline.stall_timeout else silent


def _removed_age(listing: dict[str, Any], now: float) -> float | None:
    """Seconds since something was removed from the root, where that was the last that happened to it.

    A folder changes when a name comes and when one goes; if it changed after all that is in it did, one went.
    """
    entries = listing.get("entries")
    if "mtime" not in listing or entries is None or listing.get("names", 0) > len(entries):
        return None
    newest = max((entry.get("mtime", now) for entry in entries), default=0.0)
    return max(0.0, round(now - listing["mtime"], 1)) if entries and listing["mtime"] > newest + _APART_S else None


def _rescue(seen: Seen) -> str:
    if not seen.unread:
        return ""
    return (
        f" Leave {seen.pipeline.root} alone: `hsjournal adopt RUN_DIR --dumps {seen.pipeline.root}` takes the complete "
        "dumps over, and `adopt --outputs` what was written."
    )


def _questions(pipeline: Pipeline, client: Looks) -> dict[str, tuple[str, ...]]:
    asked: dict[str, tuple[str, ...]] = {"gpu": ("gpu", "0.6"), "shm_room": ("place", "/dev/shm")}  # noqa: S108
    if client.last is not None:
        asked["cwd_room"] = ("place", f"/proc/{pipeline.pid}/cwd")
    if pipeline.log is not None:
        asked |= {"log": ("tail", str(pipeline.log)), "log_room": ("place", str(pipeline.log.parent))}
    if pipeline.root is not None:
        asked["root"] = ("root", str(pipeline.root))
    if pipeline.server:
        asked["server"] = ("server", pipeline.server, "0.6")
    return asked


def _directory(entry: dict[str, Any], now: float) -> dict[str, Any]:
    match = _REQUEST.fullmatch(entry["name"])
    files = entry.get("files", {})
    complete = entry["kind"] == "directory" and match is not None and DONE in files
    kind = "foreign" if match is None or entry["kind"] != "directory" else "dump" if complete else "partial"
    owner = f"request {match[1]}'s" if match and kind != "foreign" else "nobody's of this pipeline"
    return {
        "name": entry["name"],
        "kind": kind,
        "complete": complete,
        "bytes": entry.get("bytes", 0),
        "age_s": round(now - entry["mtime"], 1) if "mtime" in entry else None,
        "row": None,
        "tokens": entry.get("tokens"),
        "number": int(match[1]) if match else None,
        "owner": owner + (", complete and unread" if complete else ", without `done`" if kind == "partial" else ""),
    }


def _age(answer: dict[str, Any], now: float) -> float | None:
    return round(now - answer["mtime"], 1) if "mtime" in answer else None


def _hangs(answers: dict[str, dict[str, Any]], name: str) -> bool:
    return bool(answers.get(name, {}).get("hangs"))
