"""The servers' API key: from a file or the environment into the environment, and from there to our children; nowhere else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hsjournal.config import KEY_VARIABLE
from hsjournal.errors import UsageError

_MOST_BYTES = 4096


def take_key(file: Path | None) -> None:
    """Make the key in ``file`` the one that this command and its children use; without a file, nothing changes.

    Raises:
        UsageError: when it can't be read, others may read it too, or it holds no key.
    """
    if file is None:
        return
    remedy = f"Let only yourself read it: chmod 600 {file}"
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(
            f"the API key file {file} can't be read: {error.strerror}", remedy="Check --api-key-file."
        ) from None
    with os.fdopen(fd, "rb") as opened:
        mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
        if mode & (stat.S_IROTH | stat.S_IWOTH):
            raise UsageError(
                f"the API key file {file} can be read or written by everybody (mode {mode:04o})", remedy=remedy
            )
        data = opened.read(_MOST_BYTES + 1)
    try:
        key = data.decode("ascii").strip()
    except UnicodeDecodeError:
        key = ""
    if not key or len(data) > _MOST_BYTES or not key.isprintable() or " " in key:
        raise UsageError(f"the API key file {file} holds no key", remedy="Write the key alone into it, on one line.")
    os.environ[KEY_VARIABLE] = key
