"""Why one line of the prompts is refused. A refused line becomes a ``skipped`` row; the others go on."""

from __future__ import annotations

from enum import StrEnum

MAX_DETAIL = 300
"""Characters of a detail: a line of 60 MB must not come back whole in its own refusal."""


class Refusal(StrEnum):
    """The typed reasons. The value starts the row's ``reason`` in the journal, before a colon and the detail."""

    LINE_TOO_LONG = "line_too_long"  # longer than any row of tokens or words can be
    BROKEN_JSON = "broken_json"  # not one strict JSON object: syntax, NaN, a key twice, a list
    BROKEN_UNICODE = "broken_unicode"  # not UTF-8, or half of a surrogate pair
    UNKNOWN_SHAPE = "unknown_shape"  # none of the known row shapes, or two at once
    WRONG_TYPE = "wrong_type"
    BAD_ID = "bad_id"  # neither text nor a whole number, or longer than 4096 characters
    DUPLICATE_ID = "duplicate_id"
    MULTIMODAL = "multimodal"  # images, audio or video: only text is extracted
    EMPTY = "empty"  # no turns, no text or no tokens
    EMPTY_TURN = "empty_turn"  # a turn of the user or the assistant without words
    UNKNOWN_ROLE = "unknown_role"
    WRONG_ORDER = "wrong_order"
    TEMPLATE_ERROR = "template_error"  # the chat template or the tokenizer refuses the conversation
    MASK_UNPROVABLE = "mask_unprovable"  # which tokens are the assistant's can't be told for certain
    LENGTH_MISMATCH = "length_mismatch"  # loss_mask and input_ids differ in length
    BAD_TOKEN_ID = "bad_token_id"  # noqa: S105 - negative, or outside the model's vocabulary
    BAD_MASK = "bad_mask"  # something else than 0 and 1
    NO_LOSS_TOKENS = "no_loss_tokens"  # nothing in it to train on
    FEW_LOSS_TOKENS = "few_loss_tokens"  # fewer than --min-loss-tokens
    TOO_LONG = "too_long"  # more tokens than the server reads whole


class RowRefusedError(Exception):
    """One line can't be used.

    Args:
        reason: the typed reason.
        detail: which value, for people.
    """

    def __init__(self, reason: Refusal, detail: str) -> None:
        super().__init__(f"{reason.value}: {shorten(detail)}")
        self.reason = reason


def shorten(text: str, most: int = MAX_DETAIL) -> str:
    """``text`` on one line, of at most ``most`` characters, always encodable."""
    line = " ".join(text.split()).encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= most else line[: most - 1] + "…"


def show(value: object) -> str:
    """A value of the user's as a message quotes it: short, and with its type visible."""
    return shorten(repr(value), 60)
