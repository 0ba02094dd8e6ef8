"""What is wrong with stored states, in the words of both ways to find it: the model itself, and a server's probabilities."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hsjournal.data.hidden_states import HiddenStates
from hsjournal.errors import HsjournalError, UsageError
from hsjournal.journal.reading import JournalReader

GAP_TOLERANCE = {"float32": 0.01, "bfloat16": 0.1, "float16": 0.05}
"""Nats by which the rebuilt log-probability of the token that follows may differ, in the mean over a sample."""
PARTNERS = 32
"""Rows that states which are nobody's here are held against."""


class Fault(StrEnum):
    """What is wrong with a sample's states. The value is shown to the user."""

    SHIFTED_LAYER = "shifted_layer"  # the output of another layer than the run says
    SWAPPED_SAMPLE = "swapped_sample"  # another row's states
    WRONG_NORM = "wrong_norm"  # before the last norm instead of after it, or the other way round, or normed twice
    UNLIKE = "unlike"  # none of this: another model, other weights, or noise


@dataclass(frozen=True, slots=True)
class Found:
    """One faulty tensor. ``state`` is ``aux_0`` … or ``final``."""

    row: int
    sample_id: str
    state: str
    kind: str
    detail: str


def items_of(data: HiddenStates, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Those of the rows that have files.

    Raises:
        UsageError: when the format holds no final state.
        DamageError: when a file is not as it was written.
    """
    places = {entry.row: index for index, entry in enumerate(data.index)}
    items = [data[places[row]] for row in rows if row in places]
    if items and "final" not in items[0]:
        raise UsageError(f"format {data.manifest.format} holds no final state", remedy="Use plain `verify`.")
    return items


def alike(data: HiddenStates, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Prompts of the same length, the nearest rows first: dumps of other lengths are refused when they are taken."""
    with JournalReader(data.paths.journal) as journal:
        found = journal.prompts_of_length(len(item["input_ids"]), item["row"], PARTNERS)
    for prompt in found:
        ids = torch.from_numpy(np.frombuffer(prompt.input_ids, dtype="<u4").astype(np.int64))
        yield {"row": prompt.row, "id": prompt.sample_id, "input_ids": ids}


def parser_of(module: str) -> argparse.ArgumentParser:
    """The command line that both children share."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--model", default="")
    return parser


def tell(options: argparse.Namespace, examine: Callable[[HiddenStates, Sequence[int], Path], dict[str, Any]]) -> int:
    """Print what was found, or why nothing can be, as one line of JSON."""
    try:
        data = HiddenStates(options.run_dir, check=True)
        rows = [int(row) for row in options.rows.split(",")]
        answer: dict[str, Any] = examine(data, rows, Path(options.model or data.manifest.model))
    except HsjournalError as error:
        answer = {"error": error.message, "remedy": error.remedy, "exit_code": int(error.exit_code)}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0
