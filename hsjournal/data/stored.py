"""One output file as tensors that are mapped, not read."""

from __future__ import annotations

import math
import mmap
import os
import stat
from pathlib import Path
from typing import Any

import torch
import xxhash

from hsjournal.sink.containers import FormatError, StoredTensor, codec_of
from hsjournal.sink.layouts import Content, Layout
from hsjournal.sink.verify import Damage, DamageError

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int64": torch.int64,
}


class StoredFile:
    """A mapped file; its tensors keep the mapping alive. They may be written to, which changes no byte of the file.

    Args:
        path: of the file.
        layout: of its format.
        nbytes: its size by the journal.

    Raises:
        FileNotFoundError: when it is gone.
        DamageError: when it is not what the journal says, or no file of the format.
        OSError: as the storage answers.
    """

    def __init__(self, path: Path, layout: Layout, nbytes: int) -> None:
        self._path, self._layout = path, layout
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
                raise DamageError(Damage.WRONG_SIZE, f"{path} is {found.st_size:,} bytes, not {nbytes:,}")
            self._map = mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
        try:
            self._values = codec_of(layout.container).read(self._read_at, nbytes)
        except FormatError as error:
            raise DamageError(Damage.WRONG_TENSOR, f"{path}: {error}") from None

    def check(self, xxh3_128: str) -> None:
        """Read the whole file and hold it against the digest in the journal.

        Raises:
            DamageError: when it is another one.
        """
        with memoryview(self._map) as memory:
            if xxhash.xxh3_128_hexdigest(memory) != xxh3_128:
                raise DamageError(Damage.WRONG_DIGEST, f"{self._path} is not as it was written")

    def provenance(self) -> dict[str, Any]:
        """What the file says of itself; empty when another tool wrote it."""
        return next((v for v in self._values.values() if isinstance(v, dict) and "sample_id" in v), {})

    def values(self) -> dict[Content, Any]:
        """Its keys by what they hold: tensors in their stored shapes, text as it is.

        Raises:
            DamageError: when a key is missing or of another kind.
        """
        found: dict[Content, Any] = {}
        for key in self._layout.keys:
            value = self._values.get(key.name)
            if value is None:
                if key.content is Content.PROVENANCE:
                    continue
                raise DamageError(Damage.WRONG_TENSOR, f"{self._path} has no {key.name}")
            found[key.content] = self._tensor(value) if isinstance(value, StoredTensor) else value
        return found

    def _tensor(self, stored: StoredTensor) -> torch.Tensor:
        if stored.dtype not in _DTYPES:
            raise DamageError(Damage.WRONG_TENSOR, f"{self._path} holds a tensor of {stored.dtype}")
        dtype, count = _DTYPES[stored.dtype], math.prod(stored.shape)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=stored.offset).view(stored.shape)

    def _read_at(self, offset: int, nbytes: int) -> bytes:
        return self._map[offset : offset + max(0, nbytes)]
