"""Train an EAGLE-3 draft head for a few steps by SpecForge's own code on files as they lie, and print the loss.

Reader, feature store, loader, collation, draft model, training model, strategy (loss) and optimizer are SpecForge's;
nothing of hsjournal's is imported. Runs in the trainers' environment (scripts/trainers-env), on the CPU with
TRITON_INTERPRET=1 and TORCHDYNAMO_DISABLE=1. The last line is one JSON object.

Usage: train_draft.py FEATURES MODEL VOCAB_MAPPING STEPS [MAX_LEN]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from specforge.algorithms.builtin import builtin_algorithm_registry
from specforge.algorithms.eagle3.model import OnlineEagle3Model
from specforge.modeling.auto import AutoDraftModel
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore
from transformers import LlamaConfig

TTT_LENGTH = 3
SEED = 7


def batches(features: str, max_len: int) -> Any:
    """One pass over the files, two samples a step."""
    (data,) = builtin_algorithm_registry().resolve("eagle3").providers.offline
    refs = data.build_reader(features, run_id="train", ttt_length=TTT_LENGTH, max_len=max_len).read()
    return FeatureDataLoader(
        LocalFeatureStore("train"),
        refs=refs,
        batch_size=2,
        drop_last=True,
        collate_fn=data.build_collator(),
        per_sample_transform=data.build_normalizer(max_len),
    )


def with_index(model: Path, folder: Path) -> Path:
    """The model's folder as SpecForge wants it: it looks its tensors up in an index, which small models lack."""
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    if not any(model.glob("*.index.json")):
        names = {"lm_head.weight": "model.safetensors", "model.embed_tokens.weight": "model.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def draft_of(target: Any, draft_vocab_size: int) -> LlamaConfig:
    """One layer of the target's own shape."""
    fields = (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "max_position_embeddings", "rms_norm_eps",
    )  # fmt: skip
    config = LlamaConfig(**{name: getattr(target, name) for name in fields}, num_hidden_layers=1, pad_token_id=0)
    config.architectures = ["LlamaForCausalLMEagle3"]
    config.draft_vocab_size = draft_vocab_size
    config.target_hidden_size = target.hidden_size
    return config


def main(features: str, model: str, mapping: str, steps: int, max_len: int) -> int:
    """Train; 0 when the loss fell."""
    torch.manual_seed(SEED)
    d2t = torch.load(mapping, weights_only=True)["d2t"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(with_index(Path(model).absolute(), Path(scratch)))
        head = TargetHead(folder)
        tied = head.config.tie_word_embeddings
        head.load_weights(folder, lm_head_key="model.embed_tokens.weight" if tied else "lm_head.weight")
        head.freeze_weights()
        draft = AutoDraftModel.from_config(draft_of(head.config, len(d2t)), attention_backend="sdpa")
        draft.load_vocab_mapping(mapping)
        draft.load_embedding(folder)
        draft.freeze_embedding()
    trained = OnlineEagle3Model(draft, length=TTT_LENGTH, attention_backend="sdpa").float()
    strategy = builtin_algorithm_registry().resolve("eagle3").providers.step.build(trained, target_head=head.float())
    optimizer = BF16Optimizer(trained, lr=1e-3, total_steps=steps, warmup_ratio=0.1)
    losses: list[float] = []
    began = time.monotonic()
    while len(losses) < steps:
        for batch in batches(features, max_len):
            output = strategy.forward_loss(batch)
            output.loss.backward()
            optimizer.step()
            losses.append(float(output.loss.detach()))
            if len(losses) == 1 or len(losses) % 5 == 0:
                right = float(output.metrics["acces"][0])
                print(f"step {len(losses):>3}  loss {losses[-1]:.3f}  next token right {right:.1%}", flush=True)
            if len(losses) == steps:
                break
    quarter = max(1, steps // 4)
    first, last = sum(losses[:quarter]) / quarter, sum(losses[-quarter:]) / quarter
    summary: dict[str, Any] = {"steps": steps, "first_quarter": round(first, 3), "last_quarter": round(last, 3)}
    summary |= {"seconds": round(time.monotonic() - began, 1), "losses": [round(loss, 4) for loss in losses]}
    print(json.dumps(summary))
    return 0 if last < first else 1


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    features, model, mapping, steps, *rest = sys.argv[1:]
    sys.exit(main(features, model, mapping, int(steps), int(rest[0]) if rest else 96))
