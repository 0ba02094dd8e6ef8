"""What a run's probe prompt looked like at the start: kept in the run directory, for every later comparison.

A server that answers with other states for the same prompt serves other weights, or has gone wrong.
"""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hsjournal.errors import ServerError
from hsjournal.server.preflight.agreement import Agreement
from hsjournal.server.preflight.states import Difference, States, Tolerance, brief, differences

BASELINE = "canary.npz"
"""Its name in the run directory."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The probe prompt, its states as they were first seen, and what later ones may differ by.

    Args:
        ids: of the prompt.
        states: alone, at the start.
        tolerance: calibrated then.
        proven: boot ids of the servers that passed the whole preflight.
    """

    ids: tuple[int, ...]
    states: States
    tolerance: Tolerance
    proven: tuple[str, ...]

    @classmethod
    def of(cls, agreement: Agreement, boot_id: str) -> Baseline:
        """From the first server's preflight."""
        return cls(agreement.ids, agreement.states, agreement.tolerance, (boot_id,))

    def with_proven(self, boot_id: str) -> Baseline:
        """The same, once another life of a server has passed."""
        return replace(self, proven=(*self.proven, boot_id)[-64:])

    def compare(self, states: States) -> tuple[tuple[Difference, ...], list[str]]:
        """How far ``states`` are from those of the start, and in words what is too far; states of other shapes are."""
        try:
            found = differences(states, self.states)
        except ValueError as error:
            return (), [f"the states have other shapes: {error}"]
        return found, self.tolerance.exceeded_by(found)

    def save(self, folder: Path) -> None:
        """Keep it in the run directory ``folder``; whole or not at all."""
        about = {
            "ids": self.ids,
            "dtype": self.states.dtype,
            "tolerance": self.tolerance.to_json(),
            "proven": self.proven,
        }
        arrays: dict[str, Any] = {f"t{n}": tensor for n, tensor in enumerate(self.states.tensors)}
        arrays["about"] = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
        fresh = folder / f".{BASELINE}.{os.getpid()}"
        with fresh.open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(folder / BASELINE)

    @classmethod
    def load(cls, folder: Path) -> Baseline | None:
        """What was kept; None when nothing was, or what is there is damaged: then a new one is made."""
        try:
            with np.load(folder / BASELINE, allow_pickle=False) as found:
                about = json.loads(found["about"].tobytes())
                tensors = tuple(found[f"t{n}"] for n in range(len(found.files) - 1))
            return cls(
                tuple(about["ids"]),
                States(about["dtype"], tensors),
                Tolerance(**about["tolerance"]),
                tuple(about["proven"]),
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError):
            return None


def other_states(url: str, words: list[str], count: int = 0, rows: str = "") -> ServerError:
    """What to tell when a server's states are not those that the run began with.

    Args:
        url: of the server.
        words: what differs.
        count: of rows that are in doubt.
        rows: which, in words.
    """
    text = f"{url} gives other states for the run's probe prompt than at the run's start: {brief(words)}"
    remedy = (
        "Start the server anew, with the weights, revision, quantisation and kernels that the run began with; or start a "
        "new run directory for the others."
    )
    if count:
        text += f". In doubt are {count:,} rows since the last good canary: {rows}"
        remedy += (
            " `hsjournal retry RUN_DIR --doubted` puts the rows in doubt back, and `resume` makes them again; `resume` "
            "alone keeps them."
        )
    return ServerError(text, remedy=remedy)
