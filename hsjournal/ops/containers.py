"""The containers that other tools keep tensors in, read by position: what is in them and where, not the values."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hsjournal.sink.safetensors_read import read_safetensors_file
from hsjournal.sink.torch_read import FormatError, ReadAt, read_torch_object


@contextlib.contextmanager
def open_source(path: Path) -> Iterator[ReadAt]:
    """Read a regular file by offset and length; reads are short at its end.

    Raises:
        OSError: as the storage answers; EINVAL for what is no regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))

        def read_at(offset: int, nbytes: int) -> bytes:
            pieces = []
            while nbytes > 0 and (piece := os.pread(fd, min(nbytes, 1 << 30), offset)):
                pieces.append(piece)
                offset += len(piece)
                nbytes -= len(piece)
            return b"".join(pieces) if len(pieces) != 1 else pieces[0]

        yield read_at
    finally:
        os.close(fd)


def read_container(path: Path) -> Any:
    """What a file of torch or safetensors holds, tensors as :class:`hsjournal.sink.torch_read.StoredTensor`.

    Raises:
        FormatError: naming what is wrong.
        OSError: as the storage answers.
    """
    size = path.stat().st_size
    with open_source(path) as read_at:
        head = read_at(0, 10)
        if head[:2] == b"\x1f\x8b":
            raise FormatError("it is compressed; unpack it first")
        if head[:2] == b"PK":
            return read_torch_object(read_at, size)
        if path.suffix == ".safetensors" and len(head) == 10 and head[8:9] == b"{":
            return read_safetensors_file(read_at, size)
    raise FormatError("it is neither a zip of torch.save nor a safetensors file")
