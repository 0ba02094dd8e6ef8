"""What another tool left of one sample: found by its keys, described by where its rows lie; read without torch.

Known are the keys of FORMATS (SpecForge, TorchSpec, AngelSlim, ModelOpt, speculators) and a folder per sample with
``aux_0.pt … final.pt`` and its token ids. Nothing read is trusted, and no file is ever written to.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from hsjournal.dump.protocol import FINAL, ITEM_SIZE, MAX_META_BYTES, MAX_TOKENS
from hsjournal.errors import HsjournalError
from hsjournal.ops.containers import open_source, read_container
from hsjournal.sink.torch_read import StoredTensor

_IDS = ("input_ids", "token_ids")
_AUX = ("aux_hidden_state", "aux_hidden_states")
_FINAL = (
    "hidden_state", "last_hidden_states", "last_hidden_state", "target_hiddens", "target_hidden_states",
    "final_hidden_state", "final_hidden_states", "target_last_hidden_states", FINAL,
)  # fmt: skip
_ANY = "hidden_states"
_INTEGERS = {"int64": "<i8", "int32": "<i4"}


class Refused(StrEnum):
    """Why a file is not taken over. The value is shown to the user."""

    UNREADABLE = "unreadable"  # cut short, compressed, of an unknown kind, or the storage answers with an error
    NO_STATES = "no_states"  # a file of something else
    NO_IDS = "no_ids"  # states, but nothing says of which tokens
    WRONG_COUNT = "wrong_count"  # more or fewer rows than token ids
    WRONG_LAYERS = "wrong_layers"
    WRONG_DTYPE = "wrong_dtype"
    WRONG_HIDDEN = "wrong_hidden"
    WRONG_NORM = "wrong_norm"
    NOT_FINITE = "not_finite"
    DAMAGED = "damaged"  # not what the file itself says that it holds, or it reads back otherwise than it was written
    ROW_FAILED = "row_failed"  # its row used its strikes up
    UNDER_WAY = "under_way"  # its row is at the server, or its dump waits
    WRONG_PLACE = (
        "wrong_place"  # taken over in place, it does not lie under its row's name, or would have to be changed
    )


class ForeignError(HsjournalError):
    """A file can't be taken over.

    Args:
        reason: typed.
        detail: which key, row or value, for people.
    """

    def __init__(self, reason: Refused, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Stretch:
    """One stored tensor: in each of its rows, ``planes`` states of one token side by side."""

    file: Path
    offset: int
    planes: int
    name: str


@dataclass(frozen=True, slots=True)
class Foreign:
    """One sample as found.

    Args:
        path: the file, or the folder of its files.
        input_ids: of its tokens.
        dtype: of its states.
        hidden_size: columns of one state.
        stretches: where the states lie: aux ascending, then final.
        final_norm: ``post`` or ``pre``; None when the file does not say.
        said: provenance that an hsjournal put into the file, None when there is none.
        keys: everything the file holds, by name; empty for a folder.
    """

    path: Path
    input_ids: array[int]
    dtype: str
    hidden_size: int
    stretches: tuple[Stretch, ...]
    final_norm: str | None
    said: Mapping[str, Any] | None
    keys: Mapping[str, Any]

    @property
    def num_tokens(self) -> int:
        """Rows of every state."""
        return len(self.input_ids)

    @property
    def num_aux(self) -> int:
        """Aux layers beside the final state."""
        return sum(s.planes for s in self.stretches) - 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's state in one layer."""
        return self.hidden_size * ITEM_SIZE[self.dtype]


def read_foreign(path: Path) -> Foreign:
    """Look into one file, or one sample's folder.

    Raises:
        ForeignError: when it holds no sample.
    """
    try:
        return _from_folder(path) if path.is_dir() else _from_file(path)
    except OSError as error:
        raise ForeignError(Refused.UNREADABLE, error.strerror or str(error)) from None


def is_sample_folder(names: Sequence[str]) -> bool:
    """Whether files of these names are one sample, as the incident's server dumped it."""
    return "aux_0.pt" in names and f"{FINAL}.pt" in names


def _from_file(path: Path) -> Foreign:
    found = _open(path)
    if not isinstance(found, dict):
        raise ForeignError(Refused.NO_STATES, "it holds no table of tensors")
    aux, final = _roles(found)
    ids = next((found[key] for key in _IDS if key in found), None)
    if not aux and final is None:
        raise ForeignError(Refused.NO_STATES, f"its keys are {', '.join(sorted(found)[:8]) or 'none'}")
    if ids is None:
        raise ForeignError(Refused.NO_IDS, f"it has none of the keys {', '.join(_IDS)}")
    said = next((v for v in found.values() if isinstance(v, dict) and {"sample_id", "rid"} <= v.keys()), None)
    states = [(path, name, tensor) for name, tensor in (*aux, *([final] if final else []))]
    return _sample(path, _ids(path, ids), states, found, said, combined=final is None)


