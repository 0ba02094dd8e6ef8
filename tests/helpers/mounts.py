"""Small file systems for tests; they need root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@contextmanager
def tmpfs(mount: Path, size: str) -> Iterator[Path]:
    """A tmpfs of ``size`` (``2m``) at ``mount`` for the block; skips the test where that isn't allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount)], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip(f"no tmpfs here: {done.stderr.decode()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def fill(folder: Path, leave: int = 0) -> Path:
    """Fill a small file system but for ``leave`` bytes; the file to delete in order to make room."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for piece in (bytes(1 << 20), bytes(4096)):
            with contextlib.suppress(OSError):
                while file.write(piece):
                    pass
        if leave:
            file.truncate(max(0, file.tell() - leave))
    return path


@dataclass(frozen=True, slots=True)
class Disk:
    """A loop-mounted file system of its own."""

    mount: Path
    image: Path

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Frozen for the block, and thawed whatever happens: writers hang in the kernel, reads go on."""
        _run("fsfreeze", "-f", self.mount)
        try:
            yield
        finally:
            _run("fsfreeze", "-u", self.mount)

    def remount(self, how: str) -> None:
        """Remount with options ``how`` (``ro``, ``rw``)."""
        _run("mount", "-o", f"remount,{how}", self.mount)

    def try_remount(self, how: str) -> str:
        """As :meth:`remount`; what was in the way, for example a file that is open for writing."""
        return subprocess.run(
            ["mount", "-o", f"remount,{how}", self.mount], check=False, capture_output=True, timeout=30
        ).stderr.decode()

    def mend(self) -> None:
        """Unmount, check and mount again, as an operator does after a disk has failed."""
        subprocess.run(["umount", "-l", self.mount], check=False, capture_output=True, timeout=30)
        subprocess.run(["fsck.ext4", "-p", "-f", self.image], check=False, capture_output=True, timeout=60)
        _run("mount", "-o", "loop", self.image, self.mount)


@contextmanager
def ext4(folder: Path, megabytes: int, image: Path | None = None) -> Iterator[Disk]:
    """An ext4 of ``megabytes``, loop-mounted at ``folder/mount`` for the block; skips the test where that isn't allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    if not all(shutil.which(tool) for tool in ("mkfs.ext4", "fsfreeze", "losetup")):
        pytest.skip("no mkfs.ext4, fsfreeze or losetup here")
    disk = Disk(folder / "mount", image or folder / "image")
    disk.mount.mkdir(parents=True)
    with disk.image.open("wb") as file:
        file.truncate(megabytes << 20)
    _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", disk.image)
    done = subprocess.run(["mount", "-o", "loop", disk.image, disk.mount], check=False, capture_output=True)
    if done.returncode:
        pytest.skip(f"no loop mounts here: {done.stderr.decode()}")
    try:
        yield disk
    finally:
        subprocess.run(["fsfreeze", "-u", disk.mount], check=False, capture_output=True, timeout=20)
        subprocess.run(["umount", "-l", disk.mount], check=False, capture_output=True, timeout=20)


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, check=False, capture_output=True, timeout=30)
    assert done.returncode == 0, f"{command}: {done.stderr.decode()}"
