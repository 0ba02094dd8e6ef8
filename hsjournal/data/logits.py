"""Do the stored states give the model's own next-token probabilities? And if not, what are they?

``python -m hsjournal.data.logits RUN_DIR --rows 1,2,3``: a child of ``hsjournal verify --logits``, since it loads the
model. Digests prove that a file holds what a server handed over; this proves that the server handed over the right
thing. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
import transformers

from hsjournal.data.finding import GAP_TOLERANCE, Fault, Found, alike, items_of, parser_of, tell
from hsjournal.data.hidden_states import HiddenStates
from hsjournal.data.suspects import Suspects, Truth, distance, log_probabilities
from hsjournal.errors import UsageError

STATE_TOLERANCE = 0.05
"""Of the median relative error of a row of states: bfloat16 against float32 makes 0.01, another layer 0.1 and more."""


def examine(data: HiddenStates, rows: Sequence[int], folder: Path) -> dict[str, Any]:
    """Hold the rows against the model in ``folder``.

    Returns:
        ``checked``, ``mean_gap`` and ``worst_gap`` (nats), ``faults`` (a list of :class:`Found`), ``dtype``, ``device``.

    Raises:
        UsageError: when the model can't be loaded, or the format holds no final state.
        DamageError: when a file is not as it was written: that is for plain ``verify``.
    """
    truth = Truth(*_load(folder, data.manifest.dtype))
    items = items_of(data, rows)
    suspects = Suspects(truth, items, data.manifest.capture_layers, lambda item: alike(data, item))
    gaps: list[float] = []
    faults: list[Found] = []
    for item in items:
        gap, found = _one(truth, suspects, item, data)
        gaps.append(gap)
        faults += found
    return {
        "checked": len(items),
        "mean_gap": sum(gaps) / len(gaps) if gaps else 0.0,
        "worst_gap": max(gaps, default=0.0),
        "faults": [asdict(fault) for fault in faults],
        "device": str(truth.device),
        "dtype": str(truth.dtype).removeprefix("torch."),
    }


def _one(truth: Truth, suspects: Suspects, item: dict[str, Any], data: HiddenStates) -> tuple[float, list[Found]]:
    m, states = data.manifest, truth.states(item["input_ids"])
    final = item["final"].to(truth.device, truth.dtype)
    normed = final if m.final_norm == "post" else truth.norm(final)
    rebuilt = log_probabilities(truth.head(normed), item["input_ids"])
    model = log_probabilities(states.logits, item["input_ids"])
    gap = float((rebuilt - model).abs().mean()) if len(rebuilt) else 0.0
    faults: list[Found] = []

    def add(name: str, verdict: tuple[str, str]) -> None:
        faults.append(Found(item["row"], item["id"], name, *verdict))

    for number, layer in enumerate(m.capture_layers):
        stored = item["aux"][:, number].to(truth.device, truth.dtype)
        nearest, off = states.nearest(stored)
        if nearest != layer or off > STATE_TOLERANCE:
            add(f"aux_{number}", _name_aux(suspects, item, number, layer, nearest, off))
    due = states.post if m.final_norm == "post" else states.pre
    if distance(final, due) > STATE_TOLERANCE or gap > GAP_TOLERANCE[m.dtype]:
        add("final", _name_final(truth, suspects, item, final, m.final_norm, gap))
    return gap, faults


def _name_aux(
    suspects: Suspects, item: dict[str, Any], number: int, layer: int, nearest: int, off: float
) -> tuple[str, str]:
    if off <= STATE_TOLERANCE:
        return Fault.SHIFTED_LAYER, f"it is the output of layer {nearest}, not of layer {layer}"
    owner = suspects.owner_of(item, f"aux_{number}")
    if owner is not None:
        return Fault.SWAPPED_SAMPLE, f"it is that of row {owner['row']} ({owner['id']})"
    return Fault.UNLIKE, f"nearest is the output of layer {nearest}, and that differs by {off:.1%}"


def _name_final(
    truth: Truth, suspects: Suspects, item: dict[str, Any], final: torch.Tensor, said: str, gap: float
) -> tuple[str, str]:
    states = truth.states(item["input_ids"])
    last = len(states.layers) - 1
    names = {
        "post": (states.post, "the state after the last norm"),
        "pre": (states.pre, "the state before the last norm"),
        "twice": (truth.norm(states.post), "the last norm was applied twice"),
    }
    for name, (state, words) in names.items():
        if name != said and distance(final, state) <= STATE_TOLERANCE:
            return Fault.WRONG_NORM, f"{words}, where the run says {said}-norm (off by {gap:.2f} nats a token)"
    for layer, output in enumerate(states.layers[:last]):
        for state in (output, truth.norm(output)):
            if distance(final, state) <= STATE_TOLERANCE:
                return Fault.SHIFTED_LAYER, f"it is made from the output of layer {layer}, not of the last, {last}"
    owner = suspects.owner_of(item, "final")
    if owner is not None:
        return Fault.SWAPPED_SAMPLE, f"it is that of row {owner['row']} ({owner['id']})"
    return Fault.UNLIKE, f"its log-probabilities are off by {gap:.2f} nats a token"


def _load(folder: Path, dtype: str) -> tuple[Any, torch.device, torch.dtype]:
    """The model: in the run's dtype on a GPU, else in float32."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind: torch.dtype = getattr(torch, dtype) if device.type == "cuda" else torch.float32
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=kind, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(
            f"the model {folder} can't be loaded: {reason}",
            remedy="Name its folder, with weights that transformers loads, by --model.",
        ) from None
    return model.eval().requires_grad_(requires_grad=False).to(device), device, kind


def main(arguments: Sequence[str]) -> int:
    """See the module; the exit code is 0 also when faults were found."""
    options = parser_of("hsjournal.data.logits").parse_args(arguments)
    return tell(options, examine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
