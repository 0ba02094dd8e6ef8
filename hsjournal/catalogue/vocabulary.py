"""The draft model's smaller vocabulary, from the journal's own token counts: no file is opened for it.

As SpecForge and AngelSlim read it (``vocab_mapping.pt``: ``d2t``, int64 ``[draft]``, what to add to a draft id to get
the target's; ``t2d``, bool ``[target]``, whether the draft knows a target id) and as speculators does (the same two as
``.npy``). The most frequent tokens among those that count for the loss are taken, of equally frequent ones the lower
ids, and where there are too few the lowest ids that are left: speculators' own rule
(``speculators/train/vocab_mapping.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hsjournal.catalogue.whole import replaced
from hsjournal.errors import UsageError
from hsjournal.journal.reading import Reading
from hsjournal.sink import torch_zip
from hsjournal.sink.layouts import Tensor
from hsjournal.sink.pieces import Rows
from hsjournal.sink.sample import expand_mask
from hsjournal.states import State

FOLDER = "vocab_mapping"
FILES = (f"{FOLDER}/vocab_mapping.pt", f"{FOLDER}/d2t.npy", f"{FOLDER}/t2d.npy")


@dataclass(frozen=True, slots=True)
class Mapping:
    """A vocabulary mapping.

    Args:
        d2t: int64 ``[draft]``.
        t2d: bool ``[target]``.
        coverage: share of the tokens that count for the loss which the draft knows; 1.0 when there are none.
    """

    d2t: npt.NDArray[np.int64]
    t2d: npt.NDArray[np.bool_]
    coverage: float


def count_tokens(journal: Reading, vocab_size: int) -> npt.NDArray[np.int64]:
    """How often each token id counts for the loss, over all rows that have or may still get a file; ``[vocab_size]``.

    Raises:
        UsageError: when a token id lies outside the vocabulary.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for prompt in journal.masked_prompts():
        if prompt.state in (State.FAILED, State.SKIPPED):
            continue
        ids = np.frombuffer(prompt.input_ids, dtype="<u4")[expand_mask(prompt.loss_mask).astype(bool)]
        if len(ids) and int(ids.max()) >= vocab_size:
            raise UsageError(
                f"row {prompt.row} holds token id {int(ids.max())}, and the target's vocabulary has {vocab_size}",
                remedy="Give the model's own size with --vocab-size.",
            )
        counts += np.bincount(ids, minlength=vocab_size)
    return counts


def choose(counts: npt.NDArray[np.int64], draft_size: int) -> Mapping:
    """The ``draft_size`` most frequent tokens.

    Raises:
        UsageError: when the target has fewer.
    """
    if not 0 < draft_size <= len(counts):
        raise UsageError(
            f"a draft vocabulary of {draft_size:,} can't be chosen from {len(counts):,} tokens",
            remedy="Give a smaller number with --draft-vocab-size.",
        )
    by_frequency = np.lexsort((np.arange(len(counts)), -counts))[:draft_size]
    chosen = np.sort(by_frequency).astype(np.int64)
    t2d = np.zeros(len(counts), dtype=np.bool_)
    t2d[chosen] = True
    total = int(counts.sum())
    return Mapping(chosen - np.arange(draft_size), t2d, int(counts[chosen].sum()) / total if total else 1.0)


def write_mapping(mapping: Mapping, folder: Path, fence: Callable[[], None] = lambda: None) -> None:
    """Write the mapping below ``folder``, in the forms that trainers read.

    Raises:
        FencedError: from ``fence``.
        OSError: as the storage answers.
    """
    entries = (
        Tensor("d2t", "int64", mapping.d2t.shape, mapping.d2t.nbytes, mapping.d2t.astype("<i8").tobytes()),
        Tensor("t2d", "bool", mapping.t2d.shape, mapping.t2d.nbytes, mapping.t2d.tobytes()),
    )
    with replaced(folder / FILES[0], fence) as file:
        for piece in torch_zip.compose(entries, dict):
            if not isinstance(piece, Rows):
                file.write(piece)
    for name, array in zip(FILES[1:], (mapping.d2t, mapping.t2d), strict=True):
        with replaced(folder / name, fence) as file:
            np.save(file, array)
