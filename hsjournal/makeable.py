"""Folders of a run that are made for it: refused in time, and in words that name the folder, its flag and the remedy.

``python -m hsjournal.makeable JSON``, a list of ``[WHAT, FOLDER, FLAG]``, tries them and prints one JSON object: a disk may
hang, and who asks does not hang with it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

from hsjournal.errors import HsjournalError, NoRoomError, UsageError
from hsjournal.filesystems import file_system_type

_UNREAL = ("proc", "sysfs", "cgroup", "cgroup2")
"""Root may write there, and still make no folder of its own."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def make_folder(what: str, folder: Path, flag: str, mode: int = 0o777) -> None:
    """Make a folder, with its parents.

    Args:
        what: it is for people, as ``the output folder``.
        folder: absolute.
        flag: that names another one.
        mode: of the folder itself.

    Raises:
        UsageError, NoRoomError: when it can't be made.
    """
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise unusable(what, folder, flag, error) from error


def refuse_unmakeable(what: str, folder: Path, flag: str) -> None:
    """Refuse a folder that can't be made or written to: it is made, and taken away again with the parents it needed.

    Raises:
        UsageError, NoRoomError: as :func:`make_folder`, or when it may not be written to, or its disk is full.
    """
    missing = [place for place in (folder, *folder.parents) if not _is_there(what, place, folder, flag)]
    try:
        make_folder(what, folder, flag)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise unusable(what, folder, flag, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    finally:
        for place in missing:
            with contextlib.suppress(OSError):
                place.rmdir()


def refuse_unlikely(what: str, folder: Path, flag: str) -> None:
    """As :func:`refuse_unmakeable`, without making anything: by its nearest parent that is there.

    Raises:
        UsageError: when that is no folder, or may not be written to.
    """
    place = next(place for place in (folder, *folder.parents) if _is_there(what, place, folder, flag))
    number = errno.ENOTDIR if not place.is_dir() else errno.EACCES
    if number == errno.ENOTDIR or not os.access(place, os.W_OK | os.X_OK) or file_system_type(place) in _UNREAL:
        raise unusable(what, folder, flag, OSError(number, os.strerror(number)))


def room(folder: Path) -> tuple[int, int]:
    """Device and free bytes of the file system that a folder, or its nearest parent that is there, lies on."""
    place = next(place for place in (folder, *folder.parents) if place.exists())
    found = os.statvfs(place)
    return place.stat().st_dev, found.f_bavail * found.f_frsize


def unusable(what: str, folder: Path, flag: str, error: OSError) -> HsjournalError:
    """The error to show when a folder can't be made or opened."""
    said = f"{what} {folder} can't be made or used: {error.strerror or error}"
    if error.errno in _FULL:
        return NoRoomError(said, remedy=f"Make room, or name another folder with {flag}.")
    return UsageError(said, remedy=f"Mend its path or permissions, or name another folder with {flag}.")


def _is_there(what: str, place: Path, folder: Path, flag: str) -> bool:
    try:
        return os.path.lexists(place) and (place.stat() is not None)
    except OSError as error:  # a link that leads nowhere, or a parent that may not be looked into
        raise unusable(what, folder, flag, error) from error


def main(places: list[list[str]]) -> dict[str, Any]:
    """See the module."""
    try:
        for what, folder, flag in places:
            refuse_unmakeable(what, Path(folder), flag)
    except HsjournalError as error:
        return {"error": error.message, "remedy": error.remedy, "exit_code": int(error.exit_code)}
    return {}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))))
