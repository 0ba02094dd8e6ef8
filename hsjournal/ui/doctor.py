"""What ``doctor`` found, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from hsjournal.ui.words import printable

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def show(lines: Sequence[dict[str, str]], console: Console) -> None:
    """Print the lines, grouped as they come, each with its remedy under it."""
    subject = ""
    for line in lines:
        if line["subject"] != subject:
            subject = line["subject"]
            console.print(Text(printable(subject, 300), style="bold"), soft_wrap=True)
        console.print(
            Text.assemble("  ", (f"{line['level']:<4}", _STYLES[line["level"]]), "  ", printable(line["words"], 600)),
            soft_wrap=True,
        )
        if line["remedy"]:
            console.print(Text(f"        → {printable(line['remedy'], 400)}", style="cyan"), soft_wrap=True)
    counts = Counter(line["level"] for line in lines)
    words = ", ".join(f"{counts[level]} {level}" for level in _STYLES if counts[level])
    console.print(Text(words, style="bold"), soft_wrap=True)
