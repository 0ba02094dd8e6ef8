"""A plain transformers forward over token ids: packed, each sequence causal by itself, nothing captured, nothing written.

``forward_child.py MODEL IDS_JSON MAX_BATCH_TOKENS`` loads once, then answers each line of its input with seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoModelForCausalLM

from hsjournal.capture.embedded.attention import PACKED
from hsjournal.capture.embedded.batching import next_batch
from hsjournal.capture.embedded.start import _keep_memory


def main() -> None:
    """Serve until the input ends."""
    _keep_memory()  # the memory allocator is set as in the engine: it is no part of what is compared
    folder, ids, limit = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[3])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=PACKED).model
    model.eval()
    print(json.dumps({"threads": torch.get_num_threads()}), flush=True)
    for _line in sys.stdin:
        waiting = list(ids)
        begin = time.monotonic()
        while waiting:
            chosen = next_batch([len(one) for one in waiting], limit)
            batch = [waiting[index] for index in chosen]
            waiting = [one for index, one in enumerate(waiting) if index not in set(chosen)]
            lengths = tuple(len(one) for one in batch)
            flat = torch.tensor([token for one in batch for token in one])[None]
            positions = torch.cat([torch.arange(length) for length in lengths])[None]
            with torch.inference_mode():
                model(input_ids=flat, position_ids=positions, use_cache=False, hsjournal_lengths=lengths)
        print(json.dumps({"seconds": time.monotonic() - begin}), flush=True)


if __name__ == "__main__":
    main()
