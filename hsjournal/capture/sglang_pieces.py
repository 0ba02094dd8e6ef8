"""From the forward pass to the writer threads: through a fixed number of pieces of memory, allocated at load.

On CUDA a piece is a pair of equal buffers. The forward stream copies rows into the device's one (fast, and after that
the model may reuse its memory), a side stream copies that to the pinned host's one, and a writer thread waits for
the copy's event and stores the rows. On a CPU there is the host's buffer only.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hsjournal.capture.sglang_assembly import ID_BYTES, IDS, Assembly
from hsjournal.capture.sglang_rows import RowSlice
from hsjournal.dump.protocol import FailureReason

log = logging.getLogger(__name__)

_ALIGN = 256
_MIB = 1 << 20
PIECE_BYTES = 64 * _MIB
LIMIT_BYTES = 2048 * _MIB
_WRITERS = 2


@dataclass(frozen=True, slots=True)
class _Segment:
    """Rows of one request in a piece: ``nbytes`` from ``start``."""

    assembly: Assembly
    generation: int
    tensor_index: int
    row_offset: int
    start: int
    nbytes: int


@dataclass(slots=True, eq=False)
class _Piece:
    host: Any
    device: Any
    view: memoryview
    copied: Any
    """CUDA event of the copy to the host, None on a CPU."""
    used: int = 0
    segments: list[_Segment] = field(default_factory=list)

    @property
    def target(self) -> Any:
        return self.host if self.device is None else self.device


class PiecesError(Exception):
    """The pieces can't be allocated; the message is for the user."""


class NoPieceError(Exception):
    """No piece came back in time: the writers do not keep up."""


