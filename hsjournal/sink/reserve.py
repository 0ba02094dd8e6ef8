"""Asking the storage for a file's room before its bytes come."""

from __future__ import annotations

import ctypes
import errno
import os

_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""What says something about the storage; any other answer only means that it can't reserve."""


def reserve(fd: int, nbytes: int) -> None:
    """Have the first ``nbytes`` of an empty file allocated; where the file system can't, nothing happens.

    Writers past the end of a file take turns in the kernel, and each has the size entered; inside it they do not. A full
    disk is noticed before the first byte is gathered. Not ``posix_fallocate``: where it can't, the C library writes zeros.

    Raises:
        OSError: when there is no room, or the storage fails.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate64"):
        return
    while libc.fallocate64(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) != 0:
        code = ctypes.get_errno()
        if code in _REFUSED:
            raise OSError(code, os.strerror(code))
        if code != errno.EINTR:
            return
