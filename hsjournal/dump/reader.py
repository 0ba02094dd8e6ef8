"""The client's view of the hand-over root: list it, open a dump, and trust nothing in it.

Everything is reached by descriptor, from the root's own downwards, without following links. A file is taken only
if it is a regular one, so that a FIFO can't block and a link can't lead elsewhere, and no name is ever taken
from a dump's content.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from hsjournal.dump.expect import Expectation, check_size, compare
from hsjournal.dump.protocol import (
    DONE,
    ERROR,
    MAX_ERROR_BYTES,
    MAX_META_BYTES,
    META,
    TMP_PREFIX,
    CaptureFailure,
    Meta,
    RequestId,
)
from hsjournal.errors import DumpRejectedError, Reject

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "Dump",
    "Entry",
    "Expectation",
    "list_root",
    "open_dump",
    "open_root",
    "parse_name",
    "read_failure",
]

DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_NAMES = 256
"""A dump has at most 67 files; a directory with more is not one, and is not listed to its end."""


@dataclass(frozen=True, slots=True)
class Dump:
    """A complete dump, open and checked but for the values of its rows; a context manager that closes it.

    ``fds`` are in the protocol's order: ``aux_0 …``, then ``final``.
    """

    meta: Meta
    dir_fd: int
    fds: tuple[int, ...]

    def close(self) -> None:
        """Close every descriptor; call once."""
        for fd in (*self.fds, self.dir_fd):
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in the hand-over root.

    ``dump`` and ``failure`` are published and complete by their look; ``tmp`` is a server's unpublished work;
    ``partial`` is a directory of ours without ``done`` or ``error``, such as a deletion that was cut short;
    ``foreign`` is anything else, and never touched.
    """

    name: str
    kind: Literal["dump", "failure", "partial", "tmp", "foreign"]
    rid: RequestId | None
    mtime: float


def open_root(path: Path) -> int:
    """A descriptor of the hand-over root.

    Raises:
        OSError: when it is missing, is no directory, or is a link.
    """
    return os.open(path, DIRECTORY_FLAGS)


def parse_name(name: str) -> tuple[RequestId | None, bool]:
    """The request id that a name in the root stands for (None when foreign), and whether it is a ``.tmp-`` name."""
    unpublished = name.startswith(TMP_PREFIX)
    return RequestId.parse(name.removeprefix(TMP_PREFIX)), unpublished


def list_root(root_fd: int, run: str | None = None) -> list[Entry]:
    """Everything in the root, by name; with ``run``, what belongs to another run is foreign."""
    entries = (_entry(root_fd, name, run) for name in sorted(os.listdir(root_fd)))
    return [entry for entry in entries if entry is not None]


def open_dump(root_fd: int, rid: RequestId, expect: Expectation | None) -> Dump:
    """Open ``ROOT/<rid>/`` and check all but the values of its rows; without ``expect``, only that it agrees with itself.

    Raises:
        DumpRejectedError: with the typed reason and, for people, the file or value and its likely cause.
    """
    opened: list[int] = []
    try:
        dir_fd = _open_directory(root_fd, str(rid))
        opened.append(dir_fd)
        names = _names(dir_fd)
        meta = _read_meta(dir_fd, names)
        if expect is not None:
            compare(meta, expect)
        _check_names(names, meta)
        for tensor in meta.tensors:
            fd, size = _open_file(dir_fd, tensor.file)
            opened.append(fd)
            check_size(tensor.file, size, tensor.nbytes, meta)
        return Dump(meta, dir_fd, tuple(opened[1:]))
    except BaseException:
        for fd in opened:
            os.close(fd)
        raise


def read_failure(root_fd: int, rid: RequestId) -> CaptureFailure | None:
    """The typed failure that the server published for ``rid``, or None when there is none.

    Raises:
        DumpRejectedError: when there is an ``error`` that is not one, or is another request's.
    """
    try:
        dir_fd = _open_directory(root_fd, str(rid))
    except DumpRejectedError as error:
        if error.reason is Reject.VANISHED:
            return None
        raise
    try:
        if ERROR not in _names(dir_fd):
            return None
        data = _read_small(dir_fd, ERROR, MAX_ERROR_BYTES)
        try:
            failure = CaptureFailure.from_json(data)
        except ValueError as error:
            raise DumpRejectedError(Reject.MALFORMED, f"{ERROR}: {error}") from None
    finally:
        os.close(dir_fd)
    if failure.rid != str(rid):
        raise DumpRejectedError(Reject.WRONG_IDENTITY, f"{ERROR} in {rid} speaks of {failure.rid!r}")
    return failure


