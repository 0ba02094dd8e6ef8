"""One probe: a request that is no row, sent as rows are, and its dump taken through the real hand-over.

Probes are never rows: their request ids are ``hsj-<run>-p<n>-<tokens>``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hsjournal.dump import reader
from hsjournal.dump.finite import is_finite
from hsjournal.dump.protocol import FailureReason, Meta, RequestId, token_ids_sha256
from hsjournal.dump.reap import remove_dump
from hsjournal.errors import DumpRejectedError, HsjournalError, Reject, ServerError
from hsjournal.server.client import HeldError, RefusedError, ServerClient, TimedOutError

T = TypeVar("T")
PROBE_TIMEOUT = 60.0
_numbers = itertools.count(1)
_POLL = 0.05
_WRITING = 20.0
"""Seconds from the answer to the dump, and one more for each 1,000 tokens."""
_NO_ACCESS = (401, 403)
_MEND = {
    FailureReason.PREFIX_HIT: "Switch the prefix cache off (SGLang: --disable-radix-cache).",
    FailureReason.UNSUPPORTED: "Change what it names in the server's command line; README, With SGLang, says what can't be.",
    FailureReason.MISMATCH: "Start the server anew with the same hsjournal as here; see its log.",
}
"""What a server reports that does not pass, and what helps."""
_SAME_VERSION = "Install the same hsjournal at the server as here, and start it anew."
_LENGTHS = 32
"""That a probe tries where a v1 gateway holds some back."""
_PLAIN_IDS = range(256, 20_000)
"""Ids that are common words in every large vocabulary: control tokens lie at its ends."""


class ProbeError(ServerError):
    """A probe did not come through, which may pass: an outage, not a server that is set up wrongly.

    Args:
        reason: of the server's own report, if it made one.
    """

    def __init__(self, message: str, *, remedy: str | None = None, reason: FailureReason | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.reason = reason


class ProbeHeldError(ProbeError):
    """A v1 gateway can't tell the probe from another request at its server; one of another length would go."""


class NoDumpError(ProbeError):
    """The server answers, and nothing arrives in the hand-over root."""


Look = Callable[[reader.Dump], object]
"""What is shown a probe's dump, once it is known to be the right one."""


def probe_ids(tokens: int, vocab_size: int, seed: int = 0) -> list[int]:
    """A prompt of so many tokens, the same for the same ``seed``, that no vocabulary reads as control tokens."""
    vocab = vocab_size or 100
    low, high = (_PLAIN_IDS.start, min(vocab, _PLAIN_IDS.stop)) if vocab > 4 * _PLAIN_IDS.start else (1, vocab)
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    return [draw.randrange(low, max(high, low + 1)) for _ in range(tokens)]


async def probe(
    client: ServerClient,
    root: Path,
    run_id: str,
    input_ids: Sequence[int],
    *,
    timeout: float = PROBE_TIMEOUT,
    look: Look = lambda _dump: None,
    their_root: str = "",
) -> Meta:
    """Send one probe, wait for its dump, check it against the ids that were sent, show it to ``look``, delete it.

    Args:
        client: of the server.
        root: the hand-over root, as this side sees it.
        run_id: part of the request id.
        input_ids: the prompt.
        timeout: seconds for the whole.
        look: sees the open dump; it may take its time.
        their_root: what the server calls its hand-over root, if it says so.

    Raises:
        ProbeError: when no dump arrives, or the server's report of a failure that may pass; NoDumpError and
            ProbeHeldError among them.
        ServerError: when the server captures wrongly or can't, or refuses access.
        UnreachableError, TimedOutError: as the client.
    """
    rid = RequestId.for_probe(run_id, _probe_number(), len(input_ids))
    deadline = time.monotonic() + timeout
    try:
        async with asyncio.timeout(timeout):
            reply = await client.generate(str(rid), input_ids)
    except HeldError as error:
        raise ProbeHeldError(
            f"{client.url} does not send a probe of {len(input_ids)} tokens on: {error.detail}",
            remedy="Wait until the server has drained, or start it anew.",
        ) from None
    except RefusedError as error:
        raise refused(client.url, f"a probe of {len(input_ids)} tokens", error) from None
    except (TimeoutError, TimedOutError):
        with contextlib.suppress(HsjournalError):
            await client.abort(str(rid))  # or the server would run up a heap of them
        raise TimedOutError(f"{client.url} is up, but did not answer a probe within {timeout:.0f} s") from None
    if reply.prompt_tokens not in (-1, len(input_ids)):
        raise ServerError(
            f"{client.url} says that it ran {reply.prompt_tokens:,} of a probe's {len(input_ids):,} tokens",
            remedy="Start it without --allow-auto-truncate, and with a greater --context-length.",
        )
    # It answers when its forward pass is done, and writes at the same time: what is not there soon will not come.
    deadline = min(deadline, time.monotonic() + _WRITING + len(input_ids) / 1000)
    try:
        root_fd = reader.open_root(root)
    except OSError as error:
        raise ProbeError(
            f"the hand-over root {root} can't be opened: {error.strerror}",
            remedy="Let yourself read and write there, or name the server's folder with --handover-root.",
        ) from None
    try:
        while (meta := _arrived(client.url, root, root_fd, rid, input_ids, look)) is None:
            if time.monotonic() > deadline:
                raise _nothing_came(client.url, root, their_root)
            await asyncio.sleep(_POLL)
        return meta
    finally:
        os.close(root_fd)


