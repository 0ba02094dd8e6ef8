"""``prompts check`` for people: counts, lengths, refused lines, and samples with the words that count marked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hsjournal.ui.words import duration, printable, size

BAR = 40
MOST_REFUSED = 30
LONGEST = 700
"""Characters of a stretch of a sample; the middle of a longer one is left out."""
_ON, _OFF = "\x1b[1;32m", "\x1b[0m"


def check_text(found: dict[str, Any], *, colour: bool) -> str:
    """The report as lines of text; words that count are green with ``colour``, else in ``[[ ]]``."""
    lines: list[str] = []
    result = found["result"]
    if result is not None:
        lines += _counts(result)
        lines += _lengths(result["lengths"], found["histogram"])
        if found["expected"] is not None:
            lines.append(_expected(found["expected"]))
    lines += _refused(found["refused"], result)
    for sample in found["shown"]:
        lines += _sample(sample, colour=colour)
    return "\n".join(lines)


def _counts(result: dict[str, Any]) -> Iterable[str]:
    lengths = result["lengths"]
    share = result["loss_tokens"] / max(1, lengths["total"])
    yield f"rows       {result['rows']:,}: {result['usable']:,} usable, {sum(result['skipped'].values()):,} refused"
    yield f"tokens     {lengths['total']:,}, of which {result['loss_tokens']:,} count for the loss ({share:.0%})"
    yield "masks by   " + ", ".join(f"{method} {count:,}" for method, count in result["methods"].items())
    if result["cut"]:
        yield f"cut        {result['cut']:,} rows were too long"
    if result["doubled_bos"]:
        yield f"WARNING    {result['doubled_bos']:,} rows begin with two tokens of begin-of-sequence"


def _lengths(lengths: dict[str, Any], histogram: Iterable[tuple[int, int, int]]) -> Iterable[str]:
    yield (
        f"lengths    p50 {lengths['p50']:,}, p90 {lengths['p90']:,}, p99 {lengths['p99']:,}, "
        f"shortest {lengths['shortest']:,}, longest {lengths['longest']:,}"
    )
    bins = list(histogram)
    most = max((count for _, _, count in bins), default=1)
    for low, high, count in bins:
        bar = "#" * max(round(count / most * BAR), 1 if count else 0)
        yield f"{low:>9,} - {high:>9,}  {count:>9,}  {bar}".rstrip()


def _expected(expected: dict[str, Any]) -> str:
    return (
        f"expected   {size(expected['output_bytes'])} of output ({expected['aux_layers']} aux layers + final, "
        f"{expected['hidden_size']:,} wide, {expected['dtype']}), {duration(expected['hours'] * 3600)} "
        f"at {expected['tokens_per_s']:,.0f} tokens/s; largest dump {size(expected['largest_dump_bytes'])}"
    )


def _refused(refused: list[dict[str, Any]], result: dict[str, Any] | None) -> Iterable[str]:
    total = sum(result["skipped"].values()) if result is not None else len(refused)
    for line in refused[:MOST_REFUSED]:
        place = f"{line['source']}:{line['line']}"
        own = "" if line["id"] == place else f" ({printable(line['id'], 60)})"
        yield f"refused    {printable(place, 120)}{own}: {printable(line['reason'], 300)}"
    if total > MOST_REFUSED:
        yield f"refused    and {total - MOST_REFUSED:,} more; --json lists them"


def _sample(sample: dict[str, Any], *, colour: bool) -> Iterable[str]:
    yield ""
    yield (
        f"--- row {sample['row']}, {printable(sample['sample_id'], 80)} ({printable(sample['source'], 80)}:{sample['line']}): "
        f"{sample['loss_tokens']:,} of {sample['tokens']:,} tokens count, mask by {sample['method']}"
    )
    on, off = (_ON, _OFF) if colour else ("[[", "]]")
    yield "".join(f"{on}{_safe(text)}{off}" if counts else _safe(text) for counts, text in sample["pieces"])


def _safe(text: str) -> str:
    """Without control characters, and with the middle left out where it is long."""
    if len(text) > LONGEST:
        half = LONGEST // 2
        text = f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)