def piece_plan(pass_bytes: int, row_bytes: int) -> tuple[int, int]:
    """How many pieces of how many bytes serve passes of ``pass_bytes``: a pass and a bit, at least four, bounded."""
    size = max(min(pass_bytes, PIECE_BYTES), _MIB, -(-row_bytes // _MIB) * _MIB)
    return max(4, min(-(-pass_bytes // size) + 3, LIMIT_BYTES // size)), size


class Pieces:
    """The pieces and the threads that empty them.

    Args:
        device: the torch device of the model.
        pass_bytes: the most that one forward pass yields.
        row_bytes: of one row of one tensor.

    Raises:
        PiecesError: when the memory can't be had (pinned memory counts against memlock).
    """

    def __init__(self, device: Any, pass_bytes: int, row_bytes: int) -> None:
        import torch

        self._cuda = device.type == "cuda"
        count, size = piece_plan(pass_bytes, row_bytes)
        self.count, self.size = count, size
        self._free: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[_Piece | Assembly] = queue.SimpleQueue()
        self._starved = False
        self._side = torch.cuda.Stream(device) if self._cuda else None
        try:
            for _ in range(count):
                self._free.put(self._make(device, size))
        except (RuntimeError, MemoryError) as error:
            raise PiecesError(
                f"{count} buffers of {size // _MIB} MiB can't be allocated{' and pinned' if self._cuda else ''}: {error}. "
                "Raise the memlock limit (ulimit -l, --ulimit memlock=-1 in containers), or lower --chunked-prefill-size"
            ) from error
        for number in range(_WRITERS):
            threading.Thread(target=self._write_forever, name=f"hsjournal-writer-{number}", daemon=True).start()

    def settle(self, assembly: Assembly) -> None:
        """Have a writer thread publish what became of a request."""
        self._work.put(assembly)

    def take(self, deadline: float) -> _Piece:
        """A free piece.

        Once the writers were too slow, passes no longer wait for them until a piece comes back.

        Raises:
            NoPieceError: none came back before ``deadline`` (monotonic).
        """
        timeout = 0.0 if self._starved else max(0.0, deadline - time.monotonic())
        try:
            piece = self._free.get(timeout=timeout) if timeout else self._free.get_nowait()
        except queue.Empty:
            self._starved = True
            raise NoPieceError from None
        self._starved = False
        return piece

    def submit(self, piece: _Piece) -> None:
        """Hand a filled piece to the writers."""
        try:
            if piece.device is not None:
                self._copy_to_host(piece)
        except RuntimeError as error:
            _fail_all(piece, error)
            raise
        finally:
            self._work.put(piece)

    def give_back(self, piece: _Piece) -> None:
        """The piece is empty again."""
        piece.used = 0
        piece.segments = []
        self._free.put(piece)

    def _copy_to_host(self, piece: _Piece) -> None:
        import torch

        assert self._side is not None
        self._side.wait_stream(torch.cuda.current_stream(piece.device.device))
        with torch.cuda.stream(self._side):
            piece.host[: piece.used].copy_(piece.device[: piece.used], non_blocking=True)
            piece.copied.record(self._side)

    def _make(self, device: Any, size: int) -> _Piece:
        import torch

        host = torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda)
        view = memoryview((ctypes.c_char * size).from_address(host.data_ptr())).cast("B")
        if not self._cuda:
            return _Piece(host, None, view, None)
        return _Piece(host, torch.empty(size, dtype=torch.uint8, device=device), view, torch.cuda.Event(blocking=True))

    def _write_forever(self) -> None:
        while True:
            item = self._work.get()
            try:
                if isinstance(item, Assembly):
                    item.settle()
                else:
                    self._store(item)
            except Exception:  # a writer thread that dies would starve the server's passes
                log.exception("hsjournal: storing states failed")

    def _store(self, piece: _Piece) -> None:
        try:
            try:
                if piece.copied is not None:
                    piece.copied.synchronize()
            except RuntimeError as error:
                _fail_all(piece, error)
            for s in piece.segments:
                s.assembly.write(s.generation, s.tensor_index, s.row_offset, piece.view[s.start : s.start + s.nbytes])
        finally:
            self.give_back(piece)


def _fail_all(piece: _Piece, error: Exception) -> None:
    for s in piece.segments:
        s.assembly.fail(FailureReason.INTERNAL, f"copying from the device failed: {error}")


class PassCopy:
    """Copies the rows of one forward pass into pieces.

    Args:
        pieces: where pieces come from and go to.
        wait_s: how long the whole pass may wait for free pieces.
    """

    def __init__(self, pieces: Pieces, wait_s: float) -> None:
        self._pieces = pieces
        self._deadline = time.monotonic() + wait_s
        self._piece: _Piece | None = None

    def copy(self, tensor_index: int, tensor: Any, run: Sequence[tuple[Assembly, RowSlice]]) -> None:
        """Copy the rows of a run of neighbouring slices; for :data:`IDS` the tensor is the packed token ids.

        Raises:
            NoPieceError: the writers do not keep up.
        """
        import torch

        dtype = torch.int64 if tensor_index == IDS else tensor.dtype
        row_bytes = ID_BYTES if tensor_index == IDS else tensor.shape[1] * tensor.element_size()
        row, end = run[0][1].start, run[-1][1].start + run[-1][1].length
        while row < end:
            piece = self._room_for(row_bytes)
            start = piece.used
            rows = min(end - row, (self._pieces.size - start) // row_bytes)
            nbytes = rows * row_bytes
            shape = (rows,) if tensor_index == IDS else (rows, tensor.shape[1])
            piece.target[start : start + nbytes].view(dtype).view(shape).copy_(tensor[row : row + rows])
            piece.used = min(self._pieces.size, -(-(start + nbytes) // _ALIGN) * _ALIGN)
            for assembly, item in run:
                first, last = max(row, item.start), min(row + rows, item.start + item.length)
                if first < last:
                    piece.segments.append(
                        _Segment(
                            assembly,
                            assembly.expect_write(),
                            tensor_index,
                            item.prefix + first - item.start,
                            start + (first - row) * row_bytes,
                            (last - first) * row_bytes,
                        )
                    )
            row += rows

    def finish(self) -> None:
        """Hand over the last piece; also after a failure, since writers were promised its rows."""
        piece, self._piece = self._piece, None
        if piece is None:
            return
        if piece.segments:
            self._pieces.submit(piece)
        else:
            self._pieces.give_back(piece)

    def _room_for(self, row_bytes: int) -> _Piece:
        if self._piece is not None and self._pieces.size - self._piece.used < row_bytes:
            self.finish()
        if self._piece is None:
            self._piece = self._pieces.take(self._deadline)
        return self._piece
