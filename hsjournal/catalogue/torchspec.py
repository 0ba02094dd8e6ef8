"""What TorchSpec's OfflineDataset wants beside its samples: ``dataset.json`` and ``manifest.jsonl``.

It reads the manifest at its start and refuses a line whose file is not there; so the manifest is written from the
journal, after the files and, when some are released, before they go.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from hsjournal.catalogue.index import Entry
from hsjournal.catalogue.whole import replaced

DATASET, MANIFEST = "dataset.json", "manifest.jsonl"
VERSION = 1
"""Of its layout, as the reader checks it."""


def write_manifest(
    found: Iterable[Entry], folder: Path, final_norm: str, fence: Callable[[], None] = lambda: None
) -> None:
    """Write both files anew; every sample is in the split ``train``.

    Raises:
        FencedError: from ``fence``.
        OSError: as the storage answers.
    """
    with replaced(folder / MANIFEST, fence) as file:
        for entry in found:
            line = {"split": "train", "data_id": entry.id, "file": entry.file}
            file.write(json.dumps(line).encode() + b"\n")
    about = {"version": VERSION, "last_hidden_states_prenorm": final_norm == "pre"}
    with replaced(folder / DATASET, fence) as file:
        file.write(json.dumps(about, indent=2).encode() + b"\n")
