"""Dumps of protocol v2, fabricated for tests: random, finite, and broken on demand."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsjournal.dump.protocol import (
    DONE,
    ERROR,
    META,
    TMP_PREFIX,
    CaptureFailure,
    Meta,
    RequestId,
    tensor_entries,
    token_ids_sha256,
)

BOOT_ID = "boot-0"
BITS: Mapping[str, type[np.unsignedinteger[Any]]] = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
"""numpy has no bfloat16: states are compared as raw bits of this type."""


@dataclass(frozen=True, slots=True)
class FabricatedDump:
    """A dump that was written to ``path``.

    ``arrays`` holds each tensor's bits ``[num_tokens, hidden_size]`` by name, in the protocol's order.
    """

    path: Path
    meta: Meta
    arrays: dict[str, npt.NDArray[np.unsignedinteger[Any]]]

    @property
    def aux_interleaved(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """The aux layers side by side per token, ``[num_tokens, k * hidden_size]``."""
        return np.concatenate([a for name, a in self.arrays.items() if name != "final"], axis=1)

    @property
    def final(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """The final state, ``[num_tokens, hidden_size]``."""
        return self.arrays["final"]


def finite_bits(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Random bits whose top exponent bit is clear: every value is finite and below 2 in size."""
    kind = BITS[dtype]
    top = kind(1 << (np.dtype(kind).itemsize * 8 - 2))
    bits: npt.NDArray[np.unsignedinteger[Any]]
    bits = np.frombuffer(rng.bytes(shape[0] * shape[1] * np.dtype(kind).itemsize), dtype=kind).reshape(shape) & ~top
    return bits


def write_dump(
    root: Path,
    rid: RequestId | str,
    ids: Sequence[int],
    num_aux: int = 3,
    hidden: int = 64,
    dtype: str = "bfloat16",
    seed: int = 0,
    boot_id: str = BOOT_ID,
    *,
    edit: Callable[[Path], None] | None = None,
    publish: bool = True,
    **overrides: Any,
) -> FabricatedDump:
    """Write a dump as the server would: into ``.tmp-<rid>``, then one rename.

    Args:
        root: the hand-over root.
        rid: the request id; also the directory's name.
        ids: token ids; as many rows are written.
        num_aux: aux layers beside the final state.
        hidden: columns.
        dtype: ``bfloat16``, ``float16`` or ``float32``.
        seed: of the random states.
        boot_id: life of the server.
        edit: called with the unpublished directory, to break it.
        publish: False leaves ``.tmp-<rid>``.
        overrides: fields of :class:`Meta` that are to say something else than the truth; ``num_tokens``,
            ``hidden_size``, ``dtype`` and ``capture_layers`` change the tensors with them, so that the dump is
            consistent in itself.
    """
    rows = overrides.pop("num_tokens", len(ids))
    hidden = overrides.pop("hidden_size", hidden)
    layers = tuple(overrides.pop("capture_layers", range(1, 1 + 2 * num_aux, 2)))
    meta = Meta(
        rid=str(rid),
        num_tokens=rows,
        hidden_size=hidden,
        dtype=dtype,
        capture_layers=layers,
        final_norm="post",
        token_ids_sha256=token_ids_sha256(ids),
        chunks=(0,),
        boot_id=boot_id,
        engine="embedded",
        versions={"torch": "2.13.0"},
        tensors=tensor_entries(rows, hidden, dtype, len(layers)),
    )
    meta = replace(meta, **overrides)
    rng = np.random.default_rng(seed)
    arrays = {t.name: finite_bits(rng, t.shape, dtype) for t in meta.tensors}
    tmp = root / f"{TMP_PREFIX}{rid}"
    tmp.mkdir(mode=0o700)
    for tensor in meta.tensors:
        arrays[tensor.name].tofile(tmp / tensor.file)
    (tmp / META).write_bytes(meta.to_json())
    (tmp / DONE).touch()
    if edit is not None:
        edit(tmp)
    path = tmp
    if publish:
        path = root / str(rid)
        os.rename(tmp, path)
    return FabricatedDump(path, meta, arrays)


def write_failure(root: Path, rid: RequestId | str, failure: CaptureFailure) -> Path:
    """Publish ``error`` for ``rid``."""
    tmp = root / f"{TMP_PREFIX}{rid}"
    tmp.mkdir(mode=0o700)
    (tmp / ERROR).write_bytes(failure.to_json())
    path = root / str(rid)
    os.rename(tmp, path)
    return path


def random_ids(num_tokens: int, seed: int = 0, vocabulary: int = 32_000) -> array[int]:
    """Token ids as the journal keeps them (uint32)."""
    return array("I", np.random.default_rng(seed).integers(0, vocabulary, num_tokens, dtype=np.uint32).tobytes())
