"""Prompts → journal: every line that isn't blank becomes exactly one row.

``python -m hsjournal.prompts.ingest SPEC`` runs it as a child of the supervisor (which must not import a tokenizer). SPEC
is an :class:`~hsjournal.prompts.spec.IngestSpec` as JSON, or the path of a file that holds it. Standard output carries JSON
lines: ``{"progress": …}``, then ``{"result": …}`` or ``{"error": …, "remedy": …, "exit_code": …}``.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from hsjournal import faults
from hsjournal.errors import ExitCode, HsjournalError, PromptsError, UsageError
from hsjournal.journal.store import Journal, NewRow
from hsjournal.prompts.encode import Encoder, Outcome, without_torch
from hsjournal.prompts.masks import MaskMethod
from hsjournal.prompts.order import Order
from hsjournal.prompts.pool import outcomes, processes_for
from hsjournal.prompts.readers import Line, Source
from hsjournal.prompts.refusal import Refusal, RowRefusedError, shorten, show
from hsjournal.prompts.sources import open_sources, remedy_for
from hsjournal.prompts.spec import IngestResult, IngestSpec, Lengths, Progress
from hsjournal.prompts.template import Encoded
from hsjournal.prompts.tokenizer_files import tokenizer_digest

__all__ = ["PromptSink", "ingest", "without_torch"]


class PromptSink(Protocol):
    """What ingestion needs of a journal."""

    def start_ingest(self, run_id: str) -> None:
        """Start with no rows; an ingestion that was broken off is started over."""

    def add_rows(self, rows: Sequence[NewRow]) -> None:
        """Enter rows, all or none."""

    def finish_ingest(self, found: str | None = None) -> None:
        """All rows are in; ``found`` is what there is to tell of them, a JSON object."""


def ingest(
    journal: PromptSink, spec: IngestSpec, progress: Callable[[Progress], None] = lambda _: None
) -> IngestResult:
    """Read, check and tokenise all prompts into the journal.

    Args:
        journal: gets the rows in batches.
        spec: what to read.
        progress: called after each batch.

    Raises:
        PromptsError: when a file can't be read, no line is usable, or the tokenizer can't be used.
    """
    sources = open_sources(spec.files)
    total = sum(source.nbytes for source in sources)
    encoder, tally = Encoder(spec), _Tally()
    order = Order(sources, spec.reading)
    journal.start_ingest(spec.run_id)
    with closing(_rows(sources, order, encoder, spec, tally)) as rows:
        for batch in _batches(rows, spec):
            journal.add_rows(batch)
            read = sum(source.bytes_read for source in sources)
            progress(Progress(tally.rows, tally.skipped.total(), tally.tokens, read, total))
            faults.point("ingest.batch")
    if not tally.lengths:
        raise _no_usable_line(spec, tally)
    result = IngestResult(
        rows=tally.rows,
        usable=len(tally.lengths),
        skipped=dict(tally.skipped.most_common()),
        loss_tokens=tally.loss_tokens,
        lengths=Lengths.of(tally.lengths),
        methods=dict(tally.methods.most_common()),
        doubled_bos=tally.doubled_bos + _doubled_in_given(spec, encoder, tally.doubled_start),
        sources=tuple(source.identity() for source in sources),
        tokenizer_sha256=tokenizer_digest(Path(spec.model_dir)) if tally.tokenised and spec.model_dir else "",
        cut=tally.cut,
    )
    journal.finish_ingest(json.dumps(result.summary()))
    return result


@dataclass(slots=True)
class _Tally:
    """Counts of one ingestion; 4 bytes a row."""

    rows: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    first_refusal: str = ""
    lengths: array[int] = field(default_factory=lambda: array("I"))
    tokens: int = 0
    loss_tokens: int = 0
    methods: Counter[str] = field(default_factory=Counter)
    doubled_bos: int = 0
    doubled_start: Counter[int] = field(default_factory=Counter)
    """Rows of given ids that start with a token twice, by token: whether it is begin-of-sequence is asked at the end."""
    cut: int = 0
    tokenised: bool = False

    def take(self, encoded: Encoded) -> None:
        ids = encoded.input_ids
        self.lengths.append(len(ids))
        self.tokens += len(ids)
        self.loss_tokens += encoded.loss_tokens
        self.methods[encoded.method.value] += 1
        self.doubled_bos += encoded.doubled_bos
        self.cut += encoded.cut_from is not None
        if encoded.method is MaskMethod.GIVEN and len(ids) > 1 and ids[0] == ids[1]:
            self.doubled_start[ids[0]] += 1

    def refuse(self, reason: Refusal, detail: str, place: str) -> None:
        self.skipped[reason.value] += 1
        self.first_refusal = self.first_refusal or f"{place}: {detail}"


class _Ids:
    """The ids of usable rows and where each stands, by digest: about 150 bytes a row however long ids are."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._names = [source.name for source in sources]
        self._seen: dict[bytes, int] = {}

    def claim(self, sample_id: str, source: int, line: int) -> None:
        """Take an id for a line of the ``source``-th file.

        Raises:
            RowRefusedError: when another line has it.
        """
        place = source << 40 | line
        first = self._seen.setdefault(blake2b(sample_id.encode(), digest_size=16).digest(), place)
        if first != place:
            where = f"{self._names[first >> 40]}:{first & (1 << 40) - 1}"
            raise RowRefusedError(Refusal.DUPLICATE_ID, f"{show(sample_id)} is the id of {where} too")


