"""Writes dumps by hand-over protocol v2, for the embedded engine and for a plugin inside stock SGLang alike.

Nothing here may cost the server its life: a shortage of room is waited for, bounded, and every failure ends as a
:class:`CaptureError` that the caller hands to :meth:`OpenDump.fail`, which publishes ``error``. Standard library only.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hsjournal.capture.opendump import OpenDump
from hsjournal.capture.patience import CaptureError, Patience
from hsjournal.capture.root import HandoverRoot, exists, remove_abandoned
from hsjournal.dump.protocol import TMP_PREFIX, FailureReason, RequestId
from hsjournal.errors import HsjournalError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["CaptureError", "CaptureSettings", "DumpWriter", "DuplicateDumpError", "OpenDump"]

log = logging.getLogger(__name__)


class DuplicateDumpError(HsjournalError):
    """The root holds a dump of this request id already, or one is being written: the first one is kept."""


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """What all dumps of one life of a server have in common.

    Args:
        root: the hand-over root.
        capture_layers: 0-based, ascending; ``aux_i`` is the output of layer ``capture_layers[i]``.
        hidden_size: columns of every tensor.
        dtype: a key of :data:`hsjournal.dump.protocol.ITEM_SIZE`.
        final_norm: ``post`` or ``pre``.
        boot_id: of this life of the server, the same in all its processes.
        engine: ``embedded`` or ``sglang``.
        versions: of the engine and its libraries, by name.
        group_mode: dumps may be read and deleted by the root's group.
        room_wait_s: how long the root may stay full before a dump fails with ``no_room``.
    """

    root: Path
    capture_layers: tuple[int, ...]
    hidden_size: int
    dtype: str
    final_norm: str
    boot_id: str
    engine: str
    versions: Mapping[str, str] = field(default_factory=dict)
    group_mode: bool = False
    room_wait_s: float = 3.0


class DumpWriter:
    """Writes dumps into the hand-over root; thread-safe.

    Making one removes the unfinished folders of writers that are gone.

    Raises:
        UsageError: when the root can't be used.
    """

    def __init__(self, settings: CaptureSettings) -> None:
        self.settings = settings
        self.root = HandoverRoot(settings.root, group_mode=settings.group_mode)
        self.patience = Patience(settings.root, settings.room_wait_s)
        self._open: set[OpenDump] = set()
        self._lock = threading.Lock()
        self._closed = False
        for name in self.root.sweep():
            log.info("removed %s, left unfinished by a server that is gone", name)

    def begin(self, rid: RequestId) -> OpenDump:
        """Start the dump of ``rid``, ``rid.tokens`` rows a tensor; end it by commit, fail or discard.

        Raises:
            DuplicateDumpError: when there is one already.
            CaptureError: when the folder can't be made.
        """
        if rid.tokens < 1:
            raise CaptureError(FailureReason.MISMATCH, "a request of no tokens has no states")
        return self._begin(rid, self.patience)

    def publish_failure(self, rid: RequestId, reason: FailureReason, detail: str) -> bool:
        """Publish ``error`` for a request that has no open dump; False when the root takes not even that."""
        try:
            dump = self._begin(rid, Patience(self.settings.root, self.settings.room_wait_s))
        except (CaptureError, DuplicateDumpError) as error:
            log.warning("%s failed (%s: %s), and that can't be published: %s", rid, reason.value, detail, error)
            return False
        return dump.fail(reason, detail)

    def close(self) -> None:
        """Discard every open dump and refuse new ones."""
        with self._lock:
            self._closed = True
            left = list(self._open)
        for dump in left:
            dump.discard()

    def _begin(self, rid: RequestId, patience: Patience) -> OpenDump:
        try:
            root_fd = self.root.fd()
        except HsjournalError as error:
            raise CaptureError(FailureReason.INTERNAL, str(error)) from error
        if exists(root_fd, str(rid)):
            raise DuplicateDumpError(f"{rid} is in the hand-over root already")
        name = f"{TMP_PREFIX}{rid}"

        def make() -> int:
            try:
                return self.root.make_folder(root_fd, name)
            except FileExistsError:
                if not remove_abandoned(root_fd, name):
                    raise DuplicateDumpError(f"{rid} is being written already") from None
                return self.root.make_folder(root_fd, name)

        dump = OpenDump(self, rid, root_fd, patience.call(make))
        with self._lock:
            closed = self._closed
            self._open.add(dump)
        if closed:
            dump.discard()
            raise CaptureError(FailureReason.ABORTED, "the server is stopping")
        return dump

    def forget(self, dump: OpenDump) -> None:
        """Called by a dump that has ended."""
        with self._lock:
            self._open.discard(dump)
