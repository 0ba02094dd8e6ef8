"""One run's output, in one folder or in several: write, verify, inspect, set aside."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from hsjournal.config import Manifest
from hsjournal.dump.reader import Dump
from hsjournal.events import Event
from hsjournal.sink.containers import FormatError, codec_of
from hsjournal.sink.folders import list_temporaries, open_folders, output_lock, set_file_aside
from hsjournal.sink.formats import layout_named
from hsjournal.sink.readback import Method, ReadBack
from hsjournal.sink.sample import OutputSample, Written
from hsjournal.sink.stream import Sink
from hsjournal.sink.verify import Damage, DamageError, verify_file
from hsjournal.sink.volumes import Volume, Volumes, is_its_own

_NO_FILE = (errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EISDIR)
"""What stands under the name is a link, a folder or a special file."""


class Output:
    """The output of a run; safe to use from several threads.

    Paths are as the journal has them: relative to the first folder, absolute in any other.

    Args:
        manifest: names the folders and the format.
        rejects_dir: outside the output, for files that were in the way or are damaged.
        fence: raises :class:`FencedError` when a newer worker owns the run.
        tell: keeps an event.
        at_once: files that one of several folders may have under way; None for as many as there are threads.
    """

    def __init__(
        self,
        manifest: Manifest,
        rejects_dir: Path,
        fence: Callable[[], None] = lambda: None,
        tell: Callable[[Event], object] = lambda _event: None,
        at_once: int | None = None,
    ) -> None:
        self.folder = Path(manifest.out_dir)
        self._volumes = Volumes([Path(folder) for folder in manifest.out_dirs], tell, at_once)
        self._layout = layout_named(manifest.format)
        self._rejects = rejects_dir
        self._fence = fence
        self._sinks = {v: Sink(v.folder, self._layout, rejects_dir, fence) for v in self._volumes.all}

    def close(self) -> None:
        """Give the buffers back."""
        for sink in self._sinks.values():
            sink.close()

    def told(self) -> list[dict[str, object]]:
        """See :meth:`hsjournal.sink.volumes.Volumes.told`."""
        return self._volumes.told()

    @property
    def folders(self) -> list[Path]:
        """All of them, the first one first."""
        return [volume.folder for volume in self._volumes.all]

    def folder_of(self, path: str) -> Path:
        """The folder that a file lies in, by its path in the journal."""
        return self._volumes.find(path)[0].folder

    def temporaries(self, run_id: str) -> list[str]:
        """Hidden temporaries of writers that were killed."""
        return [
            self._volumes.name(volume, path)
            for volume in self._volumes.all
            for path in list_temporaries(volume.folder, run_id)
        ]

    def path_of(self, sample: OutputSample) -> str:
        """Where the sample's file lies, relative to its folder."""
        return self._layout.path_of(sample.row, sample.sample_id)

    def write(
        self, dump: Dump, sample: OutputSample, progress: Callable[[str, int], None], *, is_first: bool = False
    ) -> Written:
        """See :meth:`hsjournal.sink.stream.Sink.write`; of several folders, the one is taken that will be done first.

        Args:
            dump: open.
            sample: what the file must hold.
            progress: told of every step that can block.
            is_first: whether nobody can have written a file of this sample before.
        """
        if len(self._sinks) == 1:
            written = self._sinks[self._volumes.first].write(dump, sample, progress)
            if self._volumes.first.is_due(time.monotonic()):
                self._volumes.first.look()  # it has just answered
            return written
        path = self.path_of(sample)
        nbytes = sum(tensor.nbytes for tensor in dump.meta.tensors)
        home = None if is_first and not self._volumes.is_bound(path) else self._volumes.home_of(path)
        tried: list[Volume] = []
        while True:
            picked = self._volumes.pick(nbytes, tried, home)
            if picked is None:
                raise OSError(errno.ENOSPC, "no output folder takes a file", str(self.folder))
            volume, job = picked
            try:
                with self._volumes.writing(volume, job):
                    written = self._sinks[volume].write(dump, sample, job.progress(progress))
            except OSError as error:
                if job.publishing:
                    self._volumes.bind(path, volume)
                if job.publishing or home is not None or not is_its_own(error):
                    raise
                self._volumes.set_aside(volume, error)
                tried.append(volume)
                continue
            self._volumes.unbind(path)
            return replace(written, path=self._volumes.name(volume, written.path))

    def verify(self, sample: OutputSample, written: Written, progress: Callable[[str, int], None]) -> Method:
        """See :func:`hsjournal.sink.verify.verify_file`."""
        volume, path = self._find(written.path)
        with self._volumes.reading(volume) as job:
            return verify_file(volume.folder, self._layout, sample, replace(written, path=path), job.progress(progress))

    def set_aside(self, path: str) -> Path | None:
        """Move a damaged file out of the output; None when it is gone already.

        Raises:
            FencedError: when a newer worker owns the run.
            OSError: as the storage answers.
        """
        folders = self._folders_of(path)
        if folders is None:
            return None
        try:
            with output_lock(folders[0], fcntl.LOCK_EX):
                self._fence()
                target = set_file_aside(folders[-1], path.rsplit("/", 1)[-1], path, self._rejects)
                os.fsync(folders[-1])
        except FileNotFoundError:
            return None
        finally:
            _close(folders)
        return target

    def clear(self, row: int, sample_id: str) -> list[tuple[str, Path]]:
        """Move whatever lies under a sample's final name out of the output, in every folder that answers.

        Returns:
            What was moved, as the journal would call it, and where to.

        Raises:
            FencedError: when a newer worker owns the run.
            OSError: as the storage answers.
        """
        path = self._layout.path_of(row, sample_id)
        names = [self._volumes.name(volume, path) for volume in self._volumes.holding(path)]
        return [(name, target) for name in names if (target := self.set_aside(name)) is not None]

    def free(self, path: str, nbytes: int) -> int | None:
        """Remove the file of a row that was released.

        Returns:
            Bytes freed: 0 when it is gone already; None for something else than a file of ``nbytes``, which is left.

        Raises:
            OSError: as the storage answers.
        """
        folders = self._folders_of(path)
        if folders is None:
            return 0
        name = path.rsplit("/", 1)[-1]
        try:
            with output_lock(folders[0], fcntl.LOCK_EX):
                found = os.stat(name, dir_fd=folders[-1], follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
                    return None
                os.unlink(name, dir_fd=folders[-1])
        except FileNotFoundError:
            return 0
        finally:
            _close(folders)
        return nbytes

    def misfit(self, path: str, nbytes: int) -> str | None:
        """What is wrong with the name and the size of a file that was written; None when both are right.

        Raises:
            OSError: as the storage answers.
        """
        try:
            folders = self._folders_of(path)
            if folders is None:
                return f"{path} and its folder are gone"
            try:
                found = os.stat(path.rsplit("/", 1)[-1], dir_fd=folders[-1], follow_symlinks=False)
            finally:
                _close(folders)
        except DamageError as error:
            return str(error)
        except FileNotFoundError:
            if not self.folder_of(path).is_dir():
                raise
            return f"{path} is gone"
        if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
            return f"{path} is {found.st_size:,} bytes, not {nbytes:,}"
        return None

    def inspect(self, sample: OutputSample) -> Written | None:
        """See :meth:`_inspect`, in every folder."""
        for volume in self._volumes.all:
            written = self._inspect(sample, volume)
            if written is not None:
                return written
        return None

    def _inspect(self, sample: OutputSample, volume: Volume) -> Written | None:
        """What lies under the sample's final name, if it is a whole file of exactly this sample and attempt.

        The file is held against the digests that it carries itself, and its ids, mask and identity against the sample.

        Raises:
            OSError: when the storage can't say; that is no answer about the file.
        """
        path = self._volumes.name(volume, self.path_of(sample))
        folders = self._folders_of(path)
        if folders is None:
            return None
        try:
            with ReadBack(folders[-1], path.rsplit("/", 1)[-1], (self.folder / path).parent) as file:
                said = _provenance(codec_of(self._layout.container).read(file.read_at, file.size))
                if said.get("rid") != str(sample.rid):
                    return None
                digest = xxhash.xxh3_128()
                for _, block in file.blocks():
                    digest.update(block)
                written = Written(path, file.size, digest.hexdigest(), ",".join(said["source_xxh3"]))
            self.verify(sample, written, lambda _phase, _nbytes: None)
        except (FileNotFoundError, FormatError, DamageError, KeyError, TypeError):
            return None
        except OSError as error:
            if error.errno in _NO_FILE:
                return None
            raise
        finally:
            _close(folders)
        return written

    def _folders_of(self, path: str) -> list[int] | None:
        """Descriptors of the folders on the way to ``path``; None when one below the output folder is missing."""
        volume, inside = self._find(path)
        os.stat(volume.folder)  # its own absence is the storage's matter, not the file's
        try:
            return open_folders(volume.folder, inside)
        except FileNotFoundError:
            return None

    def _find(self, path: str) -> tuple[Volume, str]:
        try:
            return self._volumes.find(path)
        except FileNotFoundError as error:
            raise DamageError(Damage.MISSING, f"{path}: {error.strerror}") from None


def _close(folders: list[int]) -> None:
    for folder in folders:
        os.close(folder)


def _provenance(found: dict[str, Any]) -> dict[str, Any]:
    return next((v for v in found.values() if isinstance(v, dict) and "sample_id" in v), {})
