"""The page: what it shows, in which order. Every text from outside is escaped where it enters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from hsjournal.states import State
from hsjournal.ui.report.charts import Mark, area, bars, stack, strip
from hsjournal.ui.report.style import STYLE
from hsjournal.ui.words import duration, printable, size

LANES = ("stall", "death", "pause", "failure", "recovery", "start")
_DONE = (State.VERIFIED, State.FAILED, State.SKIPPED)
_LAST_EVENTS = 60


def page(facts: dict[str, Any], run_dir: str, version: str) -> str:
    """The whole HTML page of a run.

    Args:
        facts: the fields of ``hsjournal.ops.report.gather.Facts``.
        run_dir: named in the title.
        version: of hsjournal.
    """
    body = [
        _head(facts, run_dir),
        _section("Where the rows are", _states(facts)),
        _section("Throughput and what happened", _throughput(facts)),
        _section("Lengths and latency", _distributions(facts)),
        _section("Failures", _failures(facts)),
        _section("Verification", _verification(facts)),
        _section("Prompts", _prompts(facts["prompts"])),
        _section("Events", _events(facts)),
        _section("Provenance", _provenance(facts["manifest"])),
        f"<footer>hsjournal {escape(version)}, {_utc(time.time())}. Times are UTC.</footer>",
    ]
    title = f"hsjournal: {printable(run_dir)}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _head(facts: dict[str, Any], run_dir: str) -> str:
    counts = facts["counts"]
    rows = sum(c["rows"] for c in counts.values())
    done = sum(_count(facts, state) for state in _DONE)
    verified = counts.get("verified", {"rows": 0, "tokens": 0, "bytes": 0})
    failed = _count(facts, State.FAILED)
    if rows and done == rows:
        sentence = "finished: every row verified" if not failed else f"finished, {failed:,} rows failed"
        sentence += f", {_count(facts, State.SKIPPED):,} skipped" if _count(facts, State.SKIPPED) else ""
    else:
        sentence = f"{done:,} of {rows:,} rows done ({100 * done / rows:.1f} %)" if rows else "no rows yet"
    tiles = [
        ("verified rows", f"{verified['rows']:,}"),
        ("tokens", f"{verified['tokens']:,}"),
        ("on disk", size(verified["bytes"])),
    ]
    steps = facts["steps"]
    if steps:
        busy = sum(s["seconds"] for s in steps if s["rows"])
        wall = steps[-1]["at"] + steps[-1]["seconds"] - steps[0]["at"]
        tiles += [
            ("tokens/s while busy", f"{sum(s['tokens'] for s in steps) / busy:,.0f}"),
            ("wall time", duration(wall)),
            ("without a finished row", duration(wall - busy)),
        ]
    made, workers = facts["run"].get("created_at"), facts["run"].get("epoch", 0)
    return (
        f"<header><h1>{escape(printable(run_dir))}</h1><p class=lead>{escape(sentence)}</p>"
        f"<p>{'begun ' + _utc(made) if made else ''}; {workers} worker{'s' if workers != 1 else ''} so far</p>"
        "<div class=tiles>"
        + "".join(f"<div><b>{escape(value)}</b><span>{name}</span></div>" for name, value in tiles)
        + "</div></header>"
    )


def _states(facts: dict[str, Any]) -> str:
    parts = [(str(state), _count(facts, state)) for state in State]
    rows = [
        (f'<i class="key {name}"></i>{name}', f"{count:,}", f"{facts['counts'].get(name, {}).get('tokens', 0):,}",
         size(facts["counts"].get(name, {}).get("bytes", 0)))
        for name, count in parts
    ]  # fmt: skip
    total, tokens, nbytes = (sum(c[key] for c in facts["counts"].values()) for key in ("rows", "tokens", "bytes"))
    together = ("together", f"{total:,}", f"{tokens:,}", size(nbytes))
    return stack(parts) + _table(("state", "rows", "tokens", "bytes"), [*rows, together])


def _throughput(facts: dict[str, Any]) -> str:
    if not facts["steps"]:
        return "<p>Nothing is verified yet.</p>"
    points = [(s["at"], s["seconds"], s["tokens"] / s["seconds"]) for s in facts["steps"]]
    marks = [Mark(e["at"], e["drawn"], f"{_utc(e['at'])} {_event_words(e)}") for e in facts["events"]]
    lanes = [lane for lane in LANES if any(mark.lane == lane for mark in marks)]
    caption = "Verified tokens per second; below, what happened and when (point at a mark for its words)."
    return f"<figure>{area(points, lambda v: f'{v:,.0f}', marks, lanes)}<figcaption>{caption}</figcaption></figure>"


def _distributions(facts: dict[str, Any]) -> str:
    figures = []
    for name, unit, groups in (
        ("Length", "tokens", facts["lengths"]),
        ("From send to verified", "s", facts["latencies"]),
    ):
        if groups:
            drawn = bars([(_bound(a), float(n)) for a, _, n in groups], lambda v: f"{v:,.0f}")
            figures.append(
                f"<figure>{drawn}<figcaption>{name}: rows by lower bound in {unit}, bounds doubling.</figcaption></figure>"
            )
    quantiles = ", ".join(
        f"{name} {duration(value) if value >= 1 else f'{value:.2f} s'}"
        for name, value in facts["latency_quantiles"].items()
    )
    words = f"<p>Latency: {quantiles}.</p>" if quantiles else ""
    return f'<div class="pair">{"".join(figures)}</div>{words}' if figures else "<p>No rows to show.</p>"


def _failures(facts: dict[str, Any]) -> str:
    if not facts["failures"]:
        return "<p>No row failed.</p>"
    rows = [
        (
            escape(printable(f["reason"])),
            f"{f['rows']:,}",
            strip({int(k): v for k, v in f["length_mod_64"].items()}, 64),
        )
        for f in facts["failures"]
    ]
    some = [
        (
            str(f["row"]),
            escape(printable(f["sample_id"], 80)),
            str(f["strikes"]),
            escape(printable(f["reason"] or "", 300)),
        )
        for f in facts["failed"]
    ]
    return _table(
        ("reason", "rows", "length modulo 64: one strong cell points at a broken kernel tile"), rows
    ) + _table(("row", "sample", "strikes", "reason"), some)


def _verification(facts: dict[str, Any]) -> str:
    if not facts["methods"]:
        return "<p>No row is verified yet.</p>"
    return _table(("read back by", "rows"), [(escape(str(how)), f"{n:,}") for how, n in facts["methods"].items()])


def _prompts(found: dict[str, Any] | None) -> str:
    if found is None:
        return "<p>The journal does not tell how they were read.</p>"
    rows = [(f"loss mask by {escape(method)}", f"{count:,}") for method, count in found["methods"].items()]
    rows += [(f"refused: {escape(reason)}", f"{count:,}") for reason, count in found["skipped"].items()]
    rows += [("cut", f"{found['cut']:,}")] if found["cut"] else []
    return _table(("how", "rows"), rows)


def _events(facts: dict[str, Any]) -> str:
    if not facts["kinds"]:
        return "<p>None.</p>"
    counted = ", ".join(f"{escape(kind)} {count:,}" for kind, count in facts["kinds"].items())
    last = facts["events"][-_LAST_EVENTS:]
    rows = [(f'<i class="key {e["drawn"]}"></i>{_utc(e["at"])}', escape(_event_words(e))) for e in reversed(last)]
    return f"<p>{counted}</p>" + _table(("when", "what"), rows)


def _event_words(event: dict[str, Any]) -> str:
    row = f"row {event['row']}: " if event["row"] is not None else ""
    detail = ", ".join(f"{key} {value}" for key, value in event["detail"].items() if not isinstance(value, dict | list))
    return printable(f"{event['kind']} {row}{detail}", 300)


def _provenance(manifest: dict[str, Any]) -> str:
    rows = []
    for key, value in manifest.items():
        if key == "sources":
            words = "; ".join(f"{s['path']} ({size(s['nbytes'])}, sha256 {s['sha256']})" for s in value)
        elif isinstance(value, dict):
            words = ", ".join(f"{k}={v}" for k, v in value.items())
        elif isinstance(value, list | tuple):
            words = ", ".join(map(str, value))
        else:
            words = str(value)
        rows.append(
            (
                f'<span class="when">{escape(key.replace("_", " "))}</span>',
                f"<code>{escape(printable(words, 1000))}</code>" if words else "none",
            )
        )
    return _table(("setting", "value"), rows)


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already."""
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f"<table><thead><tr>{''.join(f'<th>{escape(h)}</th>' for h in head)}</tr></thead><tbody>{body}</tbody></table>"
    )


def _bound(value: float) -> str:
    return f"{value:.3g}" if value < 1024 else f"{value / 1024:g}k"


def _count(facts: dict[str, Any], state: State) -> int:
    return int(facts["counts"].get(str(state), {}).get("rows", 0))


def _utc(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
