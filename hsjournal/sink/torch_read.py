"""What a torch zip file holds and where, read without torch and without executing its pickle.

The second opinion on :mod:`hsjournal.sink.torch_zip`: it shares no code with it, goes by the zip's directory as
every reader does, and understands what ``torch.save`` itself writes for a dictionary of tensors and plain values.
Nothing read is trusted.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hsjournal.sink.unpickle import Storage, understand

ReadAt = Callable[[int, int], bytes]
"""Offset and length; short at the end of the file."""

_TAIL = 22 + 0xFFFF
_MOST_DIRECTORY = 1 << 20
_MOST_PICKLE = 1 << 24
_DTYPES = {
    "torch.BFloat16Storage": ("bfloat16", 2),
    "torch.HalfStorage": ("float16", 2),
    "torch.FloatStorage": ("float32", 4),
    "torch.LongStorage": ("int64", 8),
    "torch.IntStorage": ("int32", 4),
    "torch.BoolStorage": ("bool", 1),
}


UNREADABLE = (
    ValueError, IndexError, KeyError, TypeError, AttributeError, struct.error, RecursionError, OverflowError, MemoryError,
)  # fmt: skip
"""What bytes that are no file of ours may bring about in a reader; a place past 2**63 overflows, a huge length has no memory."""


class FormatError(ValueError):
    """Not a whole torch zip file of tensors and plain values."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A contiguous tensor and the range of the file that its elements fill."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Member:
    offset: int
    nbytes: int


def read_torch_file(read_at: ReadAt, size: int) -> dict[str, Any]:
    """The dictionary in a file: tensors as :class:`StoredTensor`, everything else as it is.

    Raises:
        FormatError: naming what is wrong.
    """
    found = read_torch_object(read_at, size)
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise FormatError("it holds no dictionary by text")
    return found


def read_torch_object(read_at: ReadAt, size: int) -> Any:
    """Whatever is in a file: a dictionary, or a tensor alone.

    Raises:
        FormatError: naming what is wrong.
    """
    try:
        return _load(read_at, size)
    except FormatError:
        raise
    except UNREADABLE as error:
        raise FormatError(f"no readable torch file: {str(error) or type(error).__name__}") from None


def _load(read_at: ReadAt, size: int) -> Any:
    members = _directory(read_at, size)
    pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise FormatError("there is no data.pkl in the zip")
    place = members[pickles[0]]
    if place.nbytes > _MOST_PICKLE:
        raise FormatError(f"data.pkl is {place.nbytes:,} bytes long")
    root = pickles[0].removesuffix("data.pkl")

    def call(name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "collections.OrderedDict" and not arguments:
            return {}
        if name != "torch._utils._rebuild_tensor_v2":
            raise FormatError(f"data.pkl calls {name}")
        storage, first, shape, stride = arguments[:4]
        return _tensor(storage, first, shape, stride, members[f"{root}data/{storage.key}"])

    return understand(read_at(place.offset, place.nbytes), call)


def _directory(read_at: ReadAt, size: int) -> dict[str, _Member]:
    """The zip's members by name, with the place of their data."""
    tail_at = max(0, size - _TAIL)
    tail = read_at(tail_at, size - tail_at)
    end = tail.rfind(b"PK\x05\x06")
    if end < 0:
        raise FormatError("the end of the zip is missing: the file was cut short")
    count, length, start, comment = struct.unpack_from("<HIIH", tail, end + 10)
    if end + 22 + comment != len(tail):
        raise FormatError("something follows the end of the zip")
    if 0xFFFFFFFF in (start, length) or count == 0xFFFF:
        _, at, _ = struct.unpack_from("<IQI", tail, end - 16)
        record = read_at(at, 56)
        if record[:4] != b"PK\x06\x06":
            raise FormatError("the zip64 end record is missing")
        count, length, start = struct.unpack_from("<QQQ", record, 32)
    if length > _MOST_DIRECTORY:
        raise FormatError(f"the zip's directory is {length:,} bytes long")
    directory = read_at(start, length)
    members: dict[str, _Member] = {}
    at = 0
    for _ in range(count):
        if directory[at : at + 4] != b"PK\x01\x02":
            raise FormatError("the zip's directory is damaged")
        method = struct.unpack_from("<H", directory, at + 10)[0]
        packed, nbytes, name_len, extra_len, comment_len = struct.unpack_from("<IIHHH", directory, at + 20)
        local = struct.unpack_from("<I", directory, at + 42)[0]
        name = directory[at + 46 : at + 46 + name_len].decode("utf-8")
        extra = directory[at + 46 + name_len : at + 46 + name_len + extra_len]
        packed, nbytes, local = _wide(extra, (nbytes, packed, local))
        at += 46 + name_len + extra_len + comment_len
        if name in members or method != 0 or packed != nbytes:
            raise FormatError(f"{name!r} stands twice in the zip, or is compressed")
        members[name] = _member(read_at, name, local, nbytes, start)
    return members


def _wide(extra: bytes, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    """Packed size, size and local offset, each from the zip64 field where the narrow one is full."""
    at, wide = 0, b""
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, at)
        if tag == 1:
            wide = extra[at + 4 : at + 4 + length]
        at += 4 + length
    values = []
    at = 0
    for narrow in sizes:
        if narrow == 0xFFFFFFFF:
            values.append(struct.unpack_from("<Q", wide, at)[0])
            at += 8
        else:
            values.append(narrow)
    return values[1], values[0], values[2]


def _member(read_at: ReadAt, name: str, local: int, nbytes: int, limit: int) -> _Member:
    header = read_at(local, 30)
    if header[:4] != b"PK\x03\x04":
        raise FormatError(f"the local header of {name!r} is damaged")
    name_len, extra_len = struct.unpack_from("<HH", header, 26)
    offset = local + 30 + name_len + extra_len
    if read_at(local + 30, name_len) != name.encode() or offset + nbytes > limit:
        raise FormatError(f"the local header of {name!r} contradicts the directory")
    return _Member(offset, nbytes)


def _tensor(storage: Any, first: int, shape: tuple[int, ...], stride: tuple[int, ...], member: _Member) -> StoredTensor:
    if not isinstance(storage, Storage) or storage.kind not in _DTYPES:
        raise FormatError(f"a tensor is of an unknown kind: {storage!r}")
    dtype, item = _DTYPES[storage.kind]
    if not all(type(n) is int and n >= 0 for n in (first, *shape, *stride)) or member.nbytes != storage.count * item:
        raise FormatError(f"storage {storage.key!r} is {member.nbytes:,} bytes, not {storage.count:,} x {item}")
    count = math.prod(shape)
    contiguous = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    strides_fit = all(s == c or n <= 1 for n, s, c in zip(shape, stride, contiguous, strict=True))
    if first + count > storage.count or not strides_fit:
        raise FormatError("a tensor is a view that is not contiguous")
    return StoredTensor(dtype, tuple(shape), member.offset + first * item, count * item)
