"""``prompts check``: what a run would make of its prompts, without a run. Nothing is written anywhere."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hsjournal.dump.protocol import ITEM_SIZE
from hsjournal.errors import PromptsError
from hsjournal.journal.rows import NewRow
from hsjournal.prompts.encode import Encoder
from hsjournal.prompts.forecast import forecast
from hsjournal.prompts.ingest import ingest
from hsjournal.prompts.spec import IngestResult, IngestSpec, Progress

MOST_REFUSED = 10_000
"""Refused lines that are kept one by one; beyond it they are only counted."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What of a model's config.json decides how large states are.

    Args:
        hidden_size: columns of every state.
        vocab_size: None when not said.
        context_length: in tokens, None when not said.
        dtype: of the weights, and so of the states.
    """

    hidden_size: int
    vocab_size: int | None
    context_length: int | None
    dtype: str

    @classmethod
    def of(cls, folder: Path) -> ModelFacts | None:
        """Of the model in ``folder``; None when it has no config.json that says how wide its states are."""
        try:
            whole = json.loads((folder / "config.json").read_bytes())
            config = next(
                (whole[key] for key in ("text_config", "language_config", "llm_config") if key in whole), whole
            )
            dtype = str(config.get("dtype") or config.get("torch_dtype") or whole.get("torch_dtype") or "bfloat16")
            return cls(
                int(config["hidden_size"]),
                _whole(config.get("vocab_size")),
                _whole(config.get("max_position_embeddings")),
                dtype if dtype in ITEM_SIZE else "bfloat16",
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


@dataclass(frozen=True, slots=True)
class Shown:
    """A sample to look at: who it is, and its text in stretches that count for the loss or don't."""

    row: int
    sample_id: str
    source: str
    line: int
    method: str
    tokens: int
    loss_tokens: int
    pieces: tuple[tuple[bool, str], ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What was found.

    Args:
        result: None when no line can be used; ``problem`` says so.
        problem: in words.
        refused: place, id and reason of refused lines, the first of them.
        histogram: usable rows by length: from, up to (both included), rows.
        shown: some samples.
        expected: bytes and hours of a run; None when the model's size is not known.
    """

    result: IngestResult | None
    problem: str
    refused: tuple[dict[str, Any], ...]
    histogram: tuple[tuple[int, int, int], ...]
    shown: tuple[Shown, ...]
    expected: dict[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return {"version": 1, **asdict(self)}


@dataclass(slots=True)
class _Keeper:
    """Stands where the journal does: counts, and keeps a few rows, each as likely as any other."""

    wanted: int
    kept: list[NewRow] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    lengths: Counter[int] = field(default_factory=Counter)
    rows: int = 0
    _usable: int = 0
    _draw: random.Random = field(default_factory=lambda: random.Random(0))  # noqa: S311 - the same five every time

    def start_ingest(self, run_id: str) -> None:
        """Nothing to start."""

    def finish_ingest(self, found: str | None = None) -> None:
        """Nothing to finish."""

    def add_rows(self, rows: Sequence[NewRow]) -> None:
        """Count rows, and keep some."""
        for row in rows:
            self.rows += 1
            if row.skipped is not None:
                if len(self.refused) < MOST_REFUSED:
                    place = {"source": row.source, "line": row.line, "id": row.sample_id}
                    self.refused.append({**place, "reason": row.skipped})
                continue
            self.lengths[len(row.input_ids).bit_length()] += 1
            self._usable += 1
            if len(self.kept) < self.wanted:
                self.kept.append(row)
            elif (place_in := self._draw.randrange(self._usable)) < self.wanted:
                self.kept[place_in] = row

    def histogram(self) -> tuple[tuple[int, int, int], ...]:
        """By powers of two, without gaps."""
        if not self.lengths:
            return ()
        bits = range(min(self.lengths), max(self.lengths) + 1)
        return tuple((1 << (n - 1), (1 << n) - 1, self.lengths[n]) for n in bits)


def check(
    spec: IngestSpec,
    facts: ModelFacts | None,
    *,
    samples: int = 5,
    num_aux: int = 3,
    dtype: str = "",
    tokens_per_s: float,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Report:
    """Read all prompts as a run would.

    Args:
        spec: what to read, and how.
        facts: of the model.
        samples: how many to show.
        num_aux: aux layers of the run.
        dtype: of the states; empty for the model's own.
        tokens_per_s: of the server.
        progress: called after each batch.

    Raises:
        PromptsError: when a file or the tokenizer can't be used.
    """
    keeper = _Keeper(samples)
    problem, result = "", None
    try:
        result = ingest(keeper, spec, progress)
    except PromptsError as error:
        if not keeper.rows or keeper.lengths:
            raise
        problem = str(error)
    expected = None
    if result is not None and facts is not None:
        sizes = forecast(result, num_aux, facts.hidden_size, dtype or facts.dtype, 0)
        expected = {
            "output_bytes": sizes.output_bytes,
            "largest_dump_bytes": sizes.largest_dump_bytes,
            "hidden_size": facts.hidden_size,
            "aux_layers": num_aux,
            "dtype": dtype or facts.dtype,
            "tokens_per_s": tokens_per_s,
            "hours": round(result.tokens / tokens_per_s / 3600, 6),
        }
    shown = tuple(_shown(row, Encoder(spec)) for row in sorted(keeper.kept, key=lambda row: row.row))
    return Report(result, problem, tuple(keeper.refused), keeper.histogram(), shown, expected)


def _shown(row: NewRow, encoder: Encoder) -> Shown:
    try:
        decode: Callable[[Sequence[int]], str] = encoder.tokenizer.decode
    except PromptsError:
        decode = _numbers  # token ids need no tokenizer
    pieces, done = [], 0
    for n, length in enumerate(row.loss_mask):
        if length:
            pieces.append((n % 2 == 1, decode(row.input_ids[done : done + length])))
        done += length
    method = row.mask_method or ""
    count = sum(row.loss_mask[1::2])
    return Shown(row.row, row.sample_id, row.source, row.line, method, len(row.input_ids), count, tuple(pieces))


def _numbers(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids)) + " "


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
