"""One dump while it is written, from its folder ``.tmp-<rid>`` to the rename that publishes it."""

from __future__ import annotations

import errno
import logging
import os
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from hsjournal import faults
from hsjournal.capture.patience import CaptureError, Patience
from hsjournal.capture.root import empty_folder, exists
from hsjournal.dump.protocol import (
    DONE,
    ERROR,
    ITEM_SIZE,
    META,
    TMP_PREFIX,
    CaptureFailure,
    FailureReason,
    Meta,
    RequestId,
    tensor_entries,
    token_ids_sha256,
)
from hsjournal.errors import HsjournalError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hsjournal.capture.writer import DumpWriter

log = logging.getLogger(__name__)

_END_WAIT_S = 5.0


class OpenDump:
    """One dump while it is written: any number of threads call :meth:`write_rows`, then one ends it."""

    def __init__(self, writer: DumpWriter, rid: RequestId, root_fd: int, folder: int) -> None:
        settings = writer.settings
        self.rid = rid
        self._writer = writer
        self._root_fd = root_fd
        self._folder = folder
        self._tmp_name = f"{TMP_PREFIX}{rid}"
        self._entries = tensor_entries(rid.tokens, settings.hidden_size, settings.dtype, len(settings.capture_layers))
        self._row_bytes = settings.hidden_size * ITEM_SIZE[settings.dtype]
        self._covered: list[list[tuple[int, int]]] = [[] for _ in self._entries]
        self._turn = threading.Condition()
        self._users = 0
        self._ended = False
        self._is_out = False
        """Published: from then on the folder is the client's, whoever ends this dump meanwhile (a server on its way out)."""

    def write_rows(self, tensor_index: int, row_offset: int, data: memoryview) -> None:
        """Write whole rows of a tensor (``aux_0`` … ``final``) at a row offset; blocks, so never in a forward pass.

        Raises:
            CaptureError: hand it to :meth:`fail`.
        """
        entry, octets = self._entries[tensor_index], data.cast("B")
        rows, rest = divmod(len(octets), self._row_bytes)
        if rest:
            raise CaptureError(FailureReason.INTERNAL, f"{len(octets)} bytes are no whole rows of {self._row_bytes}")
        if row_offset < 0 or row_offset + rows > self.rid.tokens:
            raise CaptureError(
                FailureReason.MISMATCH,
                f"rows {row_offset} to {row_offset + rows} of {entry.name}, where {self.rid.tokens} were promised",
            )
        call = self._writer.patience.call
        with self._in_use():
            if tensor_index:
                call(lambda: faults.point("capture.writing", self.rid.row))
            fd = call(lambda: self._open_file(entry.file, os.O_WRONLY | os.O_CREAT))
            try:
                done = 0
                while done < len(octets):
                    start = row_offset * self._row_bytes + done
                    done += call(lambda: os.pwrite(fd, octets[done:], start))  # noqa: B023 (called at once)
            finally:
                os.close(fd)
            with self._turn:
                self._covered[tensor_index].append((row_offset, row_offset + rows))

    def commit(self, token_ids: Sequence[int], chunks: Sequence[int] = (0,)) -> bool:
        """Publish the dump; False when one of this request id was there first, which is kept.

        Args:
            token_ids: the ids that were really run.
            chunks: token offset of each prefill chunk.

        Raises:
            CaptureError: hand it to :meth:`fail`.
        """
        if len(token_ids) != self.rid.tokens:
            detail = f"{len(token_ids)} tokens were run, {self.rid.tokens} were promised"
            raise CaptureError(FailureReason.MISMATCH, detail)
        for entry, covered in zip(self._entries, self._covered, strict=True):
            if (missing := _first_gap(covered, self.rid.tokens)) is not None:
                raise CaptureError(FailureReason.MISMATCH, f"row {missing} of {entry.name} was never written")
        meta = self._meta(token_ids, chunks).to_json()
        with self._in_use():
            self._write(META, meta, self._writer.patience)
            self._write(DONE, b"", self._writer.patience)
            if not self._writer.root.in_memory:
                self._writer.patience.call(self._sync)
            published = self._publish(self._writer.patience)
        if published:
            if self._finish():
                self._release(remove=False)
            faults.point("capture.published", self.rid.row)
        else:
            log.warning("%s was published before; the first dump is kept", self.rid)
            self.discard()
        return published

    def fail(self, reason: FailureReason, detail: str) -> bool:
        """Publish ``error`` instead of states; False when the root takes not even that."""
        settings = self._writer.settings
        if not self._finish():
            return False
        if self._is_out:
            self._release(remove=False)
            return True
        failure = CaptureFailure(str(self.rid), reason, detail, settings.boot_id).to_json()
        patience = Patience(settings.root, settings.room_wait_s)
        lost = False
        try:
            empty_folder(self._folder)  # frees the room that the error needs
            self._write(ERROR, failure, patience)
            published = self._publish(patience)
        except (CaptureError, OSError) as error:
            log.warning("%s failed (%s: %s), and that can't be published: %s", self.rid, reason.value, detail, error)
            published, lost = False, self._root_is_lost()
        self._release(remove=not published)
        if lost:
            return self._writer.publish_failure(self.rid, reason, detail)
        return published

    def discard(self) -> None:
        """Leave nothing behind; no matter if the dump has ended already."""
        if self._finish():
            self._release(remove=not self._is_out)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._turn:
            if self._ended:
                raise CaptureError(FailureReason.ABORTED, "this dump has ended")
            self._users += 1
        try:
            yield
        finally:
            with self._turn:
                self._users -= 1
                self._turn.notify_all()

    def _finish(self) -> bool:
        """Take the dump out of use; False when another thread did so before."""
        with self._turn:
            if self._ended:
                return False
            self._ended = True
            return self._turn.wait_for(lambda: self._users == 0, _END_WAIT_S) or self._abandon()

    def _abandon(self) -> bool:
        log.error("%s is left unfinished: a write to %s does not return", self.rid, self._writer.settings.root)
        self._writer.forget(self)
        return False

    def _release(self, *, remove: bool) -> None:
        try:
            if remove:
                with suppress(FileNotFoundError):
                    empty_folder(self._folder)
                    os.rmdir(self._tmp_name, dir_fd=self._root_fd)
        except OSError as error:
            log.warning("%s can't be removed: %s", self._tmp_name, error)
        finally:
            os.close(self._folder)
            self._writer.forget(self)

    def _open_file(self, name: str, flags: int) -> int:
        root = self._writer.root
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, root.file_mode, dir_fd=self._folder)
        if root.group_mode and flags & os.O_CREAT:
            os.fchmod(fd, root.file_mode)  # past the umask, which would shut the group out
        return fd

    def _write(self, name: str, content: bytes, patience: Patience) -> None:
        def write() -> None:
            fd = self._open_file(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                written = os.write(fd, content)
                if written != len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
            finally:
                os.close(fd)

        patience.call(write)

    def _sync(self) -> None:
        """Storage that outlives the machine's fall must not show a published dump with holes."""
        for name in os.listdir(self._folder):
            fd = self._open_file(name, os.O_RDONLY)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)
        os.fsync(self._folder)

    def _publish(self, patience: Patience) -> bool:
        """Rename into place; False when the name is taken."""

        def rename() -> bool:
            faults.point("capture.publishing", self.rid.row)
            if self._root_is_lost():
                raise CaptureError(FailureReason.INTERNAL, f"{self._writer.settings.root} was removed or replaced")
            if exists(self._root_fd, str(self.rid)):
                return False
            os.rename(self._tmp_name, str(self.rid), src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)
            self._is_out = True
            if not self._writer.root.in_memory:
                os.fsync(self._root_fd)
            return True

        return patience.call(rename)

    def _root_is_lost(self) -> bool:
        try:
            return self._writer.root.fd() != self._root_fd
        except HsjournalError:
            return True

    def _meta(self, token_ids: Sequence[int], chunks: Sequence[int]) -> Meta:
        settings = self._writer.settings
        return Meta(
            rid=str(self.rid),
            num_tokens=self.rid.tokens,
            hidden_size=settings.hidden_size,
            dtype=settings.dtype,
            capture_layers=settings.capture_layers,
            final_norm=settings.final_norm,
            token_ids_sha256=token_ids_sha256(token_ids),
            chunks=tuple(chunks),
            boot_id=settings.boot_id,
            engine=settings.engine,
            versions=settings.versions,
            tensors=self._entries,
        )


def _first_gap(covered: Sequence[tuple[int, int]], total: int) -> int | None:
    """The first row of ``range(total)`` that no interval covers, or None."""
    reached = 0
    for start, end in sorted(covered):
        if start > reached:
            break
        reached = max(reached, end)
    return reached if reached < total else None
