"""The journal's tables.

The schema's one description: migrations create it and a test holds them against it. SQLModel takes its time
to import and validates nothing on ``table=True``, so the hot path and the supervisor use
:mod:`hsjournal.journal.queries` instead, and the database's own CHECK constraints, STRICT tables and triggers
(:mod:`hsjournal.states`) do the validating.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import REAL, CheckConstraint, Column, ForeignKey, Index, Integer, LargeBinary, Text, text
from sqlmodel import Field, SQLModel

from hsjournal.states import INCOMPLETE, State, actor_check_sql, state_check_sql

_STRICT = {"sqlite_strict": True}


def _state_column(**kwargs: Any) -> Column[str]:
    return Column("state", Text, nullable=False, **kwargs)


class Run(SQLModel, table=True):
    """The run itself: one row, ``id`` 1."""

    __tablename__ = "run"
    __table_args__ = (CheckConstraint("id = 1", name="run_single"), _STRICT)

    id: int = Field(default=1, sa_column=Column(Integer, primary_key=True))
    run_id: str = Field(sa_column=Column(Text, nullable=False))
    epoch: int = Field(default=0, sa_column=Column(Integer, nullable=False))
    """Rises with every worker; a compare-and-set by an older one changes nothing."""
    created_at: float = Field(sa_column=Column(REAL, nullable=False))
    """Seconds since 1970, UTC, as every ``_at`` column."""
    ingested_at: float | None = Field(default=None, sa_column=Column(REAL))
    """When all prompts were in; until then ingestion starts over."""
    finished_at: float | None = Field(default=None, sa_column=Column(REAL))
    intake: str | None = Field(default=None, sa_column=Column(Text))
    """What ingestion found, a JSON object: rows by mask method, refused and cut ones; see ``prompts.spec.IngestResult``."""


class Sample(SQLModel, table=True):
    """One row of the input, and where it is on its way."""

    __tablename__ = "sample"
    __table_args__ = (
        CheckConstraint(state_check_sql(), name="sample_state"),
        CheckConstraint(actor_check_sql(), name="sample_actor"),
        CheckConstraint(
            "num_tokens >= 0 AND attempt >= 0 AND strikes >= 0 AND output_bytes >= 0", name="sample_counts"
        ),
        CheckConstraint("suspect IN (0, 1)", name="sample_suspect_flag"),
        CheckConstraint(
            "state NOT IN ('written', 'verified') OR "
            "(output_path IS NOT NULL AND output_xxh3 IS NOT NULL AND output_bytes > 0)",
            name="sample_written_has_file",
        ),
        CheckConstraint("state IN ('written', 'verified') OR output_bytes = 0", name="sample_file_only_if_written"),
        CheckConstraint("state <> 'verified' OR verify_method IS NOT NULL", name="sample_verified_says_how"),
        CheckConstraint("state NOT IN ('failed', 'skipped') OR reason IS NOT NULL", name="sample_off_path_says_why"),
        Index("sample_id_unique", "sample_id", unique=True, sqlite_where=text("state <> 'skipped'")),
        *(Index(f"sample_{s}", "row", sqlite_where=text(f"state = '{s}'")) for s in (*INCOMPLETE, State.FAILED)),
        CheckConstraint("released_at IS NULL OR state = 'verified'", name="sample_released_only_if_verified"),
        Index("sample_suspect", "row", sqlite_where=text("suspect = 1")),
        Index("sample_released", "released_at", "output_bytes", sqlite_where=text("released_at IS NOT NULL")),
        _STRICT,
    )

    row: int = Field(sa_column=Column(Integer, primary_key=True))
    """0-based position in the input, refused lines included."""
    sample_id: str = Field(sa_column=Column(Text, nullable=False))
    """The user's id, or ``<file name>:<line>``."""
    source: str = Field(sa_column=Column(Text, nullable=False))
    line: int = Field(sa_column=Column(Integer, nullable=False))
    """1-based line of ``source``."""
    num_tokens: int = Field(default=0, sa_column=Column(Integer, nullable=False))
    loss_tokens: int = Field(default=0, sa_column=Column(Integer, nullable=False))
    state: str = Field(sa_column=_state_column())
    actor: str = Field(sa_column=Column(Text, nullable=False))
    """Who made the last change."""
    reason: str | None = Field(default=None, sa_column=Column(Text))
    """Why the row is where it is: refusal, last strike, or last step back."""
    attempt: int = Field(default=0, sa_column=Column(Integer, nullable=False))
    """Part of the request id; committed before the send; never falls."""
    strikes: int = Field(default=0, sa_column=Column(Integer, nullable=False))
    suspect: int = Field(default=0, sa_column=Column(Integer, nullable=False))
    """1 when the row was in flight as a worker crashed: it runs alone next."""
    epoch: int = Field(default=0, sa_column=Column(Integer, nullable=False))
    """Of the worker that made the last change."""
    changed_at: float = Field(sa_column=Column(REAL, nullable=False))
    sent_at: float | None = Field(default=None, sa_column=Column(REAL))
    server: str | None = Field(default=None, sa_column=Column(Text))
    boot_id: str | None = Field(default=None, sa_column=Column(Text))
    """Life of the server that got, or wrote, the last attempt."""
    source_xxh3: str | None = Field(default=None, sa_column=Column(Text))
    """xxh3_128 per tensor over the dump's rows, ``aux_0,…,final``, joined by commas."""
    output_path: str | None = Field(default=None, sa_column=Column(Text))
    """Relative to the output folder."""
    output_bytes: int = Field(default=0, sa_column=Column(Integer, nullable=False))
    output_xxh3: str | None = Field(default=None, sa_column=Column(Text))
    """xxh3_128 over the whole file."""
    verify_method: str | None = Field(default=None, sa_column=Column(Text))
    """How the bytes were read back (a value of ``hsjournal.sink.verify.Method``)."""
    verified_at: float | None = Field(default=None, sa_column=Column(REAL))
    mask_method: str | None = Field(default=None, sa_column=Column(Text))
    """How the loss mask was found (a value of ``hsjournal.prompts.masks.MaskMethod``)."""
    cut_from: int | None = Field(default=None, sa_column=Column(Integer))
    """Tokens that the row had before ``--truncate`` cut it; NULL when it was not cut."""
    released_at: float | None = Field(default=None, sa_column=Column(REAL))
    """When the output was consumed and its file freed; the row stays verified, its path and digest are history then."""


