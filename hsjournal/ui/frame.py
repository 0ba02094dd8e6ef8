"""One frame of the live screen: lines of text that fit the terminal, whatever its size and whatever stands in the ids."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.cells import cell_len, chop_cells
from rich.text import Text

from hsjournal.ui.history import History
from hsjournal.ui.plain import forecast_lines
from hsjournal.ui.words import duration, printable, size
from hsjournal.watch.figures import STALE_SNAPSHOT_S
from hsjournal.watch.sight import Verdict
from hsjournal.watch.view import View

COLOURS = {
    "verified": "green", "written": "cyan", "dumped": "blue", "sent": "magenta",
    "pending": "bright_black", "failed": "red", "skipped": "yellow",
}  # fmt: skip
LETTERS = {"verified": "█", "written": "▓", "dumped": "▒", "sent": "░", "pending": "·", "failed": "!", "skipped": "-"}
_CALM = ("healthy", "slow")
_LABEL = 9
_MOST_LINES = 3


def frame(view: View, history: History, width: int, height: int) -> list[Text]:
    """The lines, at most ``height`` of them and none wider than ``width``; what matters least gives way."""
    lines, figures = _head(view, width), view.figures
    if figures is None:
        lines += _before(view) + _health(view, figures, width)
    else:
        lines += _samples(figures, history, width) + _worker(view)
        lines += _health(view, figures, width)
        for words in figures["pauses"].values():
            lines += _paragraph("PAUSED", printable(words, 300), "bold red", width)
        lines += _roots(figures, history) + _disks(figures)
    lines = lines[:height]
    flights = [_flight(f, width) for f in figures["in_flight"]] if figures is not None else []
    events = [_event(event) for event in view.events]
    lines += _lists(height - len(lines), ("in flight", flights, False), ("events", events, True))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
        line.truncate(width, overflow="ellipsis")
    return lines


def _head(view: View, width: int) -> list[Text]:
    clock = time.strftime("%H:%M:%S")
    first = Text(f"hsjournal {view.stage}  ", style="bold")
    first.append(printable(view.sentence), style="not bold")
    first.truncate(max(1, width - len(clock) - 1), overflow="ellipsis", pad=True)
    first.append(f" {clock}", style="dim not bold")
    out = view.out_dir.removeprefix(f"{view.run_dir}/")  # inside it as a rule: said once, it is less often cut
    return [first, Text(f"{printable(view.run_dir)} → {printable(out)}", style="dim")]


def _before(view: View) -> list[Text]:
    """Nothing is sent yet: what ingestion has read, and what the run will take."""
    lines = []
    if view.progress:
        p = view.progress
        share = p["bytes_read"] / max(1, p["bytes_total"])
        lines.append(
            _line("prompts", f"{p['rows']:,} rows, {p['tokens']:,} tokens, {p['skipped']:,} skipped ({share:.0%})")
        )
    if view.forecast:
        lines += [Text(printable(line, 400)) for line in forecast_lines(view.forecast)]
    return lines


def _samples(snapshot: Mapping[str, Any], history: History, width: int) -> list[Text]:
    counts, rates = snapshot["counts"], snapshot["rates"]
    total = sum(c["rows"] for c in counts.values())
    lines = [_bar(counts, total, width)]
    words = [
        (f"{LETTERS[state]} {counts[state]['rows']:,} {state}", colour)
        for state, colour in COLOURS.items()
        if counts[state]["rows"] or state in ("verified", "pending")
    ]
    lines += _wrapped([*words, (f"of {total:,}", "bold")], width)
    if rates is None:
        lines.append(
            _line(
                "speed", f"unknown: the worker has told nothing for {duration(snapshot['snapshot_age_s'])}", "bold red"
            )
        )
    else:
        lines += [_speed("speed", rates, ""), _speed("overall", rates, "_overall")]
    spark = history.sparkline(width - _LABEL - 1)
    if spark:
        lines.append(_line("", spark, "green"))
    eta, spread = duration(snapshot["eta_s"]), history.spread(snapshot) if rates is not None else None
    if spread is not None:
        eta += f" ({duration(spread[0])} to {duration(spread[1])})"
    lines.append(_line("left", f"{eta}; last progress {duration(snapshot['progress_age_s'])} ago"))
    return lines


def _bar(counts: Mapping[str, Any], total: int, width: int) -> Text:
    bar = Text()
    filled, drawn = 0, 0
    for state, colour in COLOURS.items():
        filled += counts[state]["rows"]
        upto = round(filled * width / max(1, total))
        bar.append(LETTERS[state] * (upto - drawn), style=colour)
        drawn = upto
    return bar


def _wrapped(words: Iterable[tuple[str, str]], width: int) -> list[Text]:
    lines = [Text()]
    for word, style in words:
        if lines[-1] and lines[-1].cell_len + cell_len(word) > width:
            lines.append(Text())
        lines[-1].append(word + "  ", style=style)
    return lines


def _speed(label: str, rates: Mapping[str, float], suffix: str) -> Text:
    samples, tokens, nbytes = (rates[f"{name}_per_s{suffix}"] for name in ("samples", "tokens", "bytes"))
    return _line(label, f"{samples:>8.2f} samples/s  {tokens:>9,.0f} tok/s  {size(nbytes):>9}/s")


def _worker(view: View) -> list[Text]:
    """Who works, and since when it has given no sign of life."""
    worker = view.worker
    if "pid" not in worker:
        return []
    is_well = worker["alive"] and worker["beat_age_s"] <= STALE_SNAPSHOT_S
    has_ended = (view.verdict or {}).get("verdict") in (Verdict.NOT_RUNNING, Verdict.JOURNAL_GONE)
    state = worker["phase"] if is_well else "SILENT" if worker["alive"] else "ended" if has_ended else "DEAD"
    starts = f", start {view.lives:,}" if view.lives else ""
    words = f"{state}, last beat {duration(worker['beat_age_s'])} ago; pid {worker['pid']}{starts}"
    return [_line("worker", words, "" if is_well or state == "ended" else "bold red")]


def _health(view: View, figures: Mapping[str, Any] | None, width: int) -> list[Text]:
    lines: list[Text] = []
    finding = view.verdict
    if finding is not None:
        calm = finding["verdict"] in _CALM
        is_said_below = finding["verdict"] == Verdict.WAITING and bool((figures or {}).get("pauses"))
        sentence = "see PAUSED" if is_said_below else printable(finding["sentence"], 300)
        words = f"{str(finding['verdict']).replace('_', ' ')}: {sentence}"
        lines += _paragraph("health", words, "green" if calm else "bold red", width)
        if not calm and finding.get("way_out"):
            lines += _paragraph("", f"→ {printable(finding['way_out'], 300)}", "red", width)
    servers = (figures or {}).get("servers") or []
    for server in servers:
        up = bool(server["up"]) and not server.get("problem")
        words = printable(server["url"], 80) + (
            " answers" if up else f": {printable(server.get('problem') or 'down', 200)}"
        )
        words += f"; {server['in_flight']:,} in flight" if server.get("in_flight") else ""
        lines.append(_line("server", words, "" if up else "bold red"))
    if not servers and view.server:
        lines.append(_line("server", printable(view.server)))
    if view.gpus:
        lines.append(_line("gpu", "  ".join(f"{gpu['gpu']}: {gpu['busy_percent']} %" for gpu in view.gpus)))
    return lines


def _roots(snapshot: Mapping[str, Any], history: History) -> list[Text]:
    """Each hand-over root once, be it that several servers share it."""
    lines = []
    first = snapshot.get("handover") or {}
    of_servers = [server.get("handover") or {} for server in snapshot.get("servers") or ()]
    roots = {handover.get("root"): handover for handover in reversed([first, *of_servers]) if "reserved" in handover}
    for root, handover in reversed(roots.items()):
        words = f"{size(handover['reserved'])} of {size(first.get('budget', 0))} in use"
        words += f", {size(handover['available'])} free" if "available" in handover else ""
        if (left := history.until_full(str(root))) is not None and snapshot["rates"] is not None:
            words += f", full in {duration(left)} at this speed"
        words += f"; {printable(str(root), 200)}" if len(roots) > 1 else ""
        lines.append(_line("shm", words))
    return lines


def _disks(snapshot: Mapping[str, Any]) -> list[Text]:
    lines = []
    for volume in snapshot.get("volumes") or []:
        if volume["free"] is None:  # nothing was written there yet
            continue
        words = f"{size(volume['free'])} free"
        speed = (snapshot["rates"] or {}).get("bytes_per_s", 0.0) / max(1, len(snapshot["volumes"]))
        if speed > 0:
            words += f", full in {duration(volume['free'] / speed)} at this speed"
        if volume.get("problem"):
            words += f"; {printable(volume['problem'], 120)}"
        words += f"; {printable(volume['path'], 200)}"
        lines.append(_line("disk", words, "bold red" if volume.get("problem") else ""))
    return lines


def _flight(flight: Mapping[str, Any], width: int) -> Text:
    name = printable(flight["sample_id"], max(8, width - 58))
    return Text(
        f"  row {flight['row']:<8} {flight['tokens']:>7,} tok  {flight['phase']:<10} {duration(flight['age_s']):>12}  {name}"
    )


def _event(event: str) -> Text:
    return Text("  " + printable(event, 300), style="dim")


def _lists(room: int, *lists: tuple[str, list[Text], bool]) -> list[Text]:
    """Lists share what room is left, each with a headline; ``True`` keeps the last of a list, not the first."""
    wanted = [(name, lines, last) for name, lines, last in lists if lines]
    shares: list[int] = []
    for number, (_, lines, _) in enumerate(wanted):
        share = (room - sum(shares)) // (len(wanted) - number)
        shares.append(min(share, len(lines) + 1))
    if shares and len(wanted) > 1:  # what the second list leaves, the first may have
        shares[0] = min(room - sum(shares[1:]), len(wanted[0][1]) + 1)
    drawn: list[Text] = []
    for (name, lines, last), share in zip(wanted, shares, strict=True):
        if share < 2:
            continue
        shown = lines[-(share - 1) :] if last else lines[: share - 1]
        more = f" ({len(lines):,}, {len(shown)} shown)" if len(shown) < len(lines) and not last else ""
        drawn += [Text(name + more, style="bold"), *shown]
    return drawn


def _paragraph(label: str, words: str, style: str, width: int) -> list[Text]:
    """Words that must be read to their end: broken at spaces."""
    pieces = list(_broken(words, max(10, width - _LABEL))) or [""]
    if len(pieces) > _MOST_LINES:
        pieces[_MOST_LINES - 1 :] = [f"{pieces[_MOST_LINES - 1]} {pieces[_MOST_LINES]}"]  # its end shows an ellipsis
    return [_line(label if number == 0 else "", piece, style) for number, piece in enumerate(pieces)]


def _broken(words: str, width: int) -> Iterable[str]:
    """Lines of at most ``width`` cells; a word without spaces, as other scripts have them, is cut where it must be."""
    line = ""
    for word in words.split():
        for piece in chop_cells(word, width):
            if line and cell_len(line) + 1 + cell_len(piece) > width:
                yield line
                line = piece
            else:
                line = f"{line} {piece}" if line else piece
    if line:
        yield line


def _line(label: str, words: str, style: str = "") -> Text:
    line = Text(f"{label:<{_LABEL}}", style="bold" if label else "")
    line.append(words, style=style or "not bold")
    return line
