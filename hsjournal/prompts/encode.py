"""One row of the prompts → what will be sent for it, or why nothing can be; the same in whichever process it runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hsjournal.errors import PromptsError
from hsjournal.prompts.masks import MaskMethod
from hsjournal.prompts.readers import Line
from hsjournal.prompts.records import Conversation, Record, Tokens, parse_id, parse_record
from hsjournal.prompts.refusal import Refusal, RowRefusedError
from hsjournal.prompts.runs import cut_runs
from hsjournal.prompts.shards import Shard
from hsjournal.prompts.spec import IngestSpec
from hsjournal.prompts.template import ChatTokenizer, Encoded
from hsjournal.prompts.tokenizer_files import read_template


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a row.

    Args:
        number: of the line.
        sample_id: the row's own, None when it has none, or none that can be used.
        encoded: what is sent; None when the row is refused.
        refusal: why it is.
        detail: the refusal in words.
        tokenised: whether the tokenizer was asked.
        elsewhere: whether it is another shard's row: nothing else is told of it then.
    """

    number: int
    sample_id: str | None
    encoded: Encoded | None
    refusal: Refusal | None = None
    detail: str = ""
    tokenised: bool = False
    elsewhere: bool = False


class Encoder:
    """Rows → tokens within the limits of the spec; the tokenizer is loaded when the first row needs it."""

    def __init__(self, spec: IngestSpec) -> None:
        self._spec = spec
        self._shard = Shard.parse(spec.reading.shard) if spec.reading.shard else None

    def outcome(self, line: Line) -> Outcome:
        """What becomes of a row.

        Raises:
            PromptsError: when the tokenizer can't be used.
        """
        sample_id, tokenised = None, False
        try:
            raw = line.parse()
            sample_id = parse_id(raw)
            if self._is_elsewhere(sample_id, line):
                return Outcome(line.number, None, None, elsewhere=True)
            record = parse_record(raw)
            tokenised = not isinstance(record, Tokens)
            return Outcome(line.number, sample_id, self.encode(record), tokenised=tokenised)
        except RowRefusedError as error:
            if self._is_elsewhere(sample_id, line):
                return Outcome(line.number, None, None, elsewhere=True)
            return Outcome(line.number, sample_id, None, error.reason, str(error), tokenised)

    def _is_elsewhere(self, sample_id: str | None, line: Line) -> bool:
        return self._shard is not None and not self._shard.has(sample_id, line.number)

    def encode(self, record: Record) -> Encoded:
        """A record's tokens.

        Raises:
            RowRefusedError: when the row can't be sent, or too little in it could be trained on.
            PromptsError: when the tokenizer can't be used.
        """
        least = self._spec.reading.min_loss_tokens
        if isinstance(record, Conversation) and not record.answers and least:
            raise RowRefusedError(Refusal.NO_LOSS_TOKENS, "the assistant says nothing")
        if isinstance(record, Tokens):
            encoded = Encoded(record.input_ids, record.loss_mask, MaskMethod.GIVEN)
        else:
            encoded = self.tokenizer.encode(record)
        if not encoded.input_ids:
            raise RowRefusedError(Refusal.EMPTY, "no tokens")
        vocabulary = self._spec.vocab_size
        if vocabulary is not None and (highest := max(encoded.input_ids)) >= vocabulary:
            raise RowRefusedError(Refusal.BAD_TOKEN_ID, f"token id {highest} is outside the vocabulary of {vocabulary}")
        encoded = self._fitting(encoded)
        count, cut = len(encoded.input_ids), f" (cut from {encoded.cut_from})" if encoded.cut_from else ""
        if least and not encoded.loss_tokens:
            raise RowRefusedError(Refusal.NO_LOSS_TOKENS, f"none of {count} tokens{cut} counts for the loss")
        if encoded.loss_tokens < least:
            raise RowRefusedError(
                Refusal.FEW_LOSS_TOKENS,
                f"{encoded.loss_tokens} of {count} tokens{cut} count for the loss, fewer than {least}",
            )
        return encoded

    def _fitting(self, encoded: Encoded) -> Encoded:
        spec, count = self._spec, len(encoded.input_ids)
        most, why = spec.max_tokens - spec.margin, f"context length {spec.max_tokens} - {spec.margin}"
        if not spec.margin:
            why = "the longest prompt that the server takes whole"
        asked = spec.reading.max_tokens
        if asked is not None and asked < most:
            most, why = asked, "--max-tokens"
        if count <= most:
            return encoded
        if not spec.reading.truncate:
            raise RowRefusedError(Refusal.TOO_LONG, f"{count} tokens, more than {most} ({why})")
        return Encoded(
            encoded.input_ids[:most], cut_runs(encoded.loss_mask, most), encoded.method, encoded.doubled_bos, count
        )

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer.

        Raises:
            PromptsError: when there is none.
        """
        reading = self._spec.reading
        if self._spec.model_dir is None:
            raise PromptsError(
                "the prompts have words but no model folder is named to tokenise them",
                remedy="Name the model's folder with --model, or bring rows of `input_ids` and `loss_mask`.",
            )
        return ChatTokenizer(
            Path(self._spec.model_dir),
            template=read_template(Path(reading.chat_template)) if reading.chat_template else None,
            trust_remote_code=reading.trust_remote_code,
            last_turn_only=reading.last_turn_only,
        )


def without_torch() -> None:
    """Make transformers in this process do without torch: a tokenizer needs none, and importing it takes seconds."""
    import os
    import sys

    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
