"""The incident's way to capture, for comparison only: ``.cpu()`` and ``torch.save`` inside the forward pass.

A plugin of the servers that scripts/gpu-check starts, never of the package. Each finished request becomes
``ROOT/req_N/{aux_0.pt,…,final.pt,meta.json,done}``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from hsjournal.capture.sglang_layers import choose_layers, default_layers
from hsjournal.capture.sglang_rows import our_slices, split_tensors

ROOT_VARIABLE = "GPU_CHECK_INCIDENT_ROOT"
PLUGIN = "incident = gpu.incident:register"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"


def register() -> None:
    """Hook the same places as the package's plugin does."""
    root = os.environ.get(ROOT_VARIABLE)
    if not root or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import (  # type: ignore[import-not-found,unused-ignore]
        HookRegistry,
        HookType,
    )

    incident = Incident(Path(root))
    HookRegistry.register(f"{_RUNNER}.load_model", incident.after_load, HookType.AFTER)
    HookRegistry.register(f"{_RUNNER}.forward", incident.around_forward, HookType.AROUND)
    target = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
    HookRegistry.register(target, incident.before_logits, HookType.BEFORE)


class Incident:
    """One process's capture, all of it on the scheduler's thread."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._batch: Any = None
        self._layers: tuple[int, ...] = ()
        self._hidden_size = 0
        self._dtype: Any = None
        self._parts: dict[str, list[list[Any]]] = {}
        self._count = 0

    def after_load(self, _result: Any, runner: Any, *_args: Any, **_kwargs: Any) -> None:
        """Choose the layers, as the package's plugin does by default."""
        config = runner.model_config
        self._layers = choose_layers(runner.model, default_layers(int(config.num_hidden_layers))).layers
        self._hidden_size, self._dtype = int(config.hidden_size), runner.dtype

    def around_forward(self, forward: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep the batch that has the request ids."""
        self._batch = args[0] if args else kwargs.get("forward_batch")
        try:
            return forward(runner, *args, **kwargs)
        finally:
            self._batch = None

    def before_logits(self, *args: Any, **kwargs: Any) -> None:
        """Copy to the host and save, while the GPU waits."""
        import torch

        batch, self._batch = self._batch, None
        slices = our_slices(batch) if batch is not None else []
        if not slices:
            return
        hidden = args[2] if len(args) > 2 else kwargs.get("hidden_states")
        aux = args[5] if len(args) > 5 else kwargs.get("aux_hidden_states")
        rows = max(item.start + item.length for item in slices)
        tensors = split_tensors(hidden, aux, len(self._layers), self._hidden_size, self._dtype, rows)
        for item in slices:
            parts = self._parts.setdefault(str(item.rid), [])
            parts.append([tensor[item.start : item.start + item.length].cpu() for tensor in tensors])
            if item.prefix + item.length < item.rid.tokens:
                continue
            del self._parts[str(item.rid)]
            folder = self._root / f"req_{self._count}"
            self._count += 1
            folder.mkdir()
            for index in range(len(tensors)):
                name = f"aux_{index}" if index < len(self._layers) else "final"
                whole = torch.cat([part[index] for part in parts]) if len(parts) > 1 else parts[0][index]
                torch.save(whole, folder / f"{name}.pt")
            (folder / "meta.json").write_text(json.dumps({"num_tokens": item.rid.tokens}))
            (folder / "done").touch()
