"""Deleting dumps: only ours, by descriptor, never through a link, and repeatable after any interruption.

``done`` and ``error`` go first: what a deletion that was cut short leaves behind can't be taken for a dump.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hsjournal import faults
from hsjournal.dump.protocol import DONE, ERROR, MAX_ERROR_BYTES, MAX_META_BYTES, META
from hsjournal.dump.reader import DIRECTORY_FLAGS, FILE_FLAGS, parse_name
from hsjournal.dump.unpublished import take_abandoned

if TYPE_CHECKING:
    from pathlib import Path

_KEEP_BELOW = 64 << 20
_MOST_FILES = 80
_ORDER = {DONE: 0, ERROR: 1, META: 3}  # meta.json last: it says whose the remains are


@dataclass(frozen=True, slots=True)
class SetAside:
    """What became of a rejected dump: bytes freed in the root, where its remains are kept, and why not if not."""

    freed: int
    kept: Path | None
    problem: str | None = None


def remove_dump(root_fd: int, name: str, run: str | None = None) -> int:
    """Remove one directory of ours (``<rid>`` or ``.tmp-<rid>``) from the hand-over root.

    Only regular files directly inside are unlinked. A name that is already gone frees 0 bytes, and so does an unpublished
    folder whose writer lives after all.

    Args:
        root_fd: the root.
        name: a name in it.
        run: when given, the run that it must belong to.

    Returns:
        The bytes freed.

    Raises:
        ValueError: when the name is not one of ours.
        OSError: when something could not be removed; everything else is, and a later call goes on from there.
    """
    rid, unpublished = parse_name(name)
    if rid is None or (run is not None and rid.run != run):
        raise ValueError(f"not a dump of ours: {name!r}")
    try:
        dir_fd = take_abandoned(root_fd, name) if unpublished else os.open(name, DIRECTORY_FLAGS, dir_fd=root_fd)
    except FileNotFoundError:
        return 0
    if dir_fd is None:
        return 0
    try:
        freed, problem = _empty(dir_fd, name, rid.row)
        if problem is not None:
            raise problem
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(name, dir_fd=root_fd)
    finally:
        os.close(dir_fd)
    faults.point("reap.deleted", rid.row)
    return freed


def set_aside(
    root_fd: int, name: str, rejects_dir: Path, keep: int = 5, *, why: str = "", run: str | None = None
) -> SetAside:
    """Keep a rejected dump's small files, and its tensors if they are small too, under ``rejects_dir``; then remove it.

    The last ``keep`` rejects are kept. Keeping is a courtesy: if it fails (a full disk), the dump goes all the
    same, and the result says so, since shared memory must not fill up with what nobody will use.

    Args:
        root_fd: the hand-over root.
        name: the dump's name in it.
        rejects_dir: a folder outside the output; made when missing.
        keep: how many rejects stay.
        why: kept beside them, for people.
        run: when given, the run that it must belong to.

    Raises:
        ValueError: when the name is not one of ours.
        OSError: as :func:`remove_dump`.
    """
    rid, _ = parse_name(name)
    if rid is None or (run is not None and rid.run != run):
        raise ValueError(f"not a dump of ours: {name!r}")
    kept: Path | None = None
    problem: str | None = None
    try:
        kept = _copy_out(root_fd, name, rejects_dir, why)
        _prune(rejects_dir, keep)
    except OSError as error:
        problem = f"{name} could not be kept in {rejects_dir}: {error.strerror or error}"
    return SetAside(remove_dump(root_fd, name, run), kept, problem)


def _empty(dir_fd: int, name: str, row: int | None) -> tuple[int, OSError | None]:
    """Unlink the regular files; the bytes freed and the first thing that could not be removed."""
    freed = 0
    problem: OSError | None = None
    for file in sorted(os.listdir(dir_fd), key=lambda f: (_ORDER.get(f, 2), f)):
        try:
            found = os.stat(file, dir_fd=dir_fd, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                strange = OSError(errno.ENOTEMPTY, "holds something that is no file of a dump", f"{name}/{file}")
                problem = problem or strange
                continue
            os.unlink(file, dir_fd=dir_fd)
        except FileNotFoundError:
            continue
        except OSError as error:
            problem = problem or error
            continue
        freed += found.st_size
        faults.point("reap.deleting", row)
    return freed, problem


def _copy_out(root_fd: int, name: str, rejects_dir: Path, why: str) -> Path | None:
    try:
        dir_fd = os.open(name, DIRECTORY_FLAGS, dir_fd=root_fd)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        rejects_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        number = max((_number(p.name) for p in rejects_dir.iterdir()), default=0) + 1
        target = rejects_dir / f"{number:06d}-{name.lstrip('.')}"
        target.mkdir(mode=0o700)
        try:
            small = {META: MAX_META_BYTES, ERROR: MAX_ERROR_BYTES}
            files = os.listdir(dir_fd)[:_MOST_FILES]
            total = sum(os.stat(f, dir_fd=dir_fd, follow_symlinks=False).st_size for f in files)
            for file in files:
                if file in small or total <= _KEEP_BELOW:
                    _copy_file(dir_fd, file, target / file, small.get(file, _KEEP_BELOW))
            (target / "why.txt").write_text(why + "\n", encoding="utf-8")
        except OSError:
            shutil.rmtree(target, ignore_errors=True)
            raise
        return target
    finally:
        os.close(dir_fd)


def _copy_file(dir_fd: int, file: str, target: Path, most: int) -> None:
    """Copy at most ``most`` bytes of a regular file; anything else is left out."""
    try:
        source = os.open(file, FILE_FLAGS, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENOENT, errno.ENODEV):
            return
        raise
    try:
        if not stat.S_ISREG(os.fstat(source).st_mode):
            return
        done = 0
        with target.open("xb") as out:
            while done < most and (piece := os.read(source, min(1 << 20, most - done))):
                out.write(piece)
                done += len(piece)
    finally:
        os.close(source)


def _number(name: str) -> int:
    """The serial number that a kept reject's name begins with; 0 when it is none of ours."""
    head, _, rest = name.partition("-")
    return int(head) if rest and len(head) == 6 and head.isascii() and head.isdigit() else 0


def _prune(rejects_dir: Path, keep: int) -> None:
    ours = sorted(
        (p for p in rejects_dir.iterdir() if _number(p.name) and p.is_dir() and not p.is_symlink()),
        key=lambda p: _number(p.name),
    )
    for old in ours[: max(0, len(ours) - keep)]:
        shutil.rmtree(old, ignore_errors=True)
