"""What a dump must be to answer a request, and, where it is something else, what that most likely means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hsjournal.dump.protocol import ITEM_SIZE, META
from hsjournal.errors import DumpRejectedError, Reject

if TYPE_CHECKING:
    from hsjournal.dump.protocol import Meta, RequestId


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a dump must be, to be the answer to the request ``rid``. ``boot_id`` None accepts any life of the server."""

    rid: RequestId
    num_tokens: int
    hidden_size: int
    dtype: str
    capture_layers: tuple[int, ...]
    final_norm: str
    token_ids_sha256: str
    boot_id: str | None = None


def compare(meta: Meta, expect: Expectation) -> None:
    """Hold a well-formed ``meta.json`` against what was asked for.

    Raises:
        DumpRejectedError: for the first difference, with its likely cause.
    """
    if meta.rid != str(expect.rid):
        raise DumpRejectedError(
            Reject.WRONG_IDENTITY, f"{META} in {expect.rid} speaks of {meta.rid!r}: rows of another request"
        )
    if expect.boot_id is not None and meta.boot_id != expect.boot_id:
        raise DumpRejectedError(
            Reject.STALE_BOOT,
            f"written by server life {meta.boot_id!r}, asked was {expect.boot_id!r}: the server restarted",
        )
    if meta.num_tokens != expect.num_tokens:
        raise DumpRejectedError(Reject.WRONG_COUNT, _count(meta, expect.num_tokens))
    if meta.token_ids_sha256 != expect.token_ids_sha256:
        raise DumpRejectedError(
            Reject.WRONG_IDENTITY,
            f"the digest of the token ids that were run is {meta.token_ids_sha256[:16]}…, of those sent "
            f"{expect.token_ids_sha256[:16]}…: rows of another request, or the prompt was changed on the server",
        )
    if meta.capture_layers != expect.capture_layers:
        raise DumpRejectedError(Reject.WRONG_LAYERS, _layers(meta.capture_layers, expect.capture_layers))
    if meta.dtype != expect.dtype:
        raise DumpRejectedError(Reject.WRONG_DTYPE, f"rows are {meta.dtype}, the run's are {expect.dtype}")
    if meta.hidden_size != expect.hidden_size:
        raise DumpRejectedError(
            Reject.WRONG_HIDDEN,
            f"rows are {meta.hidden_size:,} wide, the run's {expect.hidden_size:,}: another model is served",
        )
    if meta.final_norm != expect.final_norm:
        raise DumpRejectedError(
            Reject.WRONG_NORM, f"the final state is {meta.final_norm}-norm, the run's is {expect.final_norm}-norm"
        )


def _count(meta: Meta, wanted: int) -> str:
    got = meta.num_tokens
    if got > wanted:
        cause = "a request that was retracted and prefilled twice, or a second BOS"
    elif len(meta.chunks) > 1:
        cause = "a chunk of a chunked prefill is missing"
    elif wanted - got <= 16:
        cause = "the server cut the prompt to its context length, or a prefix cache hit"
    else:
        cause = "chunked prefill or a prefix cache hit"
    return f"the server returned {got:,} of {wanted:,} rows: {cause}"


def _layers(got: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    text = f"aux layers {list(got)}, the run's are {list(wanted)}"
    if len(got) != len(wanted):
        return f"{text}: {len(got)} instead of {len(wanted)}"
    shifts = {g - w for g, w in zip(got, wanted, strict=True)}
    if shifts in ({1}, {-1}):
        return f"{text}: off by one, the other convention of numbering layers (inputs instead of outputs)"
    return text


def check_size(file: str, got: int, wanted: int, meta: Meta) -> None:
    """Hold a tensor file's size against its shape.

    Raises:
        DumpRejectedError: ``wrong_size``, in rows.
    """
    if got == wanted:
        return
    row = meta.hidden_size * ITEM_SIZE[meta.dtype]
    text = f"{file} is {got:,} bytes ({got / row:,.2f} rows), not {wanted:,} ({meta.num_tokens:,} rows)"
    raise DumpRejectedError(Reject.WRONG_SIZE, text)
