"""Which tokens count for the loss: how a conversation's mask is found.

A mask counts the assistant's words and the token that ends the turn; it is aligned with the token ids and not
shifted (the trainer shifts). A token that also holds characters of the role header does not count: no model generates
a header. A method either proves its mask or says why it can't; they are tried in the order in which they stand here, and
the last one is :mod:`hsjournal.prompts.scan`.
"""

from __future__ import annotations

import unicodedata
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from hsjournal.prompts.runs import run_lengths


class MaskMethod(StrEnum):
    """How a row's mask came to be."""

    GIVEN = "given"  # the row brought it
    WHOLE_TEXT = "whole_text"  # a `text` row without role headers: who says what is not known, every token counts
    GENERATION = "generation"  # the chat template marks what the assistant generates
    PREFIX = "prefix"  # the conversation cut before and after each answer, tokenised and compared
    SCAN = "scan"  # role headers and end-of-turn tokens found in the ids


Span = tuple[int, int]
"""First token, and the one after the last."""


@dataclass(frozen=True, slots=True)
class Masked:
    """Token ids and the stretches that count.

    Args:
        input_ids: of the whole conversation.
        spans: ascending, one for each turn of the assistant.
        method: how they were found.
    """

    input_ids: array[int]
    spans: tuple[Span, ...]
    method: MaskMethod

    def run_lengths(self) -> tuple[int, ...]:
        """The mask as run lengths, the first of zeros (may be 0)."""
        lengths = [0]  # alternately zeros and ones, from zeros on
        done = 0
        for start, end in self.spans:
            if start == end:
                continue
            if start == done and len(lengths) % 2 == 0:
                lengths[-1] += end - start
            elif len(lengths) % 2:
                lengths[-1] += start - done
                lengths.append(end - start)
            else:
                lengths += (start - done, end - start)
            done = end
        left = len(self.input_ids) - done
        if left and len(lengths) % 2:
            lengths[-1] += left
        elif left:
            lengths.append(left)
        return tuple(lengths) if self.input_ids else ()


class UnprovableError(Exception):
    """This method can't tell for certain which tokens are the assistant's; the text says why."""


Turns = Sequence[dict[str, Any]]
Tools = list[dict[str, Any]] | None


class Renderer(Protocol):
    """What the methods need of a tokenizer with a chat template."""

    def text(self, turns: Turns, tools: Tools, *, prompt: bool = False) -> str:
        """The templated turns; with ``prompt`` up to where the assistant's next words would begin."""

    def tokens(self, turns: Turns, tools: Tools, *, prompt: bool = False) -> array[int]:
        """The same as ids."""

    def text_tokens(self, text: str) -> array[int]:
        """The ids of text that a template has made."""

    def anchors(self, text: str, ids: array[int]) -> list[tuple[int, int]]:
        """Where added tokens stand in the text and in its ids, ascending; these cut a text before it is tokenised.

        Empty when the one can't be matched with the other.
        """

    def generation_tokens(self, turns: Turns, tools: Tools) -> tuple[array[int], bytes]:
        """The templated turns as ids, and the flags of those that the template marks as generated."""

    def marks_generation(self, tools: Tools) -> bool:
        """Whether the template has ``{% generation %}``, and the tokenizer can follow it."""

    def prompt_fault(self) -> str | None:
        """Why the assistant's words don't begin where the template's generation prompt ends, None when they do."""

    def prompt(self) -> str:
        """What the generation prompt adds to a question; empty when it adds nothing."""

    def question_tokens(self) -> frozenset[int]:
        """The control tokens that the template writes for a question and the generation prompt after it."""

    def closing(self) -> int:
        """How many tokens the template writes after the last turn's own end, as some do with end-of-text."""

    def is_special(self, token: int) -> bool:
        """Whether it is a control token."""

    def control_id(self, token: str) -> int | None:
        """The id of a token that is never part of a word, None when there is none of that text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""


def answers_of(turns: Turns) -> list[tuple[int, dict[str, Any]]]:
    """The assistant's turns, each with its place, counted from 1."""
    return [(n, turn) for n, turn in enumerate(turns, 1) if turn["role"] == "assistant"]


def shows(shown: str, turn: dict[str, Any]) -> bool:
    """Whether what a template shows of a turn holds its words and the names of the tools that it calls.

    All words, or all but the thoughts, which templates leave out.
    """
    place, words = _plain(shown), turn["content"] or ""
    if not (_plain(words) in place or _plain(words.rsplit("</think>", 1)[-1]) in place):
        return False
    calls = (call.get("function", call) for call in turn.get("tool_calls") or ())
    return all(_plain(str(call.get("name") or "")) in place for call in calls)


def by_generation(renderer: Renderer, turns: Turns, tools: Tools) -> Masked:
    """Take the template's own word, where it can be seen to be the assistant's words and the end of the turn.

    Templates that are in use put the header inside their marks, or the line break after the end of turn, or leave the end
    outside; and transformers flags a token that only overlaps with a mark. So each stretch must begin where the generation
    prompt ends, hold its turn's words and no control token of other roles, and end with one end of turn.

    Raises:
        UnprovableError: when the template marks nothing, or something else than that.
    """
    if not renderer.marks_generation(tools):
        raise UnprovableError("the chat template has no {% generation %}")
    ids, flags = renderer.generation_tokens(turns, tools)
    answers, marked = answers_of(turns), _runs(flags)
    if len(marked) != len(answers):
        raise UnprovableError(f"the template marks {len(marked)} stretches for {len(answers)} turns of the assistant")
    spans = []
    for (n, turn), (start, stop) in zip(answers, marked, strict=True):
        most = len(ids) - renderer.closing() if n == len(turns) else len(ids)
        span = start, _end_of_turn(renderer, ids, start, min(stop, most))
        if fault := _marked_fault(renderer, ids, span, turn):
            raise UnprovableError(f"what the template marks of turn {n} {fault}")
        spans.append(span)
    return Masked(ids, tuple(spans), MaskMethod.GENERATION)


