"""``status`` for people."""

from __future__ import annotations

import time
from typing import Any

from hsjournal.ui.words import duration, printable, size


def status_text(s: dict[str, Any]) -> str:
    """A dozen lines; plain text."""
    lines = [f"run        {s['run_dir']}"]
    lines += [f"{name:<10} {s[key]}" for name, key in (("output", "out_dir"), ("draft", "draft_config")) if s.get(key)]
    lines[2:2] = [f"{'':<10} {folder}" for folder in s.get("more_out") or ()]
    if s.get("problem"):
        lines.append(f"PROBLEM    {printable(s['problem'], 400)}")
    lines.append(_supervisor(s))
    lines += _verdict(s.get("verdict") or {})
    if s.get("prompts"):
        lines.append(f"prompts    {_prompts(s['prompts'])}")
    counts = s["counts"]
    if counts:
        total = s["rows"]
        for state in ("pending", "sent", "dumped", "written", "verified", "failed", "skipped"):
            c = counts.get(state, {"rows": 0, "tokens": 0, "bytes": 0})
            if c["rows"] or state in ("pending", "verified"):
                more = f"  {c['tokens']:,} tokens" + (f"  {size(c['bytes'])}" if c["bytes"] else "")
                lines.append(f"{state:<10} {c['rows']:>10,}{more}")
        if s.get("deferred"):
            words = f"of the written, not read back yet: `hsjournal verify {s['run_dir']}` does it"
            lines.append(f"{'deferred':<10} {s['deferred']:>10,}  {words}")
        released = s.get("released") or {"rows": 0}
        if released["rows"]:
            freed = size(released["bytes"])
            lines.append(f"{'released':<10} {released['rows']:>10,}  of the verified, their files freed  {freed}")
        lines.append(f"{'total':<10} {total:>10,}")
    if s.get("rates"):
        r = s["rates"]
        lines.append(
            f"speed      {r['samples_per_s']:.2f} samples/s, {r['tokens_per_s']:,.0f} tok/s, {size(r['bytes_per_s'])}/s, "
            f"ETA {duration(s['eta_s'])}"
        )
    lines.extend(f"PAUSED     {printable(words, 400)}" for words in s.get("pauses", {}).values())
    lines.extend(_servers(s.get("servers", [])))
    lines.extend(f"failures   {_failure(f)}" for f in s.get("failures", []))
    lines.extend(
        f"failed     row {f['row']} ({printable(f['sample_id'], 60)}): {printable(f['reason'], 200)}"
        for f in s.get("failed", [])
    )
    for event in s.get("events", [])[-5:]:
        when = time.strftime("%H:%M:%S", time.localtime(event["at"]))
        row = f" row {event['row']}" if event["row"] is not None else ""
        lines.append(f"event      {when} {event['kind']}{row} {printable(str(event['detail']), 160)}")
    return "\n".join(lines)


def _supervisor(s: dict[str, Any]) -> str:
    """Who watches the run."""
    supervisor = s["supervisor"]
    if supervisor.get("state") == "silent":
        since = duration(supervisor["beat_age_s"])
        return f"PROBLEM    the supervisor (pid {supervisor['pid']}) has given no sign of life for {since}"
    if supervisor["alive"]:
        return f"supervisor {supervisor.get('stage')}: {printable(str(supervisor.get('sentence')))}"
    if s["complete"]:
        but = ", but not all of it was read back" if s.get("deferred") else ""
        return f"supervisor none: the run is complete{but}"
    gone = {"ended": "none: it ended by itself", "dead": "DEAD"}.get(str(supervisor.get("state")), "none")
    return f"supervisor {gone}; the run is not complete"


def _prompts(found: dict[str, Any]) -> str:
    """How the loss masks were found, and what was refused and cut."""
    words = "masks by " + ", ".join(f"{method} {count:,}" for method, count in found["methods"].items())
    if found["cut"]:
        words += f"; cut {found['cut']:,}"
    if found["skipped"]:
        words += "; refused " + ", ".join(f"{reason} {count:,}" for reason, count in found["skipped"].items())
    return words


def _failure(failure: dict[str, Any]) -> str:
    """One kind of failure; lengths that share a remainder point at a broken kernel tile."""
    rests = failure["length_mod_64"]
    text = f"{failure['rows']:,} x {printable(failure['reason'], 80)}"
    if len(rests) == 1 and failure["rows"] > 1:
        text += f", all of a length that leaves {next(iter(rests))} when divided by 64"
    return text


def _servers(servers: list[dict[str, Any]]) -> list[str]:
    """One alone is told of where it fails: as a pause."""
    return [f"server     {_server(server)}" for server in servers] if len(servers) > 1 else []


def _server(server: dict[str, Any]) -> str:
    """One of several servers."""
    if not server["up"]:
        return f"{printable(server['url'], 80)} SET ASIDE: {printable(server.get('problem') or 'down', 200)}"
    words = f"{printable(server['url'], 80)} {server['in_flight']:,} in flight, {server['verified']:,} verified"
    return words + (f"; {printable(server['problem'], 200)}" if server.get("problem") else "")


def _verdict(verdict: dict[str, Any]) -> list[str]:
    """What the supervisor makes of it, once it is more than a moment's silence."""
    if not verdict.get("overdue"):
        return []
    name = verdict["verdict"].replace("_", " ")
    return [
        f"VERDICT    {name}: {printable(verdict['sentence'], 400)}",
        f"way out    {printable(verdict['way_out'], 200)}",
    ]
