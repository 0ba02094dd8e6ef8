"""A v1 directory, checked, handed on as a dump of protocol v2; or why there is none."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence

from hsjournal.dump.protocol import DONE, ERROR, META, TMP_PREFIX, CaptureFailure, Meta, tensor_entries
from hsjournal.dump.reader import DIRECTORY_FLAGS
from hsjournal.errors import DumpRejectedError, Reject
from hsjournal.server.v1.dumps import ENGINE, Found, opened

UNPROVEN = {"identity": "by token count alone: that the rows are those of the ids sent is not proven"}
"""Stands among the versions of every dump that came this way."""
_PIECE = 8 << 20


def publish(root_fd: int, found: Found, meta: Meta, to_root_fd: int | None = None) -> None:
    """Hand a checked directory on as the v2 dump ``meta.rid``; the directory itself stays.

    Args:
        root_fd: where it lies.
        found: what :func:`look` said of it.
        meta: of the v2 dump; its tensors agree with ``found``.
        to_root_fd: the hand-over root; the same one if not given.

    Raises:
        DumpRejectedError: when it changed meanwhile.
        OSError: when there is no room, or something of this name is there; nothing is left of it then.
    """
    target_fd = root_fd if to_root_fd is None else to_root_fd
    with fresh_folder(target_fd, meta.rid) as folder:
        source_fd = os.open(found.name, DIRECTORY_FLAGS, dir_fd=root_fd)
        try:
            if os.fstat(source_fd).st_ino != found.inode:
                raise DumpRejectedError(Reject.VANISHED, f"{found.name} is another one by now")
            for file, offset, tensor in zip(found.files, found.offsets, meta.tensors, strict=True):
                with opened(source_fd, file) as (fd, _, _):
                    _copy(fd, offset, folder, tensor.file, tensor.nbytes)
        finally:
            os.close(source_fd)
        _write(folder, META, meta.to_json())
        _write(folder, DONE, b"")


def publish_failure(root_fd: int, failure: CaptureFailure) -> None:
    """Tell the client by protocol v2 why there is no dump.

    Raises:
        OSError: as :func:`publish`.
    """
    with fresh_folder(root_fd, failure.rid) as folder:
        _write(folder, ERROR, failure.to_json())


@contextlib.contextmanager
def fresh_folder(root_fd: int, rid: str) -> Iterator[int]:
    """A descriptor of ``.tmp-<rid>``, which is published as ``<rid>`` when the block ends well, and removed when not."""
    unpublished = f"{TMP_PREFIX}{rid}"
    os.mkdir(unpublished, 0o700, dir_fd=root_fd)
    folder = os.open(unpublished, DIRECTORY_FLAGS, dir_fd=root_fd)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # as every writer holds its own: who sees it free may clear it away
        yield folder
        if rid in os.listdir(root_fd):  # a rename would replace an empty one
            raise FileExistsError(f"{rid} is there already")
        os.rename(unpublished, rid, src_dir_fd=root_fd, dst_dir_fd=root_fd)
    except BaseException:
        for file in os.listdir(folder):
            os.unlink(file, dir_fd=folder)
        os.rmdir(unpublished, dir_fd=root_fd)
        raise
    finally:
        os.close(folder)


def meta_of(
    found: Found, rid: str, ids_sha256: str, capture_layers: Sequence[int], final_norm: str, boot_id: str
) -> Meta:
    """The ``meta.json`` under which a directory is handed on.

    Raises:
        DumpRejectedError: when it holds another number of layers.
    """
    if len(found.files) - 1 != len(capture_layers):
        raise DumpRejectedError(
            Reject.WRONG_LAYERS,
            f"{len(found.files) - 1} aux layers, {len(capture_layers)} are named ({capture_layers})",
        )
    proven = found.ids_sha256 is not None or found.rid is not None
    return Meta(
        rid=rid,
        num_tokens=found.num_tokens,
        hidden_size=found.hidden_size,
        dtype=found.dtype,
        capture_layers=tuple(capture_layers),
        final_norm=final_norm,
        token_ids_sha256=ids_sha256,
        chunks=(0,),
        boot_id=boot_id,
        engine=ENGINE,
        versions={"identity": f"by what {META} says of {found.name}"} if proven else UNPROVEN,
        tensors=tensor_entries(found.num_tokens, found.hidden_size, found.dtype, len(capture_layers)),
    )


def _copy(fd: int, offset: int, folder: int, file: str, nbytes: int) -> None:
    out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        done = 0
        while done < nbytes:
            sent = os.sendfile(out, fd, offset + done, min(_PIECE, nbytes - done))
            if sent == 0:
                raise DumpRejectedError(Reject.WRONG_SIZE, f"{file} is shorter than it was")
            done += sent
    finally:
        os.close(out)


def _write(folder: int, file: str, data: bytes) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)
