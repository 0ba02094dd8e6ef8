"""What plain transformers says of the same token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Reference:
    """A model run one sequence at a time, in float32, without any of our code."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def before_norm(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The residual stream at the entry of the model's last norm, ``[N, H]``."""
        entered: list[torch.Tensor] = []
        hook = self._model.model.norm.register_forward_pre_hook(lambda _module, inputs: entered.append(inputs[0][0]))
        with torch.no_grad():
            self._model(input_ids[None])
        hook.remove()
        return entered[0]

    def states(self, input_ids: torch.Tensor, layers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of ``layers`` side by side ``[N, k*H]``, and the post-norm last state ``[N, H]``."""
        with torch.no_grad():
            hidden = self._model(input_ids[None], output_hidden_states=True).hidden_states
        return torch.cat([hidden[k + 1][0] for k in layers], dim=-1), hidden[-1][0]


def worst_row_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest of per-row ``|difference| / |reference|``; NaN anywhere gives infinity."""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    error = (got.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1)
    return float("inf") if bool(error.isnan().any()) else float(error.max())


def check_outputs(out_dir: Path, reference: Reference, tolerance: float = 1e-4) -> dict[int, dict[str, Any]]:
    """Hold every SpecForge file below ``out_dir`` against plain transformers; the files by row."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(out_dir.rglob("*.ckpt")):
        data = torch.load(path, weights_only=True)
        said = data["hsjournal"]
        aux, final = reference.states(data["input_ids"], said["capture_layers"])
        assert worst_row_error(data["aux_hidden_state"][0], aux) <= tolerance, path
        assert worst_row_error(data["hidden_state"][0], final) <= tolerance, path
        assert said["row"] not in found, f"two files for row {said['row']}"
        found[said["row"]] = data
    return found
