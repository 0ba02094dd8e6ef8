"""The sample that a file is written for, and what is known of the file afterwards."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hsjournal.dump.protocol import ITEM_SIZE, RequestId, token_ids_sha256

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    Progress = Callable[[str, int], None]
    """Called with a phase and the bytes done in it, before each step that can block."""

SCHEMA = "hsjournal/output-1"
CONVERTED, AS_FOUND = "adopted-converted", "adopted-as-found"
"""What a row that was adopted has for the life of its server: its file was written anew, or taken as it was found."""


@dataclass(frozen=True, slots=True)
class OutputSample:
    """One row of the run, as its output file must show it.

    Args:
        row: 0-based position in the input.
        sample_id: the user's id.
        run_id: of the run.
        rid: the request whose dump is written.
        input_ids: token ids, ``array`` of type ``I`` or ``q``.
        loss_mask: run lengths as little-endian uint32, the first one of zeros (may be 0).
        hidden_size: columns of every state.
        dtype: ``bfloat16``, ``float16`` or ``float32``.
        capture_layers: 0-based; ``aux_i`` is the output of layer ``capture_layers[i]``.
        final_norm: ``post`` or ``pre``.
        model: name of the target model, for provenance only.

    Raises:
        ValueError: when ids, mask and request id contradict each other.
    """

    row: int
    sample_id: str
    run_id: str
    rid: RequestId
    input_ids: array[int]
    loss_mask: bytes
    hidden_size: int
    dtype: str
    capture_layers: tuple[int, ...]
    final_norm: str
    model: str = ""

    def __post_init__(self) -> None:
        if len(self.loss_mask) % 4 or int(self._runs().sum()) != self.num_tokens:
            raise ValueError(f"row {self.row}: the loss mask's run lengths don't add up to {self.num_tokens} tokens")
        if self.rid.tokens != self.num_tokens or self.num_tokens == 0:
            raise ValueError(f"row {self.row}: {self.rid} is not a request of {self.num_tokens} tokens")

    @property
    def num_tokens(self) -> int:
        """Rows of every state."""
        return len(self.input_ids)

    @property
    def num_aux(self) -> int:
        """Aux layers beside the final state."""
        return len(self.capture_layers)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's state in one layer."""
        return self.hidden_size * ITEM_SIZE[self.dtype]

    def ids_int64(self) -> npt.NDArray[np.int64]:
        """Token ids, ``[num_tokens]``."""
        return np.asarray(self.input_ids).astype("<i8")

    def mask_int64(self) -> npt.NDArray[np.int64]:
        """The loss mask as zeros and ones, ``[num_tokens]``."""
        return expand_mask(self.loss_mask)

    def mask_text(self) -> str:
        """The loss mask's run lengths, joined by commas."""
        return ",".join(map(str, self._runs()))

    def provenance(self, source_xxh3: str) -> dict[str, Any]:
        """What the file says about itself; only text, integers and lists of them.

        Args:
            source_xxh3: xxh3_128 per tensor over the dump's rows, ``aux_0,…,final``, joined by commas.
        """
        return {
            "schema": SCHEMA,
            "run_id": self.run_id,
            "row": self.row,
            "sample_id": self.sample_id,
            "rid": str(self.rid),
            "model": self.model,
            "num_tokens": self.num_tokens,
            "hidden_size": self.hidden_size,
            "dtype": self.dtype,
            "capture_layers": list(self.capture_layers),
            "final_norm": self.final_norm,
            "token_ids_sha256": token_ids_sha256(self.input_ids),
            "source_xxh3": source_xxh3.split(","),
        }

    def _runs(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self.loss_mask, dtype="<u4").astype(np.int64)


def expand_mask(loss_mask: bytes) -> npt.NDArray[np.int64]:
    """Run lengths (little-endian uint32, the first of zeros) as zeros and ones, ``[num_tokens]``."""
    runs = np.frombuffer(loss_mask, dtype="<u4").astype(np.int64)
    return np.repeat(np.arange(len(runs), dtype="<i8") % 2, runs)


@dataclass(frozen=True, slots=True)
class Written:
    """A published, durable file.

    Args:
        path: relative to the output folder.
        nbytes: its exact size.
        output_xxh3: xxh3_128 over the whole file.
        source_xxh3: xxh3_128 per tensor over the dump's rows, ``aux_0,…,final``, joined by commas.
        adopted: the very same bytes already lay under this name.
        displaced: where another file that lay under this name was set aside to, if one did.
        as_found: another tool, or another run, wrote the file; it has the format's keys, and perhaps more, but not
            this run's provenance.
    """

    path: str
    nbytes: int
    output_xxh3: str
    source_xxh3: str
    adopted: bool = False
    displaced: str | None = None
    as_found: bool = False


if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("hsjournal writes states as they lie in memory, which must be little-endian")
