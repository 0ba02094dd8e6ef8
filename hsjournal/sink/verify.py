"""Proof that a published file is on its storage, whole, and holds this sample's states in the trainer's format.

Two digests are recomputed from the bytes read back: the whole file's, and each tensor's rows as the dump had
them, found by an independent reading of the container and taken apart through the layout; so neither a damaged
storage nor a wrong interleave can bless itself.
"""

from __future__ import annotations

import errno
import os
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from hsjournal import faults
from hsjournal.errors import HsjournalError
from hsjournal.sink.containers import FormatError, StoredTensor, codec_of
from hsjournal.sink.folders import open_folders
from hsjournal.sink.gather import COPY_BELOW, TILE_BYTES
from hsjournal.sink.layouts import Tensor
from hsjournal.sink.readback import Method, ReadBack

if TYPE_CHECKING:
    from pathlib import Path

    from hsjournal.sink.layouts import Layout
    from hsjournal.sink.sample import OutputSample, Progress, Written

__all__ = ["Damage", "DamageError", "Method", "verify_file"]


class Damage(StrEnum):
    """What is wrong with an output file. The value is stored in the journal and shown to the user."""

    MISSING = "missing"
    UNREADABLE = "unreadable"  # a link or special file, or the storage answers with an I/O error
    WRONG_SIZE = "wrong_size"  # cut short, or something was appended
    WRONG_CONTENT = "wrong_content"  # another sample's file, or another attempt's
    WRONG_TENSOR = "wrong_tensor"  # the file is as it was written, but not what the format and the dump make
    WRONG_DIGEST = "wrong_digest"  # other bytes than were written


class DamageError(HsjournalError):
    """An output file is damaged.

    Args:
        kind: what is wrong, typed.
        detail: which file, tensor or value, for people.
    """

    def __init__(self, kind: Damage, detail: str) -> None:
        super().__init__(f"{kind.value}: {detail}")
        self.kind = kind
        self.detail = detail


def verify_file(out_dir: Path, layout: Layout, sample: OutputSample, written: Written, progress: Progress) -> Method:
    """Read a published file back and hold it against the sample and the digests taken when it was written.

    Args:
        out_dir: the output folder.
        layout: the format.
        sample: what the file must hold.
        written: what the journal knows of the file.
        progress: called with ``reading`` and the bytes read, before each step that can block.

    Returns:
        How the bytes were read.

    Raises:
        DamageError: the file is not what it must be.
        OSError: the storage can't say: the output folder is gone, permissions, a server away.
    """
    progress("reading", 0)
    faults.point("verify.reading", sample.row)
    folders = _open(out_dir, written.path)
    try:
        with _read_back(folders[-1], written.path, (out_dir / written.path).parent) as file:
            try:
                _check(file, layout, sample, written, progress)
            except OSError as error:
                raise _unreadable(written.path, error) from error
            method = file.method
    finally:
        for folder in folders:
            os.close(folder)
    faults.point("verify.done", sample.row)
    return method


def _open(out_dir: Path, path: str) -> list[int]:
    out = open_folders(out_dir, "")  # its absence is no damage of one file
    try:
        return open_folders(out_dir, path)
    except FileNotFoundError:
        raise DamageError(Damage.MISSING, f"{path} and its folder are gone") from None
    finally:
        for folder in out:
            os.close(folder)


def _read_back(folder: int, path: str, place: Path) -> ReadBack:
    try:
        return ReadBack(folder, path.rsplit("/", 1)[-1], place)
    except FileNotFoundError:
        raise DamageError(Damage.MISSING, f"{path} is gone") from None
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> Exception:
    """Damage of this file, or the storage's own trouble, which is passed on."""
    if error.errno in (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EILSEQ):
        return DamageError(Damage.UNREADABLE, f"{path}: the storage answers {error.strerror}")
    if error.errno in (errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EISDIR):
        return DamageError(Damage.UNREADABLE, f"{path} is a link or no regular file")
    return error


def _check(file: ReadBack, layout: Layout, sample: OutputSample, written: Written, progress: Progress) -> None:
    path = written.path
    found: dict[str, Any] = {}
    broken: FormatError | None = None
    try:
        found = codec_of(layout.container).read(file.read_at, file.size)
    except FormatError as error:
        broken = error
    other = "" if written.as_found else _other_identity(found, sample, written)
    if other:
        raise DamageError(Damage.WRONG_CONTENT, f"{path} is another sample's file: {other}")
    if file.size != written.nbytes:
        text = f"{path} is {file.size:,} bytes, not {written.nbytes:,}"
        raise DamageError(
            Damage.WRONG_SIZE, f"{text}: {'cut short' if file.size < written.nbytes else 'something was appended'}"
        )

    parts = [] if broken else _parts(found, layout, sample, written)
    digest = xxhash.xxh3_128()
    for offset, block in file.blocks():
        progress("reading", offset)
        for at in range(0, len(block), TILE_BYTES):  # all that looks at a byte does so while it is in the cache
            with block[at : at + TILE_BYTES] as tile:
                digest.update(tile)
                for part in parts:
                    part.feed(offset + at, tile)
    wrong = [part.name for part in parts if not part.holds(written.source_xxh3.split(","))]
    if written.as_found and parts and len(wrong) == len(parts):
        raise DamageError(Damage.WRONG_CONTENT, f"{path} is another sample's file: all of {', '.join(wrong)} differ")
    if digest.hexdigest() != written.output_xxh3:
        where = f"in {', '.join(wrong)}" if wrong else str(broken) if broken else "outside the tensors"
        raise DamageError(Damage.WRONG_DIGEST, f"{path} is not as it was written: {where}")
    if broken:
        raise DamageError(Damage.WRONG_TENSOR, f"{path}: {broken}")
    if wrong or not parts:
        raise DamageError(
            Damage.WRONG_TENSOR, f"{path}: {', '.join(wrong) or 'its keys'} are not what the dump and the format make"
        )


