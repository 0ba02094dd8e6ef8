"""Hand-over protocol v2: names, request ids and ``meta.json``, for the server's side and the client's alike.

A request's states travel as one directory ``ROOT/<rid>/``, published by a single rename of ``ROOT/.tmp-<rid>/``::

    aux_0.bin … aux_{k-1}.bin   raw little-endian rows [num_tokens, hidden_size], output of capture_layers[i]
    final.bin                   the same shape: the final hidden state
    meta.json                   a :class:`Meta`
    done                        empty

or, when the capture failed, ``ROOT/<rid>/`` with ``error`` (a :class:`CaptureFailure` as JSON) and no ``done``.

Standard library only: this module is imported inside stock SGLang servers.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

SCHEMA = "hsjournal/v2"
TMP_PREFIX = ".tmp-"
META, DONE, ERROR, FINAL = "meta.json", "done", "error", "final"
MAX_META_BYTES = 1 << 20
MAX_ERROR_BYTES = 1 << 14
MAX_TOKENS = 1 << 24
MAX_HIDDEN = 1 << 17
MAX_LAYERS = 64
ITEM_SIZE: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
BOOT_ID_VARIABLE = "HSJOURNAL_BOOT_ID"
"""Made once by the server's launcher and inherited by every process of it."""

_RUN = r"[0-9a-z]{4,16}"
_NUMBER = r"0|[1-9][0-9]{0,11}"
_RID = re.compile(
    rf"hsj-(?P<run>{_RUN})-(?:(?P<row>{_NUMBER})-(?P<attempt>{_NUMBER})|p(?P<probe>{_NUMBER}))-(?P<tokens>{_NUMBER})"
)


class FailureReason(StrEnum):
    """Why a server published ``error`` instead of states."""

    NO_ROOM = "no_room"  # the hand-over root was full for longer than the server may wait
    PREFIX_HIT = "prefix_hit"  # part of the prompt came from the prefix cache: its states were never computed
    UNSUPPORTED = "unsupported"  # this server can't capture (model class, parallelism, versions)
    MISMATCH = "mismatch"  # the tokens that were run are not those that the request id promises
    ABORTED = "aborted"  # the request was aborted before its prefill ended
    INTERNAL = "internal"  # anything else; the detail says what


@dataclass(frozen=True, slots=True)
class RequestId:
    """A request id of ours: ``hsj-<run>-<row>-<attempt>-<tokens>``, or ``hsj-<run>-p<n>-<tokens>`` for a probe.

    Probes and canaries are never rows: ``row`` and ``attempt`` are None for them, ``probe`` is None for samples.
    """

    run: str
    tokens: int
    row: int | None = None
    attempt: int | None = None
    probe: int | None = None

    @classmethod
    def sample(cls, run: str, row: int, attempt: int, tokens: int) -> RequestId:
        """The id of attempt ``attempt`` at sample ``row``."""
        return cls(run=run, tokens=tokens, row=row, attempt=attempt)

    @classmethod
    def for_probe(cls, run: str, probe: int, tokens: int) -> RequestId:
        """The id of a probe or canary."""
        return cls(run=run, tokens=tokens, probe=probe)

    @classmethod
    def parse(cls, text: str) -> RequestId | None:
        """The request id that ``text`` is, or None when it is not one of ours."""
        match = _RID.fullmatch(text)
        if match is None:
            return None
        row, attempt, probe = match["row"], match["attempt"], match["probe"]
        return cls(
            run=match["run"],
            tokens=int(match["tokens"]),
            row=None if row is None else int(row),
            attempt=None if attempt is None else int(attempt),
            probe=None if probe is None else int(probe),
        )

    def __post_init__(self) -> None:
        if _RID.fullmatch(str(self)) is None:
            raise ValueError(f"not a request id of hsjournal: {str(self)!r}")

    def __str__(self) -> str:
        middle = f"p{self.probe}" if self.row is None else f"{self.row}-{self.attempt}"
        return f"hsj-{self.run}-{middle}-{self.tokens}"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a dump: raw rows ``[num_tokens, hidden_size]`` in ``file``, ``nbytes`` long."""

    name: str
    file: str
    shape: tuple[int, int]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Meta:
    """``meta.json`` of a complete dump.

    Args:
        rid: the request id; also the directory's name.
        num_tokens: rows of every tensor.
        hidden_size: columns of every tensor.
        dtype: ``bfloat16``, ``float16`` or ``float32``.
        capture_layers: 0-based; ``aux_i`` is the output of layer ``capture_layers[i]``.
        final_norm: ``post`` when ``final`` is the state after the model's final norm, ``pre`` when before it.
        token_ids_sha256: SHA-256 over the little-endian int64 ids that were really run.
        chunks: token offset of each prefill chunk, ascending from 0.
        boot_id: of the server's life that wrote it.
        engine: ``embedded`` or ``sglang``.
        versions: of the engine and its libraries, by name.
        tensors: ``aux_0`` … ``aux_{k-1}``, ``final``, in this order.
    """

    rid: str
    num_tokens: int
    hidden_size: int
    dtype: str
    capture_layers: tuple[int, ...]
    final_norm: str
    token_ids_sha256: str
    chunks: tuple[int, ...]
    boot_id: str
    engine: str
    versions: Mapping[str, str]
    tensors: tuple[TensorEntry, ...]

    def to_json(self) -> bytes:
        """``meta.json``'s bytes."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, ensure_ascii=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Meta:
        """Parse and check ``meta.json``; nothing in it is trusted.

        Raises:
            ValueError: naming the first value that is missing, of a wrong type or out of bounds, or that
                contradicts another.
        """
        raw = strict_json(data)
        _expect(raw.get("schema") == SCHEMA, f"schema is {raw.get('schema')!r}, not {SCHEMA!r}")
        known = {"schema", *cls.__dataclass_fields__}
        _expect(set(raw) == known, f"keys {sorted(set(raw) ^ known)} are missing or unknown")
        num_tokens = _integer(raw, "num_tokens", 1, MAX_TOKENS)
        hidden_size = _integer(raw, "hidden_size", 1, MAX_HIDDEN)
        dtype = _text(raw, "dtype")
        _expect(dtype in ITEM_SIZE, f"dtype {dtype!r} is none of {sorted(ITEM_SIZE)}")
        layers = _integers(raw, "capture_layers", MAX_LAYERS)
        _expect(sorted(set(layers)) == list(layers), "capture_layers are not ascending")
        chunks = _integers(raw, "chunks", MAX_TOKENS)
        _expect(bool(chunks) and chunks[0] == 0 and sorted(set(chunks)) == list(chunks), "chunks do not ascend from 0")
        _expect(chunks[-1] < num_tokens, "a chunk starts past the last token")
        final_norm = _text(raw, "final_norm")
        _expect(final_norm in ("post", "pre"), f"final_norm {final_norm!r} is neither 'post' nor 'pre'")
        digest = _text(raw, "token_ids_sha256")
        _expect(re.fullmatch(r"[0-9a-f]{64}", digest) is not None, "token_ids_sha256 is not a SHA-256")
        versions = raw["versions"]
        _expect(
            isinstance(versions, dict) and all(isinstance(v, str) for v in versions.values()),
            "versions is not a table of text",
        )
        tensors = tensor_entries(num_tokens, hidden_size, dtype, len(layers))
        given = raw["tensors"]
        _expect(
            given == [asdict(t) | {"shape": list(t.shape)} for t in tensors],
            "tensors do not follow from num_tokens, hidden_size, dtype and capture_layers",
        )
        return cls(
            rid=_text(raw, "rid"),
            num_tokens=num_tokens,
            hidden_size=hidden_size,
            dtype=dtype,
            capture_layers=layers,
            final_norm=final_norm,
            token_ids_sha256=digest,
            chunks=chunks,
            boot_id=_text(raw, "boot_id"),
            engine=_text(raw, "engine"),
            versions=versions,
            tensors=tensors,
        )