def _rows(
    sources: Sequence[Source], order: Order, encoder: Encoder, spec: IngestSpec, tally: _Tally
) -> Generator[NewRow]:
    """One row for each line that is taken."""
    ids = _Ids(sources)
    places: deque[tuple[int, int]] = deque()  # of the lines that are being encoded

    def lines() -> Iterator[Line]:
        for row, index, line in order.rows():
            places.append((row, index))
            yield line

    processes = processes_for(spec, sum(source.nbytes for source in sources))
    with closing(outcomes(lines(), encoder, spec, processes)) as encoded:
        for outcome in encoded:
            row, index = places.popleft()
            if outcome.elsewhere:
                continue
            yield _row(row, index, outcome, sources[index].name, ids, tally)


def _row(row: int, index: int, outcome: Outcome, source: str, ids: _Ids, tally: _Tally) -> NewRow:
    place = f"{source}:{outcome.number}"
    sample_id = place if outcome.sample_id is None else outcome.sample_id
    refusal, detail, encoded = outcome.refusal, outcome.detail, outcome.encoded
    tally.rows += 1
    tally.tokenised |= outcome.tokenised
    if encoded is not None:
        try:
            ids.claim(sample_id, index, outcome.number)
        except RowRefusedError as error:
            refusal, detail, encoded = error.reason, str(error), None
    if encoded is None:
        assert refusal is not None
        tally.refuse(refusal, detail, place)
        return NewRow(row, sample_id, source, outcome.number, array("I"), (), detail)
    tally.take(encoded)
    return NewRow(
        row, sample_id, source, outcome.number, encoded.input_ids, encoded.loss_mask,
        mask_method=encoded.method.value, cut_from=encoded.cut_from,
    )  # fmt: skip


def _doubled_in_given(spec: IngestSpec, encoder: Encoder, starts: Counter[int]) -> int:
    """How many rows of given ids start with two tokens of begin-of-sequence, as far as that can be told."""
    if not starts or spec.model_dir is None:
        return 0
    try:
        bos = encoder.tokenizer.bos
    except PromptsError:
        return 0  # these rows need no tokenizer, so a broken one is no error
    return 0 if bos is None else starts[bos]


def _batches(rows: Iterator[NewRow], spec: IngestSpec) -> Iterator[list[NewRow]]:
    batch: list[NewRow] = []
    tokens = 0
    for row in rows:
        batch.append(row)
        tokens += len(row.input_ids)
        if len(batch) >= spec.batch_rows or tokens >= spec.batch_tokens:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _no_usable_line(spec: IngestSpec, tally: _Tally) -> PromptsError:
    names = ", ".join(spec.files)
    if not tally.rows and spec.reading.shard:
        return PromptsError(f"shard {spec.reading.shard} of {names} has no row", remedy="Make fewer shards.")
    if not tally.rows:
        return PromptsError(f"{names} has only blank lines", remedy="Name a JSON Lines file with one prompt a line.")
    counts = ", ".join(f"{count} {reason}" for reason, count in tally.skipped.most_common())
    return PromptsError(
        f"none of the {tally.rows} lines of {names} can be used ({counts}); the first is {tally.first_refusal}",
        remedy=remedy_for(spec.files[0]),
    )


def main(arguments: Sequence[str]) -> int:
    """Run as a child process; see the module's docstring. Returns the exit code."""
    without_torch()
    try:
        spec = _read_spec(arguments)
        with Journal(Path(spec.journal)) as journal:
            result = ingest(journal, spec, lambda p: _say({"progress": asdict(p)}))
        _say({"result": json.loads(result.to_json())})
    except HsjournalError as error:
        _say({"error": error.message, "remedy": error.remedy, "exit_code": int(error.exit_code)})
        return int(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the parent is gone; nothing is left to flush at exit
        return int(ExitCode.ERROR)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - the parent gets it as the typed last line
        _say({"error": shorten(f"{type(error).__name__}: {error}"), "remedy": None, "exit_code": int(ExitCode.ERROR)})
        return int(ExitCode.ERROR)
    return int(ExitCode.DONE)


def _read_spec(arguments: Sequence[str]) -> IngestSpec:
    try:
        (text,) = arguments
        return IngestSpec.from_json(text if text.lstrip().startswith("{") else Path(text).read_text())
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"not an ingest spec: {error}", remedy="Give one argument: its JSON, or a file with it."
        ) from None


def _say(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line, ensure_ascii=True) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
