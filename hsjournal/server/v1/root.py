"""The root that a v1 server writes into: held by descriptor, and found again when somebody deletes the folder."""

from __future__ import annotations

import os
from pathlib import Path

from hsjournal.dump.reader import open_root


class Root:
    """Opened when it is first asked for.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    @property
    def fd(self) -> int:
        """A descriptor of the folder that has the name now.

        Raises:
            OSError: when there is none.
        """
        if self._fd >= 0 and os.fstat(self._fd).st_nlink == 0:
            self.close()
        if self._fd < 0:
            self._fd = open_root(self._path)
        return self._fd

    def close(self) -> None:
        """Let go of it; the next look opens it anew."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