@dataclass(frozen=True, slots=True)
class CaptureFailure:
    """The content of ``error``."""

    rid: str
    reason: FailureReason
    detail: str
    boot_id: str

    def to_json(self) -> bytes:
        """``error``'s bytes; a detail too long for a reader's bound is cut."""
        body = {"schema": SCHEMA, **asdict(self), "detail": self.detail[:2000]}
        return json.dumps(body, ensure_ascii=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> CaptureFailure:
        """Parse and check ``error``.

        Raises:
            ValueError: when it is not one.
        """
        raw = strict_json(data)
        _expect(raw.get("schema") == SCHEMA, f"schema is {raw.get('schema')!r}, not {SCHEMA!r}")
        return cls(
            rid=_text(raw, "rid"),
            reason=FailureReason(_text(raw, "reason")),
            detail=_text(raw, "detail", 2000),
            boot_id=_text(raw, "boot_id"),
        )


def tensor_entries(num_tokens: int, hidden_size: int, dtype: str, num_aux: int) -> tuple[TensorEntry, ...]:
    """The tensors of a dump, in their fixed order: aux ascending, then final."""
    nbytes = num_tokens * hidden_size * ITEM_SIZE[dtype]
    names = [*(f"aux_{i}" for i in range(num_aux)), FINAL]
    return tuple(TensorEntry(name, f"{name}.bin", (num_tokens, hidden_size), nbytes) for name in names)


def payload_bytes(num_tokens: int, hidden_size: int, dtype: str, num_aux: int) -> int:
    """Bytes of all tensors of a sample: what must be reserved in the hand-over root before it is sent."""
    return num_tokens * hidden_size * ITEM_SIZE[dtype] * (num_aux + 1)


def token_ids_sha256(ids: Iterable[int]) -> str:
    """SHA-256 over token ids as little-endian int64."""
    packed = ids if isinstance(ids, array) and ids.typecode == "q" else array("q", ids)
    if sys.byteorder == "big":
        packed = array("q", packed)
        packed.byteswap()
    return hashlib.sha256(packed.tobytes()).hexdigest()


def strict_json(data: bytes) -> dict[str, Any]:
    """Parse one JSON object; NaN, infinities and repeated keys are refused.

    Raises:
        ValueError: when it is not one strict JSON object in UTF-8.
    """

    def no_constant(text: str) -> Any:
        raise ValueError(f"{text} is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a key stands twice")
        return table

    try:
        value = json.loads(data.decode("utf-8"), parse_constant=no_constant, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _expect(isinstance(value, dict), "not a JSON object")
    return dict(value)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _integer(raw: Mapping[str, Any], key: str, low: int, high: int) -> int:
    value = raw.get(key)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{key} is {value!r}, not an integer from {low} to {high}")
    return value


def _integers(raw: Mapping[str, Any], key: str, most: int) -> tuple[int, ...]:
    value = raw.get(key)
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"{key} is not a list of at most {most} integers")
    for item in value:
        if type(item) is not int or not 0 <= item <= MAX_TOKENS:
            raise ValueError(f"{key} holds {item!r}, not an integer from 0 to {MAX_TOKENS}")
    return tuple(value)


def _text(raw: Mapping[str, Any], key: str, most: int = 200) -> str:
    value = raw.get(key)
    if not isinstance(value, str) or len(value) > most:
        raise ValueError(f"{key} is not text of at most {most} characters")
    return value
