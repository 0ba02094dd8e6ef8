"""Shared memory that a killed server leaves in ``/dev/shm``: removed when it is provably that server's.

SGLang's tree is ended by SIGKILL (its launcher lingers), and nobody unlinks then. A file is taken for the server's when
all of this holds: it was not there before the server started, a process of its tree had it mapped or open, its name is
one that SGLang, torch or Python give to such files, it belongs to this user, and no living process has it mapped or open.
Files are told by their inode: glibc makes a semaphore under a passing name, which is the one that ``/proc`` goes on
showing. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

SHM = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lives, not a place for temporary files
_NAMES = re.compile(r"(sglang_loads_|sgl_shm_|sem\.mp-|psm_|torch_|multi_tokenizer_args_|nccl-|cuda\.shm\.)[\w.+-]+")
_MAPS = re.compile(rb"^\S+ \S+ \S+ \S+ (\d+) +/dev/shm/", re.MULTILINE)


class Leftovers:
    """Watches what a tree uses; made before the server is started."""

    def __init__(self) -> None:
        self._before = {inode for _, inode in _files()}
        self._seen: set[int] = set()

    def look(self, pids: Iterable[int]) -> None:
        """Note what these processes have mapped or open now."""
        for pid in pids:
            self._seen |= _used_by(pid) - self._before

    def remove(self) -> list[str]:
        """Remove what is left of it, now that the tree is gone; the names."""
        left = {path: inode for path, inode in _files() if inode in self._seen}
        if not left:
            return []
        used = {inode for name in os.listdir("/proc") if name.isdigit() for inode in _used_by(int(name))}
        removed = []
        for path, inode in sorted(left.items()):
            if inode not in used:
                with contextlib.suppress(OSError):
                    path.unlink()
                    removed.append(path.name)
        return removed


def _files() -> list[tuple[Path, int]]:
    """This user's files of such names, with their inodes."""
    found = []
    with contextlib.suppress(OSError), os.scandir(SHM) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if _NAMES.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_uid == os.getuid():
                        found.append((Path(entry.path), status.st_ino))
    return found


def _used_by(pid: int) -> set[int]:
    """Inodes in shared memory that a process has mapped or open."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        found |= {int(inode) for inode in _MAPS.findall(Path(f"/proc/{pid}/maps").read_bytes())}
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                link = f"/proc/{pid}/fd/{fd}"
                if os.readlink(link).startswith(f"{SHM}/"):
                    found.add(os.stat(link).st_ino)
    return found
