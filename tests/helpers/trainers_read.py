"""Read a folder of hidden states with a trainer's own loader, and keep what a training step would be given.

Runs in the trainers' environment (scripts/trainers-env) and imports nothing of hsjournal's.
Usage: trainers_read.py MAX_LEN FORMAT=FOLDER…; beside each FOLDER, FOLDER.read gets a torch.save of a list of dictionaries.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Samples = list[dict[str, Any]]


def specforge(folder: Path, max_len: int, strategy: str) -> Samples:
    """The strategy's own reader, feature store, loader, collation and normaliser."""
    from specforge.algorithms.builtin import builtin_algorithm_registry
    from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    os.environ["SPECFORGE_VALIDATE_OFFLINE_FEATURES"] = "1"
    (data,) = builtin_algorithm_registry().resolve(strategy).providers.offline
    reader = data.build_reader(str(folder), run_id="check", ttt_length=7, max_len=max_len)
    loader = FeatureDataLoader(
        LocalFeatureStore("check"),
        refs=reader.read(),
        strategy=strategy,
        batch_size=1,
        drop_last=False,
        collate_fn=data.build_collator(),
        per_sample_transform=data.build_normalizer(max_len),
    )
    return [dict(batch.tensors) for batch in loader]


def speculators(folder: Path, max_len: int) -> Samples:
    """``ArrowDataset``; rows without a file come as what it calls unavailable, and are left out."""
    from speculators.train.data import ArrowDataset

    data = ArrowDataset(max_len=max_len, datapath=folder, on_missing="skip", hidden_states_dtype=torch.float32)
    items = [data[index] for index in range(len(data))]
    assert data.approx_lengths == [len(row) for row in data.data.with_format(None)["input_ids"]]
    return [item for item in items if isinstance(item, dict)]


def modelopt(folder: Path, max_len: int) -> Samples:
    """``OfflineSupervisedDataset`` with the stored loss mask, and its collator."""
    from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset

    data = OfflineSupervisedDataset(sorted(map(str, folder.glob("*.pt"))), answer_only_loss=True)
    items = [data[index] for index in range(len(data))]
    assert EagleOfflineDataCollator(max_len)(items)["input_ids"].shape == (len(items), max_len)
    return items


def angelslim(folder: Path, _max_len: int) -> Samples:
    """``OfflineEagle3Dataset``. The wheel can't be imported whole (a module is missing in it): only its data modules are."""
    base = next(Path(place) for place in sys.path if (Path(place) / "angelslim").is_dir())
    train = "angelslim.compressor.speculative.train"
    for name in (
        "angelslim", "angelslim.utils", "angelslim.compressor", "angelslim.compressor.speculative", train,
        f"{train}.data", f"{train}.data.dataset_builder",
    ):  # fmt: skip
        package = types.ModuleType(name)
        package.__path__ = [str(base.joinpath(*name.split(".")))]
        sys.modules[name] = package
    sys.modules["angelslim.utils"].rank0_print = lambda *_: None  # type: ignore[attr-defined]
    module = importlib.import_module(f"{train}.data.dataset_builder.offline_dataset_builder")
    data = module.OfflineEagle3Dataset(str(folder))
    items = [data[index] for index in range(len(data))]
    module.DataCollatorWithPadding()([{k: v for k, v in item.items() if isinstance(v, torch.Tensor)} for item in items])
    return items


LOADERS: dict[str, Callable[[Path, int], Samples]] = {
    "specforge": lambda folder, max_len: specforge(folder, max_len, "eagle3"),
    "specforge-dflash": lambda folder, max_len: specforge(folder, max_len, "dflash"),
    "specforge-dspark": lambda folder, max_len: specforge(folder, max_len, "dspark"),
    "speculators": speculators,
    "modelopt": modelopt,
    "angelslim": angelslim,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for task in sys.argv[2:]:
        name, _, place = task.partition("=")
        read = LOADERS[name](Path(place), int(sys.argv[1]))
        torch.save([{k: v for k, v in item.items() if isinstance(v, torch.Tensor)} for item in read], f"{place}.read")
