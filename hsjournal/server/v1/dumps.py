"""What a v1 server leaves in its root, read without torch, and removed when it is safe elsewhere.

Nothing read is trusted: regular files directly inside, reached by descriptor, sizes and numbers bounded.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hsjournal.dump.protocol import (
    DONE,
    ITEM_SIZE,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_META_BYTES,
    MAX_TOKENS,
    META,
    strict_json,
    token_ids_sha256,
)
from hsjournal.dump.reader import DIRECTORY_FLAGS, FILE_FLAGS
from hsjournal.errors import DumpRejectedError, Reject
from hsjournal.sink.torch_read import FormatError, StoredTensor, read_torch_object

NAME = re.compile(r"req_(0|[1-9][0-9]{0,15})")
ENGINE = "v1"
_AUX = re.compile(r"aux_(0|[1-9][0-9]?)\.pt")
_FINAL = "final.pt"
_COUNT_KEYS = ("num_tokens", "seq_len", "num_input_tokens")
_ID_KEYS = ("input_ids", "token_ids")


@dataclass(frozen=True, slots=True)
class Found:
    """A complete directory, checked as far as it can be.

    Args:
        name: ``req_N``.
        inode: of the directory: with the name its identity, since a restarted server counts from 0 again.
        num_tokens: rows of every tensor.
        hidden_size: columns.
        dtype: of all.
        files: names in order, ``aux_0.pt …``, then ``final.pt``.
        offsets: where each file's rows begin.
        began: seconds since 1970: the oldest of its files.
        rid: that its meta.json names, if it names one.
        ids_sha256: digest over the token ids in its meta.json, if they are there.
    """

    name: str
    inode: int
    num_tokens: int
    hidden_size: int
    dtype: str
    files: tuple[str, ...]
    offsets: tuple[int, ...]
    began: float
    rid: str | None = None
    ids_sha256: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return len(self.files) * self.num_tokens * self.hidden_size * ITEM_SIZE[self.dtype]


def names(root_fd: int) -> dict[str, int]:
    """Every ``req_N`` directory, complete or not, with its inode. Links and files are none."""
    found = {}
    for name in os.listdir(root_fd):
        if NAME.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                entry = os.stat(name, dir_fd=root_fd, follow_symlinks=False)
                if stat.S_ISDIR(entry.st_mode):
                    found[name] = entry.st_ino
    return found


def is_complete(root_fd: int, name: str) -> bool:
    """Whether its server has written ``done``, which it does last."""
    try:
        os.stat(f"{name}/{DONE}", dir_fd=root_fd, follow_symlinks=False)
    except OSError:
        return False
    return True


def look(root_fd: int, name: str) -> Found:
    """Check a complete directory.

    Raises:
        DumpRejectedError: with the reason and, for people, which file or value it is.
    """
    try:
        dir_fd = os.open(name, DIRECTORY_FLAGS, dir_fd=root_fd)
    except FileNotFoundError:
        raise DumpRejectedError(Reject.VANISHED, f"{name} went away") from None
    except OSError as error:
        raise DumpRejectedError(Reject.UNSAFE, f"{name}: {error.strerror}") from None
    try:
        return _look(dir_fd, name)
    finally:
        os.close(dir_fd)


def _look(dir_fd: int, name: str) -> Found:
    inside = set(os.listdir(dir_fd))
    if DONE not in inside or META not in inside or _FINAL not in inside:
        missing = next(file for file in (DONE, META, _FINAL) if file not in inside)
        raise DumpRejectedError(Reject.MALFORMED, f"{missing} is missing")
    aux = sorted((file for file in inside if _AUX.fullmatch(file)), key=lambda file: int(_number(file)))
    files = (*(f"aux_{i}.pt" for i in range(len(aux))), _FINAL)
    if set(files) != inside - {DONE, META} or len(aux) > MAX_LAYERS:
        raise DumpRejectedError(Reject.MALFORMED, f"the files are {sorted(inside)[:8]}, not aux_0.pt … and final.pt")
    about = _meta(dir_fd)
    tensors, began = [], []
    for file in files:
        with opened(dir_fd, file) as (fd, size, mtime):
            tensors.append(_tensor(fd, size, file))
            began.append(mtime)
    first = tensors[0]
    if any((t.dtype, t.shape) != (first.dtype, first.shape) for t in tensors):
        raise DumpRejectedError(
            Reject.WRONG_SIZE, f"the tensors differ in shape or dtype: {[(t.dtype, t.shape) for t in tensors]}"
        )
    num_tokens, hidden = first.shape
    for key in _COUNT_KEYS:
        if about.get(key, num_tokens) != num_tokens:
            raise DumpRejectedError(
                Reject.WRONG_COUNT, f"{META} says {key} {about[key]!r}, the tensors have {num_tokens:,} rows"
            )
    return Found(
        name=name,
        inode=os.fstat(dir_fd).st_ino,
        num_tokens=num_tokens,
        hidden_size=hidden,
        dtype=first.dtype,
        files=files,
        offsets=tuple(t.offset for t in tensors),
        began=min(began),
        rid=about["rid"] if isinstance(about.get("rid"), str) else None,
        ids_sha256=_ids_digest(about, num_tokens),
    )


def _number(file: str) -> str:
    return file.removeprefix("aux_").removesuffix(".pt")


def _meta(dir_fd: int) -> dict[str, Any]:
    with opened(dir_fd, META) as (fd, size, _):
        if size > MAX_META_BYTES:
            raise DumpRejectedError(Reject.MALFORMED, f"{META} is {size:,} bytes long")
        try:
            return strict_json(os.pread(fd, size, 0))
        except ValueError as error:
            raise DumpRejectedError(Reject.MALFORMED, f"{META}: {error}") from None


def _ids_digest(about: dict[str, Any], num_tokens: int) -> str | None:
    for key in _ID_KEYS:
        ids = about.get(key)
        if isinstance(ids, list) and ids:
            if len(ids) != num_tokens or not all(type(i) is int and 0 <= i < 1 << 32 for i in ids):
                raise DumpRejectedError(
                    Reject.WRONG_IDENTITY, f"{META} names {len(ids)} {key}, the tensors have {num_tokens} rows"
                )
            return token_ids_sha256(ids)
    return None


@contextlib.contextmanager
def opened(dir_fd: int, file: str) -> Iterator[tuple[int, int, float]]:
    """Descriptor, size and time of change of a regular file directly inside.

    Raises:
        DumpRejectedError: when it is none, or has gone.
    """
    try:
        fd = os.open(file, FILE_FLAGS, dir_fd=dir_fd)
    except FileNotFoundError:
        raise DumpRejectedError(Reject.VANISHED, f"{file} went away") from None
    except OSError as error:
        raise DumpRejectedError(Reject.UNSAFE, f"{file}: {error.strerror}") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise DumpRejectedError(Reject.UNSAFE, f"{file} is not a regular file")
        yield fd, found.st_size, found.st_mtime
    finally:
        os.close(fd)


def _tensor(fd: int, size: int, file: str) -> StoredTensor:
    """The tensor alone in a file: ``[num_tokens, hidden_size]``, or the same with a leading 1."""
    try:
        found = read_torch_object(lambda offset, length: os.pread(fd, length, offset), size)
    except FormatError as error:
        raise DumpRejectedError(Reject.MALFORMED, f"{file}: {error}") from None
    if not isinstance(found, StoredTensor) or found.dtype not in ITEM_SIZE:
        raise DumpRejectedError(Reject.WRONG_DTYPE, f"{file} holds no tensor of states")
    shape = found.shape[1:] if len(found.shape) == 3 and found.shape[0] == 1 else found.shape
    if len(shape) != 2 or not 1 <= shape[0] <= MAX_TOKENS or not 1 <= shape[1] <= MAX_HIDDEN:
        raise DumpRejectedError(Reject.WRONG_SIZE, f"{file} has the shape {list(found.shape)}")
    return StoredTensor(found.dtype, tuple(shape), found.offset, found.nbytes)


def remove(root_fd: int, found: Found) -> int:
    """Remove a directory whose rows are safe elsewhere; the bytes freed. ``done`` goes first.

    Raises:
        OSError: when something in it can't be removed.
    """
    try:
        dir_fd = os.open(found.name, DIRECTORY_FLAGS, dir_fd=root_fd)
    except FileNotFoundError:
        return 0
    freed = 0
    try:
        if os.fstat(dir_fd).st_ino != found.inode:
            return 0
        for file in (DONE, *found.files, META):
            with contextlib.suppress(FileNotFoundError):
                freed += os.stat(file, dir_fd=dir_fd, follow_symlinks=False).st_size
                os.unlink(file, dir_fd=dir_fd)
    finally:
        os.close(dir_fd)
    os.rmdir(found.name, dir_fd=root_fd)
    return freed
