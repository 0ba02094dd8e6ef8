"""Many shards on one screen: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from hsjournal.fleet.telling import Telling
from hsjournal.states import State
from hsjournal.ui.screens import Drawing, Lasting, has_terminal
from hsjournal.ui.terminal import Terminal
from hsjournal.ui.words import duration, printable, size

EVERY = 10.0
PER_SECOND = 2


FleetScreen = Drawing[list[Telling]]
"""How all shards stand."""


def fleet_screen(*, plain: bool, quiet: bool, log: Path | None = None) -> FleetScreen:
    """The table on a terminal; plain lines where there is none, in CI, or on demand.

    Args:
        plain: lines are asked for.
        quiet: nothing is to be shown.
        log: takes the lines when the terminal of a fleet that must outlive it is closed.
    """
    screen: FleetScreen = LiveFleet() if has_terminal(plain=plain, quiet=quiet) else PlainFleet(quiet=quiet)
    return screen if log is None else Lasting(screen, log, lambda: PlainFleet(quiet=quiet))


def total_line(tellings: Sequence[Telling]) -> str:
    """The whole fleet on one line."""
    verified, rows = sum(t.count(State.VERIFIED) for t in tellings), sum(t.rows for t in tellings)
    failed, rate = sum(t.count(State.FAILED) for t in tellings), sum(t.rate for t in tellings)
    ended, begun = sum(t.code is not None for t in tellings), sum(t.incarnation > 0 for t in tellings)
    left = rows - verified - failed - sum(t.count(State.SKIPPED) for t in tellings)
    parts = [
        f"{ended:,} of {len(tellings):,} shards ended, {begun - ended if begun > ended else 0:,} under way",
        f"{verified:,}/{rows:,} rows verified" + (f", {failed:,} failed" if failed else ""),
        f"{rate:.2f} samples/s" + (f", ETA {duration(left / rate)}" if rate and begun == len(tellings) else ""),
    ]
    return "; ".join(parts)


def shard_line(telling: Telling) -> str:
    """One shard on one line."""
    where = f" on {telling.host}, incarnation {telling.incarnation}" if telling.incarnation else ""
    done = f": {telling.count(State.VERIFIED):,}/{telling.rows:,} verified" if telling.counts else ""
    return printable(f"shard {telling.shard}{where}{done}: {telling.sentence}", 500)


class PlainFleet:
    """Lines: one for a shard whenever it starts or ends, and one for all every ten seconds."""

    def __init__(self, out: TextIO | None = None, *, quiet: bool = False) -> None:
        self._out, self._quiet = out or sys.stdout, quiet
        self._told: dict[str, tuple[int, int | None]] = {}
        self._last = 0.0

    def show(self, tellings: list[Telling]) -> None:
        """Draw, if it is time."""
        if self._quiet:
            return
        for telling in tellings:
            key = (telling.incarnation, telling.code)
            if self._told.get(telling.shard, (0, None)) != key:
                self._told[telling.shard] = key
                self._print(shard_line(telling))
        if time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            self._print(total_line(tellings))

    def close(self) -> None:
        """Nothing to restore."""

    def _print(self, line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {line}", file=self._out, flush=True)


class LiveFleet:
    """A table; on a terminal with fewer lines than shards, those that need to be seen come first."""

    def __init__(self, console: Console | None = None) -> None:
        self._terminal = Terminal(PER_SECOND, console)

    def show(self, tellings: list[Telling]) -> None:
        """Draw, unless it was done just now."""
        self._terminal.draw(lambda: self._frame(tellings))

    def close(self) -> None:
        """Leave the last frame and give the terminal back."""
        self._terminal.close()

    def _frame(self, tellings: list[Telling]) -> Group:
        room = max(1, self._terminal.size[1] - 5)
        return Group(table(tellings, room), Text(total_line(tellings)))


def table(tellings: Sequence[Telling], room: int) -> Table:
    """At most ``room`` shards: those that gave up, then those under way, then the rest."""
    order = sorted(tellings, key=_urgency) if len(tellings) > room else list(tellings)
    shown = order[:room]
    found = Table(box=None, pad_edge=False, expand=True)
    for name, justify in (("shard", "right"), ("start", "right"), ("node", "left"), ("verified", "right")):
        found.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    found.add_column("rate", justify="right", no_wrap=True)
    found.add_column("", ratio=1, no_wrap=True, overflow="ellipsis")
    for t in shown:
        done = f"{t.count(State.VERIFIED):,}/{t.rows:,}" if t.counts else ""
        style = "" if t.code in (None, 0) else "yellow" if t.code == 3 else "bold red"
        words = Text(printable(t.sentence, 300), style=style)
        found.add_row(
            t.shard, str(t.incarnation or ""), printable(t.host, 40), done, f"{t.rate:.2f}" if t.rate else "", words
        )
    if len(shown) < len(tellings):
        found.add_row("", "", "", "", "", Text(f"… and {len(tellings) - len(shown):,} more", style="dim"))
    return found


def _urgency(telling: Telling) -> int:
    if telling.code is not None:
        return 3 if telling.code == 0 else 0
    return 1 if telling.incarnation else 2


def survey_text(found: dict[str, Any]) -> str:
    """What ``fleet status`` tells."""
    lines = [f"fleet {printable(found['fleet'], 80)}" if found["fleet"] else "a fleet without a name"]
    for shard in found["shards"]:
        counts, rows = shard["counts"], sum(shard["counts"].values())
        words = [f"shard {shard['shard'] or '?'}", f"incarnation {shard['incarnation']}"]
        words += [f"on {shard['host']}"] if shard["host"] else []
        if not shard["counts_here"]:
            words.append("SUPERSEDED")
        words.append(f"{counts.get('verified', 0):,}/{rows:,} verified")
        words += [f"{counts['failed']:,} failed"] if counts.get("failed") else []
        words += ["complete"] if shard["complete"] else [shard["sentence"] or "nobody runs it"]
        words += [f"PROBLEM: {shard['problem']}"] if shard["problem"] else []
        lines.append(printable("  " + ", ".join(words) + f"  ({shard['run_dir']})", 500))
    lines += [printable(f"  UNREADABLE {folder}: {why}", 500) for folder, why in found["unreadable"].items()]
    counts = found["counts"]
    lines.append(
        f"{counts['verified']:,} of {found['rows']:,} rows verified"
        + (f", {counts['failed']:,} failed" if counts["failed"] else "")
    )
    lines += [printable(f"not to be merged as it is: {found['unclear']}", 800)] if found["unclear"] else []
    lines += ["every shard is complete"] if found["complete"] else []
    return "\n".join(lines)


def checked_text(found: dict[str, Any]) -> str:
    """What ``fleet verify`` found."""
    lines = [f"checked {found['checked']:,} files of {len(found['shards']):,} shards, {size(found['bytes'])}"]
    for shard in found["shards"]:
        if shard["damaged"] or shard["unchecked"]:
            lines.append(
                f"shard {shard['shard']}: {len(shard['damaged']):,} damaged, {len(shard['unchecked']):,} unchecked"
            )
            lines.append(f"  see: hsjournal verify {printable(shard['run_dir'], 300)}")
    lines += [f"passed over: {printable(place, 300)} (of a lower incarnation)" for place in found["passed_over"]]
    lines.append("no damage" if not found["damaged"] else f"{found['damaged']:,} damaged")
    return "\n".join(lines)


def merged_text(found: dict[str, Any]) -> str:
    """What ``fleet merge`` wrote."""
    lines = [f"{found['samples']:,} samples of {found['rows']:,} rows in {printable(found['index'], 300)}"]
    lines += [f"{found['failed']:,} rows failed"] if found["failed"] else []
    lines += [f"{found['incomplete']:,} rows are still to be done"] if found["incomplete"] else []
    lines += [f"passed over: {printable(place, 300)} (of a lower incarnation)" for place in found["passed_over"]]
    return "\n".join(lines)
