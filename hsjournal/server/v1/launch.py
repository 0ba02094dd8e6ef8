"""The gateway, to be started in place of a server of our own; the v1 server behind it is never touched."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hsjournal.server.launch import free_port
from hsjournal.server.recipe import Recipe


def gateway(
    upstream: str, handover_root: str, layers: Sequence[int], final_norm: str, state: Path, port: int = 0
) -> Recipe:
    """How to start it.

    Args:
        upstream: address of the v1 server.
        handover_root: where that one writes ``req_N``.
        layers: which ones it captures, 0-based, since its dumps don't say.
        final_norm: ``post`` or ``pre``: what its ``final.pt`` is.
        state: file in tmpfs that outlives the gateway: which requests have no end yet.
        port: 0 for a free one.
    """
    number = port or free_port()
    argv = (
        sys.executable, "-m", "hsjournal.server.v1", "--server", upstream, "--handover-root", handover_root,
        "--layers", ",".join(map(str, layers)), "--final-norm", final_norm, "--state", str(state), "--port", str(number),
    )  # fmt: skip
    return Recipe("the v1 gateway", argv, f"http://127.0.0.1:{number}")
