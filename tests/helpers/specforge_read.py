"""Read an output folder with SpecForge's own reader, store, normaliser and loader; one JSON line per sample.

Runs in SpecForge's environment (scripts/trainers-env) and imports nothing of hsjournal's.
Usage: specforge_read.py FOLDER MAX_LEN
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any
from urllib.parse import urlparse

import torch
from specforge.algorithms.common.collation import concatenate_features
from specforge.algorithms.eagle3.data import build_offline_normalizer, build_offline_reader
from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    kind = str(tensor.dtype).removeprefix("torch.")
    return {"shape": list(tensor.shape), "dtype": kind, "sha256": hashlib.sha256(raw).hexdigest()}


def main(folder: str, max_len: int) -> None:
    os.environ["SPECFORGE_VALIDATE_OFFLINE_FEATURES"] = "1"  # open every file at once, as a careful user would
    torch.set_num_threads(1)
    reader = build_offline_reader(folder, run_id="check", ttt_length=7, max_len=max_len)
    refs = reader.read()
    paths = {ref.sample_id: urlparse(ref.feature_store_uri).path for ref in refs}
    loader = FeatureDataLoader(
        LocalFeatureStore("check"),
        refs=refs,
        batch_size=1,
        drop_last=False,
        collate_fn=concatenate_features,
        per_sample_transform=build_offline_normalizer(max_len),
    )
    for batch in loader:
        (sample_id,) = batch.sample_ids
        line = {name: describe(tensor) for name, tensor in batch.tensors.items()}
        print(json.dumps({"path": os.path.relpath(paths[sample_id], folder), "tensors": line}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
