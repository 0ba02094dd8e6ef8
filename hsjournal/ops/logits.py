"""``verify --logits``: some rows are held against the model itself, in a child that loads it or asks a server."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from hsjournal.config import RunPaths
from hsjournal.errors import ExitCode, HsjournalError, ServerError, UsageError
from hsjournal.journal.reading import JournalReader
from hsjournal.ops.verify_report import has_file
from hsjournal.states import State

MODULE, WITH_SERVER = "hsjournal.data.logits", "hsjournal.data.served"


@dataclass(frozen=True, slots=True)
class Examined:
    """What the child found: see :func:`hsjournal.data.logits.examine`."""

    seed: int
    answer: dict[str, Any]

    @property
    def exit_code(self) -> ExitCode:
        """3 when states are not the model's, else 0."""
        return ExitCode.FAILED_SAMPLES if self.answer["faults"] else ExitCode.DONE

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return self.answer | {"seed": self.seed}


def examine(paths: RunPaths, most: int, *, seed: int, model: str = "", server: str = "") -> Examined:
    """Draw up to ``most`` verified rows and rebuild their next-token log-probabilities.

    Args:
        paths: of the run, which may be going on.
        most: rows.
        seed: of the draw.
        model: folder of the model; empty for the one that the run was made with.
        server: whose own log-probabilities the final states are held against, instead of loading the model.

    Raises:
        UsageError: when there is nothing to look at, or the model can't be loaded.
        ServerError: when the server can't be asked.
        NoJournalError: when there is no run.
        HsjournalError: when the child dies, or a file is damaged.
    """
    with JournalReader(paths.journal) as journal:
        rows = [row["row"] for row in journal.all_rows() if State(row["state"]) is State.VERIFIED and has_file(row)]
    if not rows:
        raise UsageError("no row is verified yet, or all were released", remedy="Run it again later.")
    chosen = sorted(random.Random(seed).sample(rows, min(most, len(rows))))  # noqa: S311 - a sample, no secret
    command = [sys.executable, "-m", WITH_SERVER if server else MODULE, str(paths.run_dir)]
    command += ["--rows", ",".join(map(str, chosen)), "--model", model, *(["--server", server] if server else [])]
    child = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    lines = child.stdout.strip().splitlines()
    if child.returncode or not lines:
        words = (child.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise HsjournalError(
            f"the child that holds states against the model ended with {child.returncode}: {words}",
            remedy="It needs torch and transformers, and memory for the model; --logits-server needs only its last layer.",
        )
    answer = json.loads(lines[-1])
    if "error" in answer:
        raised = {ExitCode.USAGE: UsageError, ExitCode.SERVER: ServerError}.get(answer["exit_code"], HsjournalError)
        raise raised(answer["error"], remedy=answer["remedy"])
    return Examined(seed, answer)
