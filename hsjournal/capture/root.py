"""The hand-over root as its writers see it: made private, opened without following links, found again when deleted.

A writer holds an flock on each ``.tmp-<rid>`` folder that it fills: see :mod:`hsjournal.dump.unpublished`.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import threading
import time
from pathlib import Path

from hsjournal.dump.protocol import TMP_PREFIX, RequestId
from hsjournal.dump.unpublished import outgrow_birth, take_abandoned
from hsjournal.errors import UsageError

log = logging.getLogger(__name__)

OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_WAIT_S = 0.5
"""Seconds that somebody who only looks whether a folder is abandoned may hold its lock, and far more."""


class HandoverRoot:
    """The folder ``path``, made if it is missing and made again when somebody deletes it.

    Args:
        path: the hand-over root.
        group_mode: False for 0700; True for 2770, where server and client are different users of one group.

    Raises:
        UsageError: when it is a link, another user's, open to everyone, or can't be made.
    """

    def __init__(self, path: Path, *, group_mode: bool = False) -> None:
        self.path = path
        self.folder_mode = 0o2770 if group_mode else 0o700
        self.file_mode = 0o660 if group_mode else 0o600
        self.group_mode = group_mode
        self._lock = threading.Lock()
        self._lost: list[int] = []
        self.in_memory = False
        self._fd = self._open()

    def fd(self) -> int:
        """A descriptor of the root that ``path`` names now; a root that was deleted or moved away is made anew.

        Raises:
            UsageError: when that is impossible.
        """
        with self._lock:
            held = os.fstat(self._fd)
            try:
                named = os.stat(self.path, follow_symlinks=False)
            except OSError:
                named = None
            if named is None or (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino):
                log.warning("the hand-over root %s was removed or replaced; opening it anew", self.path)
                fresh = self._open()
                # Other threads may still use the old descriptor: closed only at the end.
                self._lost.append(self._fd)
                self._fd = fresh
            return self._fd

    def make_folder(self, root_fd: int, name: str) -> int:
        """Make and lock folder ``name``; its descriptor.

        Raises:
            OSError: FileExistsError when it is there already.
        """
        os.mkdir(name, self.folder_mode, dir_fd=root_fd)
        folder = os.open(name, OPEN_FOLDER, dir_fd=root_fd)
        try:
            _lock(folder)
            if self.group_mode:
                os.fchmod(folder, self.folder_mode)
        except OSError:
            os.close(folder)
            raise
        return folder

    def sweep(self) -> list[str]:
        """Remove the ``.tmp-<rid>`` folders of writers that are gone; their names."""
        root_fd = self.fd()
        names = [n for n in os.listdir(root_fd) if n.startswith(TMP_PREFIX) and RequestId.parse(n[len(TMP_PREFIX) :])]
        outgrow_birth(root_fd, names)
        return [name for name in names if remove_abandoned(root_fd, name)]

    def close(self) -> None:
        """Close every descriptor."""
        with self._lock:
            for fd in (*self._lost, self._fd):
                os.close(fd)
            self._lost.clear()

    def _open(self) -> int:
        path = self.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.mkdir(path, self.folder_mode)
                made = True
            except FileExistsError:
                made = False
            fd = os.open(path, OPEN_FOLDER)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) or path.is_symlink():
                raise UsageError(
                    f"The hand-over root {path} is a link or not a folder",
                    remedy="Name a folder of your own, or one that does not exist yet.",
                ) from None
            raise UsageError(
                f"The hand-over root {path} can't be used: {error.strerror or error}",
                remedy="Name a folder that you may write to with --handover-root.",
            ) from None
        try:
            self._check(fd, made)
        except UsageError:
            os.close(fd)
            raise
        self.in_memory = _is_in_memory(fd)
        return fd

    def _check(self, fd: int, made: bool) -> None:
        if made:
            os.fchmod(fd, self.folder_mode)  # the process's umask must not decide
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            raise UsageError(
                f"The hand-over root {self.path} belongs to user {status.st_uid}, not to {os.geteuid()}",
                remedy="Name another folder with --handover-root.",
            )
        if status.st_mode & stat.S_IWOTH:
            raise UsageError(
                f"Everyone may write to the hand-over root {self.path}",
                remedy="Name a folder of your own below it, or take the right away with chmod o-w.",
            )
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise UsageError(
                f"The hand-over root {self.path} can't be written to", remedy="Change its mode or name another folder."
            )


def remove_abandoned(root_fd: int, name: str) -> bool:
    """Remove folder ``name`` unless a live writer holds it; True when it is gone.

    Only regular files directly inside are deleted: a folder that holds anything else is not a writer's.
    """
    try:
        folder = take_abandoned(root_fd, name)
        if folder is None:
            return not exists(root_fd, name)
        try:
            empty_folder(folder)
            os.rmdir(name, dir_fd=root_fd)
        finally:
            os.close(folder)
    except OSError as error:
        log.warning("%s is left alone: %s", name, error)
        return False
    return True


def empty_folder(folder: int) -> None:
    """Delete the regular files directly inside ``folder``."""
    for name in os.listdir(folder):
        try:
            if stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            continue


def exists(root_fd: int, name: str) -> bool:
    """Whether anything, a dangling link too, has this name in the root."""
    try:
        os.stat(name, dir_fd=root_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _lock(folder: int) -> None:
    """Lock a folder that was made just now.

    Raises:
        OSError: BlockingIOError when somebody else keeps it locked.
    """
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
        else:
            return


def _is_in_memory(fd: int) -> bool:
    """Whether the folder lies in tmpfs or ramfs: its files end with the machine's life and need no fsync."""
    device = os.fstat(fd).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        head, _, tail = line.partition(" - ")
        if head.split()[2] == wanted:
            return tail.split()[0] in ("tmpfs", "ramfs")
    return False
