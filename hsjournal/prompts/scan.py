"""The third way to a loss mask: role headers and end-of-turn tokens, found in the ids of the whole conversation.

It needs no prefixes, so it works where a template shows a turn differently once others follow (reasoning templates drop
earlier thoughts), and where an answer's first white space makes one token with the header's last. It is proof, not a
guess, for three reasons: a question and its answer show that the header and the end of the preset are this template's; no
text of the row may hold one of these control tokens, so every one in the ids is the template's; and there must be just as
many answers as turns of the assistant, each with its turn's words inside.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hsjournal.prompts.masks import (
    Masked,
    MaskMethod,
    Renderer,
    Span,
    Tools,
    Turns,
    UnprovableError,
    answers_of,
    shows,
)
from hsjournal.prompts.trial import ANSWER, QUESTION

WINDOW = 48
"""Tokens that a header and what the generation prompt writes after it may have."""


@dataclass(frozen=True, slots=True)
class Preset:
    """How a family of templates writes turns.

    Args:
        name: of the family.
        headers: patterns of what comes before the assistant's words; each begins with a control token.
        opens: the control tokens that the headers begin with.
        ends: control tokens that end a turn; any of them.
        others: control tokens that begin something of another role.
    """

    name: str
    headers: tuple[str, ...]
    opens: tuple[str, ...]
    ends: tuple[str, ...]
    others: tuple[str, ...] = ()


PRESETS = (
    Preset("llama", (r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n",), ("<|start_header_id|>",), ("<|eot_id|>", "<|eom_id|>")),
    Preset("phi4", (r"<\|im_start\|>assistant<\|im_sep\|>",), ("<|im_start|>",), ("<|im_end|>",)),
    Preset("chatml", (r"<\|im_start\|>assistant\n",), ("<|im_start|>",), ("<|im_end|>",)),  # Qwen2.5, Qwen3, SmolLM2
    Preset(
        "deepseek",  # V3, R1, V3.1: after the outputs of tools the assistant goes on without a header of its own
        (r"<｜Assistant｜>", r"<｜tool▁outputs▁end｜>", r"<｜tool▁output▁end｜>(?!\s*<｜tool▁output)"),
        ("<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>"),
        ("<｜end▁of▁sentence｜>",),
        ("<｜User｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>"),
    ),
    Preset(
        "kimi",  # a turn's `name` stands in its header
        (r"<\|im_assistant\|>[^<]*<\|im_middle\|>",),
        ("<|im_assistant|>",),
        ("<|im_end|>",),
        ("<|im_user|>", "<|im_system|>", "<|im_middle|>"),
    ),
    Preset("gemma", (r"<start_of_turn>model\n",), ("<start_of_turn>",), ("<end_of_turn>",)),
    Preset("phi3", (r"<\|assistant\|>\n?",), ("<|assistant|>",), ("<|end|>",), ("<|user|>", "<|system|>", "<|tool|>")),
    Preset(
        "granite", (r"<\|start_of_role\|>assistant<\|end_of_role\|>",), ("<|start_of_role|>",), ("<|end_of_text|>",), ("<|end_of_role|>",),
    ),
    Preset(
        "mistral",
        (r"\[/INST\]", r"\[/TOOL_RESULTS\](?!\[TOOL_RESULTS\])"),
        ("[/INST]", "[/TOOL_RESULTS]"),
        ("</s>",),
        ("[INST]", "[TOOL_RESULTS]"),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Markers:
    """A preset in the ids of one tokenizer; ``header`` takes in what the generation prompt writes after a header."""

    header: re.Pattern[str]
    opens: frozenset[int]
    ends: frozenset[int]
    others: frozenset[int]
    texts: tuple[str, ...]

    @classmethod
    def of(cls, preset: Preset, renderer: Renderer) -> Markers | None:
        """None when the tokenizer lacks the preset's control tokens."""
        known = {text: renderer.control_id(text) for text in (*preset.opens, *preset.ends, *preset.others)}
        ids = {text: token for text, token in known.items() if token is not None}
        opens, ends, others = (
            frozenset(ids[text] for text in texts if text in ids)
            for texts in (preset.opens, preset.ends, preset.others)
        )
        if preset.opens[0] not in ids or not ends:
            return None
        header = "|".join(preset.headers)
        return cls(re.compile(f"(?:{header}){_tail(renderer, header)}"), opens, ends, others, tuple(ids))

    def spans(self, renderer: Renderer, ids: array[int]) -> Iterator[Span]:
        """The assistant's stretches, from after the header to after the end of turn.

        Raises:
            UnprovableError: when a turn has no end.
        """
        start, done = None, 0
        for at, token in enumerate(ids):
            if at < done:
                continue
            if start is not None and token in self.ends:
                yield start, at + 1
                start = None
            elif start is not None and (token in self.others or token in self.opens):
                raise UnprovableError(f"an answer that begins at token {start} has no end of turn before token {at}")
            elif token in self.opens and (length := self._header_length(renderer, ids, at)):
                start = done = at + length
        if start is not None and start < len(ids):
            raise UnprovableError(f"the answer that begins at token {start} has no end of turn")

    def _header_length(self, renderer: Renderer, ids: array[int], at: int) -> int:
        """Tokens of the header that begins at ``at``, one that holds the answer's first characters too included; 0 for none."""
        window = ids[at : at + WINDOW]
        found = self.header.match(renderer.decode(window))
        if found is None:
            return 0
        return next((n for n in range(1, len(window)) if len(renderer.decode(window[:n])) >= found.end()), len(window))


