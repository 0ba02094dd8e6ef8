"""A server as it answers: reachable, which engine and model, and whether it can capture. Only looked at: no probe is sent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hsjournal.errors import HsjournalError
from hsjournal.ops.doctor.lines import Line, fail, ok, warn
from hsjournal.server.client import ServerClient
from hsjournal.server.preflight.settings import faults, ours
from hsjournal.ui.words import printable

DEADLINE = 5.0


def examine(url: str, root: Path, api_key: str = "") -> Iterator[Line]:
    """Lines about the server at ``url``, which should hand over in ``root``."""
    subject = f"server {url}"
    try:
        info = asyncio.run(_ask(url, api_key))
    except HsjournalError as error:
        yield fail(subject, error.message, error.remedy or "Start it, or check the address.")
        return
    except TimeoutError:
        yield fail(
            subject, f"did not tell its settings in {DEADLINE:.0f} s", "Look at its log: it may still be loading."
        )
        return
    version = info.get("version") or "unknown version"
    yield ok(subject, f"serves {printable(str(info.get('model_path') or 'a model that it does not name'))} ({version})")
    yield from judge(subject, info, root)


def judge(subject: str, info: Mapping[str, Any], root: Path) -> Iterator[Line]:
    """What its settings mean for a run."""
    for what, remedy in faults(info):
        yield fail(subject, printable(what, 400), remedy)
    plugin = ours(info)
    if not plugin:
        return
    layers = ", ".join(map(str, plugin.get("capture_layers") or ()))
    yield ok(
        subject, f"captures the outputs of layers {layers}, {plugin.get('final_norm')}-norm, {plugin.get('dtype')}"
    )
    theirs = str(plugin.get("handover_root") or "")
    if theirs and os.path.realpath(theirs) != os.path.realpath(root):
        yield warn(
            subject, f"hands over in {printable(theirs)}, this run would look in {root}",
            "Name the same folder with --handover-root, unless a container mounts it under two names.",
        )  # fmt: skip


async def _ask(url: str, api_key: str) -> dict[str, Any]:
    async with asyncio.timeout(DEADLINE), ServerClient(url, connect_timeout=DEADLINE, api_key=api_key) as client:
        return await client.server_info()