def _entry(root_fd: int, name: str, run: str | None) -> Entry | None:
    rid, unpublished = parse_name(name)
    try:
        found = os.stat(name, dir_fd=root_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None  # gone since it was listed
    if rid is None or not stat.S_ISDIR(found.st_mode) or (run is not None and rid.run != run):
        return Entry(name, "foreign", None, found.st_mtime)
    if unpublished:
        return Entry(name, "tmp", rid, found.st_mtime)
    if _exists(root_fd, f"{name}/{DONE}"):
        return Entry(name, "dump", rid, found.st_mtime)
    return Entry(name, "failure" if _exists(root_fd, f"{name}/{ERROR}") else "partial", rid, found.st_mtime)


def _exists(root_fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=root_fd, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    return True


def _open_directory(root_fd: int, name: str) -> int:
    try:
        return os.open(name, DIRECTORY_FLAGS, dir_fd=root_fd)
    except FileNotFoundError:
        raise DumpRejectedError(Reject.VANISHED, f"{name} is not in the hand-over root") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise DumpRejectedError(Reject.UNSAFE, f"{name} is a link or a file, not a directory") from None
        raise


def _names(dir_fd: int) -> frozenset[str]:
    names: set[str] = set()
    try:
        with os.scandir(dir_fd) as entries:
            for entry in entries:
                names.add(entry.name)
                if len(names) > _MOST_NAMES:
                    raise DumpRejectedError(Reject.MALFORMED, f"the directory holds more than {_MOST_NAMES} names")
    except FileNotFoundError:  # removed while we hold it
        raise DumpRejectedError(Reject.VANISHED, "the directory was removed while it was being read") from None
    return frozenset(names)


def _open_file(dir_fd: int, name: str) -> tuple[int, int]:
    """A descriptor of a regular file directly in ``dir_fd``, and its size."""
    try:
        fd = os.open(name, FILE_FLAGS, dir_fd=dir_fd)
    except FileNotFoundError:
        raise DumpRejectedError(Reject.VANISHED, f"{name} went away while the dump was being opened") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):  # a link, a socket, a device without driver
            raise DumpRejectedError(Reject.UNSAFE, f"{name} is a link or a special file") from None
        raise
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise DumpRejectedError(Reject.UNSAFE, f"{name} is not a regular file")
    return fd, found.st_size


def _read_small(dir_fd: int, name: str, most: int) -> bytes:
    fd, size = _open_file(dir_fd, name)
    try:
        if size > most:
            raise DumpRejectedError(Reject.MALFORMED, f"{name} is {size:,} bytes long, more than {most:,}")
        data = bytearray()
        while piece := os.read(fd, most + 1 - len(data)):  # it may grow under us, but never past the bound
            data += piece
            if len(data) > most:
                raise DumpRejectedError(Reject.MALFORMED, f"{name} grew past {most:,} bytes while it was read")
        return bytes(data)
    finally:
        os.close(fd)


def _read_meta(dir_fd: int, names: frozenset[str]) -> Meta:
    for name in (DONE, META):
        if name not in names:
            hint = "; it holds a failed capture, not states" if ERROR in names else ""
            raise DumpRejectedError(Reject.MALFORMED, f"{name} is missing{hint}")
    _read_small(dir_fd, DONE, 0)
    try:
        return Meta.from_json(_read_small(dir_fd, META, MAX_META_BYTES))
    except ValueError as error:
        raise DumpRejectedError(Reject.MALFORMED, f"{META}: {error}") from None


def _check_names(names: frozenset[str], meta: Meta) -> None:
    files = {t.file for t in meta.tensors}
    wrong = sorted((files | {META, DONE}) ^ names)
    if not wrong:
        return
    word = "missing" if wrong[0] in files else "one too many"
    # Not "wrong layers", which ends the run: meta.json says the right ones, so it is this dump that is damaged.
    raise DumpRejectedError(
        Reject.MALFORMED, f"{wrong[0]!r} is {word}: {len(meta.capture_layers)} aux layers and a final state are due"
    )