def _other_identity(found: dict[str, Any], sample: OutputSample, written: Written) -> str:
    """How the file's own provenance says that it is another sample's, or another attempt's; empty when it doesn't.

    Two different values are asked for: a single one may be a flipped bit.
    """
    due = sample.provenance(written.source_xxh3)
    said = next((v for v in found.values() if isinstance(v, dict) and "sample_id" in v), due)
    keys = [key for key in ("sample_id", "row", "rid", "run_id", "source_xxh3") if said.get(key) != due[key]]
    return ", ".join(f"{key} {said.get(key)!r} instead of {due[key]!r}" for key in keys[:2]) if len(keys) > 1 else ""


def _parts(found: dict[str, Any], layout: Layout, sample: OutputSample, written: Written) -> list[_Part]:
    """Who checks which range of the file; nothing when keys, shapes, types or provenance are not the format's."""
    parts: list[_Part] = []
    entries = layout.entries(sample)
    if written.as_found:
        entries = tuple(e for e in entries if isinstance(e, Tensor) or e.value is not None)
        if not {e.name for e in entries} <= found.keys():
            return []
    elif list(found) != [e.name for e in entries]:
        return []
    for entry in entries:
        there = found[entry.name]
        if isinstance(entry, Tensor):
            if not isinstance(there, StoredTensor) or (there.dtype, there.shape, there.nbytes) != (
                entry.dtype,
                entry.shape,
                entry.nbytes,
            ):
                return []
            parts.append(_Part(entry, there.offset, sample.row_bytes))
        elif there != (sample.provenance(written.source_xxh3) if entry.value is None else entry.value):
            return []
    return parts


class _Part:
    """Checks one tensor's range of the file as it passes by."""

    def __init__(self, tensor: Tensor, start: int, row_bytes: int) -> None:
        self.name = tensor.name
        self._start, self._end = start, start + tensor.nbytes
        self._content = tensor.content
        self._row_bytes = row_bytes
        self._seen = 0
        self._equal = True
        self._digests = [xxhash.xxh3_128() for _ in tensor.content] if isinstance(tensor.content, tuple) else []

    def feed(self, offset: int, block: memoryview) -> None:
        """Take what a block holds of the range."""
        low, high = max(self._start, offset), min(self._end, offset + len(block))
        if low >= high:
            return
        with block[low - offset : high - offset] as view:
            if isinstance(self._content, bytes):
                self._equal &= view == memoryview(self._content)[low - self._start : high - self._start]
            else:
                self._take_apart(view, low - self._start)
        self._seen += high - low

    def holds(self, source_xxh3: list[str]) -> bool:
        """Whether the range was there and is what it must be."""
        if self._seen != self._end - self._start or not self._equal:
            return False
        sources = self._content if isinstance(self._content, tuple) else ()
        return all(d.hexdigest() == source_xxh3[s] for d, s in zip(self._digests, sources, strict=True))

    def _whole_rows(self, rows: memoryview, tokens: int, count: int, row: int) -> None:
        """Give the rows of whole tokens to the digests of their tensors."""
        if row < COPY_BELOW:
            table = np.frombuffer(rows, dtype=np.uint8).reshape(tokens, count, row)
            for index, digest in enumerate(self._digests):
                digest.update(np.ascontiguousarray(table[:, index]).data)
            return
        for index, digest in enumerate(self._digests):
            update = digest.update
            for at in range(index * row, len(rows), count * row):
                update(rows[at : at + row])

    def _take_apart(self, view: memoryview, at: int) -> None:
        """Give each row to its tensor's digest; ``at`` is where in the range the view begins."""
        count, row = len(self._digests), self._row_bytes
        if count == 1:
            self._digests[0].update(view)
            return
        wide = row * count
        offset = 0
        while offset < len(view):
            source, inside = divmod((at + offset) % wide, row)
            whole = (len(view) - offset) // wide
            if source == 0 and inside == 0 and whole:
                length = whole * wide
                with view[offset : offset + length] as rows:
                    self._whole_rows(rows, whole, count, row)
            else:  # one that straddles two tiles
                length = min(row - inside, len(view) - offset)
                with view[offset : offset + length] as piece:
                    self._digests[source].update(piece)
            offset += length
