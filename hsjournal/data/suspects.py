"""What the model itself computes for a sample, and whose states an unknown one's are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from hsjournal.errors import UsageError

_KEPT = 4
_NEAR = 0.05


@dataclass(frozen=True, slots=True)
class States:
    """One forward pass of transformers, alone and unpacked; ``N`` tokens, hidden size ``H``.

    Args:
        layers: output of each layer, ``[N, H]``.
        pre: at the entry of the last norm, ``[N, H]``.
        post: behind it, ``[N, H]``.
        logits: ``[N, vocabulary]``, straight from the output embeddings.
    """

    layers: tuple[torch.Tensor, ...]
    pre: torch.Tensor
    post: torch.Tensor
    logits: torch.Tensor

    def nearest(self, state: torch.Tensor) -> tuple[int, float]:
        """The layer whose output is most like ``state``, and how far off it is."""
        off = [distance(state, layer) for layer in self.layers]
        best = min(range(len(off)), key=off.__getitem__)
        return best, off[best]


class Truth:
    """A model, asked for its states; the last few answers are kept.

    Args:
        model: a causal language model of transformers.
        device: that it is on.
        dtype: that it computes in.

    Raises:
        UsageError: when it has no decoder layers and final norm where they are looked for.
    """

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._model = model
        self._decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
        named = dict(self._decoder.named_children())
        lists = [part for part in named.values() if isinstance(part, torch.nn.ModuleList)]
        norm = next((named[n] for n in ("norm", "final_layernorm", "final_layer_norm", "ln_f") if n in named), None)
        if len(lists) != 1 or norm is None or model.get_output_embeddings() is None:
            raise UsageError(
                f"{type(model).__name__} has no decoder layers and final norm where they are looked for",
                remedy="This architecture can't be checked by its logits; plain `verify` checks the files.",
            )
        self._layers, self._norm = lists[0], norm
        self._kept: dict[bytes, States] = {}

    def states(self, input_ids: torch.Tensor) -> States:
        """What the model computes for these ids, ``[N]``."""
        key = input_ids.numpy().tobytes()
        if key not in self._kept:
            while len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = self._run(input_ids)
        return self._kept[key]

    def norm(self, state: torch.Tensor) -> torch.Tensor:
        """The model's last norm."""
        with torch.no_grad():
            normed: torch.Tensor = self._norm(state)
        return normed

    def head(self, state: torch.Tensor) -> torch.Tensor:
        """The model's output embeddings: logits of a state after the last norm."""
        with torch.no_grad():
            logits: torch.Tensor = self._model.get_output_embeddings()(state)
        return logits

    def _run(self, input_ids: torch.Tensor) -> States:
        seen: dict[int, torch.Tensor] = {}

        def keep(key: int) -> Any:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                seen[key] = (output[0] if isinstance(output, tuple) else output)[0].clone()

            return hook

        hooks = [layer.register_forward_hook(keep(number)) for number, layer in enumerate(self._layers)]
        hooks.append(self._norm.register_forward_hook(keep(len(self._layers))))
        try:
            with torch.no_grad():
                self._decoder(input_ids=input_ids[None].to(self.device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        count = len(self._layers)
        post = seen[count]
        return States(tuple(seen[number] for number in range(count)), seen[count - 1], post, self.head(post))


class Suspects:
    """Finds the row that some states belong to: one that is looked at, or another of the same length near it.

    Args:
        truth: the model.
        items: samples as :class:`~hsjournal.data.HiddenStates` gives them.
        capture_layers: of the run.
        others: further prompts (``row``, ``id``, ``input_ids``) that an item's states may belong to, the likeliest first.
    """

    def __init__(
        self,
        truth: Truth,
        items: Sequence[dict[str, Any]],
        capture_layers: Sequence[int],
        others: Callable[[dict[str, Any]], Iterable[dict[str, Any]]] = lambda _item: (),
    ) -> None:
        self._truth, self._items, self._layers, self._others = truth, items, tuple(capture_layers), others
        self._owners: dict[int, dict[str, dict[str, Any]]] = {}

    def owner_of(self, item: dict[str, Any], name: str) -> dict[str, Any] | None:
        """Whose state ``name`` (``aux_0`` …, ``final``) of ``item`` is, if another row's; None when nobody's here."""
        if item["row"] not in self._owners:
            self._owners[item["row"]] = self._search(item)
        return self._owners[item["row"]].get(name)

    def _search(self, item: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """The owner of each state that has one; the model runs each candidate once."""
        stored = {f"aux_{number}": item["aux"][:, number] for number in range(len(self._layers))}
        stored["final"] = item["final"]
        found: dict[str, dict[str, Any]] = {}
        for other in chain(self._items, self._others(item)):
            if other["row"] == item["row"]:
                continue
            states = self._truth.states(other["input_ids"])
            for name, state in stored.items():
                number = None if name == "final" else int(name.removeprefix("aux_"))
                due = (states.post, states.pre) if number is None else (states.layers[self._layers[number]],)
                if name not in found and any(self._is(state, one) for one in due):
                    found[name] = other
            if len(found) == len(stored):
                break
        return found

    def _is(self, stored: torch.Tensor, due: torch.Tensor) -> bool:
        count = min(len(stored), len(due))
        return distance(stored[:count].to(self._truth.device, self._truth.dtype), due[:count]) <= _NEAR


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Median over rows of the relative difference: one row that a router sends elsewhere is no fault."""
    a, b = a.float(), b.float()
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-30)).median())


def log_probabilities(logits: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Of each token that follows, ``[N - 1]``."""
    following = input_ids[1:].to(logits.device)
    return logits[:-1].float().log_softmax(dim=-1).gather(1, following[:, None])[:, 0]
