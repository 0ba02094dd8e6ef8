"""What a run will take, before its first request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hsjournal.dump.protocol import payload_bytes
from hsjournal.errors import NoRoomError
from hsjournal.prompts.spec import IngestResult, Lengths

ROW_OVERHEAD = 8192
"""Bytes of a container's own headers and rounding, at most: the tensors and the provenance of one file."""
TOKEN_OVERHEAD = 16
"""Bytes of a token's id and loss flag, both int64."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Size of the output against the room for it. All sizes are bytes.

    Args:
        rows: samples that will be sent.
        skipped: refused lines, by reason.
        tokens: of all samples.
        lengths: of the samples, in tokens.
        output_bytes: of all finished files.
        largest_dump_bytes: room in the hand-over root that the longest sample needs at once.
        free_bytes: free room where the output goes.
        methods: samples by how their loss mask was found.
        cut: samples that were cut to the most tokens allowed.
    """

    rows: int
    skipped: dict[str, int]
    tokens: int
    lengths: Lengths
    output_bytes: int
    largest_dump_bytes: int
    free_bytes: int
    methods: dict[str, int]
    cut: int = 0


def refuse_too_little(output_bytes: int, free_bytes: int, out_dirs: Sequence[Path]) -> None:
    """Refuse to begin what won't fit.

    Args:
        output_bytes: of all files to come.
        free_bytes: in all output folders together.
        out_dirs: the output folders.

    Raises:
        NoRoomError: with what is missing.
    """
    if output_bytes > free_bytes:
        raise NoRoomError(
            f"the output needs about {output_bytes:,} bytes and {', '.join(map(str, out_dirs))} has {free_bytes:,} free "
            f"({output_bytes - free_bytes:,} missing)",
            remedy="Make room, name another folder with --out, or go on anyway with --allow-little-room.",
        )


def file_bytes(tokens: int, hidden: int, dtype: str, num_aux: int, *, files: int = 1) -> int:
    """The most bytes that ``files`` samples of ``tokens`` together take in the output."""
    return payload_bytes(tokens, hidden, dtype, num_aux) + tokens * TOKEN_OVERHEAD + files * ROW_OVERHEAD


def forecast(result: IngestResult, num_aux: int, hidden: int, dtype: str, free_bytes: int) -> Forecast:
    """Work a run's size out: tokens x (aux layers + 1) x hidden x item size, and the containers around them.

    Args:
        result: of the ingestion.
        num_aux: aux layers; the final state comes on top.
        hidden: the model's hidden size.
        dtype: of the states.
        free_bytes: free room where the output goes.
    """
    return Forecast(
        rows=result.usable,
        skipped=result.skipped,
        tokens=result.tokens,
        lengths=result.lengths,
        output_bytes=file_bytes(result.tokens, hidden, dtype, num_aux, files=result.usable),
        largest_dump_bytes=payload_bytes(result.lengths.longest, hidden, dtype, num_aux),
        free_bytes=free_bytes,
        methods=result.methods,
        cut=result.cut,
    )
