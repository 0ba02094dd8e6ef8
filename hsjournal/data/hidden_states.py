"""A run's verified samples as a torch Dataset, also while the run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from hsjournal.catalogue.index import Entry, entries
from hsjournal.config import Manifest, RunPaths
from hsjournal.data.stored import StoredFile
from hsjournal.errors import HsjournalError
from hsjournal.journal.reading import JournalReader
from hsjournal.sink.formats import layout_named
from hsjournal.sink.layouts import Content
from hsjournal.sink.sample import expand_mask
from hsjournal.sink.verify import Damage, DamageError


class ReleasedError(HsjournalError):
    """A sample's file was freed by ``hsjournal release`` since the dataset looked."""


class HiddenStates(Dataset[dict[str, Any]]):
    """The verified rows of a run directory whose files were not released, in the order of the input.

    An item is a dictionary, with ``N`` tokens, ``k`` aux layers and ``H`` hidden size:

    ``row``, ``id``
        place in the input (int), the sample's id (str)
    ``input_ids``, ``loss_mask``
        int64 ``[N]``, not shifted; the mask is 0 or 1
    ``aux``
        ``[N, k, H]`` in the run's dtype: outputs of ``capture_layers``, lowest first
    ``final``
        ``[N, H]`` in the run's dtype; after or before the model's last norm as ``final_norm`` says; not there in format
        ``specforge-dflash``, whose files hold none

    The states are views of the mapped file: nothing is read before it is used. Items may be written to; the file does
    not change. The object can be handed to DataLoader workers, forked or spawned; each opens the files by itself.
    Nothing in the run directory or the output is changed by it.

    The journal is read by :meth:`refresh` only, and when a file turns out to be gone.

    Args:
        run_dir: of the run, which may be going on.
        check: read each file whole when it is taken, and hold it against its digest in the journal.

    Raises:
        NoJournalError, SchemaError: when there is no run, or not one of this version.
    """

    def __init__(self, run_dir: Path | str, *, check: bool = False) -> None:
        self.paths = RunPaths.of(run_dir)
        self.manifest = Manifest.load(self.paths.manifest)
        self.check = check
        self._layout = layout_named(self.manifest.format)
        self._entries: tuple[Entry, ...] = ()
        self._masks: dict[int, bytes] = {}
        """By row, for formats whose files hold none: an item must not go to the journal, which is being written."""
        self.refresh()

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample.

        Raises:
            IndexError: when there is none.
            ReleasedError: when its file was freed meanwhile.
            DamageError: when the file is missing, or not what the journal says.
            OSError: as the storage answers.
        """
        entry = self._entries[index]
        try:
            file = StoredFile(Path(self.manifest.out_dir) / entry.file, self._layout, entry.bytes)
        except FileNotFoundError:
            raise self._gone(entry) from None
        if self.check:
            file.check(entry.xxh3_128)
        self._refuse_another(file, entry)
        return {"row": entry.row, "id": entry.id} | self._tensors(file.values(), entry)

    def refresh(self) -> int:
        """Look into the journal again; how many samples there are now.

        Indices change by it: a row that was verified meanwhile comes in at its place, one that was released goes. Call
        it between two passes, before the DataLoader starts its workers.
        """
        with JournalReader(self.paths.journal) as journal:
            self._entries = tuple(entries(journal))
            if not {Content.MASK, Content.MASK_RUNS} & {key.content for key in self._layout.keys}:
                rows = {entry.row for entry in self._entries}
                self._masks = {row: mask for row, mask in journal.all_masks() if row in rows}
        return len(self._entries)

    @property
    def index(self) -> tuple[Entry, ...]:
        """What the journal says of each sample: row, id, file, tokens, digest."""
        return self._entries

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each sample, int64 ``[len(self)]``, for samplers that batch by length."""
        return torch.tensor([entry.tokens for entry in self._entries], dtype=torch.int64)

    def _tensors(self, values: dict[Content, Any], entry: Entry) -> dict[str, torch.Tensor]:
        m, n = self.manifest, entry.tokens
        k, h = len(m.capture_layers), m.hidden_size
        found = {"input_ids": values[Content.IDS].view(n), "loss_mask": self._mask(values, entry)}
        if Content.ALL in values:
            states = values[Content.ALL].view(n, k + 1, h)
            return found | {"aux": states[:, :k], "final": states[:, k]}
        found["aux"] = values[Content.AUX].view(n, k, h)
        if Content.FINAL in values:
            found["final"] = values[Content.FINAL].view(n, h)
        return found

    def _mask(self, values: dict[Content, Any], entry: Entry) -> torch.Tensor:
        if Content.MASK in values:
            mask: torch.Tensor = values[Content.MASK].view(entry.tokens)
            return mask
        if Content.MASK_RUNS not in values:
            return torch.from_numpy(expand_mask(self._masks[entry.row]))
        try:
            packed = np.array([int(run) for run in values[Content.MASK_RUNS].split(",")], dtype="<u4").tobytes()
            mask = torch.from_numpy(expand_mask(packed))
        except (ValueError, OverflowError):
            mask = torch.empty(0)
        if len(mask) != entry.tokens:
            raise DamageError(Damage.WRONG_TENSOR, f"the loss mask in {entry.file} is not one of {entry.tokens} tokens")
        return mask

    def _refuse_another(self, file: StoredFile, entry: Entry) -> None:
        said = file.provenance()
        if said and (said.get("sample_id"), said.get("row")) != (entry.id, entry.row):
            text = f"{entry.file} says that it is row {said.get('row')}, not {entry.row}"
            raise DamageError(Damage.WRONG_CONTENT, text)

    def _gone(self, entry: Entry) -> HsjournalError:
        with JournalReader(self.paths.journal) as journal:
            row = next(iter(journal.rows_of([entry.row])), {})
        if row.get("released_at") is not None:
            return ReleasedError(f"row {entry.row} was released, its file is gone", remedy="Call refresh().")
        return DamageError(Damage.MISSING, f"{entry.file} is gone")


def pad(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A ``collate_fn``: samples of different lengths as one batch, padded at the end with zeros.

    Returns:
        ``input_ids``, ``loss_mask`` and ``attention_mask`` (1 where there is a token), int64 ``[B, N]``; ``aux``
        ``[B, N, k, H]`` and ``final`` ``[B, N, H]``, ``N`` of the longest; ``row`` int64 ``[B]`` and ``id``, a list.
    """
    tensors = {key for key, value in samples[0].items() if isinstance(value, torch.Tensor)}
    batch: dict[str, Any] = {
        key: torch.nn.utils.rnn.pad_sequence([sample[key] for sample in samples], batch_first=True) for key in tensors
    }
    ones = [torch.ones_like(sample["input_ids"]) for sample in samples]
    batch["attention_mask"] = torch.nn.utils.rnn.pad_sequence(ones, batch_first=True)
    batch["row"] = torch.tensor([sample["row"] for sample in samples], dtype=torch.int64)
    batch["id"] = [sample["id"] for sample in samples]
    return batch
