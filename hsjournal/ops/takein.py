"""One foreign sample into the output folder: written anew, linked, or left where it is; its source is never changed."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import xxhash

from hsjournal import faults
from hsjournal.config import Manifest
from hsjournal.errors import DumpRejectedError
from hsjournal.ops.containers import open_source
from hsjournal.ops.foreign import Foreign, ForeignError, Refused, read_foreign
from hsjournal.ops.planes import as_dump, digests
from hsjournal.sink.folders import open_folders, output_lock
from hsjournal.sink.formats import layout_named
from hsjournal.sink.layouts import Layout, Tensor
from hsjournal.sink.output import Output
from hsjournal.sink.publish import Publication
from hsjournal.sink.sample import OutputSample, Written
from hsjournal.sink.torch_read import ReadAt, StoredTensor

_FICLONE = 0x40049409  # _IOW(0x94, 9, int) of linux/fs.h
_PIECE = 1 << 20
TORCH = "torch"
"""The container that files can be taken over in as they are."""


class How(StrEnum):
    """How a file came into the output."""

    CONVERTED = "converted"
    LINKED = "linked"
    CLONED = "cloned"
    IN_PLACE = "in_place"


class TakeIn:
    """Takes samples into one run's output; may be used from several threads.

    Args:
        manifest: of the run.
        output: of the run, fenced.
        rejects_dir: for a different file under a final name.
        fence: raises :class:`FencedError` when something newer owns the run.
        link: share the source's bytes where the file can stay as it is.
        in_place: the output folder is where the files lie already.
    """

    def __init__(
        self,
        manifest: Manifest,
        output: Output,
        rejects_dir: Path,
        fence: Callable[[], None],
        *,
        link: bool,
        in_place: bool,
    ) -> None:
        self._manifest, self._output, self._rejects, self._fence = manifest, output, rejects_dir, fence
        self._layout = layout_named(manifest.format)
        self._link, self._in_place = link, in_place

    def take(self, path: Path, sample: OutputSample) -> tuple[Written, How]:
        """Make ``path`` the output of ``sample``; when this returns, the file is durable under its final name.

        Raises:
            ForeignError: it can't be; nothing was changed.
            FencedError: something newer owns the run.
            OSError: as the output's storage answers.
        """
        found, as_it_is = self._look(path, sample)
        if as_it_is is None:
            return self._convert(found, sample), How.CONVERTED
        if self._in_place:
            self._stay(path, as_it_is.path)
            return as_it_is, How.IN_PLACE
        for share, how in ((self._clone, How.CLONED), (self._hard_link, How.LINKED)):
            with contextlib.suppress(OSError):  # another file system, or one that can't: the way that always works
                share(path, sample, as_it_is)
                return as_it_is, how
        return self._convert(found, sample), How.CONVERTED

    def _look(self, path: Path, sample: OutputSample) -> tuple[Foreign, Written | None]:
        """The sample, and the file as an output of this run if it can be one unchanged and should."""
        try:
            found = read_foreign(path)
            check(found, self._manifest)
            if found.input_ids.tolist() != list(sample.input_ids):
                raise ForeignError(Refused.DAMAGED, "its token ids have changed since it was looked at")
            if not self._link and not self._in_place:
                return found, None
            obstacle = as_format(found, self._layout, sample)
            if obstacle and self._in_place:
                raise ForeignError(Refused.WRONG_PLACE, f"{obstacle}, and it is not to be changed: use another --out")
            if obstacle:
                return found, None
            target, nbytes = self._output.path_of(sample), path.stat().st_size
            return found, Written(target, nbytes, _digest(path), _sources(found), as_found=True)
        except OSError as error:
            raise ForeignError(Refused.UNREADABLE, error.strerror or str(error)) from None

    def _convert(self, found: Foreign, sample: OutputSample) -> Written:
        source = _sources(found) if found.said else ""
        with as_dump(found, sample.rid, sample.capture_layers, sample.final_norm) as dump:
            try:
                written = self._output.write(dump, sample, lambda _phase, _nbytes: None)
            except DumpRejectedError as error:
                raise ForeignError(Refused.DAMAGED, error.detail) from None
        if source and written.source_xxh3 != source:
            raise ForeignError(Refused.DAMAGED, "it was changed while it was being read")
        return written

    def _stay(self, path: Path, target: str) -> None:
        """Who wrote it may never have made it durable."""
        self._fence()
        _make_durable(path)
        folders = open_folders(self._output.folder, target)
        try:
            for folder in reversed(folders):
                os.fsync(folder)
        finally:
            _close(folders)

    def _clone(self, path: Path, sample: OutputSample, as_it_is: Written) -> None:
        """A file of its own that shares the source's blocks until either is changed (XFS, Btrfs, bcachefs)."""
        with Publication(self._output.folder, as_it_is.path, sample.rid, self._rejects, self._fence) as publication:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.ioctl(publication.fd, _FICLONE, fd)
            finally:
                os.close(fd)
            os.fdatasync(publication.fd)
            publication.publish(as_it_is.nbytes, as_it_is.output_xxh3)

    def _hard_link(self, path: Path, sample: OutputSample, as_it_is: Written) -> None:
        """A second name for the source; there already when a kill came after it."""
        target = as_it_is.path
        _make_durable(path)
        folders = open_folders(self._output.folder, target, create=True)
        try:
            name = target.rsplit("/", 1)[-1]
            self._fence()
            faults.point("sink.synced", sample.row)
            with output_lock(folders[0], fcntl.LOCK_SH):
                try:
                    os.link(path, name, dst_dir_fd=folders[-1])
                except FileExistsError:
                    if _digest(self._output.folder / target) != as_it_is.output_xxh3:
                        raise
            faults.point("sink.linked", sample.row)
            for folder in reversed(folders):
                os.fsync(folder)
            faults.point("sink.published", sample.row)
        finally:
            _close(folders)


