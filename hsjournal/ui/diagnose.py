"""``diagnose`` for people: the verdict first, then what it rests on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hsjournal.ui.words import duration, printable, size

MOST = 12
"""Lines of one kind on a screen; ``--json`` has all."""


def diagnose_text(r: dict[str, Any]) -> str:
    """About thirty lines; plain text."""
    lines = [
        f"VERDICT    {r['verdict']}: {printable(r['sentence'], 600)}",
        f"NEXT STEP  {printable(r['next_step'], 600)}",
        "",
    ]
    if r.get("run_dir"):
        lines.append(f"run        {r['run_dir']}")
    if r["hangs"]:
        lines.append(
            f"HANGS      {printable(', '.join(r['hangs']), 400)}: not read; what follows is from the mirror and /proc"
        )
    lines += _worker(r["worker"], has_ended=r.get("supervisor", {}).get("state") == "ended")
    if "supervisor" in r:
        lines.append(_supervisor(r["supervisor"]))
    age = r["progress"]["age_s"]
    lines.append(
        f"progress   {'unknown' if age is None else duration(age) + ' ago'} (by the {r['progress']['source']})"
    )
    lines += _some(
        f"in flight  row {f['row']}, attempt {f['attempt']}, {f['phase']}, {size(f['bytes'])}"
        + (f", for {duration(f['since_s'])}" if f["since_s"] is not None else "")
        for f in r.get("in_flight", ())
    )
    counts = {state: rows for state, rows in r.get("counts", {}).items() if rows}
    if counts:
        lines.append("rows       " + ", ".join(f"{rows:,} {state}" for state, rows in counts.items()))
    lines.append(_log(r["log"]))
    lines += _handover(r["handover"])
    if r.get("next_request"):
        n = r["next_request"]
        lines.append(f"next       {n['rid']} (row {n['row']}, {printable(n['sample_id'], 60)}, {n['tokens']:,} tokens)")
    lines.append(_server(r["server"]))
    lines += _gpus(r)
    lines += [_room(room) for room in r["room"]]
    return "\n".join(lines)


def _worker(w: dict[str, Any], *, has_ended: bool) -> list[str]:
    if not w["alive"]:
        how = "ended" if has_ended else "DEAD"
        return [f"worker     {how} (pid {w['pid']})" if "pid" in w else "worker     none"]
    head = f"worker     pid {w['pid']}, {w['cpu_percent']:.0f}% CPU, {size(w['rss'])}"
    if "phase" in w:
        head += f", {w['phase']}, last beat {duration(w['beat_age_s'])} ago, epoch {w['epoch']}"
    if w["kill_pending"]:
        head += ", SIGKILL PENDING"
    threads = sorted(w["threads"], key=lambda t: (not t["stuck"], t["state"] in "SI", t["tid"]))
    lines = _some(
        f"thread     {t['tid']} {printable(t['name'], 20)}: {t['state']} {t['wchan']}".rstrip()
        + (f", has not run for {duration(t['idle_s'])}" if t["idle_s"] else "")
        + (" STUCK" if t["stuck"] else "")
        for t in threads
    )
    return [head, *lines]


def _supervisor(s: dict[str, Any]) -> str:
    if s.get("state") == "ended":
        said = f": {printable(str(s['sentence']), 300)} (exit {s['exit_code']})" if "sentence" in s else ""
        return f"supervisor ended by itself{said}"
    if not s["alive"]:
        return (
            f"supervisor DEAD (pid {s['pid']}); its last words: {printable(str(s.get('sentence')))}"
            if "pid" in s
            else "supervisor none"
        )
    beat = f", last beat {duration(s['beat_age_s'])} ago" if s.get("beat_age_s") is not None else ""
    state = "" if s["state"] == "alive" else " IT DOES NOT RUN:"
    return f"supervisor pid {s['pid']}{beat}:{state} {s.get('stage')}: {printable(str(s.get('sentence')))}"


def _log(log: dict[str, Any]) -> str:
    if not log["path"]:
        return "log        none named"
    if log.get("missing"):
        return f"log        {log['path']}: nothing was logged yet"
    if log["age_s"] is None:
        return f"log        {log['path']}: {printable(str(log.get('problem')))}"
    last = f": {printable(log['last_line'], 160)}" if log.get("last_line") else ""
    return f"log        {log['path']}, {size(log['size'])}, silent for {duration(log['age_s'])}{last}"


def _handover(h: dict[str, Any]) -> list[str]:
    if not h["root"]:
        return ["hand-over  unknown"]
    if h["problem"]:
        return [f"hand-over  {h['root']}: {printable(h['problem'])}"]
    found = h["directories"]
    complete = sum(1 for d in found if d["complete"])
    head = f"hand-over  {h['root']}: {len(found):,} names, {complete:,} complete, {size(h['bytes'])}"
    if h.get("highest_number") is not None:
        head += f"; the server's counter stands at {h['highest_number']:,}, which counts probes and retries too"
    ordered = sorted(found, key=lambda d: (not d["complete"], d["kind"] == "foreign"))
    return [head, *_some(_directory(d) for d in ordered)]


def _directory(d: dict[str, Any]) -> str:
    age = f", {duration(d['age_s'])} old" if d["age_s"] is not None else ""
    return f"           {printable(d['name'], 80)}: {d['kind']}, {size(d['bytes'])}{age}, {printable(d['owner'], 160)}"


def _server(s: dict[str, Any]) -> str:
    if not s["url"]:
        return "server     unknown"
    if not s.get("answers"):
        return f"server     {s['url']}: {printable(str(s.get('problem') or s.get('error')))}"
    flight = f", {s['in_flight']} request(s) in flight" if s.get("in_flight") is not None else ""
    return f"server     {s['url']} answers in {s.get('ms', 0):.0f} ms{flight}"


def _gpus(r: dict[str, Any]) -> list[str]:
    if not r["gpus"]:
        return [f"GPUs       {printable(str(r['gpu_problem'] or 'none'))}"]
    return [
        f"GPU {g['index']:<6} {printable(g['name'], 40)}: {g['use_percent']}% used, {g['memory_used_mib']} of {g['memory_total_mib']} MiB"
        for g in r["gpus"]
    ]


def _room(room: dict[str, Any]) -> str:
    head = f"room       {room['what']}"
    if "error" in room:
        return f"{head}: {printable(room['error'])}"
    full = " FULL" if room["total"] and room["free"] < max(1 << 20, room["total"] // 1000) else ""
    ro = " READ-ONLY" if room["read_only"] else ""
    return f"{head} ({room['path']}): {size(room['free'])} of {size(room['total'])} free{full}{ro}"


def _some(lines: Iterable[str]) -> list[str]:
    every = list(lines)
    more = [f"           … and {len(every) - MOST:,} more"] if len(every) > MOST else []
    return every[:MOST] + more
