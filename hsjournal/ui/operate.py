"""What the operator's commands found, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from hsjournal.ui.words import duration, printable, size

MOST = 20
"""Lines of one kind on a screen; ``--json`` has all."""


def verify_text(r: dict[str, Any], run_dir: str) -> str:
    """A report of ``verify``."""
    methods = ", ".join(f"{count:,} {how}" for how, count in sorted(r["methods"].items()))
    speed = size(r["bytes"] / r["seconds"]) if r["seconds"] else size(r["bytes"])
    lines = [
        f"checked {r['checked']:,} files, {size(r['bytes'])} in {duration(r['seconds'])} ({speed}/s; {methods or 'none sound'})"
    ]
    if r["completed"]:
        lines.append(f"{r['completed']:,} of them had not been read back before, and are verified now")
    lines += _some(
        f"DAMAGED row {d['row']} ({printable(d['sample_id'], 60)}): {d['kind']}: {printable(d['detail'], 300)}"
        for d in r["damaged"]
    )
    lines += _some(f"UNCHECKED row {u['row']}: {printable(u['path'])}: {printable(u['why'])}" for u in r["unchecked"])
    unowned = r["unowned"]
    if unowned["count"]:
        lines.append(f"{unowned['count']:,} files in the output belong to no row (left alone):")
        lines += _some((f"  {printable(path, 300)}" for path in unowned["paths"]), unowned["count"])
    if not r["damaged"]:
        lines.append("no damage" if not r["unchecked"] else "no damage in what could be checked")
        return "\n".join(lines)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in Counter(d["kind"] for d in r["damaged"]).most_common())
    lines.append(f"{len(r['damaged']):,} damaged: {kinds}")
    if r["repaired"]:
        lines.append(f"{r['repaired']:,} rows are to be made again, their files are set aside in {run_dir}/rejects.")
        lines.append(f"Go on with: hsjournal resume {run_dir}")
    if r["repaired"] < len(r["damaged"]):
        lines.append(
            f"To make {'them' if not r['repaired'] else 'the others'} again: hsjournal verify {run_dir} --repair"
        )
    return "\n".join(lines)


def logits_text(r: dict[str, Any]) -> str:
    """A report of ``verify --logits``."""
    whom = r.get("server") or f"the model ({r['dtype']} on {r['device']})"
    held = f"held {r['checked']:,} samples against {whom}"
    gap = f"{r['mean_gap']:.4f} nats in the mean, {r['worst_gap']:.4f} in the worst sample"
    lines = [f"{held}: rebuilt log-probabilities of the next tokens differ by {gap}"]
    lines += _some(
        f"FAULT row {f['row']} ({printable(f['sample_id'], 60)}) {f['state']}: {f['kind']}: {printable(f['detail'], 300)}"
        for f in r["faults"]
    )
    if not r["faults"]:
        whole, last = (
            "the states are the model's, layer by layer",
            "the final states are the model's; aux layers were not looked at",
        )
        lines.append(last if r.get("server") else whole)
    return "\n".join(lines)


def reconcile_text(r: dict[str, Any], run_dir: str) -> str:
    """A plan of ``reconcile``, and whether it was carried out."""
    lines = [f"hand-over root {r['handover_root']}; server: {r['server'] or 'none answers, so nothing is awaited'}"]
    if r["live"]:
        lines.append("the run is going on: its own steps show up here as well")
    lines += [printable(line, 400) for line in r["plan"]]
    todo = r["moves"] + r["removed"] + r["temporaries"]
    if not todo:
        lines.append("nothing to do: journal, hand-over root and output agree")
    elif r["applied"]:
        lines.append(
            f"done: {r['moves']:,} rows moved, {r['removed']:,} entries removed, {size(r['freed_bytes'])} freed"
        )
    else:
        lines.append(f"nothing was changed; without --dry-run this is done: hsjournal reconcile {run_dir}")
    return "\n".join(lines)


def adopt_text(r: dict[str, Any], run_dir: str) -> str:
    """A report of ``adopt``."""
    how = ", ".join(f"{count:,} {way.replace('_', ' ')}" for way, count in sorted(r["how"].items()))
    lines = [
        f"looked at {r['files']:,} samples" + (f" ({r['ignored']:,} other files ignored)" if r["ignored"] else ""),
        f"adopted {r['adopted']:,} ({how or 'none'}): {r['tokens']:,} tokens, {size(r['bytes'])} in {duration(r['seconds'])}",
    ]
    if r["layers_stated"]:
        lines.append(f"the layers are as you stated: {r['layers_stated']} (nothing was compared)")
    for c in r["compared"]:
        worst = max(c["differences"], default=0.0)
        lines.append(
            f"compared with the server: row {c['row']}, {c['num_tokens']:,} tokens: differs by at most {worst:.2%}"
        )
    for count, words in (
        (r["finished_before"], "had been written by an adoption that was broken off, and are verified now"),
        (r["already"], "were adopted before"),
        (r["not_needed"], "are not needed: their rows have an output already"),
    ):
        if count:
            lines.append(f"{count:,} {words}")
    if r["unmatched"]:
        lines.append(f"{len(r['unmatched']):,} match no prompt of this run by their token ids (left alone):")
        lines += _some(f"  {printable(path, 300)}" for path in r["unmatched"])
    lines += _some(
        f"REFUSED {printable(f['path'], 300)}: {f['reason']}: {printable(f['detail'], 300)}" for f in r["refused"]
    )
    if r["refused"]:
        kinds = ", ".join(
            f"{count:,} {kind}" for kind, count in Counter(f["reason"] for f in r["refused"]).most_common()
        )
        lines.append(f"{len(r['refused']):,} refused: {kinds}")
    rest = f"{r['left']:,} rows are left to do; go on with: hsjournal resume {run_dir}"
    lines.append(rest if r["left"] else "every row is done")
    return "\n".join(lines)


def drained_text(r: dict[str, Any], run_dir: str) -> str:
    """A report of ``adopt --dumps``."""
    would = "would be " if r["dry_run"] else ""
    lines = [f"{len(r['taken']):,} dumps {would}handed on to their rows, which are dumped now"]
    lines += _some(f"  {name}: row {row}" for name, row in r["taken"].items())
    if r["removed"]:
        lines.append(f"{len(r['removed']):,} dumps of verified rows {would}removed, {size(r['freed_bytes'])}")
    if r["refused"]:
        lines.append(f"{len(r['refused']):,} left alone:")
        lines += _some((f"  {name}: {printable(why, 300)}" for name, why in r["refused"].items()), len(r["refused"]))
    if r["taken"] and not r["dry_run"]:
        lines.append(
            f"Go on with: hsjournal resume {run_dir}; then the same command removes the dumps of verified rows."
        )
    return "\n".join(lines)


def _some(lines: Iterable[str], count: int | None = None) -> list[str]:
    every = list(lines)
    left = (len(every) if count is None else count) - MOST
    return every if left <= 0 else [*every[:MOST], f"  … and {left:,} more (--json names all)"]
