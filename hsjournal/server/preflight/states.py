"""The states of a dump in memory, and how far two captures of one prompt are from each other.

Two captures are close, never equal: another batch is another order of additions, and where a mixture of experts stands
at a near tie a row goes to another expert and is another row then. So what counts is the median row and the share of
rows that are far off; in dense models, which have no such ties, the worst row too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsjournal.dump.reader import Dump

FLIPPED = 0.3
"""Relative error from which a row counts as another row: a flipped expert moves it by more, rounding by far less."""


@dataclass(frozen=True, slots=True)
class States:
    """All tensors of one dump, aux ascending, then final: raw values ``[tokens, hidden]`` as the server wrote them."""

    dtype: str
    tensors: tuple[npt.NDArray[Any], ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """How far apart two captures of one tensor are, over its rows.

    Args:
        name: ``aux_0`` … ``final``.
        median_cosine: of the rows' cosines.
        median_error: of the rows' ‖a - b‖ / ‖b‖.
        worst_error: the largest of them.
        flipped_share: rows that differ by more than :data:`FLIPPED`.
    """

    name: str
    median_cosine: float
    median_error: float
    worst_error: float
    flipped_share: float


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What two captures may differ by; ``worst_error`` is infinite for mixtures of experts.

    ``median_cosine`` is the least, the others are the most.
    """

    median_cosine: float
    median_error: float
    worst_error: float
    flipped_share: float

    def exceeded_by(self, differences: Sequence[Difference]) -> list[str]:
        """In words, each tensor that is outside; empty when all is well. A value that is no number is outside."""
        found = []
        for d in differences:
            words = []
            if not (d.median_cosine >= self.median_cosine and d.median_error <= self.median_error):
                words.append(f"its median row by {d.median_error:.2%} (cosine {d.median_cosine:.4f})")
            if not d.worst_error <= self.worst_error:
                words.append(f"its worst row by {d.worst_error:.2%}")
            if not d.flipped_share <= self.flipped_share:
                words.append(f"{d.flipped_share:.1%} of its rows by more than {FLIPPED:.0%}")
            if words:
                found.append(f"{d.name} differs, {' and '.join(words)}")
        return found

    def to_json(self) -> dict[str, float]:
        """For an event or a file; infinity is no JSON, so it becomes 1e9."""
        return {name: min(value, 1e9) for name, value in asdict(self).items()}


_FLOOR = {
    "float32": Tolerance(median_cosine=0.99999, median_error=0.003, worst_error=0.05, flipped_share=0.0),
    "bfloat16": Tolerance(median_cosine=0.995, median_error=0.06, worst_error=0.3, flipped_share=0.0),
    "float16": Tolerance(median_cosine=0.998, median_error=0.03, worst_error=0.3, flipped_share=0.0),
}
"""What is always allowed: rounding in other orders, over some sixty layers. Partial sums, other layers or other
requests' rows are off by half a row's length or more."""
_CEILING = Tolerance(median_cosine=0.98, median_error=0.2, worst_error=0.6, flipped_share=0.3)
"""What calibration never goes beyond, whatever was measured."""
_MOE_FLIPPED = 0.1
_MARGIN = 3.0


def tolerance_for(dtype: str, *, has_experts: bool, measured: Sequence[Difference] = ()) -> Tolerance:
    """What captures of one prompt may differ by, calibrated by some that were made for it.

    Args:
        dtype: of the states.
        has_experts: whether the model is a mixture of experts.
        measured: differences between repeats at the start; three times as much is allowed, within bounds.
    """
    floor = _FLOOR[dtype]
    ceiling = _CEILING if dtype != "float32" else Tolerance(0.9995, 0.03, 0.3, 0.3)

    def most(name: str, base: float) -> float:
        seen = max((getattr(d, name) for d in measured), default=0.0)
        return float(min(max(base, _MARGIN * seen), getattr(ceiling, name)))

    off = max((1.0 - d.median_cosine for d in measured), default=0.0)
    return Tolerance(
        median_cosine=max(min(floor.median_cosine, 1.0 - _MARGIN * off), ceiling.median_cosine),
        median_error=most("median_error", floor.median_error),
        worst_error=float("inf") if has_experts else most("worst_error", floor.worst_error),
        flipped_share=most("flipped_share", _MOE_FLIPPED if has_experts else floor.flipped_share),
    )


def brief(outside: Sequence[str]) -> str:
    """The first of what :meth:`Tolerance.exceeded_by` found in full, the others by name."""
    first, *rest = outside
    return f"{first}, and so do {', '.join(text.split()[0] for text in rest)}" if rest else first


def read_states(dump: Dump) -> States:
    """The values of an open dump, whole.

    Raises:
        OSError: when they can't be read, or end too early.
    """
    kind = "<u2" if dump.meta.dtype == "bfloat16" else "<f2" if dump.meta.dtype == "float16" else "<f4"
    tensors = []
    for tensor, fd in zip(dump.meta.tensors, dump.fds, strict=True):
        data = os.pread(fd, tensor.nbytes, 0)
        if len(data) != tensor.nbytes:
            raise OSError(f"{tensor.file} ends after {len(data):,} of {tensor.nbytes:,} bytes")
        tensors.append(np.frombuffer(data, dtype=kind).reshape(tensor.shape))
    return States(dump.meta.dtype, tuple(tensors))


def differences(one: States, other: States) -> tuple[Difference, ...]:
    """How far ``one`` is from ``other``, tensor by tensor.

    Raises:
        ValueError: when they have not the same shapes.
    """
    found = []
    for number, (a, b) in enumerate(zip(one.tensors, other.tensors, strict=True)):
        if a.shape != b.shape:
            raise ValueError(f"shapes {a.shape} and {b.shape}")
        name = "final" if number == len(one.tensors) - 1 else f"aux_{number}"
        found.append(_difference(name, _numbers(a, one.dtype), _numbers(b, other.dtype)))
    return tuple(found)


def _difference(name: str, a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> Difference:
    with np.errstate(all="ignore"):
        length_a, length_b = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
        apart = np.linalg.norm(a - b, axis=1)
        error = np.where(length_b > 0, apart / length_b, np.where(apart > 0, np.inf, 0.0))
        both = length_a * length_b
        cosine = np.where(both > 0, (a * b).sum(axis=1) / both, np.where(apart > 0, 0.0, 1.0))
    error = np.nan_to_num(error, nan=np.inf)
    return Difference(
        name=name,
        median_cosine=float(np.median(np.nan_to_num(cosine, nan=-1.0))),
        median_error=float(np.median(error)),
        worst_error=float(error.max()),
        flipped_share=float((error > FLIPPED).mean()),
    )


def _numbers(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
