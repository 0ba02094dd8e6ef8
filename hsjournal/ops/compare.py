"""Are these the states of this model's layers? A few samples are run again, as probes, and compared."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hsjournal.config import Manifest
from hsjournal.dump.reader import Dump
from hsjournal.errors import HsjournalError
from hsjournal.ops.foreign import ForeignError, read_foreign
from hsjournal.ops.planes import differences, state_name
from hsjournal.server.client import ServerClient
from hsjournal.server.preflight import check_facts, preflight, probe

TOLERANCE = {"float32": 0.01, "bfloat16": 0.03, "float16": 0.03}
"""‖difference‖ / ‖reference‖ of a state: other kernels and batches move it less, another layer moves it more."""
_PATIENCE = 900.0


@dataclass(frozen=True, slots=True)
class Compared:
    """One sample against the server: ``differences`` of each state, aux ascending, then final."""

    path: str
    row: int
    num_tokens: int
    differences: tuple[float, ...]


def compare(
    url: str, root: Path, manifest: Manifest, samples: Sequence[tuple[Path, int]], wanted: int
) -> list[Compared]:
    """Hold up to ``wanted`` of ``samples`` (path and row) against what a server says to the same token ids.

    A file that turns out unusable proves nothing, and the next one is taken.

    Args:
        url: of the server.
        root: the hand-over root that it shares.
        manifest: of the run.
        samples: candidates, the best first.
        wanted: how many.

    Raises:
        ServerError: when the server can't be asked, or serves something else than the run was made for.
        HsjournalError: when a state differs by more than the tolerance: the files are not what they are taken for.
    """
    return asyncio.run(_compare(url, root, manifest, samples, wanted))


async def _compare(
    url: str, root: Path, manifest: Manifest, samples: Sequence[tuple[Path, int]], wanted: int
) -> list[Compared]:
    done: list[Compared] = []
    async with ServerClient(url, api_key=os.environ.get("HSJOURNAL_API_KEY", "")) as client:
        check_facts(await preflight(client, root, manifest.run_id), manifest)
        for path, row in samples:
            if len(done) == wanted:
                break
            found: list[tuple[float, ...]] = []
            try:
                foreign = read_foreign(path)

                def look(dump: Dump) -> None:
                    found.append(differences(foreign, dump))  # noqa: B023 - called before the loop goes on

                await probe(client, root, manifest.run_id, foreign.input_ids, timeout=_PATIENCE, look=look)
            except ForeignError:
                continue
            compared = Compared(str(path), row, foreign.num_tokens, found[0])
            _judge(compared, manifest)
            done.append(compared)
    return done


def _judge(compared: Compared, manifest: Manifest) -> None:
    most, num_aux = TOLERANCE[manifest.dtype], len(manifest.capture_layers)
    far = [
        f"{state_name(number, num_aux)} by {value:.1%}"
        for number, value in enumerate(compared.differences)
        if not value <= most
    ]
    if far:
        raise HsjournalError(
            f"the states in {compared.path} (row {compared.row}) are not this server's: {', '.join(far)} differ, "
            f"up to {most:.0%} may. The run captures the outputs of layers {list(manifest.capture_layers)} (0-based) and the "
            f"{manifest.final_norm}-norm final state",
            remedy="The files were made with other layers, another model or another numbering of layers; nothing was adopted.",
        )
