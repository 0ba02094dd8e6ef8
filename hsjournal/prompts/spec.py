"""What ingestion is asked for and what it found: values that travel as JSON between the supervisor and its child."""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from hsjournal import config
from hsjournal.errors import PromptsError
from hsjournal.prompts.shards import Shard


@dataclass(frozen=True, slots=True)
class Reading:
    """How the prompts are read, as far as that changes rows: frozen in the run's manifest.

    Args:
        max_tokens: longer rows are refused, or cut with ``truncate``; None for the server's own limit alone.
        truncate: cut what is too long at its end.
        last_turn_only: only the assistant's last turn of a conversation counts for the loss.
        min_loss_tokens: rows with fewer tokens that count are refused.
        limit: only so many rows are taken, refused ones included; the first ones in the run's order.
        shuffle_seed: rows are put in an order drawn from it; None for the files' order.
        chat_template: file with a chat template that replaces the model's.
        trust_remote_code: run Python code of the model's folder if its tokenizer needs it.
        shard: ``i/n``: only the rows of this shard are taken, after ``limit``; they keep their numbers. None for all.
    """

    max_tokens: int | None = None
    truncate: bool = False
    last_turn_only: bool = False
    min_loss_tokens: int = 1
    limit: int | None = None
    shuffle_seed: int | None = None
    chat_template: str | None = None
    trust_remote_code: bool = False
    shard: str | None = None

    def frozen(self) -> dict[str, str]:
        """Every option and its value as text; of the chat template the SHA-256 of its file.

        Raises:
            PromptsError: when that file can't be read, or the shard is none.
        """
        values = asdict(self)
        if self.shard is not None:
            Shard.parse(self.shard)
        if self.chat_template is not None:
            values["chat_template"] = _digest(self.chat_template)
        return {name: str(value).lower() for name, value in values.items()}

    def said(self) -> dict[str, str]:
        """What of :meth:`frozen` differs from the defaults, as the manifest keeps it."""
        return dict(self.frozen().items() - Reading().frozen().items())


def _digest(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError as error:
        raise PromptsError(
            f"the chat template {file} can't be read: {error.strerror}", remedy="Check the path (--chat-template)."
        ) from None


MARGIN = 7
"""Where no server says what it takes whole: SGLang takes prompts up to so many tokens below its context length, and cuts
longer ones without a word."""


@dataclass(frozen=True, slots=True)
class IngestSpec:
    """What to read, and the limits of who will run it.

    Args:
        run_id: of the run whose rows they become.
        files: files and dataset folders, in order.
        model_dir: folder with the tokenizer and chat template; None when all rows bring token ids.
        max_tokens: the server's context length, or the longest prompt that it takes whole (then ``margin`` is 0).
        vocab_size: of the model, None when unknown.
        margin: tokens of the context that a server keeps for itself.
        journal: path of the migrated database, for the child process.
        batch_rows: rows of one transaction, at most.
        batch_tokens: tokens after which a transaction is closed early.
        reading: how they are read.
        processes: that tokenise; 0 for as many as there are processors, if there is enough to do.
    """

    run_id: str
    files: tuple[str, ...]
    model_dir: str | None
    max_tokens: int
    vocab_size: int | None = None
    margin: int = MARGIN
    journal: str = ""
    batch_rows: int = 500
    batch_tokens: int = 1 << 20
    reading: Reading = field(default_factory=Reading)
    processes: int = 0

    def to_json(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of :meth:`to_json`."""
        raw: dict[str, Any] = json.loads(text)
        return cls(**raw | {"files": tuple(raw["files"]), "reading": Reading(**raw.get("reading", {}))})


@dataclass(frozen=True, slots=True)
class Progress:
    """How far ingestion is: rows so far, the refused among them, tokens, and bytes of the files."""

    rows: int
    skipped: int
    tokens: int
    bytes_read: int
    bytes_total: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts of the rows that will be sent; percentiles are lengths that occur (nearest rank)."""

    total: int
    mean: float
    shortest: int
    p50: int
    p90: int
    p99: int
    longest: int

    @classmethod
    def of(cls, lengths: array[int]) -> Self:
        """Of at least one length."""
        ordered = sorted(lengths)
        p50, p90, p99 = (ordered[-(-len(ordered) * percent // 100) - 1] for percent in (50, 90, 99))
        return cls(sum(ordered), sum(ordered) / len(ordered), ordered[0], p50, p90, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class IngestResult:
    """What came in. ``rows`` is ``usable`` plus all of ``skipped``.

    Args:
        rows: lines that aren't blank.
        usable: rows that will be sent.
        skipped: refused rows by reason (a value of :class:`hsjournal.prompts.refusal.Refusal`).
        loss_tokens: tokens that count for the loss.
        lengths: of the usable rows.
        methods: usable rows by how their loss mask was found.
        doubled_bos: usable rows that begin with two tokens of begin-of-sequence.
        sources: the files, as they were read.
        tokenizer_sha256: over the tokenizer's files; empty when none was used.
        cut: usable rows that were cut to the most tokens allowed.
    """

    rows: int
    usable: int
    skipped: dict[str, int]
    loss_tokens: int
    lengths: Lengths
    methods: dict[str, int]
    doubled_bos: int
    sources: tuple[config.Source, ...]
    tokenizer_sha256: str
    cut: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all usable rows."""
        return self.lengths.total

    def summary(self) -> dict[str, Any]:
        """What the journal keeps of it, and ``status`` shows."""
        keys = ("rows", "usable", "skipped", "loss_tokens", "methods", "doubled_bos", "cut")
        return {key: value for key, value in asdict(self).items() if key in keys}

    def to_json(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of :meth:`to_json`."""
        raw = json.loads(text)
        raw["lengths"] = Lengths(**raw["lengths"])
        raw["sources"] = tuple(config.Source(**source) for source in raw["sources"])
        return cls(**raw)
