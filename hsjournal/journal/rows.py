"""The values that go into and come out of the journal."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hsjournal.events import Event
from hsjournal.states import Transition


@dataclass(frozen=True, slots=True)
class NewRow:
    """One line of the input on its way into the journal.

    Args:
        row: 0-based position in the input.
        sample_id: the user's id, or ``<file name>:<line>``.
        source: name of the file; ``line`` is 1-based in it.
        input_ids: token ids; empty for a refused line.
        loss_mask: run lengths, the first of zeros (may be 0); their sum is the number of tokens.
        skipped: why the line was refused, None when it was not.
        mask_method: how the loss mask was found.
        cut_from: tokens before the row was cut, None when it was not.
    """

    row: int
    sample_id: str
    source: str
    line: int
    input_ids: array[int]
    loss_mask: Sequence[int]
    skipped: str | None = None
    mask_method: str | None = None
    cut_from: int | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """What the worker needs to run a row."""

    row: int
    sample_id: str
    num_tokens: int
    attempt: int
    strikes: int
    input_ids: array[int]
    loss_mask: array[int]


@dataclass(frozen=True, slots=True)
class MaskedPrompt:
    """What one row is made of.

    Args:
        row: of the input.
        sample_id: of the row.
        state: of the row.
        input_ids: little-endian uint32; empty for a refused row.
        loss_mask: run lengths, little-endian uint32, the first of zeros.
    """

    row: int
    sample_id: str
    state: str
    input_ids: bytes
    loss_mask: bytes


@dataclass(frozen=True, slots=True)
class Move:
    """One change of one row, applied only if the row is as expected and the epoch is the run's.

    Args:
        row: the row.
        attempt: the attempt that the row must still be at.
        transition: from, to and actor.
        values: further columns to set (``attempt`` among them for a claim).
        event: recorded in the same transaction.
    """

    row: int
    attempt: int
    transition: Transition
    values: dict[str, Any] = field(default_factory=dict)
    event: Event | None = None


@dataclass(frozen=True, slots=True)
class Count:
    """Totals of one state."""

    rows: int
    tokens: int
    nbytes: int
