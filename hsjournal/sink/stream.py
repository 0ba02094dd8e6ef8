"""From an open dump to a durable file in the trainer's format, at the speed of the disk and in bounded memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hsjournal import faults
from hsjournal.dump.expect import Expectation, compare
from hsjournal.dump.protocol import token_ids_sha256
from hsjournal.sink.blocks import BLOCK_BYTES, BlockPool, BlockWriter
from hsjournal.sink.containers import codec_of
from hsjournal.sink.gather import Gatherer
from hsjournal.sink.layouts import Tensor
from hsjournal.sink.pieces import Rows
from hsjournal.sink.publish import Publication
from hsjournal.sink.reserve import reserve
from hsjournal.sink.sample import Written

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hsjournal.dump.reader import Dump
    from hsjournal.sink.layouts import Layout
    from hsjournal.sink.sample import OutputSample, Progress


_RESERVE_FROM = 2 * BLOCK_BYTES
"""Smaller files are written by one or two calls."""


def _no_fence() -> None:
    """Used where nobody else can own the run."""


class Sink:
    """Writes samples into one output folder; may be used from several threads at once.

    Args:
        out_dir: the output folder, which must exist.
        layout: the format.
        rejects_dir: outside the output; where a different file under a final name is set aside to.
        fence: called before a final name is touched; raises :class:`FencedError` when a newer worker owns the run.
    """

    def __init__(self, out_dir: Path, layout: Layout, rejects_dir: Path, fence: Callable[[], None] = _no_fence) -> None:
        self._out_dir = out_dir
        self._layout = layout
        self._rejects_dir = rejects_dir
        self._fence = fence
        self._pool = BlockPool()
        self._durable: set[str] = set()

    def close(self) -> None:
        """Give the buffers back."""
        self._pool.close()

    def write(self, dump: Dump, sample: OutputSample, progress: Progress) -> Written:
        """Write one sample and publish it: when this returns, the file is durable under its final name.

        Raises:
            DumpRejectedError: the dump is another sample's, holds NaN or infinity, or was cut under our hands.
            FencedError: a newer worker owns the run.
            OSError: as the output's storage answers (ENOSPC, EDQUOT, EIO, EROFS, …). Nothing lies under the final
                name then, unless only its durability is in doubt.
        """
        compare(dump.meta, _expectation(sample))
        path = self._layout.path_of(sample.row, sample.sample_id)
        gatherer = Gatherer(dump)
        progress("opening", 0)
        with Publication(self._out_dir, path, sample.rid, self._rejects_dir, self._fence, self._durable) as publication:
            nbytes, digest = self._fill(publication, gatherer, sample, progress)
            faults.point("sink.written", sample.row)
            progress("syncing", nbytes)
            os.fdatasync(publication.fd)
            progress("publishing", nbytes)
            adopted, displaced = publication.publish(nbytes, digest)
        return Written(path, nbytes, digest, gatherer.digests(), adopted, displaced)

    def _fill(
        self, publication: Publication, gatherer: Gatherer, sample: OutputSample, progress: Progress
    ) -> tuple[int, str]:
        entries = self._layout.entries(sample)
        if self._layout.drops_final:
            gatherer.look_through(sample.num_aux)
        reserved = sum(entry.nbytes for entry in entries if isinstance(entry, Tensor))
        if reserved >= _RESERVE_FROM:
            progress("writing", 0)
            reserve(publication.fd, reserved)
        compose = codec_of(self._layout.container).compose
        pieces = compose(entries, lambda: sample.provenance(gatherer.digests()))
        with (
            self._pool.blocks() as blocks,
            BlockWriter(
                publication.fd,
                blocks,
                direct=publication.direct,
                progress=lambda done: progress("writing", done),
                row=sample.row,
            ) as out,
        ):
            for piece in pieces:
                if isinstance(piece, Rows):
                    piece.crc = gatherer.rows(piece.sources, out)
                else:
                    out.append(piece)
            return out.finish()


def _expectation(sample: OutputSample) -> Expectation:
    return Expectation(
        rid=sample.rid,
        num_tokens=sample.num_tokens,
        hidden_size=sample.hidden_size,
        dtype=sample.dtype,
        capture_layers=sample.capture_layers,
        final_norm=sample.final_norm,
        token_ids_sha256=token_ids_sha256(sample.input_ids),
    )
