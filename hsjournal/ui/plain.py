"""Plain lines where there is no terminal: one every ten seconds, and one at every change of stage."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from hsjournal.ui.lines import Lines
from hsjournal.ui.words import duration, printable, size
from hsjournal.watch.view import View

EVERY = 10.0


def forecast_lines(sizes: dict[str, object]) -> list[str]:
    """What a run will take, before its first request."""
    lengths = sizes["lengths"]
    assert isinstance(lengths, dict)
    skipped = sizes["skipped"]
    assert isinstance(skipped, dict)
    refused = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
    methods = sizes.get("methods")
    masks = ", ".join(f"{count:,} {method}" for method, count in methods.items()) if isinstance(methods, dict) else ""
    cut = _number(sizes.get("cut", 0))
    return [
        f"forecast: {sizes['rows']:,} samples, {sizes['tokens']:,} tokens"
        + (f"; skipped: {refused}" if refused else "")
        + (f"; cut: {cut:,.0f}" if cut else ""),
        *([f"forecast: loss masks found by: {masks}"] if masks else []),
        f"forecast: tokens a sample: p50 {lengths['p50']:,}, p90 {lengths['p90']:,}, p99 {lengths['p99']:,}, longest {lengths['longest']:,}",
        f"forecast: output {size(_number(sizes['output_bytes']))}, free {size(_number(sizes['free_bytes']))}",
        f"forecast: largest dump {size(_number(sizes['largest_dump_bytes']))}",
    ]


def status_line(view: View) -> str:
    """Everything that matters on one line."""
    snapshot = view.figures
    if snapshot is None:
        progress = view.progress
        more = f" {progress['rows']:,} rows, {progress['tokens']:,} tokens" if progress else ""
        return printable(f"{view.stage}: {view.sentence}{more}", 400)
    counts = {state: value["rows"] for state, value in snapshot["counts"].items()}
    total = sum(counts.values())
    rates = snapshot["rates"]
    parts = [
        f"{view.stage}: {counts['verified']:,}/{total:,} verified",
        *(f"{counts[s]:,} {s}" for s in ("pending", "sent", "dumped", "written", "failed", "skipped") if counts[s]),
        f"{rates['samples_per_s']:.2f} samples/s, {rates['tokens_per_s']:,.0f} tok/s, {size(rates['bytes_per_s'])}/s"
        if rates
        else f"speed unknown: the worker has told nothing for {duration(snapshot['snapshot_age_s'])}",
        f"ETA {duration(snapshot['eta_s'])}",
        f"last progress {duration(snapshot['progress_age_s'])} ago",
        *(f"PAUSED: {sentence}" for sentence in snapshot["pauses"].values()),
    ]
    if view.stage != "running":
        parts.append(view.sentence)
    return printable("; ".join(parts), 600)


class PlainScreen:
    """Draws a view as lines of text without a single escape sequence."""

    def __init__(self, out: TextIO | None = None, *, quiet: bool = False) -> None:
        self._lines, self._quiet = Lines(out or sys.stdout), quiet
        self._last, self._key = 0.0, ""
        self._told_forecast = False
        self._told_notes = 0

    def show(self, view: View) -> None:
        """Draw, if it is time."""
        if self._quiet:
            return
        for note in view.notes[self._told_notes :]:
            self._print(printable(note, 400))
        self._told_notes = len(view.notes)
        if view.forecast is not None and not self._told_forecast:
            self._told_forecast = True
            for line in forecast_lines(view.forecast):
                self._print(line)
        figures = view.figures
        pauses = figures["pauses"] if figures else {}
        key = f"{view.stage}{view.sentence}{sorted(pauses)}"
        if key != self._key or time.monotonic() - self._last >= EVERY:
            self._key, self._last = key, time.monotonic()
            self._print(status_line(view))

    def close(self) -> None:
        """Nothing to restore; the last lines are given a moment."""
        self._lines.close()

    def _print(self, line: str) -> None:
        stamp = time.strftime("%H:%M:%S")
        self._lines.say(f"{stamp} {line}")


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
