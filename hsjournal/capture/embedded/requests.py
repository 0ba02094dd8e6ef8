"""What ``/generate`` is asked for: parsed and checked, with a refusal that says what to do."""

from __future__ import annotations

import json
import uuid
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hsjournal.dump.protocol import RequestId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MAX_RID = 1000
_NOT_OFFERED = (
    "stream",
    "return_logprob",
    "return_hidden_states",
    "image_data",
    "audio_data",
    "video_data",
    "input_embeds",
)


class BadRequestError(Exception):
    """A request that can't be served; the message goes to the client with HTTP 400."""


class TokenMismatchError(BadRequestError):
    """The token ids are not as many as the request id promises."""

    def __init__(self, rid: RequestId, given: int) -> None:
        super().__init__(
            f"rid {rid} promises {rid.tokens} tokens and input_ids holds {given}. "
            "Send exactly the tokens that the request id was made for."
        )
        self.rid = rid


class AbortedError(Exception):
    """The request was aborted before it was answered."""


class EngineError(Exception):
    """The request was accepted and could not be served, through no fault of its own: HTTP 500."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model allows."""

    vocab_size: int
    context_length: int


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way through the engine.

    Args:
        rid: as the client sent it, or made up.
        own: the same if it is one of ours: then its states are captured.
        input_ids: what is run.
        want_token: whether one token is generated.
        answer: set to the next token (None if none is wanted) once the dump is published; or to an exception.
        aborted: set by an abort; the dump is then not published.
    """

    rid: str
    own: RequestId | None
    input_ids: Sequence[int]
    want_token: bool
    answer: Future[int | None] = field(default_factory=Future)
    aborted: bool = False


def parse_generate(
    body: bytes, limits: Limits, tokenize: Callable[[str], list[int]] | None
) -> tuple[list[Request], bool]:
    """The requests in the body of ``/generate``, and whether they came as a list.

    Raises:
        BadRequestError: naming what is wrong, and what to send instead.
    """
    raw = parse_object(body)
    for key in _NOT_OFFERED:
        if raw.get(key):
            raise BadRequestError(f"{key} is not offered by the embedded engine. Leave it out.")
    want_token = _wants_token(raw.get("sampling_params"))
    prompts, many = _prompts(raw, tokenize)
    rids = _rids(raw.get("rid"), len(prompts), many)
    requests = [
        _request(rid, prompt, want_token, limits, f"input_ids[{i}]" if many else "input_ids")
        for i, (rid, prompt) in enumerate(zip(rids, prompts, strict=True))
    ]
    return requests, many


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object that ``body`` is.

    Raises:
        BadRequestError: when it is none.
    """
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"The body is not JSON ({error}). Send one JSON object in UTF-8.") from None
    if not isinstance(raw, dict):
        raise BadRequestError('The body is JSON, but no object. Send one like {"rid": …, "input_ids": […]}.')
    return raw


def _wants_token(params: Any) -> bool:
    if isinstance(params, list) and params and all(item == params[0] for item in params):
        params = params[0]
    if params is None:
        params = {}
    if not isinstance(params, dict):
        raise BadRequestError('sampling_params is not an object. Send {"max_new_tokens": 0} or {"max_new_tokens": 1}.')
    count = params.get("max_new_tokens", 1)
    if type(count) is not int or count not in (0, 1):
        raise BadRequestError(
            f"max_new_tokens is {_short(count)}. The embedded engine only runs prefills: ask for 0 or 1 new token."
        )
    return count == 1


def _prompts(raw: dict[str, Any], tokenize: Callable[[str], list[int]] | None) -> tuple[list[Any], bool]:
    text, ids = raw.get("text"), raw.get("input_ids")
    if (text is None) == (ids is None):
        raise BadRequestError("Send input_ids (a list of token ids), and not text beside it.")
    if text is None:
        if not isinstance(ids, list):
            raise BadRequestError(f"input_ids is {_short(ids)}. Send a list of token ids.")
        many = bool(ids) and isinstance(ids[0], list)
        return (ids, True) if many else ([ids], False)
    texts = text if isinstance(text, list) else [text]
    if not texts or not all(isinstance(item, str) for item in texts):
        raise BadRequestError("text is neither a text nor a list of texts. Send input_ids, a list of token ids.")
    if tokenize is None:
        raise BadRequestError(
            "This model has no tokenizer here, so text can't be run. Send input_ids, a list of token ids."
        )
    return [tokenize(item) for item in texts], isinstance(text, list)


def _rids(rid: Any, count: int, many: bool) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    rids = rid if many else [rid]
    if not isinstance(rids, list) or len(rids) != count:
        raise BadRequestError(f"rid is {_short(rid)}. Send as many rids as prompts, as a list if the prompts are one.")
    for item in rids:
        if not isinstance(item, str) or not 0 < len(item) <= _MAX_RID:
            raise BadRequestError(f"rid is {_short(item)}. Send a text of 1 to {_MAX_RID} characters, or leave it out.")
    if len(set(rids)) != len(rids):
        raise BadRequestError("A rid stands twice in one request. Give each prompt its own.")
    return rids


def _request(rid: str, ids: Any, want_token: bool, limits: Limits, where: str) -> Request:
    own = RequestId.parse(rid)
    if not isinstance(ids, list):
        raise BadRequestError(f"{where} is {_short(ids)}. Send a list of token ids.")
    if not ids:
        raise BadRequestError(f"{where} is empty. Send at least one token id.")
    for position, token in enumerate(ids):
        if type(token) is not int:
            raise BadRequestError(f"{where}[{position}] is {_short(token)}. Token ids are whole numbers.")
        if not 0 <= token < limits.vocab_size:
            raise BadRequestError(
                f"{where}[{position}] is {_short(token)}, outside the vocabulary of {limits.vocab_size}. "
                "Tokenize with this model's own tokenizer."
            )
    if own is not None and own.tokens != len(ids):
        raise TokenMismatchError(own, len(ids))
    if len(ids) > limits.context_length:
        raise BadRequestError(
            f"{where} holds {len(ids)} tokens, longer than the model's context length ({limits.context_length} tokens). "
            "Nothing is cut here: send a shorter prompt."
        )
    return Request(rid=rid, own=own, input_ids=ids, want_token=want_token)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
