"""The model's own tokenizer and chat template: a record becomes token ids and a loss mask, tokenised once."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hsjournal.errors import PromptsError
from hsjournal.prompts.masks import (
    Masked,
    MaskMethod,
    Tools,
    Turns,
    UnprovableError,
    by_generation,
    by_prefix,
)
from hsjournal.prompts.records import Conversation, Record, Text, Tokens
from hsjournal.prompts.refusal import Refusal, RowRefusedError
from hsjournal.prompts.runs import last_run
from hsjournal.prompts.scan import Markers, by_headers, by_scan, markers_of
from hsjournal.prompts.tokenizer_files import load_tokenizer, tokenizer_digest
from hsjournal.prompts.trial import Trial

__all__ = ["ChatTokenizer", "Encoded", "tokenizer_digest"]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Encoded:
    """A record as it is sent.

    Args:
        input_ids: token ids; all of them, uncut.
        loss_mask: run lengths, the first of zeros (may be 0).
        method: how the mask was found.
        doubled_bos: whether it begins with two tokens of begin-of-sequence, which is rarely meant.
        cut_from: tokens before it was cut, None when it was not.
    """

    input_ids: array[int]
    loss_mask: tuple[int, ...]
    method: MaskMethod
    doubled_bos: bool = False
    cut_from: int | None = None

    @property
    def loss_tokens(self) -> int:
        """How many tokens count for the loss."""
        return sum(self.loss_mask[1::2])


class ChatTokenizer:
    """A tokenizer with its chat template, loaded from a model folder. Nothing is fetched.

    Args:
        folder: the model's folder.
        template: a chat template instead of the folder's own.
        trust_remote_code: run Python code of the folder if the tokenizer needs it.
        last_turn_only: only the assistant's last turn counts; of a mask that a row brings, its last stretch of ones.

    Raises:
        PromptsError: when the folder holds no tokenizer that can be read.
    """

    def __init__(
        self,
        folder: Path,
        *,
        template: str | None = None,
        trust_remote_code: bool = False,
        last_turn_only: bool = False,
    ) -> None:
        self.folder = folder
        self._last_turn_only, self._trial = last_turn_only, Trial(self)
        self._tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        # Only its warning depends on it: no length is cut here, and over-long rows are refused by the caller.
        self._tokenizer.model_max_length = 1 << 60
        if template is not None:
            self._tokenizer.chat_template = template
        added = self._tokenizer.added_tokens_decoder
        self._special = {*self._tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        self._control: dict[str, int] = {str(token): i for i, token in added.items()}
        self._added = re.compile("|".join(map(re.escape, sorted(self._control, key=len, reverse=True))) or r"(?!)")
        self._added_ids = frozenset(self._control.values())
        self._by_text = self._tokenizer.is_fast and _keeps_method(self._tokenizer, "apply_chat_template")

    @property
    def bos(self) -> int | None:
        """The token of begin-of-sequence."""
        token: int | None = self._tokenizer.bos_token_id
        return token

    def encode(self, record: Record) -> Encoded:
        """Token ids and loss mask of a record.

        Raises:
            RowRefusedError: when the template does not take the conversation, or no method proves the mask.
            PromptsError: when the tokenizer has no chat template, or returns something else than ids.
        """
        match record:
            case Tokens():
                mask = last_run(record.loss_mask) if self._last_turn_only else record.loss_mask
                return Encoded(record.input_ids, mask, MaskMethod.GIVEN)
            case Text():
                return self._encode_text(record)
            case Conversation():
                return self._encode_conversation(record)

    def _encode_text(self, record: Text) -> Encoded:
        ids = self._text_ids(record.text)
        markers = self._markers if self._tokenizer.chat_template else ""
        try:
            found = None if isinstance(markers, str) else by_headers(self, markers, ids)
        except UnprovableError as error:
            raise RowRefusedError(Refusal.MASK_UNPROVABLE, str(error)) from None
        return self._encoded(found or Masked(ids, ((0, len(ids)),), MaskMethod.WHOLE_TEXT))

    def _encoded(self, found: Masked) -> Encoded:
        if self._last_turn_only:
            found = Masked(found.input_ids, found.spans[-1:], found.method)
        return Encoded(found.input_ids, found.run_lengths(), found.method, self._doubled(found.input_ids))

    def _encode_conversation(self, record: Conversation) -> Encoded:
        if not self._tokenizer.chat_template:
            raise PromptsError(
                f"the tokenizer in {self.folder} has no chat template, which conversations need",
                remedy="Name one with --chat-template FILE, or bring rows of `text` or `input_ids`.",
            )
        whys = []
        for method in (by_generation, by_prefix, self._by_scan):
            try:
                return self._encoded(method(self, record.turns, record.tools))
            except UnprovableError as error:
                whys.append(str(error))
        # That the template marks nothing is the common case, and no news.
        raise RowRefusedError(
            Refusal.MASK_UNPROVABLE, "; ".join(whys if self.marks_generation(record.tools) else whys[1:])
        )

    def _by_scan(self, _: object, turns: Turns, tools: Tools) -> Masked:
        markers = self._markers
        if isinstance(markers, str):
            raise UnprovableError(markers)
        return by_scan(self, markers, turns, tools)

    @cached_property
    def _markers(self) -> Markers | str:
        """The template's preset, or why there is none."""
        try:
            return markers_of(self)
        except UnprovableError as error:
            return str(error)
        except RowRefusedError as error:
            return f"the chat template does not take a question and its answer ({error})"

    def _doubled(self, ids: array[int]) -> bool:
        return len(ids) > 1 and ids[0] == ids[1] == self.bos

    def _text_ids(self, text: str) -> array[int]:
        """The ids of templated text; begin-of-sequence is not added where the text already starts with it."""
        bos = self._tokenizer.bos_token
        add = not (bos and text.startswith(bos))
        with _refusing():
            result = self._tokenizer(text, add_special_tokens=add)
        return _flat_ids(result)

    # what the methods of masks.py and scan.py ask

    def text(self, turns: Turns, tools: Tools, *, prompt: bool = False) -> str:
        """The templated turns."""
        return str(self._apply(turns, tools, prompt=prompt, tokenize=False))

    def tokens(self, turns: Turns, tools: Tools, *, prompt: bool = False) -> array[int]:
        """The templated turns as ids."""
        if self._by_text:  # as apply_chat_template does it
            return self.text_tokens(self.text(turns, tools, prompt=prompt))
        return _flat_ids(self._apply(turns, tools, prompt=prompt, tokenize=True, return_dict=True))

    def text_tokens(self, text: str) -> array[int]:
        """The ids of text that a template has made."""
        with _refusing():
            result = self._tokenizer(
                text, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False
            )
        return _flat_ids(result)

    def anchors(self, text: str, ids: array[int]) -> list[tuple[int, int]]:
        """Where added tokens stand in the text and in its ids."""
        if not self._by_text:
            return []
        seen = [(found.start(), self._control[found[0]]) for found in self._added.finditer(text)]
        placed = [n for n, token in enumerate(ids) if token in self._added_ids]
        if [token for _, token in seen] != [ids[n] for n in placed]:
            return []
        return [(place, n) for (place, _), n in zip(seen, placed, strict=True)]

    def generation_tokens(self, turns: Turns, tools: Tools) -> tuple[array[int], bytes]:
        """The templated turns as ids, and the flags of what the template marks as generated."""
        result = self._apply(turns, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, flags = _flat_ids(result), result["assistant_masks"]
        if len(flags) != len(ids):
            raise UnprovableError(f"the tokenizer marks {len(flags)} of {len(ids)} tokens")
        return ids, bytes(flags)

    def marks_generation(self, tools: Tools) -> bool:
        """Whether the template has ``{% generation %}`` and the tokenizer knows where its tokens lie in the text."""
        template = self._tokenizer.get_chat_template(None, tools)
        return self._tokenizer.is_fast and _GENERATION.search(template) is not None

    def prompt_fault(self) -> str | None:
        """Why the assistant's words don't begin where the generation prompt ends, None when they do."""
        return self._trial.fault

    def prompt(self) -> str:
        """What the generation prompt adds to a question."""
        return self._trial.prompt

    def question_tokens(self) -> frozenset[int]:
        """The control tokens that the template writes for a question and the generation prompt after it."""
        return self._trial.question_tokens

    def closing(self) -> int:
        """How many tokens the template writes after the last turn's own end, as some do with end-of-text."""
        return self._trial.closing

    def is_special(self, token: int) -> bool:
        """Whether it is a control token."""
        return token in self._special

    def control_id(self, token: str) -> int | None:
        """The id of a token that is never a part of a word; None when there is none of that text."""
        found = self._control.get(token)
        if found is None and not self._by_text:  # tokenizers of Python code may keep control tokens in their vocabulary
            ids = self.text_tokens(token)
            found = ids[0] if len(ids) == 1 and self.decode(ids) == token else None
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _apply(self, turns: Turns, tools: Tools, *, prompt: bool = False, **options: Any) -> Any:
        with _refusing():
            # Without words beside tool calls, templates are given empty ones: many join them without asking.
            spoken = [turn | {"content": turn["content"] or ""} for turn in turns]
            return self._tokenizer.apply_chat_template(spoken, tools=tools, add_generation_prompt=prompt, **options)


def _keeps_method(tokenizer: Any, name: str) -> bool:
    """Whether the tokenizer has transformers' own method, and none of its own."""
    owner = next(kind for kind in type(tokenizer).__mro__ if name in vars(kind))
    return owner.__module__ == "transformers.tokenization_utils_base"


@contextmanager
def _refusing() -> Iterator[None]:
    """Whatever a template or a tokenizer raises over a row is that row's refusal."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # templates raise what they like, the tokenizers library bare Exception
        raise RowRefusedError(Refusal.TEMPLATE_ERROR, f"{type(error).__name__}: {error}") from error


def _flat_ids(result: object) -> array[int]:
    """The ids in what a tokenizer returned: a mapping from transformers 5 on, a list of ids before.

    Raises:
        PromptsError: when it is neither; the length of the wrong thing would pass for a token count.
    """
    ids = result["input_ids"] if isinstance(result, Mapping) else result
    try:
        if isinstance(ids, list) and set(map(type, ids)) <= {int}:
            return array("I", ids)
    except OverflowError:
        pass  # negative, or too large
    raise PromptsError(
        f"the tokenizer returned {type(result).__name__} without a flat list of token ids",
        remedy="Use a tokenizer of the transformers library's kind, or rows of `input_ids` and `loss_mask`.",
    )
