"""The file that ``torch.save`` writes for a dictionary of tensors, composed piece by piece without torch.

Equal to it in meaning, not in bytes: ``torch.load`` (with and without mmap, ``weights_only=True``), SpecForge's
reader and any zip tool read it. Where it differs:

- The storages come first and ``data.pkl`` after them, since the digests that the pickle holds are known only then.
  Readers go by the zip's directory. For the same reason there is no ``.format_version``: by it, torch could be
  told to compute the storages' places from the order that it writes itself.
- The folder inside the zip has a fixed name, so that a file's bytes don't depend on its own name.

Storages are stored uncompressed and 64-byte aligned; CRC-32 and sizes follow the data in data descriptors. Rules
of the zip format: APPNOTE.TXT 6.3 of PKWARE; of the rest: ``torch/serialization.py``.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hsjournal.sink.crc import crc32
from hsjournal.sink.layouts import Tensor, Value
from hsjournal.sink.pieces import Rows

ALIGN = 64
ZIP64_FROM = 0xFFFFFFFF
"""Sizes and offsets from here on need zip64."""
_FULL = 0xFFFFFFFF
"""In a narrow field: the zip64 field has the value."""
_ROOT = "archive"
_FLAGS = 0x0808  # sizes and CRC-32 follow the data; names are UTF-8
_DATE = 0x0021  # 1980-01-01, the first day of zip's calendar
_STORAGE = {
    "bfloat16": "BFloat16Storage",
    "float16": "HalfStorage",
    "float32": "FloatStorage",
    "int64": "LongStorage",
    "bool": "BoolStorage",
}
_ITEM = {"bfloat16": 2, "float16": 2, "float32": 4, "int64": 8, "bool": 1}


def compose(entries: Sequence[Tensor | Value], provenance: Callable[[], dict[str, Any]]) -> Iterator[bytes | Rows]:
    """The file's pieces, in order.

    Args:
        entries: the keys.
        provenance: called after the last :class:`Rows` piece.
    """
    archive = _Zip()
    yield archive.member("byteorder", b"little")
    for index, tensor in enumerate(e for e in entries if isinstance(e, Tensor)):
        if isinstance(tensor.content, bytes):
            yield archive.member(f"data/{index}", tensor.content)
            continue
        yield archive.begin(f"data/{index}", tensor.nbytes)
        rows = Rows(tensor.content, tensor.nbytes)
        yield rows
        yield archive.end(rows.crc, rows.nbytes)
    pickled = pickle(entries, provenance)
    yield archive.member("data.pkl", pickled)
    yield archive.member("version", b"3\n")
    # torch makes this from the members' names and CRCs; it only has to tell contents apart
    identity = int(hashlib.sha256(pickled + archive.directory()).hexdigest(), 16) % 10**40
    yield archive.member(".data/serialization_id", f"{identity:040d}".encode())
    yield archive.finish()


def pickle(entries: Sequence[Tensor | Value], provenance: Callable[[], dict[str, Any]]) -> bytes:
    """``data.pkl``: protocol 2, with only what ``weights_only=True`` accepts."""
    parts = [b"\x80\x02}("]
    index = 0
    for entry in entries:
        parts.append(_plain(entry.name))
        if isinstance(entry, Tensor):
            parts.append(_tensor(entry, str(index)))
            index += 1
        else:
            parts.append(_plain(provenance() if entry.value is None else entry.value))
    return b"".join((*parts, b"u."))


def _tensor(tensor: Tensor, key: str) -> bytes:
    """A call of ``torch._utils._rebuild_tensor_v2`` on a storage named by a persistent id."""
    stride = [math.prod(tensor.shape[i + 1 :]) for i in range(len(tensor.shape))]
    storage = f"ctorch\n{_STORAGE[tensor.dtype]}\n".encode()
    persistent = (
        b"("
        + _plain("storage")
        + storage
        + _plain(key)
        + _plain("cpu")
        + _plain(tensor.nbytes // _ITEM[tensor.dtype])
        + b"tQ"
    )
    sizes, strides = (b"(" + b"".join(map(_plain, numbers)) + b"t" for numbers in (tensor.shape, stride))
    no_hooks = b"ccollections\nOrderedDict\n)R"
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + persistent + _plain(0) + sizes + strides + b"\x89" + no_hooks + b"tR"
    )


def _plain(value: Any) -> bytes:
    """A value of plain type."""
    match value:
        case bool():
            return b"\x88" if value else b"\x89"
        case int() if -(1 << 31) <= value < 1 << 31:
            return b"J" + struct.pack("<i", value)
        case int():
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(data)]) + data
        case str():
            text = value.encode("utf-8", "surrogatepass")
            return b"X" + struct.pack("<I", len(text)) + text
        case list():
            return b"](" + b"".join(map(_plain, value)) + b"e"
        case dict():
            return b"}(" + b"".join(_plain(k) + _plain(v) for k, v in value.items()) + b"u"
    raise TypeError(f"not plain: {type(value).__name__}")


class _Zip:
    """Keeps the offsets and the directory of a zip that is written front to back."""

    def __init__(self) -> None:
        self._offset = 0
        self._open: tuple[bytes, int, bool] | None = None
        self._directory: list[bytes] = []

    def directory(self) -> bytes:
        return b"".join(self._directory)

    def member(self, name: str, content: bytes) -> bytes:
        """A whole member."""
        return self.begin(name, len(content)) + content + self.end(crc32(content), len(content))

    def begin(self, name: str, nbytes: int) -> bytes:
        """The local header of a member, padded so that its data begins aligned."""
        path = f"{_ROOT}/{name}".encode()
        large = nbytes >= ZIP64_FROM
        # zeros, and in zip64 the mark: the sizes follow the data
        extra = struct.pack("<HHQQ", 1, 16, 0, 0) if large else b""
        padding = -(self._offset + 30 + len(path) + len(extra) + 4) % ALIGN
        extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
        size = _FULL if large else 0
        header = struct.pack(
            "<IHHHHHIIIHH", 0x04034B50, 45 if large else 20, _FLAGS, 0, 0, _DATE, 0, size, size, len(path), len(extra)
        )
        self._open = (path, self._offset, large)
        self._offset += len(header) + len(path) + len(extra)
        return header + path + extra

    def end(self, crc: int, nbytes: int) -> bytes:
        """The data descriptor that closes the member."""
        assert self._open is not None
        path, start, large = self._open
        self._open = None
        descriptor = struct.pack("<IIQQ" if large else "<IIII", 0x08074B50, crc, nbytes, nbytes)
        self._offset += nbytes + len(descriptor)
        extra = b""
        size, offset = nbytes, start
        if nbytes >= ZIP64_FROM:
            extra += struct.pack("<QQ", nbytes, nbytes)
            size = _FULL
        if start >= ZIP64_FROM:
            extra += struct.pack("<Q", start)
            offset = _FULL
        if extra:
            extra = struct.pack("<HH", 1, len(extra)) + extra
        version = 45 if extra or large else 20
        fields = (
            0x02014B50,
            version,
            version,
            _FLAGS,
            0,
            0,
            _DATE,
            crc,
            size,
            size,
            len(path),
            len(extra),
            0,
            0,
            0,
            0,
            offset,
        )
        self._directory.append(struct.pack("<IHHHHHHIIIHHHHHII", *fields) + path + extra)
        return descriptor

    def finish(self) -> bytes:
        """The directory and what follows it."""
        directory, count = self.directory(), len(self._directory)
        size, start = len(directory), self._offset
        tail, narrow = b"", start
        if start >= ZIP64_FROM:
            narrow = _FULL
            tail = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, size, start)
            tail += struct.pack("<IIQI", 0x07064B50, 0, start + size, 1)
        tail += struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, size, narrow, 0)
        return directory + tail