async def of_free_length(tokens: int, ask: Callable[[int], Awaitable[T]]) -> T:
    """``ask`` with a length of ``tokens``, or a little more where a v1 gateway holds such a probe back.

    Raises:
        ProbeHeldError: when it holds all of them back.
    """
    for more in range(_LENGTHS):
        with contextlib.suppress(ProbeHeldError):
            return await ask(tokens + more)
    return await ask(tokens)


def _nothing_came(url: str, root: Path, their_root: str) -> NoDumpError:
    theirs = f", and the server writes into {their_root} on its side" if their_root else ""
    return NoDumpError(
        f"{url} answers, but no dump arrives in {root}{theirs}",
        remedy="Server and client do not share this folder, or the capture plugin is not loaded: start the server with "
        f"HSJOURNAL_HANDOVER_ROOT={root} on this machine, or name its folder with --handover-root (in containers: the "
        "same mount on both sides).",
    )


def refused(url: str, what: str, error: RefusedError) -> ServerError:
    """What to tell of an error status in answer to ``what``."""
    return no_access(url, error) or ProbeError(
        f"{url} refuses {what}: {error}", remedy="See the server's log, and that it runs a supported version."
    )


def no_access(url: str, error: RefusedError) -> ServerError | None:
    """What to tell of a server that wants another key; None when that isn't it."""
    if error.status not in _NO_ACCESS:
        return None
    return ServerError(
        f"{url} refuses access: {error.detail}",
        remedy="Give the API key with --api-key-file FILE (or HSJOURNAL_API_KEY).",
    )


def _arrived(url: str, root: Path, root_fd: int, rid: RequestId, input_ids: Sequence[int], look: Look) -> Meta | None:
    """The probe's checked dump, deleted; None while there is none."""
    try:
        failure = reader.read_failure(root_fd, rid)
        if failure is not None:
            remove_dump(root_fd, str(rid))
            text = f"{url} can't capture: {failure.reason} ({failure.detail})"
            if failure.reason in _MEND:
                raise ServerError(text, remedy=_MEND[failure.reason])
            raise ProbeError(
                text, remedy="See the server's log; `hsjournal doctor` looks at the room.", reason=failure.reason
            )
        if not (root / str(rid)).is_dir():
            return None
        with reader.open_dump(root_fd, rid, None) as dump:
            meta = _checked(dump.meta, rid, input_ids)
            _refuse_not_finite(dump)
            look(dump)
        remove_dump(root_fd, str(rid))
    except DumpRejectedError as error:
        if error.reason is Reject.VANISHED:
            raise ProbeError(
                f"the dump of a probe went away before it was read: {error.detail}",
                remedy=f"See that nothing else cleans up in {root}.",
            ) from None
        raise ServerError(f"the dump of a probe from {url} is not usable: {error}", remedy=_SAME_VERSION) from None
    except OSError as error:
        raise ProbeError(
            f"the dump of a probe can't be read: {error.strerror} ({root})",
            remedy="Let the server's user and yours share it: one user, or HSJOURNAL_GROUP_MODE=1 at the server.",
        ) from None
    return meta


def _checked(meta: Meta, rid: RequestId, input_ids: Sequence[int]) -> Meta:
    if meta.rid != str(rid):
        raise ServerError(f"a probe came back with the states of another request ({meta.rid})", remedy=_SAME_VERSION)
    if meta.num_tokens != len(input_ids):
        raise ServerError(
            f"a probe of {len(input_ids)} tokens came back with {meta.num_tokens} rows",
            remedy="Switch the prefix cache off (SGLang: --disable-radix-cache) and speculative decoding too.",
        )
    if meta.token_ids_sha256 != token_ids_sha256(input_ids):
        raise ServerError(
            "a probe came back with the states of other token ids than were sent",
            remedy="Serve the model alone: whatever rewrites prompts before it (a proxy, a multimodal processor) must go.",
        )
    return meta


def _refuse_not_finite(dump: reader.Dump) -> None:
    for tensor, fd in zip(dump.meta.tensors, dump.fds, strict=True):
        if not is_finite(os.pread(fd, tensor.nbytes, 0), dump.meta.dtype):
            raise ServerError(
                f"a probe came back with NaN or infinity in {tensor.file}",
                remedy="Try another dtype or attention backend, and see the server's log.",
            )


def _probe_number() -> int:
    # Unique over restarts of the client: a late dump of an older probe must not answer a newer one.
    return (time.time_ns() // 1_000_000 % 1_000_000_000) * 100 + next(_numbers) % 100
