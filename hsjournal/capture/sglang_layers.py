"""Which layers a stock SGLang model hands out, in our terms: always "output of layer k", 0-based.

SGLang knows boundaries: boundary ``b`` is what enters layer ``b``, so the output of layer ``k`` is boundary ``k + 1``.
The models' own method ``set_eagle3_layers_to_capture(ids)`` turns ids into boundaries by rules that differ: most add
1; deepseek_v2 and glm4_moe_lite add 1 only when the first id is 1; gpt_oss does not when the largest id is the number of
layers. So ids are tried, the boundaries that the model took are read back, and nothing else counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hsjournal.errors import UsageError

# Modules of sglang.srt.models whose capture was read, in 0.5.17 and 0.5.23 (where both have them), to hand out the
# residual stream that enters a layer: nothing missing, and safe from what the layer does to it afterwards.
FAMILIES = frozenset({
    "apertus", "bailing_moe", "deepseek_v2", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm5_next", "gpt_oss", "llama",
    "longcat_flash", "minimax_m2", "minimax_m3", "minimax_m3_vl", "qwen2", "qwen2_5_vl", "qwen2_moe", "qwen3", "qwen3_5",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl",
})  # fmt: skip
# These hand the ids to their ``language_model``, whose own family decides.
WRAPPERS = frozenset({"kimi_k25", "mllama4"})
REFUSED = {
    "gemma3_causal": "it hands out a layer's last branch without the residual stream",
    "gemma3_mm": "it hands out a layer's last branch without the residual stream",
    "mindspore": "its model runs outside torch",
}
SINCE = {
    "gemma4_causal": ((0, 5, 23), "before SGLang 0.5.23 the layer overwrites the state that was handed out"),
    "gemma4_mm": ((0, 5, 23), "before SGLang 0.5.23 the layer overwrites the state that was handed out"),
}
# Their layers look at a flag of their own, not at the list.
_FLAG_READERS = frozenset({"minimax_m3", "qwen2_moe", "qwen3_5", "qwen3_5_text", "qwen3_moe", "qwen3_next"})
_METHOD = "set_eagle3_layers_to_capture"
_LIST, _FLAG = "layers_to_capture", "_is_layer_to_capture"


class LayersError(UsageError):
    """The chosen layers can't be captured on this model; the message is for the user."""


@dataclass(frozen=True, slots=True)
class ChosenLayers:
    """What was arranged with the model.

    Args:
        layers: the outputs that are captured, ascending, 0-based.
        ids: what was passed to the model's method to get them; a draft model's configuration names the same.
        inner: the module that runs the layers (it has ``layers`` and ``norm``).
    """

    layers: tuple[int, ...]
    ids: tuple[int, ...]
    inner: Any


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The outputs of layers 1, L//2-1 and L-4, which other tools call inputs 2, L//2, L-3.

    Raises:
        LayersError: when they are not three different layers.
    """
    layers = (1, num_layers // 2 - 1, num_layers - 4)
    if sorted(set(layers)) != list(layers):
        raise LayersError(
            f"A model of {num_layers} layers has no three different default layers",
            remedy="Name the layers in HSJOURNAL_CAPTURE_LAYERS.",
        )
    return layers


def check_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layers, sorted.

    Raises:
        LayersError: when one is repeated, or is none whose output SGLang hands out.
    """
    chosen = tuple(sorted(layers))
    if not chosen or len(set(chosen)) != len(chosen):
        raise LayersError(f"The layers {list(layers)} are none, or one stands twice", remedy="Name each layer once.")
    if chosen[0] < 0 or chosen[-1] >= num_layers - 1:
        raise LayersError(
            f"The layers {list(chosen)} do not all lie in 0 to {num_layers - 2} (the model has {num_layers} layers, "
            "and the last one's output can't be captured as an aux layer)",
            remedy="Choose others.",
        )
    return chosen


def candidate_ids(layers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Ids to try, the likeliest first: for models that add 1, for those that do not, for those that look at the first."""
    shifted = tuple(k + 1 for k in layers)
    yield tuple(layers)
    yield shifted
    if len(shifted) > 1:
        yield (*shifted[1:], shifted[0])


def family_of(model: Any) -> str:
    """The module of ``sglang.srt.models`` that defines the model's method, or the class's full name if it is another's.

    Raises:
        LayersError: when there is no such method.
    """
    method = getattr(type(model), _METHOD, None)
    if method is None:
        raise LayersError(f"{type(model).__name__} has no {_METHOD}: SGLang can't hand out its layers' states")
    package, _, module = str(method.__module__).rpartition(".")
    return module if package == "sglang.srt.models" else f"{method.__module__}.{type(model).__name__}"


def check_family(model: Any, version: tuple[int, ...]) -> None:
    """Raises :class:`LayersError` unless the model's capture is known to hand out what we promise."""
    family = family_of(model)
    name = type(model).__name__
    if family in WRAPPERS:
        inner = getattr(model, "language_model", None)
        if inner is None:
            raise LayersError(f"{name} was loaded without its language model")
        check_family(inner, version)
    elif family in REFUSED:
        raise LayersError(f"{name} can't be captured: {REFUSED[family]}")
    elif family in SINCE:
        first, reason = SINCE[family]
        if version < first:
            raise LayersError(f"{name} can't be captured: {reason}")
    elif family not in FAMILIES:
        raise LayersError(f"{name} is not a model whose capture hsjournal knows")


def choose_layers(model: Any, layers: Sequence[int]) -> ChosenLayers:
    """Make the model hand out the outputs of ``layers`` (ascending), and check that it took them.

    Raises:
        LayersError: when no ids make it do so.
    """
    wanted = [k + 1 for k in layers]
    inner = _inner_model(model)
    took: list[int] = []
    for ids in candidate_ids(layers):
        _clear(inner)
        try:
            getattr(model, _METHOD)(list(ids))
        except (IndexError, ValueError):
            continue  # an id that this model's rule turns into a layer that it has not
        took = sorted(getattr(inner, _LIST) or ())
        if took == wanted and _flags_agree(inner, wanted):
            return ChosenLayers(tuple(layers), ids, inner)
    _clear(inner)
    raise LayersError(
        f"{type(model).__name__} did not take the layers {list(layers)} (it would hand out the outputs of {[b - 1 for b in took]})"
    )


def _inner_model(model: Any) -> Any:
    """The module that holds the list of boundaries; wrappers lie around it."""
    found = model
    for _ in range(4):
        if hasattr(found, _LIST) and hasattr(found, "layers"):
            return found
        outer = found
        found = next((m for name in ("language_model", "model") if (m := getattr(outer, name, None)) is not None), None)
        if found is None:
            break
    raise LayersError(f"{type(model).__name__} keeps no list of layers to capture where hsjournal looks for it")


def _clear(inner: Any) -> None:
    setattr(inner, _LIST, [])
    for layer in inner.layers:
        if getattr(layer, _FLAG, False):
            setattr(layer, _FLAG, False)


def _flags_agree(inner: Any, wanted: Sequence[int]) -> bool:
    """Whether the layers' own flags say what the list says; set here where a version of SGLang forgets it."""
    flagged = [i for i, layer in enumerate(inner.layers) if getattr(layer, _FLAG, False)]
    reads_flags = any(c.__module__.rpartition(".")[2] in _FLAG_READERS for c in type(inner).__mro__)
    if reads_flags and not flagged:
        for i in wanted:
            setattr(inner.layers[i], _FLAG, True)
        return True
    return flagged == list(wanted) if reads_flags else not flagged