def _roles(found: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], tuple[str, Any] | None]:
    """The aux states and the final state by their keys; the final is None when the aux key holds it too."""
    aux: list[tuple[str, Any]] = []
    name = next((key for key in _AUX if key in found), None)
    final = next((key for key in _FINAL if key in found), None)
    if name is None and "aux_0" in found:
        aux = [(f"aux_{i}", found[f"aux_{i}"]) for i in range(len(found)) if f"aux_{i}" in found]
    elif name is None and _ANY in found:
        name = _ANY
    if final is None and (aux or name in _AUX) and _ANY in found:
        final = _ANY
    if name is not None:
        value = found[name]
        parts = value if isinstance(value, list | tuple) else [value]
        aux = [(name if len(parts) == 1 else f"{name}[{i}]", part) for i, part in enumerate(parts)]
    return aux, None if final is None else (final, found[final])


def _from_folder(folder: Path) -> Foreign:
    states = []
    for index in range(len(os.listdir(folder))):
        path = folder / f"aux_{index}.pt"
        if not path.exists():
            break
        states.append((path, path.name, _open(path)))
    final = folder / f"{FINAL}.pt"
    states.append((final, final.name, _open(final)))
    meta: Any = {}
    given = folder / "input_ids.pt"
    if given.exists():
        return _sample(folder, _ids(given, _open(given)), states, {}, None, combined=False)
    place = folder / "meta.json"
    if place.exists() and place.stat().st_size <= MAX_META_BYTES:
        try:
            meta = json.loads(place.read_bytes())
        except ValueError as error:
            raise ForeignError(Refused.UNREADABLE, f"meta.json is no JSON: {error}") from None
    ids = next((meta[key] for key in _IDS if isinstance(meta, dict) and key in meta), None)
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 32 for i in ids):
        raise ForeignError(
            Refused.NO_IDS, "neither input_ids.pt nor meta.json says which tokens these are the states of"
        )
    return _sample(folder, array("q", ids), states, {}, None, combined=False)


def _sample(
    path: Path,
    ids: array[int],
    states: Sequence[tuple[Path, str, Any]],
    found: Mapping[str, Any],
    said: Mapping[str, Any] | None,
    *,
    combined: bool,
) -> Foreign:
    for _, name, tensor in states:
        if not isinstance(tensor, StoredTensor) or tensor.dtype not in ITEM_SIZE:
            kind = tensor.dtype if isinstance(tensor, StoredTensor) else type(tensor).__name__
            raise ForeignError(Refused.WRONG_DTYPE, f"{name} is {kind}, no tensor of states")
    dtypes = {tensor.dtype for _, _, tensor in states}
    if len(dtypes) > 1:
        raise ForeignError(Refused.WRONG_DTYPE, f"its states are partly {' and partly '.join(sorted(dtypes))}")
    widths = [_width(name, tensor, len(ids)) for _, name, tensor in states]
    hidden = states[-1][2].shape[-1]
    for (_, name, tensor), width in zip(states, widths, strict=True):
        if hidden == 0 or width % hidden:
            raise ForeignError(
                Refused.WRONG_HIDDEN, f"{name} {list(tensor.shape)} is no whole number of states of {hidden:,}"
            )
    if combined and (len(states) > 1 or widths[-1] == hidden):
        raise ForeignError(Refused.WRONG_LAYERS, "nothing says which of its states is the final one")
    flag = next((v for k, v in found.items() if k.endswith("prenorm") and isinstance(v, bool)), None)
    norm = (said or {}).get("final_norm") or ("pre" if combined or flag else "post" if flag is False else None)
    stretches = (Stretch(file, t.offset, w // hidden, name) for (file, name, t), w in zip(states, widths, strict=True))
    return Foreign(path, ids, dtypes.pop(), hidden, tuple(stretches), norm, said, found)


def _width(name: str, tensor: StoredTensor, num_tokens: int) -> int:
    """Values of one token: of ``[N, W]``, ``[1, N, W]`` or ``[N, states, H]``."""
    shape = tensor.shape
    if len(shape) == 3 and shape[0] == 1 and shape[1] == num_tokens:
        shape = shape[1:]
    if len(shape) not in (2, 3) or shape[0] != num_tokens:
        text = f"{name} is {list(tensor.shape)} and there are {num_tokens:,} token ids"
        raise ForeignError(Refused.WRONG_COUNT, text)
    return math.prod(shape[1:])


def _ids(path: Path, tensor: Any) -> array[int]:
    """The token ids of a stored ``[N]`` or ``[1, N]``."""
    if not isinstance(tensor, StoredTensor) or tensor.dtype not in _INTEGERS:
        raise ForeignError(Refused.NO_IDS, "its token ids are no tensor of integers")
    count = math.prod(tensor.shape)
    if count == 0 or count > MAX_TOKENS or max(tensor.shape) != count:
        raise ForeignError(Refused.NO_IDS, f"its token ids are {list(tensor.shape)}")
    with open_source(path) as read_at:
        data = read_at(tensor.offset, tensor.nbytes)
    if len(data) != tensor.nbytes:
        raise ForeignError(Refused.UNREADABLE, f"{path.name} ends before its token ids do")
    return array("q", np.frombuffer(data, dtype=_INTEGERS[tensor.dtype]).astype("<i8").tobytes())


def _open(path: Path) -> Any:
    try:
        return read_container(path)
    except ValueError as error:
        raise ForeignError(Refused.UNREADABLE, f"{path.name}: {error}") from None
