"""Files of prompts as streams of numbered rows.

A source yields one :class:`Line` for each row, numbered as an editor (or a table) numbers it, and knows the digest of
the bytes that it read. Here are lines of text, plain or compressed; tables are in :mod:`hsjournal.prompts.tables`, and
:mod:`hsjournal.prompts.sources` tells which is which.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from hsjournal import config
from hsjournal.dump.protocol import strict_json
from hsjournal.errors import PromptsError
from hsjournal.prompts.refusal import Refusal, RowRefusedError

MAX_LINE_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a source: its 1-based number, and its JSON text or its table's values, or why it has none."""

    number: int
    value: bytes | dict[str, Any] | RowRefusedError

    @property
    def nbytes(self) -> int:
        """About how much it is; of a table's row, by its longest texts and lists."""
        if isinstance(self.value, bytes):
            return len(self.value)
        return _weight(self.value) if isinstance(self.value, dict) else 0

    def parse(self) -> dict[str, Any]:
        """The row's JSON object.

        Raises:
            RowRefusedError: when it has none.
        """
        value = _parse(self.value) if isinstance(self.value, bytes) else self.value
        if isinstance(value, RowRefusedError):
            raise value
        return value


class Source(Protocol):
    """An input, to be iterated once."""

    name: str
    """Short and distinct among the sources of a run: the ``source`` of rows, and the stem of ids that lines lack."""
    nbytes: int
    """Size of the file when it was checked."""

    def __iter__(self) -> Iterator[Line]:
        """The rows that aren't blank, in order."""

    @property
    def bytes_read(self) -> int:
        """How far the file has been read."""

    def count(self) -> int:
        """How many rows there are; costs a pass over a file of lines."""

    def identity(self) -> config.Source:
        """Path, size and digest of what was read; whole once the iteration has ended."""


class JsonLines:
    r"""A JSON Lines file, plain or compressed, read as a stream in constant memory.

    Lines end at ``\n`` and nowhere else (U+2028 and its like may stand in any text); ``\r\n`` and a byte-order mark
    at the start are tolerated; blank lines count in the numbering but are no rows.

    Args:
        path: the file.
        name: see :class:`Source`.
        packing: ``gzip`` or ``zstd``, empty for none.
    """

    def __init__(self, path: Path, name: str, packing: str = "") -> None:
        self.name = name
        self.path = path
        self.nbytes = path.stat().st_size
        self._packing = packing
        self._raw: _Hashed | None = None

    def __iter__(self) -> Iterator[Line]:
        """The lines that aren't blank.

        Raises:
            PromptsError: when the file can't be read on.
        """
        number = 0
        try:
            with _Hashed(self.path) as self._raw, _unpacked(self._raw, self._packing) as stream:
                for number, data in _lines(stream):
                    if data:
                        yield Line(number, data)
                self._raw.read_rest()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _broken_off(self.path, number, error) from error
        except OSError as error:
            if error.errno is None:  # what the libraries make of a broken file
                raise _broken_off(self.path, number, error) from error
            raise unreadable(self.path, error) from error

    @property
    def bytes_read(self) -> int:
        """How far the file has been read."""
        return self._raw.count if self._raw else 0

    def count(self) -> int:
        """How many lines aren't blank, by reading them."""
        return sum(1 for _ in self)

    def identity(self) -> config.Source:
        """Path, size and digest of what was read."""
        if self._raw is None:
            raise RuntimeError(f"{self.path} has not been read yet")
        return config.Source(os.path.abspath(self.path), self._raw.count, self._raw.sha256.hexdigest())


def unreadable(path: Path, error: OSError) -> PromptsError:
    """``path`` can't be read."""
    return PromptsError(
        f"the prompts file {path} can't be read: {error.strerror or error}",
        remedy="Check the path and its permissions (--prompts).",
    )


def need_pyarrow(path: Path, kind: str) -> Any:
    """The pyarrow package, which only some inputs need.

    Raises:
        PromptsError: when it is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise PromptsError(
            f"{path} is {kind}, which needs the package pyarrow", remedy="Install it: pip install 'hsjournal[parquet]'."
        ) from None
    return pa


class _Hashed(io.RawIOBase):
    """A file that keeps the digest and number of the bytes read from it: what was read is what is recorded."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        self.sha256 = hashlib.sha256()
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self.sha256.update(memoryview(buffer)[:count])
        self.count += count
        return count

    def read_rest(self) -> None:
        """Take what a decompressor left unread into the digest too."""
        piece = bytearray(1 << 16)
        while self.readinto(piece):
            pass

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def _unpacked(raw: _Hashed, packing: str) -> Iterator[BinaryIO | io.BufferedReader]:
    with io.BufferedReader(raw, 1 << 20) as stream:
        if packing == "gzip":
            with gzip.GzipFile(fileobj=stream) as inner, io.BufferedReader(inner, 1 << 20) as lines:
                yield lines
        elif packing == "zstd":
            arrow = need_pyarrow(raw.path, "compressed with zstd")
            with arrow.CompressedInputStream(arrow.PythonFile(stream, "r"), "zstd") as inner:
                yield io.BufferedReader(cast("io.RawIOBase", _Readable(inner)), 1 << 20)
        else:
            yield stream


class _Readable(io.RawIOBase):
    """A pyarrow stream as Python's own kind, which can read lines."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._inner.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _lines(stream: BinaryIO | io.BufferedReader) -> Iterator[tuple[int, bytes | RowRefusedError]]:
    """Each line with its number, stripped of ASCII white space; too long a line is passed over without being kept."""
    number = 0
    while data := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(data) > MAX_LINE_BYTES and not data.endswith(b"\n"):
            while (more := stream.readline(1 << 20)) and not more.endswith(b"\n"):
                pass
            yield number, RowRefusedError(Refusal.LINE_TOO_LONG, f"more than {MAX_LINE_BYTES} bytes")
            continue
        yield number, (data.removeprefix(_BOM) if number == 1 else data).strip()


def _parse(data: bytes) -> dict[str, Any] | RowRefusedError:
    try:
        return strict_json(data)
    except UnicodeDecodeError as error:
        return RowRefusedError(Refusal.BROKEN_UNICODE, f"not UTF-8: {error.reason} at byte {error.start + 1}")
    except JSONDecodeError as error:
        return RowRefusedError(Refusal.BROKEN_JSON, f"{error.msg} at character {error.pos + 1}")
    except ValueError as error:
        return RowRefusedError(Refusal.BROKEN_JSON, str(error))


def _weight(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_weight, value.values()))
    if isinstance(value, list):
        return sum(map(_weight, value)) if value and isinstance(value[0], str | dict | list) else 8 * len(value)
    return 8


def _broken_off(path: Path, number: int, error: Exception) -> PromptsError:
    return PromptsError(
        f"the prompts file {path} can't be unpacked beyond line {number:,}: {error}",
        remedy="It is cut short or damaged; check it with gzip -t or zstd -t, and fetch it again.",
    )
