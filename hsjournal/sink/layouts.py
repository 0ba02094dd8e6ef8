"""What a trainer's file format is, as data: which keys, holding what, in which shape, container and path.

All formats are token-aligned and unshifted: the trainer shifts. Those there are stand in :mod:`hsjournal.sink.formats`.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from hsjournal.dump.protocol import ITEM_SIZE

if TYPE_CHECKING:
    from hsjournal.sink.sample import OutputSample


class Content(StrEnum):
    """What a key holds."""

    AUX = "aux"  # the aux layers, side by side per token
    FINAL = "final"  # the final state
    ALL = "all"  # the aux layers, then the final state, side by side per token
    IDS = "ids"  # token ids, int64
    MASK = "mask"  # loss mask, int64 zeros and ones
    MASK_RUNS = "mask_runs"  # loss mask as text: run lengths joined by commas
    SAMPLE_ID = "sample_id"  # text
    NORM = "norm"  # "post" or "pre": what the final state is
    IS_PRENORM = "is_prenorm"  # a flag: whether the final state is that before the last norm
    LAYERS = "layers"  # the aux layers as text, 0-based outputs joined by commas
    PROVENANCE = "provenance"  # a table of text, integers and lists: see OutputSample.provenance


class Container(StrEnum):
    """How keys become one file."""

    TORCH = "torch"  # the zip of torch.save
    SAFETENSORS = "safetensors"


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a format. In ``shape``, ``N`` is tokens, ``H`` hidden size, ``k`` aux layers; ``kH`` their product."""

    name: str
    content: Content
    shape: tuple[str | int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tensor:
    """A key of one sample that is a tensor.

    ``content`` is the tensor's bytes, or which of the dump's tensors (by index) are interleaved in it row by row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    content: bytes | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A key of one sample that is text or a flag; None stands for provenance, known when the rows have been read."""

    name: str
    value: str | bool | None


@dataclass(frozen=True, slots=True)
class Layout:
    """A format.

    Args:
        name: as in ``--format``.
        path: of a sample's file below the output folder, made of ``{row}``, ``{start}`` and ``{end}`` (of the
            group of ``group`` rows that it lies in), ``{id}`` (see :func:`file_name`) and ``{sha1}`` (of the sample id).
        group: most files in one folder.
        container: of the file.
        final_norm: what the trainer wants the final state to be; None where both are allowed.
        keys: in the order of the file.
        drops_final: whether the final state is checked and then left out, since the trainer does not read it.
    """

    name: str
    path: str
    group: int
    container: Container
    final_norm: str | None
    keys: tuple[Key, ...]
    drops_final: bool = False

    def __post_init__(self) -> None:
        states = sorted(k.content for k in self.keys if k.content in (Content.AUX, Content.FINAL, Content.ALL))
        due = ([Content.AUX],) if self.drops_final else ([Content.ALL], [Content.AUX, Content.FINAL])
        if states not in due:
            raise ValueError(f"format {self.name!r} must hold every state once, not {states}")

    def path_of(self, row: int, sample_id: str) -> str:
        """Where the sample's file lies, relative to the output folder."""
        start = row - row % self.group
        sha1 = hashlib.sha1(sample_id.encode("utf-8", "surrogatepass"), usedforsecurity=False).hexdigest()
        return self.path.format(row=row, start=start, end=start + self.group, sha1=sha1, id=file_name(sample_id))

    def entries(self, sample: OutputSample) -> tuple[Tensor | Value, ...]:
        """The keys of one sample's file, shapes resolved."""
        return tuple(_entry(key, sample) for key in self.keys)


def _entry(key: Key, sample: OutputSample) -> Tensor | Value:
    n, h, k = sample.num_tokens, sample.hidden_size, sample.num_aux
    sizes = {"N": n, "H": h, "kH": k * h, "k": k, "k+1": k + 1, "(k+1)H": (k + 1) * h}
    shape = tuple(s if isinstance(s, int) else sizes[s] for s in key.shape)

    def states(*sources: int) -> Tensor:
        return Tensor(key.name, sample.dtype, shape, n * h * ITEM_SIZE[sample.dtype] * len(sources), sources)

    match key.content:
        case Content.AUX:
            return states(*range(k))
        case Content.FINAL:
            return states(k)
        case Content.ALL:
            return states(*range(k + 1))
        case Content.IDS:
            return Tensor(key.name, "int64", shape, 8 * n, sample.ids_int64().tobytes())
        case Content.MASK:
            return Tensor(key.name, "int64", shape, 8 * n, sample.mask_int64().tobytes())
        case _:
            return Value(key.name, _value(key.content, sample))


def _value(content: Content, sample: OutputSample) -> str | bool | None:
    match content:
        case Content.MASK_RUNS:
            return sample.mask_text()
        case Content.SAMPLE_ID:
            return sample.sample_id
        case Content.NORM:
            return sample.final_norm
        case Content.IS_PRENORM:
            return sample.final_norm == "pre"
        case Content.LAYERS:
            return ",".join(map(str, sample.capture_layers))
        case _:
            return None  # provenance


def file_name(sample_id: str) -> str:
    """A sample id as part of a file's name: as it is where it may stand in one, else tidied and told apart by its SHA-1.

    Two ids never share a name, not even where capital letters are no others (SMB, HFS+, casefolded ext4): a tidied one, or one
    with a capital, has a ``~``, which none that stays as it is may hold, and the digest of the id as it was.
    """
    if _PLAIN_NAME.fullmatch(sample_id):
        return sample_id
    sha1 = hashlib.sha1(sample_id.encode("utf-8", "surrogatepass"), usedforsecurity=False).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '_', sample_id).lstrip('._')[:80]}~{sha1}"


_PLAIN_NAME = re.compile(r"[a-z0-9_-][a-z0-9._-]{0,120}")
