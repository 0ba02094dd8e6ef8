"""The states of a foreign sample, state by state: digested, checked for NaN and infinity, copied, compared."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hsjournal.dump.finite import BITS, is_finite
from hsjournal.dump.protocol import FINAL, Meta, RequestId, tensor_entries, token_ids_sha256
from hsjournal.dump.reader import Dump
from hsjournal.ops.containers import open_source
from hsjournal.ops.foreign import Foreign, ForeignError, Refused

_TILE_BYTES = 1 << 20


class Room:
    """How much of samples may be held in memory at a time, by all threads together; one that is larger is held alone.

    Args:
        most: bytes.
    """

    def __init__(self, most: int) -> None:
        self._most, self._held, self._changed = most, 0, threading.Condition()

    @contextlib.contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """Wait until there is room, and take it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + nbytes <= self._most)
            self._held += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._held -= nbytes
                self._changed.notify_all()


ROOM = Room(256 << 20)


@dataclass(frozen=True, slots=True)
class Tile:
    """Some rows of one state (by its number: aux ascending, then final), the first of them row ``first``."""

    state: int
    first: int
    rows: bytes


def tiles(found: Foreign) -> Iterator[Tile]:
    """All rows of all states; each file is read once, front to back.

    Raises:
        ForeignError: ``not_finite``, naming key, row and number of values; ``unreadable``.
    """
    state = 0
    for stretch in found.stretches:
        wide = stretch.planes * found.row_bytes
        most = max(1, _TILE_BYTES // wide)
        with open_source(stretch.file) as read_at:
            for first in range(0, found.num_tokens, most):
                rows = min(most, found.num_tokens - first)
                data = _read(read_at, stretch.file.name, stretch.offset + first * wide, rows * wide)
                if not is_finite(data, found.dtype):
                    raise _not_finite(data, found.dtype, stretch.name, first, wide)
                table = np.frombuffer(data, dtype=np.uint8).reshape(rows, stretch.planes, found.row_bytes)
                for plane in range(stretch.planes):
                    piece = data if stretch.planes == 1 else np.ascontiguousarray(table[:, plane]).tobytes()
                    yield Tile(state + plane, first, piece)
        state += stretch.planes


def digests(found: Foreign) -> str:
    """xxh3_128 over the rows of each state, aux ascending, then final, joined by commas.

    Raises:
        ForeignError: as :func:`tiles`.
    """
    sums = [xxhash.xxh3_128() for _ in range(found.num_aux + 1)]
    for tile in tiles(found):
        sums[tile.state].update(tile.rows)
    return ",".join(s.hexdigest() for s in sums)


@contextlib.contextmanager
def as_dump(found: Foreign, rid: RequestId, capture_layers: tuple[int, ...], final_norm: str) -> Iterator[Dump]:
    """The sample as if a server had just handed it over, in memory: what the sink writes from. Waits for :data:`ROOM`.

    Raises:
        ForeignError: as :func:`tiles`.
    """
    meta = Meta(
        rid=str(rid),
        num_tokens=found.num_tokens,
        hidden_size=found.hidden_size,
        dtype=found.dtype,
        capture_layers=capture_layers,
        final_norm=final_norm,
        token_ids_sha256=token_ids_sha256(found.input_ids),
        chunks=(0,),
        boot_id="adopted",
        engine="adopted",
        versions={},
        tensors=tensor_entries(found.num_tokens, found.hidden_size, found.dtype, found.num_aux),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(ROOM.hold(sum(tensor.nbytes for tensor in meta.tensors)))
        fds = []
        for tensor in meta.tensors:
            fd = os.memfd_create(f"hsjournal-{tensor.name}", os.MFD_CLOEXEC)
            stack.callback(os.close, fd)
            fds.append(fd)
        for tile in tiles(found):
            _write(fds[tile.state], tile.rows, tile.first * found.row_bytes)
        yield Dump(meta, fds[-1], tuple(fds))


def differences(found: Foreign, dump: Dump) -> tuple[float, ...]:
    """‖found - dump‖ / ‖dump‖ of each state, aux ascending, then final.

    Raises:
        ForeignError: as :func:`tiles`.
    """
    off, size = np.zeros(found.num_aux + 1), np.zeros(found.num_aux + 1)
    for tile in tiles(found):
        there = os.pread(dump.fds[tile.state], len(tile.rows), tile.first * found.row_bytes)
        ours, theirs = as_float(tile.rows, found.dtype), as_float(there, found.dtype)
        off[tile.state] += float(np.square(ours - theirs).sum())
        size[tile.state] += float(np.square(theirs).sum())
    return tuple(math.sqrt(a / b) if b > 0 else math.inf if a > 0 else 0.0 for a, b in zip(off, size, strict=True))


def as_float(data: bytes, dtype: str) -> npt.NDArray[np.float64]:
    """Raw little-endian values as numbers."""
    if dtype == "bfloat16":
        wide = np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64)
    return np.frombuffer(data, dtype="<f2" if dtype == "float16" else "<f4").astype(np.float64)


def state_name(number: int, num_aux: int) -> str:
    """What a state is called."""
    return FINAL if number == num_aux else f"aux_{number}"


def _read(read_at: Any, name: str, offset: int, nbytes: int) -> bytes:
    try:
        data: bytes = read_at(offset, nbytes)
    except OSError as error:
        raise ForeignError(Refused.UNREADABLE, f"{name}: {error.strerror}") from None
    if len(data) != nbytes:
        raise ForeignError(Refused.UNREADABLE, f"{name} ends before its states do")
    return data


def _write(fd: int, data: bytes, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, memoryview(data)[done:], offset + done)


def _not_finite(data: bytes, dtype: str, name: str, first: int, wide: int) -> ForeignError:
    unsigned, _, infinity = BITS[dtype]
    bits = np.frombuffer(data, dtype=unsigned).reshape(-1, wide // np.dtype(unsigned).itemsize)
    bad = ((bits & unsigned(infinity)) == infinity).sum(axis=1)
    row = first + int(np.flatnonzero(bad)[0])
    return ForeignError(Refused.NOT_FINITE, f"{name} holds NaN or infinity, first in row {row:,}")
