"""Loss masks word by word, on tokenizers of the families in use, and what a tokenizer folder may lack."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import pytest

from hsjournal.errors import PromptsError
from hsjournal.prompts.masks import MaskMethod
from hsjournal.prompts.records import parse_record
from hsjournal.prompts.refusal import RowRefusedError
from hsjournal.prompts.runs import run_lengths
from hsjournal.prompts.template import ChatTokenizer, Encoded, _flat_ids, tokenizer_digest
from tests.helpers.tokenizers import FAMILIES, make_tokenizer


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {family: ChatTokenizer(make_tokenizer(root / family, family)) for family in FAMILIES}


def conversation(*words: str, system: str | None = None) -> dict[str, Any]:
    roles = ("user", "assistant") * len(words)
    turns = [{"role": role, "content": content} for role, content in zip(roles, words, strict=False)]
    return {"messages": [{"role": "system", "content": system}, *turns] if system else turns}


def pieces(chat: ChatTokenizer, encoded: Encoded) -> list[tuple[int, str]]:
    """The text of each stretch of equal flags."""
    assert sum(encoded.loss_mask) == len(encoded.input_ids)
    flags = [n % 2 for n, length in enumerate(encoded.loss_mask) for _ in range(length)]
    return [
        (flag, chat.decode([token for token, _ in group]))
        for flag, group in groupby(zip(encoded.input_ids, flags, strict=True), key=lambda pair: pair[1])
    ]


EXPECTED = {
    "chatml": [
        (
            0,
            (
                "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello, how are you?<|im_end|>\n<|im_start|>assistant\n"
            ),
        ),
        (1, "I am fine, 你好 😀!<|im_end|>"),
        (0, "\n<|im_start|>user\nWhat is the capital?<|im_end|>\n<|im_start|>assistant\n"),
        (1, " Paris.\n\nOui.<|im_end|>"),
        (0, "\n"),
    ],
    "llama3": [
        (
            0,
            (
                "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
                "<|start_header_id|>user<|end_header_id|>\n\nHello, how are you?<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n"
            ),
        ),
        (1, "I am fine, 你好 😀!<|eot_id|>"),
        (
            0,
            (
                "<|start_header_id|>user<|end_header_id|>\n\nWhat is the capital?<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n"
            ),
        ),
        (1, "Paris.\n\nOui.<|eot_id|>"),
    ],
}
EXPECTED["chatml_marked"] = EXPECTED["qwen3"] = EXPECTED["chatml"]


@pytest.mark.parametrize("family", EXPECTED)
def test_the_mask_is_the_assistants_words_and_the_end_of_turn(chat, family):
    raw = conversation(
        "Hello, how are you?", "I am fine, 你好 😀!", "What is the capital?", " Paris.\n\nOui.", system="Be brief."
    )
    encoded = chat[family].encode(parse_record(raw))
    assert pieces(chat[family], encoded) == EXPECTED[family]
    assert encoded.method is (MaskMethod.GENERATION if family == "chatml_marked" else MaskMethod.PREFIX)
    assert not encoded.doubled_bos


def test_both_methods_agree_to_the_token(chat):
    raw = conversation("Hello?", "def add(a, b):\n    return a + b\n", "And?", "x", "Last question without an answer")
    marked, cut = (chat[family].encode(parse_record(raw)) for family in ("chatml_marked", "chatml"))
    assert (marked.input_ids, marked.loss_mask) == (cut.input_ids, cut.loss_mask)
    assert (marked.method, cut.method) == (MaskMethod.GENERATION, MaskMethod.PREFIX)


def test_a_template_that_needs_no_generation_prompt_is_cut_all_the_same(chat):
    encoded = chat["mistral"].encode(parse_record(conversation("Hello?", "Fine.", "And?", "Bye.")))
    assert pieces(chat["mistral"], encoded) == [
        (0, "<s>[INST] Hello? [/INST]"),
        (1, " Fine.</s>"),
        (0, "[INST] And? [/INST]"),
        (1, " Bye.</s>"),
    ]


def test_a_template_that_lacks_one_is_scanned_for_its_headers(chat):
    encoded = chat["chatml_without_prompt"].encode(parse_record(conversation("Hello?", "Fine.")))
    assert encoded.method is MaskMethod.SCAN
    assert pieces(chat["chatml_without_prompt"], encoded)[1:] == [(1, "Fine.<|im_end|>"), (0, "\n")]


def test_thoughts_count_where_the_template_shows_them(chat):
    answer = {"role": "assistant", "content": "Paris.", "reasoning_content": "France, so Paris."}
    ask = {"role": "user", "content": "Capital?"}
    encoded = chat["qwen3"].encode(parse_record({"messages": [ask, answer]}))
    assert pieces(chat["qwen3"], encoded)[1] == (1, "<think>\nFrance, so Paris.\n</think>\n\nParis.<|im_end|>")
    both = chat["qwen3"].encode(parse_record({"messages": [ask, answer, ask, answer]}))
    assert (encoded.method, both.method) == (MaskMethod.PREFIX, MaskMethod.SCAN)
    assert [text for flag, text in pieces(chat["qwen3"], both) if flag] == [
        "Paris.<|im_end|>",  # an earlier turn's thoughts are not shown, and so not counted
        "<think>\nFrance, so Paris.\n</think>\n\nParis.<|im_end|>",
    ]


def test_a_token_that_holds_the_end_of_the_header_too_does_not_count(chat):
    raw = conversation("Hello?", "\n\nFine.", "And?", "Good.")
    ids = chat["chatml"].tokens(raw["messages"], None)
    assert "\n\n" in [chat["chatml"].decode([i]) for i in ids]  # one token: the header's newline and an answer's
    encoded = chat["chatml"].encode(parse_record(raw))
    assert encoded.method is MaskMethod.SCAN
    assert encoded.input_ids == ids
    assert pieces(chat["chatml"], encoded) == [
        (0, "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n\n"),
        (1, "\nFine.<|im_end|>"),
        (0, "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"),
        (1, "Good.<|im_end|>"),
        (0, "\n"),
    ]


def test_tools_and_tool_calls_reach_the_template(chat):
    raw = {
        "tools": [{"name": "add"}],
        "messages": [
            {"role": "user", "content": "1+1?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "Two."},
        ],
    }
    found = pieces(chat["qwen3"], chat["qwen3"].encode(parse_record(raw)))
    assert found[0][1].startswith('<|im_start|>system\n{"name": "add"}<|im_end|>\n<|im_start|>user\n1+1?')
    assert [text for flag, text in found if flag] == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "Two.<|im_end|>",
    ]
    assert "<tool_response>\n2\n</tool_response>" in found[2][1]


def test_what_the_template_raises_is_the_rows_refusal(chat):
    with pytest.raises(RowRefusedError) as caught:
        chat["mistral"].encode(parse_record(conversation("Hello?", "Fine.", system="Be brief.")))
    assert str(caught.value) == "template_error: TemplateError: Only user and assistant roles are supported!"


def test_text_gets_one_begin_of_sequence_whether_it_brings_it_or_not(chat):
    llama = chat["llama3"]
    with_bos, without = (llama.encode(parse_record({"text": text})) for text in ("<|begin_of_text|>Hello", "Hello"))
    assert with_bos.input_ids == without.input_ids
    assert (with_bos.input_ids[0], llama.bos in with_bos.input_ids[1:]) == (llama.bos, False)
    assert with_bos.loss_mask == (0, len(with_bos.input_ids))  # every token of a text counts
    assert with_bos.method is MaskMethod.WHOLE_TEXT
    assert not with_bos.doubled_bos


def test_a_doubled_begin_of_sequence_is_seen(chat):
    assert chat["llama3"].encode(parse_record({"text": "<|begin_of_text|><|begin_of_text|>Hello"})).doubled_bos


def test_nothing_is_cut_by_limits_in_the_tokenizers_own_files(tmp_path):
    folder = make_tokenizer(tmp_path / "t", "chatml")
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"model_max_length": 4}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    chat = ChatTokenizer(folder)
    for raw in ({"text": "x" * 1000}, conversation("Hello?", "x" * 1000)):
        assert "x" * 1000 in chat.decode(chat.encode(parse_record(raw)).input_ids)


def test_conversations_without_a_chat_template_end_the_run_with_a_remedy(chat):
    with pytest.raises(PromptsError, match="no chat template") as caught:
        chat["bare"].encode(parse_record(conversation("Hello?", "Fine.")))
    assert caught.value.remedy
    assert chat["bare"].encode(parse_record({"text": "Hello"})).loss_tokens > 0


def test_folders_without_a_readable_tokenizer_are_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    broken = make_tokenizer(tmp_path / "broken", "chatml")
    (broken / "tokenizer.json").write_text('{"model": 5}')
    for folder, what in [
        (tmp_path / "none", "no model folder"),
        (tmp_path, "holds no tokenizer"),
        (broken, "can't be read"),
    ]:
        with pytest.raises(PromptsError, match=what) as caught:
            ChatTokenizer(folder)
        assert str(folder) in caught.value.message
        assert caught.value.remedy


@pytest.mark.parametrize(
    "result", [[[1, 2]], {"input_ids": [[1, 2]]}, {"input_ids": "12"}, "12", [1, True], [-1], [1.0]]
)
def test_what_is_no_flat_list_of_ids_is_never_counted(result):
    with pytest.raises(PromptsError, match="without a flat list of token ids"):
        _flat_ids(result)


def test_a_mapping_and_a_list_of_ids_are_both_taken():
    assert list(_flat_ids({"input_ids": [1, 2]})) == list(_flat_ids([1, 2])) == [1, 2]


def test_the_digest_follows_every_file_that_changes_the_tokens(tmp_path):
    folder = make_tokenizer(tmp_path / "t", "chatml")
    seen = {tokenizer_digest(folder)}
    (folder / "model.safetensors").write_bytes(b"weights")
    assert tokenizer_digest(folder) in seen
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    seen.add(tokenizer_digest(folder))
    (folder / "added_tokens.json").write_text("{}")
    seen.add(tokenizer_digest(folder))
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("flags", "lengths"),
    [([], ()), ([0], (1,)), ([1], (0, 1)), ([1, 1, 0], (0, 2, 1)), ([0, 0, 1, 0, 1], (2, 1, 1, 1))],
)
def test_run_lengths_start_with_zeros(flags, lengths):
    assert run_lengths(flags) == lengths
