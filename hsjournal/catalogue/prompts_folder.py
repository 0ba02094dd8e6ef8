"""The prompts as a Hugging Face dataset folder, as speculators wants them beside its hidden states.

Its ArrowDataset takes item ``i`` of the dataset and the file ``hs_<i>``: so item ``i`` is row ``i`` of the input here,
and a row without a file (refused, failed, or not there yet) is one that the trainer has to leave out
(``on_missing="skip"``). A refused row has no tokens. Written as ``Dataset.save_to_disk`` does: an Arrow stream and two
JSON files, of which ``state.json`` comes last.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hsjournal.catalogue.needs import need_pyarrow
from hsjournal.catalogue.whole import replaced
from hsjournal.journal.reading import BATCH, MaskedPrompt, Reading
from hsjournal.sink.sample import expand_mask

ARROW, INFO, STATE = "data-00000-of-00001.arrow", "dataset_info.json", "state.json"
_TENSORS = ["input_ids", "loss_mask", "seq_len"]


def write_prompts(journal: Reading, folder: Path, run_id: str, fence: Callable[[], None] = lambda: None) -> bool:
    """Write the folder's three files, unless it holds this run's prompts already; whether it did.

    The columns are ``input_ids`` and ``loss_mask`` (int64), ``seq_len`` (int64) and ``id`` (text); the first three come
    as torch tensors.

    Raises:
        UsageError: when pyarrow is not installed.
        FencedError: from ``fence``.
        OSError: as the storage answers.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise need_pyarrow("format speculators") from None
    fingerprint = hashlib.sha256(f"hsjournal {run_id}".encode()).hexdigest()[:16]
    if _fingerprint_of(folder) == fingerprint:
        return False
    features = {name: _list_of_int64() for name in _TENSORS[:2]} | {"seq_len": _value("int64"), "id": _value("string")}
    numbers = pa.list_(pa.int64())
    schema = pa.schema(
        [("input_ids", numbers), ("loss_mask", numbers), ("seq_len", pa.int64()), ("id", pa.string())],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    with replaced(folder / ARROW, fence) as file, pa.ipc.new_stream(file, schema) as stream:
        for batch in _batches(_every_row(journal)):
            stream.write_batch(pa.record_batch(_columns(pa, batch), schema=schema))
    with replaced(folder / INFO, fence) as file:
        file.write(
            json.dumps(
                {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
            ).encode()
        )
    state = {
        "_data_files": [{"filename": ARROW}],
        "_fingerprint": fingerprint,
        "_format_columns": _TENSORS,
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    with replaced(folder / STATE, fence) as file:
        file.write(json.dumps(state).encode())
    return True


def _columns(pa: Any, batch: list[MaskedPrompt]) -> list[Any]:
    ids = [np.frombuffer(p.input_ids, dtype="<u4").astype(np.int64) for p in batch]
    masks = [expand_mask(p.loss_mask) for p in batch]
    return [
        pa.array(ids, type=pa.list_(pa.int64())),
        pa.array(masks, type=pa.list_(pa.int64())),
        pa.array([len(one) for one in ids], type=pa.int64()),
        pa.array([p.sample_id.encode("utf-8", "replace").decode() for p in batch], type=pa.string()),
    ]


def _every_row(journal: Reading) -> Iterator[MaskedPrompt]:
    """One for each row of the input: item ``i`` must be row ``i``."""
    number = 0
    for prompt in journal.masked_prompts():
        for gap in range(number, prompt.row):
            yield MaskedPrompt(gap, "", "", b"", b"")
        yield prompt
        number = prompt.row + 1


def _batches(rows: Iterator[MaskedPrompt]) -> Iterator[list[MaskedPrompt]]:
    while batch := list(itertools.islice(rows, BATCH)):
        yield batch


def _fingerprint_of(folder: Path) -> str | None:
    try:
        state = json.loads((folder / STATE).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return state.get("_fingerprint") if isinstance(state, dict) else None


def _value(dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, "_type": "Value"}


def _list_of_int64() -> dict[str, Any]:
    return {"feature": _value("int64"), "_type": "List"}