def markers_of(renderer: Renderer) -> Markers:
    """The preset that a question and its answer prove to be the template's.

    Raises:
        UnprovableError: when none is.
    """
    for preset in PRESETS:
        markers = Markers.of(preset, renderer)
        if markers is None:
            continue
        ids = renderer.tokens([QUESTION, ANSWER], None)
        try:
            found = [renderer.decode(ids[start : end - 1]) for start, end in markers.spans(renderer, ids)]
        except UnprovableError:
            continue
        if len(found) == 1 and re.fullmatch(r"\s*(<think>)?\s*(</think>)?\s*Answer\.\s*", found[0]):
            return markers
    raise UnprovableError(
        "the chat template's role headers are none of the known ones (" + ", ".join(p.name for p in PRESETS) + ")"
    )


def by_scan(renderer: Renderer, markers: Markers, turns: Turns, tools: Tools) -> Masked:
    """Find the assistant's turns in the ids by their headers and ends.

    Raises:
        UnprovableError: when what is found is not for certain the assistant's turns, all of them, in order.
    """
    for where, text in _texts(turns, tools):
        if held := next((marker for marker in markers.texts if marker in text), None):
            raise UnprovableError(
                f"{where} holds the control token {held}, so it can't be told from the template's own"
            )
    ids = renderer.tokens(turns, tools)
    spans = tuple(markers.spans(renderer, ids))
    answers = answers_of(turns)
    if len(spans) != len(answers):
        raise UnprovableError(f"the template shows {len(spans)} answers for {len(answers)} turns of the assistant")
    for (n, turn), (start, end) in zip(answers, spans, strict=True):
        if not shows(renderer.decode(ids[start - 1 : end]), turn):
            raise UnprovableError(f"the words of turn {n} do not stand where its header and end are found")
    return Masked(ids, spans, MaskMethod.SCAN)


def by_headers(renderer: Renderer, markers: Markers, ids: array[int]) -> Masked | None:
    """The assistant's stretches of text that came templated; None where no role header stands in it.

    Whose words hold a header can't be told here: the text is taken for what the template has made.

    Raises:
        UnprovableError: when an answer has no end of turn.
    """
    if not any(token in markers.opens or token in markers.others for token in ids):
        return None
    return Masked(ids, tuple(markers.spans(renderer, ids)), MaskMethod.SCAN)


def _tail(renderer: Renderer, header: str) -> str:
    """A pattern for what the generation prompt writes after the header, as ``<think>``: the model doesn't generate it."""
    added = renderer.prompt()
    found = re.match(header, added)
    tail = added[found.end() :] if found else ""
    return f"(?:{re.escape(tail)})?" if tail else ""


def _texts(turns: Turns, tools: Tools) -> Iterator[tuple[str, str]]:
    """Every text of a conversation, and where it stands."""
    stack: list[tuple[str, Any]] = [(f"turn {n}", turn) for n, turn in enumerate(turns, 1)]
    if tools:
        stack.append(("tools", tools))
    while stack:
        where, item = stack.pop()
        if isinstance(item, str):
            yield where, item
        elif isinstance(item, dict):
            stack += [(where, part) for pair in item.items() for part in pair]
        elif isinstance(item, list | tuple):
            stack += [(where, part) for part in item]
