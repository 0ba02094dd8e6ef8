"""What a question and its answer tell of a chat template, once for all rows."""

from __future__ import annotations

from array import array
from functools import cached_property

from hsjournal.prompts.masks import Renderer
from hsjournal.prompts.refusal import RowRefusedError

QUESTION = {"role": "user", "content": "Question?"}
ANSWER = {"role": "assistant", "content": "Answer."}


class Trial:
    """See :class:`~hsjournal.prompts.masks.Renderer` for what each is."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    @cached_property
    def fault(self) -> str | None:
        """Why the assistant's words don't begin where the generation prompt ends, None when they do."""
        # Some templates need no generation prompt, as an answer follows the user's words directly; some older ones lack it
        # and open the answer with a header of its own, which would be taken for the assistant's words.
        try:
            before = self._renderer.text([QUESTION], None)
            if self._renderer.text([QUESTION], None, prompt=True) != before:
                return None
            whole = self._renderer.text([QUESTION, ANSWER], None)
        except RowRefusedError as error:
            return f"the chat template does not take a question and its answer ({error})"
        if whole.startswith(before) and whole[len(before) :].lstrip().startswith("Answer."):
            return None
        return "the chat template has no generation prompt, so that the answer's header can't be told from its words"

    @cached_property
    def prompt(self) -> str:
        """What the generation prompt adds to a question; empty when it adds nothing."""
        try:
            before = self._renderer.tokens([QUESTION], None)
            prompted = self._renderer.tokens([QUESTION], None, prompt=True)
        except RowRefusedError:
            return ""
        return self._renderer.decode(
            prompted[_common(before, prompted) :]
        )  # some write end-of-text where there is none

    @cached_property
    def question_tokens(self) -> frozenset[int]:
        """The control tokens that the template writes for a question and the generation prompt after it."""
        try:
            tokens = self._renderer.tokens([QUESTION], None, prompt=True)
        except RowRefusedError:
            return frozenset()
        return frozenset(token for token in tokens if self._renderer.is_special(token))

    @cached_property
    def closing(self) -> int:
        """How many tokens the template writes after the last turn's own end."""
        try:
            ended = self._renderer.tokens([QUESTION, ANSWER], None)
            goes_on = self._renderer.tokens([QUESTION, ANSWER, QUESTION], None)
        except RowRefusedError:
            return 0
        rest = ended[_common(ended, goes_on) :]
        # Anything else than control tokens is the answer itself, shown differently once others follow.
        return len(rest) if all(self._renderer.is_special(token) for token in rest) else 0


def _common(some: array[int], others: array[int]) -> int:
    """How many tokens both begin with."""
    return next((n for n, (a, b) in enumerate(zip(some, others, strict=False)) if a != b), min(len(some), len(others)))
