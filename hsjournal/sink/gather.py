"""Rows from a dump's files into the output's order, digested and checked for NaN and infinity on the way.

Each file is read front to back in tiles small enough to stay in the processor's cache while they are read,
digested, checked, interleaved and hashed: each byte comes from main memory once.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from hsjournal.dump.finite import BITS, is_finite
from hsjournal.errors import DumpRejectedError, Reject
from hsjournal.sink.crc import crc32

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hsjournal.dump.reader import Dump
    from hsjournal.sink.blocks import BlockWriter

TILE_BYTES = 256 << 10
COPY_BELOW = 2048
"""Narrower rows (in bytes) are copied by the tile; wider ones are read straight to their places, row by row."""
_MOST_SLICES = 1024  # IOV_MAX


class Gatherer:
    """Reads one dump's tensors, each once and whole, in any grouping.

    Raises (from :meth:`rows`):
        DumpRejectedError: ``not_finite``, naming file, first bad row and count; ``wrong_size`` or ``vanished``
            when a file is shorter than it was, or can't be read.
    """

    def __init__(self, dump: Dump) -> None:
        self._dump = dump
        meta = dump.meta
        self._row_bytes = meta.tensors[0].nbytes // meta.num_tokens
        self._digests = [xxhash.xxh3_128() for _ in meta.tensors]
        self._tile_rows = max(1, TILE_BYTES // self._row_bytes)

    def digests(self) -> str:
        """xxh3_128 per tensor over its rows as read, in the dump's order, joined by commas."""
        return ",".join(d.hexdigest() for d in self._digests)

    def rows(self, sources: Sequence[int], out: BlockWriter) -> int:
        """Append the rows of ``sources``, interleaved token by token.

        Returns:
            Their CRC-32.
        """
        if len(sources) == 1:
            return self._straight(sources[0], out)
        return self._scattered(sources, out) if self._row_bytes >= COPY_BELOW else self._staged(sources, out)

    def look_through(self, source: int) -> None:
        """Digest and check a tensor that is not to be written."""
        nbytes = self._dump.meta.tensors[source].nbytes
        tile = bytearray(min(TILE_BYTES, nbytes))
        with memoryview(tile) as memory:
            for offset in range(0, nbytes, TILE_BYTES):
                with memory[: min(TILE_BYTES, nbytes - offset)] as view:
                    self._read(source, view, offset)

    def _straight(self, source: int, out: BlockWriter) -> int:
        """One tensor: read into the block itself."""
        nbytes = self._dump.meta.tensors[source].nbytes
        offset = crc = 0
        while offset < nbytes:
            size = min(TILE_BYTES, out.space(), nbytes - offset)
            with out.view(size) as view:
                self._read(source, view, offset)
                crc = crc32(view, crc)
            out.advance(size)
            offset += size
        return crc

    def _scattered(self, sources: Sequence[int], out: BlockWriter) -> int:
        """Several tensors of wide rows: each read, one call per tensor and tile, to its places in the block."""
        count, row_bytes, num_tokens = len(sources), self._row_bytes, self._dump.meta.num_tokens
        wide = count * row_bytes
        most = min(max(1, TILE_BYTES // wide), _MOST_SLICES)
        row = crc = 0
        while row < num_tokens:
            rows = min(most, num_tokens - row, out.space() // wide)
            if rows == 0:  # a row that straddles two blocks
                for source in sources:
                    piece = bytearray(row_bytes)
                    with memoryview(piece) as view:
                        self._read(source, view, row * row_bytes)
                        out.append(view)
                    crc = crc32(piece, crc)
                row += 1
                continue
            with out.view(rows * wide) as view:
                for index, source in enumerate(sources):
                    places = [view[at : at + row_bytes] for at in range(index * row_bytes, rows * wide, wide)]
                    self._read_scattered(source, places, row * row_bytes)
                if not is_finite(view, self._dump.meta.dtype):
                    raise self._not_finite(sources)
                crc = crc32(view, crc)
            out.advance(rows * wide)
            row += rows
        return crc

    def _staged(self, sources: Sequence[int], out: BlockWriter) -> int:
        """Several tensors of narrow rows: read a tile of each, then lay them side by side in the block."""
        count, row_bytes = len(sources), self._row_bytes
        wide = count * row_bytes
        staged = np.empty((count, self._tile_rows, row_bytes), dtype=np.uint8)
        crc = 0
        for first in range(0, self._dump.meta.num_tokens, self._tile_rows):
            rows = min(self._tile_rows, self._dump.meta.num_tokens - first)
            for tile, source in zip(staged, sources, strict=True):
                self._read(source, tile[:rows].data.cast("B"), first * row_bytes)
            row = 0
            while row < rows:
                whole = min(rows - row, out.space() // wide)
                if whole:
                    with out.view(whole * wide) as view:
                        block = np.frombuffer(view, dtype=np.uint8).reshape(whole, count, row_bytes)
                        for index in range(count):
                            block[:, index] = staged[index, row : row + whole]
                        del block
                        crc = crc32(view, crc)
                    out.advance(whole * wide)
                else:  # a row that straddles two blocks
                    whole = 1
                    for index in range(count):
                        piece = staged[index, row].data
                        crc = crc32(piece, crc)
                        out.append(piece)
                row += whole
        return crc

    def _read(self, source: int, view: memoryview, offset: int) -> None:
        """Fill ``view`` from the tensor's file, digest it, and check that it is finite."""
        self._fill(source, view, offset)
        self._digests[source].update(view)
        if not is_finite(view, self._dump.meta.dtype):
            raise self._not_finite([source])

    def _read_scattered(self, source: int, places: list[memoryview], offset: int) -> None:
        """Fill ``places`` from the tensor's file and digest them."""
        try:
            got = os.preadv(self._dump.fds[source], places, offset)
        except OSError as error:
            raise self._unreadable(source, error) from error
        digest = self._digests[source]
        if got == len(places) * self._row_bytes:
            for place in places:
                digest.update(place)
            return
        for number, place in enumerate(places):  # cut short by a signal, or by somebody
            self._fill(source, place, offset + number * self._row_bytes)
            digest.update(place)

    def _fill(self, source: int, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            with view[done:] as rest:
                try:
                    got = os.preadv(self._dump.fds[source], [rest], offset + done)
                except OSError as error:
                    raise self._unreadable(source, error) from error
            if got == 0:
                raise self._shrunk(source, offset + done)
            done += got

    def _reject(self, reason: Reject, source: int, text: str) -> DumpRejectedError:
        return DumpRejectedError(reason, f"{self._dump.meta.tensors[source].file} {text}")

    def _unreadable(self, source: int, error: OSError) -> DumpRejectedError:
        """Not the output's trouble: a dump that can't be read is as good as gone."""
        return self._reject(Reject.VANISHED, source, f"can't be read: {error.strerror}")

    def _shrunk(self, source: int, end: int) -> DumpRejectedError:
        found = os.fstat(self._dump.fds[source])
        reason = Reject.VANISHED if found.st_nlink == 0 else Reject.WRONG_SIZE
        return self._reject(reason, source, f"ends after {end:,} bytes: it was cut while it was being read")

    def _not_finite(self, sources: Sequence[int]) -> DumpRejectedError:
        """Look through the whole files, for the report."""
        meta = self._dump.meta
        for source in sources:
            first, bad_rows, bad_values = -1, 0, 0
            for start in range(0, meta.num_tokens, self._tile_rows):
                tile = bytearray(min(self._tile_rows, meta.num_tokens - start) * self._row_bytes)
                with memoryview(tile) as view:
                    self._fill(source, view, start * self._row_bytes)
                counts = _not_finite_per_row(tile, meta.dtype, meta.hidden_size)
                hit = np.flatnonzero(counts)
                if len(hit):
                    first = first if first >= 0 else start + int(hit[0])
                    bad_rows += len(hit)
                    bad_values += int(counts.sum())
            if bad_rows:
                text = f"{bad_values:,} values in {bad_rows:,} of {meta.num_tokens:,} rows, the first in row {first:,}"
                return self._reject(Reject.NOT_FINITE, source, f"holds NaN or infinity: {text}")
        return self._reject(
            Reject.NOT_FINITE, sources[0], "held NaN or infinity, and was changed while it was being read"
        )


def _not_finite_per_row(data: bytearray, dtype: str, hidden_size: int) -> npt.NDArray[np.intp]:
    unsigned, _, infinity = BITS[dtype]
    bits = np.frombuffer(data, dtype=unsigned).reshape(-1, hidden_size)
    counts: npt.NDArray[np.intp] = ((bits & unsigned(infinity)) == infinity).sum(axis=1)
    return counts
