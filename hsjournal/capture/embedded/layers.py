"""Which layers are captured, always told as "output of layer k", 0-based."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsjournal.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_FEWEST_FOR_DEFAULT = 7


def parse_layers(text: str) -> tuple[int, ...]:
    """The list behind ``--layers 1,14,24``.

    Raises:
        UsageError: when it is not a list of whole numbers.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--layers {text} is not a list of layer numbers", remedy="Write it like --layers 1,14,24."
        ) from None


def choose_layers(asked: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """The layers to capture on a model of ``num_layers``; by default the outputs of layers 1, L//2-1 and L-4.

    Raises:
        UsageError: when a layer can't be captured, or when the model is too small for the default.
    """
    if asked is None:
        if num_layers < _FEWEST_FOR_DEFAULT:
            raise UsageError(
                f"The model has {num_layers} layers, too few for the default choice (from {_FEWEST_FOR_DEFAULT})",
                remedy=f"Choose layers from 0 to {num_layers - 2} with --layers.",
            )
        return (1, num_layers // 2 - 1, num_layers - 4)
    remedy = f"Layers are counted from 0; this model allows 0 to {num_layers - 2}, ascending, each once."
    if not asked:
        raise UsageError("--layers names no layer", remedy=remedy)
    for layer in asked:
        if layer < 0 or layer >= num_layers - 1:
            last = " (the last layer's output is what the final state is made from)" if layer == num_layers - 1 else ""
            raise UsageError(f"Layer {layer} of {num_layers} can't be captured{last}", remedy=remedy)
    if list(asked) != sorted(set(asked)):
        raise UsageError(f"--layers {','.join(map(str, asked))} does not ascend", remedy=remedy)
    return tuple(asked)
