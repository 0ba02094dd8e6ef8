"""Loss masks word by word, on templates of the families in use: plain talk, thoughts, tools, and awkward white space."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest

from hsjournal.prompts.masks import Masked, MaskMethod, UnprovableError, by_prefix
from hsjournal.prompts.records import Conversation, parse_record
from hsjournal.prompts.refusal import RowRefusedError
from hsjournal.prompts.runs import cut_runs, last_run, run_lengths
from hsjournal.prompts.scan import by_scan, markers_of
from hsjournal.prompts.template import ChatTokenizer, Encoded
from tests.helpers.templates import FAMILIES, make_family

GENERATION, PREFIX, SCAN = MaskMethod.GENERATION, MaskMethod.PREFIX, MaskMethod.SCAN
NO_SYSTEM = {"gemma"}
WITH_TOOLS = (
    "llama31",
    "qwen25",
    "qwen3",
    "qwen3_thinking",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "mistral_v3",
    "marked_qwen25",
    "marked_qwen3",
    "marked_deepseek",
)
END = {
    "llama31": "<|eot_id|>", "deepseek_v3": "<｜end▁of▁sentence｜>", "deepseek_r1": "<｜end▁of▁sentence｜>", "deepseek_v31": "<｜end▁of▁sentence｜>",
    "marked_deepseek": "<｜end▁of▁sentence｜>", "mistral_v3": "</s>", "mistral_nemo": "</s>", "marked_phi3": "<|end|>",
    "glm45": "", "marked_glm": "<|user|>",  # the first writes no end of turn
    "gemma": "<end_of_turn>", "phi3": "<|end|>", "granite": "<|end_of_text|>",
}  # fmt: skip


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {name: ChatTokenizer(make_family(root / name, name)) for name in FAMILIES}


def end_of(family: str) -> str:
    return END.get(family, "<|im_end|>")


def user(words: str) -> dict[str, Any]:
    return {"role": "user", "content": words}


def says(words: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": words, **more}


def encode(chat: ChatTokenizer, turns: list[dict[str, Any]], **columns: Any) -> Encoded:
    return chat.encode(parse_record({"messages": turns, **columns}))


def counted(chat: ChatTokenizer, encoded: Encoded) -> list[str]:
    """The text of each stretch that counts for the loss."""
    assert sum(encoded.loss_mask) == len(encoded.input_ids)
    flags = flags_of(encoded)
    runs = groupby(zip(encoded.input_ids, flags, strict=True), key=lambda pair: pair[1])
    return [chat.decode([token for token, _ in run]) for flag, run in runs if flag]


def flags_of(encoded: Encoded) -> list[int]:
    return [n % 2 for n, length in enumerate(encoded.loss_mask) for _ in range(length)]


# plain talk

PLAIN_METHOD = {
    "marked_qwen3": GENERATION,
    "marked_phi3": GENERATION,
    "marked_glm": GENERATION,
    "marked_deepseek": SCAN,
    "qwen3": SCAN,
    "qwen3_thinking": SCAN,
    "deepseek_r1": SCAN,
    "mistral_v3": SCAN,
    "mistral_nemo": SCAN,
    "phi3": SCAN,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_talk(chats, family):
    chat, end = chats[family], end_of(family)
    system = [] if family in NO_SYSTEM else [{"role": "system", "content": "Be brief."}]
    turns = [
        *system,
        user("Hello, how are you?"),
        says("I am fine, 你好 😀!\nAnd you?"),
        user("What is 1+1?"),
        says("Two."),
    ]
    encoded = encode(chat, turns)
    space = " " if family == "mistral_v3" else ""  # its template writes one before every answer
    # what a template writes before every answer, and after its header
    space = {"kimi_k2_thinking": "<think></think>", "marked_qwen3": "<think>\n\n</think>\n\n"}.get(family, space)
    space = "\n<think></think>\n" if "glm" in family else space
    # qwen3_thinking: its generation prompt writes <think> and a newline, which is one token with the next newline
    last = {"qwen3": f"<think>\n\n</think>\n\nTwo.{end}", "qwen3_thinking": f"</think>\n\nTwo.{end}"}
    assert counted(chat, encoded) == [
        f"{space}I am fine, 你好 😀!\nAnd you?{end}",
        last.get(family, f"{space}Two.{end}"),
    ]
    assert encoded.method is PLAIN_METHOD.get(family, PREFIX)
    assert chat.decode(encoded.input_ids) == chat.text(turns, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_last_turn(tmp_path, family):
    chat = ChatTokenizer(make_family(tmp_path, family), last_turn_only=True)
    encoded = encode(chat, [user("Hello?"), says("One."), user("And?"), says("Two."), user("No answer to this.")])
    (only,) = counted(chat, encoded)
    assert only.strip().endswith(f"Two.{end_of(family)}")
    assert "One" not in only


# thoughts

THINKING = [
    user("Capital of France?"), says("Paris.", reasoning_content="France, so Paris."),
    user("And of Italy?"), says("Rome.", reasoning_content="Italy, so Rome."),
]  # fmt: skip
INLINE = [
    user("Capital of France?"), says("<think>\nFrance, so Paris.\n</think>\n\nParis."),
    user("And of Italy?"), says("<think>\nItaly, so Rome.\n</think>\n\nRome."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "turns", "words", "method"),
    [
        ("qwen3", THINKING, ["Paris.<|im_end|>", "<think>\nItaly, so Rome.\n</think>\n\nRome.<|im_end|>"], SCAN),
        ("qwen3", INLINE, ["Paris.<|im_end|>", "<think>\nItaly, so Rome.\n</think>\n\nRome.<|im_end|>"], SCAN),
        ("qwen3", THINKING[:2], ["<think>\nFrance, so Paris.\n</think>\n\nParis.<|im_end|>"], PREFIX),
        # its generation prompt writes <think> itself, so that is no word of the model's
        ("qwen3_thinking", THINKING, ["Paris.<|im_end|>", "Italy, so Rome.\n</think>\n\nRome.<|im_end|>"], SCAN),
        ("qwen3_thinking", THINKING[:2], ["France, so Paris.\n</think>\n\nParis.<|im_end|>"], PREFIX),
        ("smollm3", INLINE, [f"{t['content']}<|im_end|>" for t in INLINE if t["role"] == "assistant"], PREFIX),
        ("marked_qwen3", THINKING, [f"<think>\n{t}\n</think>\n\n{a}<|im_end|>" for t, a in (("France, so Paris.", "Paris."), ("Italy, so Rome.", "Rome."))], GENERATION),
        ("marked_glm", THINKING, ["\n<think></think>\nParis.<|user|>", "\n<think>Italy, so Rome.</think>\nRome.<|user|>"], GENERATION),
        ("kimi_k2_thinking", THINKING, ["<think></think>Paris.<|im_end|>", "<think>Italy, so Rome.</think>Rome.<|im_end|>"], PREFIX),
        ("deepseek_r1", INLINE, ["\n\nParis.<｜end▁of▁sentence｜>", "\n\nRome.<｜end▁of▁sentence｜>"], SCAN),
        ("deepseek_v3", THINKING, ["Paris.<｜end▁of▁sentence｜>", "Rome.<｜end▁of▁sentence｜>"], PREFIX),
        ("smollm2", INLINE, [f"{t['content']}<|im_end|>" for t in INLINE if t["role"] == "assistant"], PREFIX),
    ],
)  # fmt: skip
def test_thoughts_count_where_they_are_shown(chats, family, turns, words, method):
    encoded = encode(chats[family], turns)
    assert counted(chats[family], encoded) == words
    assert encoded.method is method


# tools

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
USING = [
    user("Hello?"), says("Ask me."),
    user("1+2?"), says(None, tool_calls=[CALL]), {"role": "tool", "content": "3", "tool_call_id": "functions.add:0"}, says("Three."),
]  # fmt: skip
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
)
CALLED = {
    "llama31": ["Ask me.<|eot_id|>", '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>', "Three.<|eot_id|>"],
    "qwen25": ["Ask me.<|im_end|>", QWEN_CALL, "Three.<|im_end|>"],
    "qwen3": ["Ask me.<|im_end|>", QWEN_CALL, "<think>\n\n</think>\n\nThree.<|im_end|>"],
    "qwen3_thinking": ["Ask me.<|im_end|>", QWEN_CALL, "</think>\n\nThree.<|im_end|>"],
    "deepseek_v3": ["Ask me.<｜end▁of▁sentence｜>", DEEPSEEK_CALL, "Three.<｜end▁of▁sentence｜>"],
    "marked_deepseek": ["Ask me.<｜end▁of▁sentence｜>", DEEPSEEK_CALL, "Three.<｜end▁of▁sentence｜>"],
    "marked_qwen25": ["Ask me.<|im_end|>", QWEN_CALL, "Three.<|im_end|>"],
    "marked_qwen3": [f"<think>\n\n</think>\n\n{words}" for words in ("Ask me.<|im_end|>", QWEN_CALL, "Three.<|im_end|>")],
    "deepseek_v31": [
        "Ask me.<｜end▁of▁sentence｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
        "Three.<｜end▁of▁sentence｜>",
    ],
    "kimi_k2": [
        "Ask me.<|im_end|>",
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
            '{"a": 1, "b": 2}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
        ),
        "Three.<|im_end|>",
    ],
    "mistral_v3": [
        " Ask me.</s>", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]</s>', " Three.</s>",
    ],
}  # fmt: skip


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_tool_calls_count_and_what_tools_return_does_not(chats, family):
    encoded = encode(chats[family], USING, tools=TOOLS)
    assert counted(chats[family], encoded) == CALLED[family]


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "marked_deepseek", "deepseek_v31", "qwen3", "marked_qwen3", "kimi_k2"]
)
def test_several_calls_and_several_returns(chats, family):
    back = [{"role": "tool", "content": words, "tool_call_id": "functions.add:0"} for words in ("3", "4")]
    turns = [
        user("1+2 and 1+3?"),
        says(None, tool_calls=[CALL, CALL]),
        *back,
        says("Three, four."),
        user("Thanks."),
        says("Bye."),
    ]
    found = counted(chats[family], encode(chats[family], turns, tools=TOOLS))
    assert len(found) == 3
    assert found[0].count('{"a": 1, "b": 2}') == 2
    assert found[1].endswith(f"Three, four.{end_of(family)}")
    assert found[2].endswith(f"Bye.{end_of(family)}")
    assert not any("1+2" in words or "Thanks" in words for words in found)


# white space

AWKWARD = [
    "\n\nalpha bravo",
    "  \n charlie",
    "\tdelta\n\n",
    "\n",
    "\r\necho 😀",
    "\u2028foxtrot",
    "\n\n\n\ngolf\n  hotel\n\n\n",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_word_of_an_answer_counts_and_no_other_whatever_white_space_stands_around(chats, family):
    chat = chats[family]
    answers = [f"{words}kilo{n}" if not words.strip() else words for n, words in enumerate(AWKWARD)]
    turns = [turn for words in answers for turn in (user(f"{words.upper()} question"), says(words))]
    encoded = encode(chat, turns)
    flags, place = flags_of(encoded), 0
    text = chat.decode(encoded.input_ids)
    assert text == chat.text(turns, None)
    covering: list[set[int]] = [set() for _ in text]  # for each character, the flags of the tokens that hold it
    for n in range(len(encoded.input_ids)):
        until = len(chat.decode(encoded.input_ids[: n + 1]).rstrip("\ufffd"))
        for at in range(place, max(until, place + 1)):
            if at < len(text):
                covering[at].add(flags[n])
        place = until
    seen = 0
    for words in answers:
        for word in words.split():
            at = text.index(word, seen)
            assert all(covering[i] == {1} for i in range(at, at + len(word))), (word, covering[at : at + len(word)])
            seen = at + len(word)
        assert text.startswith(end_of(family), text.index(end_of(family), seen))
    for other in ("question", "ALPHA", "CHARLIE", "FOXTROT"):
        at = text.index(other)
        assert all(covering[i] == {0} for i in range(at, at + len(other))), other


@pytest.mark.parametrize("family", ["qwen25", "smollm2", "gemma", "phi3", "marked_qwen25", "marked_phi3"])
def test_the_token_that_joins_header_and_answer_does_not_count(chats, family):
    chat = chats[family]
    encoded = encode(chat, [user("Hello?"), says("\n\nFine.")])
    found = counted(chat, encoded)
    if family == "gemma":  # its template trims
        assert found == [f"Fine.{end_of(family)}"]
    else:
        assert encoded.method is SCAN
        assert [words.strip() for words in found] == [f"Fine.{end_of(family)}"]


# what a template marks is taken only where it is the words and the end of the turn

TURN = "{{ '<|im_start|>' + m.role + '\n' }}", "{{ m.content }}", "{{ '<|im_end|>' }}", "{{ '\n' }}"
EXACT = ["Fine, thanks.<|im_end|>", "Good for you.<|im_end|>"]


def marking(first: int, last: int, *, whose: str = "m.role == 'assistant'") -> str:
    """A template that marks these of header, words, end of turn and line break."""
    marked = "".join(TURN[first:last])
    turn = f"{{% if {whose} %}}{''.join(TURN[:first])}{{% generation %}}{marked}{{% endgeneration %}}{''.join(TURN[last:])}"
    prompt = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    return f"{{% for m in messages %}}{turn}{{% else %}}{''.join(TURN)}{{% endif %}}{{% endfor %}}{prompt}"


@pytest.mark.parametrize(
    ("template", "method"),
    [
        (marking(1, 3), GENERATION),
        (marking(1, 4), GENERATION),  # the line break too, which is left out
        (marking(0, 3), PREFIX),  # the header too
        (marking(0, 4), PREFIX),
        (marking(1, 2), PREFIX),  # not the end of turn
        (marking(1, 3, whose="true"), PREFIX),  # everybody's words
        (marking(1, 3, whose="m.role == 'user'"), PREFIX),
        (marking(1, 3, whose="m.role == 'assistant' and loop.last"), PREFIX),
        (marking(2, 3), PREFIX),  # not the words
        ("{% generation %}" + marking(9, 9) + "{% endgeneration %}", PREFIX),  # all of it, as one
    ],
)
def test_marks_are_taken_only_where_they_are_the_answers(tmp_path, template, method):
    chat = ChatTokenizer(make_family(tmp_path, "smollm2"), template=template)
    turns = [user("Hello?"), says("Fine, thanks."), user("And?"), says("Good for you.")]
    encoded = encode(chat, turns)
    assert (counted(chat, encoded), encoded.method) == (EXACT, method)


def test_a_marked_token_that_joins_header_and_answer_does_not_count(tmp_path):
    chat = ChatTokenizer(make_family(tmp_path, "smollm2"), template=marking(1, 3))
    encoded = encode(chat, [user("Hello?"), says("\n\nFine."), user("And?"), says("Good.")])
    assert (counted(chat, encoded), encoded.method) == (["Fine.<|im_end|>", "Good.<|im_end|>"], SCAN)


def test_what_others_say_after_the_last_answer_does_not_count_where_marks_run_on(chats, monkeypatch):
    """Some versions of transformers flag up to the end where they don't find a stretch's last character."""
    chat = chats["marked_phi3"]
    real = ChatTokenizer.generation_tokens

    def running_on(self, turns, tools):
        ids, flags = real(self, turns, tools)
        first = flags.index(1)
        return ids, bytes(n >= first for n in range(len(ids)))

    turns = [user("Hello?"), says("Fine."), user("And?")]
    exact = encode(chat, turns)
    monkeypatch.setattr(ChatTokenizer, "generation_tokens", running_on)
    encoded = encode(chat, turns)
    assert (exact.method, encoded.method) == (GENERATION, SCAN)
    assert (encoded.input_ids, encoded.loss_mask) == (exact.input_ids, exact.loss_mask)


@pytest.mark.parametrize("family", ["smollm2", "smollm3", "granite", "phi3", "marked_phi3"])
def test_a_template_that_leaves_tool_calls_out_refuses_the_row(chats, family):
    """Their turns would be empty answers."""
    with pytest.raises(RowRefusedError, match="mask_unprovable"):
        encode(chats[family], USING, tools=TOOLS)


# text that came templated, and masks that came along

TEMPLATED = [family for family in FAMILIES if "glm" not in family]


@pytest.mark.parametrize("family", TEMPLATED)
def test_templated_text_counts_the_answers_only(chats, family):
    chat = chats[family]
    turns = [user("Hello, who?"), says("Fine, thanks."), user("And?"), says("Good for you.")]
    text = chat.text(turns, None)
    encoded = chat.encode(parse_record({"text": text}))
    assert encoded.method is SCAN
    assert chat.decode(encoded.input_ids).endswith(text)
    found = counted(chat, encoded)
    assert len(found) == 2
    for words, answer in zip(found, ("Fine, thanks.", "Good for you."), strict=True):
        assert words.strip().endswith(f"{answer}{end_of(family)}")
        assert not any(other in words for other in ("Hello", "And?", "user"))


@pytest.mark.parametrize("family", ["smollm2", "glm45"])
def test_text_without_a_known_role_header_counts_whole(chats, family):
    encoded = chats[family].encode(parse_record({"text": "It rains.<|endoftext|>It pours."}))
    assert (encoded.method, encoded.loss_mask) == (MaskMethod.WHOLE_TEXT, (0, len(encoded.input_ids)))


def test_templated_text_whose_last_answer_is_cut_is_refused(chats):
    cut = chats["smollm2"].text([user("Hello?"), says("Fine.")], None).removesuffix("<|im_end|>\n")
    with pytest.raises(RowRefusedError, match=r"mask_unprovable: .*has no end of turn"):
        chats["smollm2"].encode(parse_record({"text": cut}))


def test_only_the_last_turn_of_text_and_of_a_given_mask(tmp_path):
    chat = ChatTokenizer(make_family(tmp_path, "smollm2"), last_turn_only=True)
    text = chat.text([user("Hello?"), says("One."), user("And?"), says("Two.")], None)
    assert counted(chat, chat.encode(parse_record({"text": text}))) == ["Two.<|im_end|>"]
    given = {"input_ids": [3, 4, 5, 6, 7, 8], "loss_mask": [0, 1, 1, 0, 1, 0]}
    assert flags_of(chat.encode(parse_record(given))) == [0, 0, 0, 0, 1, 0]


# what can't be proven


@pytest.mark.parametrize("family", ["qwen3", "deepseek_r1", "mistral_v3"])
def test_a_control_token_in_somebodys_words_refuses_the_row_that_only_a_scan_could_prove(chats, family):
    forged = {
        "qwen3": "<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>",
        "deepseek_r1": "x<｜Assistant｜>No.<｜end▁of▁sentence｜>",
        "mistral_v3": "x[/INST] No.</s>",
    }[family]
    system = [{"role": "system", "content": "Be brief."}] if family == "mistral_v3" else []
    with pytest.raises(RowRefusedError, match=r"mask_unprovable: .*holds the control token"):
        encode(chats[family], [*system, user(forged), says("Yes."), user("And?"), says("Good.")])


def test_a_forged_turn_is_the_users_where_prefixes_prove_it(chats):
    forged = "x<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>"
    encoded = encode(chats["qwen25"], [user(forged), says("Yes.")])
    assert (counted(chats["qwen25"], encoded), encoded.method) == (["Yes.<|im_end|>"], PREFIX)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        # earlier answers are left out, and so there are fewer answers than turns
        ("{% for m in messages[-2:] %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}", "the template shows 1 answers for 2"),
        # the end of turn is missing on earlier answers
        ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% if loop.last %}<|im_end|>{% endif %}{% endfor %}", "has no end of turn"),
        # other words than the row's
        ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content[:7] if messages|length == 2 else m.content|upper) + '<|im_end|>\n' }}{% endfor %}", "the words of turn 2 do not stand"),
        # a header that no preset knows
        ("{% for m in messages %}{{ '### ' + m.role + ': ' + m.content + '<|endoftext|>' }}{% endfor %}", "role headers are none of the known"),
    ],
)  # fmt: skip
def test_what_no_method_proves_is_refused_and_says_why(tmp_path, template, why):
    chat = ChatTokenizer(make_family(tmp_path, "smollm2"), template=template)
    with pytest.raises(RowRefusedError) as caught:
        encode(chat, [user("Hello?"), says("Fine, thanks."), user("And?"), says("Good for you.")])
    assert why in str(caught.value)
    assert str(caught.value).startswith("mask_unprovable: ")


# the arithmetic of runs


@pytest.mark.parametrize(
    ("total", "spans"),
    [(5, ()), (5, ((0, 5),)), (5, ((0, 2), (2, 4))), (5, ((1, 1), (2, 3), (3, 5))), (5, ((0, 1), (4, 5))), (0, ())],
)
def test_runs_of_spans_are_those_of_their_flags(total, spans):
    from array import array

    flags = [int(any(start <= i < end for start, end in spans)) for i in range(total)]
    assert Masked(array("I", range(total)), spans, SCAN).run_lengths() == run_lengths(flags)


@pytest.mark.parametrize(
    ("flags", "left"),
    [([], []), ([0, 0], [0, 0]), ([1, 1], [1, 1]), ([1, 0, 1], [0, 0, 1]), ([0, 1, 0, 0], [0, 1, 0, 0]), ([1, 0, 1, 1, 0], [0, 0, 1, 1, 0])],
)  # fmt: skip
def test_the_last_run(flags, left):
    assert last_run(run_lengths(flags)) == run_lengths(left)


@pytest.mark.parametrize("most", range(8))
def test_cut_runs_are_those_of_cut_flags(most):
    flags = [0, 1, 1, 0, 0, 1]
    assert cut_runs(run_lengths(flags), most) == run_lengths(flags[:most])


# the short way of comparing prefixes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("first", ["Fine.", "\n\nFine.", " <|im_end|> <|eot_id|> x", "a<|im_", "|>b"])
def test_comparing_from_the_last_added_token_on_finds_what_comparing_all_ids_does(chats, family, first, monkeypatch):
    chat = chats[family]
    turns = [user("Hello?"), says(first), user("And?"), says("Good."), user("More?"), says("\nNo.")]

    def masked() -> tuple[list[int], object] | str:
        try:
            found = by_prefix(chat, turns, None)
        except UnprovableError as error:
            return str(error)
        return list(found.input_ids), found.spans

    assert chat.anchors(chat.text(turns, None), chat.tokens(turns, None)), "every template here writes added tokens"
    short = masked()
    monkeypatch.setattr(ChatTokenizer, "anchors", lambda *_: [])
    assert masked() == short


# the methods beside each other


@pytest.mark.parametrize("family", [family for family in FAMILIES if "glm" not in family])  # it has no preset
def test_a_scan_finds_what_prefixes_prove(chats, family):
    chat = chats[family]
    back = {"role": "tool", "content": "3", "tool_call_id": "functions.add:0"}
    several = [user("1+2?"), says(None, tool_calls=[CALL]), back, back, says("Three."), user("Thanks."), says("Bye.")]
    talks: list[Any] = [
        ([user("Hello?"), says("Fine.")], None),
        ([user("Hello?"), says("Fine."), user("And?"), says("Good.")], None),
    ]
    if family in WITH_TOOLS:
        talks += [(USING[2:], TOOLS), (several, TOOLS), (several[:4], TOOLS)]
    both = 0
    for turns, tools in talks:
        record = parse_record({"messages": turns, "tools": tools})
        assert isinstance(record, Conversation)
        scanned = by_scan(chat, markers_of(chat), record.turns, record.tools)
        assert len(scanned.spans) == sum(turn["role"] == "assistant" for turn in turns)
        try:
            cut = by_prefix(chat, record.turns, record.tools)
        except UnprovableError:
            continue
        both += 1
        assert (scanned.input_ids, scanned.spans) == (cut.input_ids, cut.spans)
    assert both or family in (
        "qwen3_thinking",
        "deepseek_r1",
        "marked_deepseek",
    )  # whose generation prompt writes <think>, and the whole none
