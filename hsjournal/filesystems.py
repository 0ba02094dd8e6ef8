"""Which file system a path lies on, whether it is one that reaches over a network, and what a failing one answers."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "ocfs2",
     "gfs2", "orangefs", "pvfs2", "wekafs", "vastnfs", "virtiofs", "coda", "ncpfs", "vboxsf", "vmhgfs", "prl_fs"}
)  # fmt: skip
"""Types whose data may come from another machine's cache. FUSE types count as network unless known as local."""

_OURS = frozenset({errno.EBADF, errno.EFAULT, errno.EINVAL})
_LOCAL_FUSE = frozenset({"fuseblk", "fuse.ext4", "fuse.ntfs", "fuse.overlayfs", "fuse.fuse-overlayfs"})


def file_system_type(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that ``path``, or its nearest existing parent, lies on (``ext4``, ``nfs4``, …).

    Read from the mount table, by device number, so that bind mounts and overmounted folders come out right.
    """
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    real = os.path.realpath(place)
    device = os.stat(place).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    best, best_length = "unknown", -1
    for line in mountinfo.read_text(errors="replace").split("\n"):
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        mount_point = _unescaped(fields[4])
        covers = real == mount_point or real.startswith(mount_point.rstrip("/") + "/")
        rank = len(mount_point) + (1 << 20 if fields[2] == wanted else 0)
        if covers and rank >= best_length:
            best, best_length = after.split(" ")[0], rank
    return best


def _unescaped(name: str) -> str:
    """Space, tab, newline and backslash stand as octal numbers in the mount table."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), name)


def is_network(kind: str) -> bool:
    """Whether a file-system type reaches over a network, as far as its name tells."""
    return kind in NETWORK or (kind.startswith("fuse") and kind not in _LOCAL_FUSE)


def is_trouble(error: OSError) -> bool:
    """Whether an error says that the storage does not work, rather than that we asked for nonsense.

    No list of what storage may answer is whole: each kind of it (NFS, FUSE, iSCSI, a pulled disk) has its own words.
    """
    return error.errno is not None and error.errno not in _OURS