def _runs(flags: bytes) -> list[Span]:
    """The stretches of ones."""
    spans, done = [], 0
    for n, length in enumerate(run_lengths(flags)):
        if n % 2:
            spans.append((done, done + length))
        done += length
    return spans


def _marked_fault(renderer: Renderer, ids: array[int], span: Span, turn: dict[str, Any]) -> str | None:
    """Why a marked stretch is not the words of a turn and its end; None when it is."""
    start, end = span
    prompt, marked = renderer.prompt(), ids[start:end]
    window = ids[max(0, start - len(prompt.encode()) - 1) : start]  # a token is at least one byte
    if prompt and not renderer.decode(window).endswith(prompt):
        return "does not begin where the generation prompt ends"
    if not prompt and (renderer.prompt_fault() or not window or not renderer.is_special(window[-1])):
        return "does not begin after a control token"
    if not marked or not renderer.is_special(marked[-1]):
        return "does not end with a control token"
    if not {*renderer.question_tokens(), marked[-1]}.isdisjoint(marked[:-1]):
        return "goes on after its end, or holds a header"
    if not shows(renderer.decode(marked), turn):
        return "does not hold its words"
    return None


def by_prefix(renderer: Renderer, turns: Turns, tools: Tools) -> Masked:
    """Cut the conversation before and after each answer; what lies between the cuts is the answer.

    Raises:
        UnprovableError: when a cut conversation's ids are not the beginning of the whole one's. That is so with templates
            that show a turn differently once others follow (they drop earlier thoughts), and where a token reaches
            across the cut; also where it leaves a turn's tool calls out.
    """
    if fault := renderer.prompt_fault():
        raise UnprovableError(fault)
    cut = _Cut(renderer, turns, tools)
    spans = []
    for n, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        start = cut.before(n)
        end = len(cut.ids) - renderer.closing() if n == len(turns) - 1 else cut.after(n)
        spans.append((start, _end_of_turn(renderer, cut.ids, start, end)))
        if turn.get("tool_calls") and not shows(renderer.decode(cut.ids[start:end]), turn):
            raise UnprovableError(f"the template does not show what turn {n + 1} says and calls")
    return Masked(cut.ids, tuple(spans), MaskMethod.PREFIX)


class _Cut:
    """A conversation, and beginnings of it. Texts are compared first: that is cheap, and tells most of what differs."""

    def __init__(self, renderer: Renderer, turns: Turns, tools: Tools) -> None:
        self._renderer, self._turns, self._tools = renderer, turns, tools
        self._whole = renderer.text(turns, tools)
        self._befores = {n: self._text(n, prompt=True) for n, turn in enumerate(turns) if turn["role"] == "assistant"}
        self.ids = renderer.tokens(turns, tools)
        self._anchors = renderer.anchors(self._whole, self.ids)

    def before(self, n: int) -> int:
        """How many tokens come before the words of turn ``n``."""
        return self._length(self._befores[n], n, prompt=True)

    def after(self, n: int) -> int:
        """How many tokens turn ``n`` and all before it have."""
        return self._length(self._text(n + 1, prompt=False), n + 1, prompt=False)

    def _text(self, turns: int, *, prompt: bool) -> str:
        text = self._renderer.text(self._turns[:turns], self._tools, prompt=prompt)
        if not self._whole.startswith(text):
            raise UnprovableError(
                f"the conversation cut {_place(turns, prompt=prompt)} is not the beginning of the whole"
            )
        return text

    def _length(self, text: str, turns: int, *, prompt: bool) -> int:
        """Tokens of a beginning. What stands before its last added token is tokenised alike in both, so only the rest is compared."""
        if self._anchors:
            at = bisect_left(self._anchors, (len(text), 0)) - 1
            place, start = self._anchors[at] if at >= 0 else (0, 0)
            rest = self._renderer.text_tokens(text[place:])
        else:
            start, rest = 0, self._renderer.tokens(self._turns[:turns], self._tools, prompt=prompt)
        if self.ids[start : start + len(rest)] != rest:
            where = _place(turns, prompt=prompt)
            raise UnprovableError(f"the conversation cut {where} is not tokenised as the beginning of the whole")
        return start + len(rest)


def _place(turns: int, *, prompt: bool) -> str:
    return f"before turn {turns + 1}" if prompt else f"after turn {turns}"


def _end_of_turn(renderer: Renderer, ids: array[int], start: int, end: int) -> int:
    """Leave out the white space that a template writes after the token that ends a turn: no model generates it."""
    last = next((i for i in range(end - 1, start - 1, -1) if renderer.is_special(ids[i])), None)
    if last is None or renderer.decode(ids[last + 1 : end]).strip():
        return end
    return last + 1


def _plain(text: str) -> str:
    """Without white space, and as normalising tokenizers write it."""
    return "".join(unicodedata.normalize("NFKC", text).split())