def check(found: Foreign, manifest: Manifest) -> None:
    """Hold a sample against what the run captures; its values and digests are looked at later.

    Raises:
        ForeignError: naming the first difference.
    """
    if found.num_aux != len(manifest.capture_layers):
        text = f"it holds {found.num_aux} aux layers, the run captures {len(manifest.capture_layers)}"
        raise ForeignError(Refused.WRONG_LAYERS, text)
    said = (found.said or {}).get("capture_layers")
    if said is not None and said != list(manifest.capture_layers):
        text = f"it says that its layers are {said}, the run's are {list(manifest.capture_layers)}"
        raise ForeignError(Refused.WRONG_LAYERS, text)
    if found.dtype != manifest.dtype:
        raise ForeignError(Refused.WRONG_DTYPE, f"its states are {found.dtype}, the run's {manifest.dtype}")
    if found.hidden_size != manifest.hidden_size:
        text = f"its states are {found.hidden_size:,} wide, the run's {manifest.hidden_size:,}"
        raise ForeignError(Refused.WRONG_HIDDEN, text)
    if found.final_norm not in (None, manifest.final_norm):
        text = f"its final state is {found.final_norm}-norm, the run's {manifest.final_norm}-norm"
        raise ForeignError(Refused.WRONG_NORM, text)


def as_format(found: Foreign, layout: Layout, sample: OutputSample) -> str:
    """Why the file, as it is, is no file of the format for this sample; empty when it is one."""
    if layout.container.value != TORCH or not found.path.is_file() or found.path.suffix == ".safetensors":
        return f"it is no file of format {layout.name}"
    if found.path.is_symlink():
        return "it is a link"
    with open_source(found.path) as read_at:
        for entry in layout.entries(sample):
            if not isinstance(entry, Tensor):
                if entry.value not in (None, found.keys.get(entry.name)):
                    return f"its {entry.name} is not this run's"
            elif not _holds(found, entry, found.keys.get(entry.name), read_at):
                return f"its {entry.name} is not what format {layout.name} and this run's prompts want"
    return ""


def _holds(found: Foreign, entry: Tensor, there: Any, read_at: ReadAt) -> bool:
    if not isinstance(there, StoredTensor):
        return False
    if (there.dtype, there.shape, there.nbytes) != (entry.dtype, entry.shape, entry.nbytes):
        return False
    if isinstance(entry.content, bytes):
        return read_at(there.offset, there.nbytes) == entry.content
    first = 0
    for stretch in found.stretches:
        if stretch.offset == there.offset:
            return entry.content == tuple(range(first, first + stretch.planes))
        first += stretch.planes
    return False


def _sources(found: Foreign) -> str:
    """The digests of its states, which must be those that it says itself, if it does.

    Raises:
        ForeignError: when they are not, or a value is not finite.
    """
    sums = digests(found)
    said = (found.said or {}).get("source_xxh3")
    if said is not None and said != sums.split(","):
        raise ForeignError(Refused.DAMAGED, "its states are not those that its own digests speak of")
    return sums


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open_source(path) as read_at:
        offset = 0
        while piece := read_at(offset, _PIECE):
            digest.update(piece)
            offset += len(piece)
    return digest.hexdigest()


def _make_durable(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _close(folders: list[int]) -> None:
    for folder in folders:
        os.close(folder)