class Prompt(SQLModel, table=True):
    """What is sent for a row."""

    __tablename__ = "prompt"
    __table_args__ = (_STRICT,)

    row: int = Field(sa_column=Column(Integer, ForeignKey("sample.row"), primary_key=True))
    input_ids: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    """Token ids, little-endian uint32."""
    loss_mask: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    """Run lengths, little-endian uint32, the first one of zeros (may be 0)."""


class StateCount(SQLModel, table=True):
    """Rows, tokens and output bytes per state; kept by trigger."""

    __tablename__ = "state_count"
    __table_args__ = (CheckConstraint(state_check_sql(), name="state_count_state"), _STRICT)

    state: str = Field(sa_column=_state_column(primary_key=True))
    rows: int = Field(default=0, sa_column=Column(Integer, nullable=False))
    tokens: int = Field(default=0, sa_column=Column(Integer, nullable=False))
    bytes: int = Field(default=0, sa_column=Column(Integer, nullable=False))


class Event(SQLModel, table=True):
    """What happened, besides the forward steps of rows."""

    __tablename__ = "event"
    __table_args__ = (_STRICT,)

    id: int | None = Field(default=None, sa_column=Column(Integer, primary_key=True))
    key: str = Field(sa_column=Column(Text, nullable=False, unique=True))
    """``<mirror>:<number>`` for events that were first kept in the mirror, so that each is entered once."""
    at: float = Field(sa_column=Column(REAL, nullable=False))
    epoch: int = Field(sa_column=Column(Integer, nullable=False))
    kind: str = Field(sa_column=Column(Text, nullable=False))
    row: int | None = Field(default=None, sa_column=Column(Integer))
    detail: str = Field(sa_column=Column(Text, nullable=False))
    """JSON object."""
