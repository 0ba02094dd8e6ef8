"""Row shapes and what is refused in them, with exact reasons."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hsjournal.prompts.records import Conversation, Text, Tokens, parse_id, parse_record
from hsjournal.prompts.refusal import RowRefusedError

ASK = {"role": "user", "content": "Hello?"}
SAY = {"role": "assistant", "content": "Hi."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def turns(raw: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    record = parse_record(raw)
    assert isinstance(record, Conversation)
    return record.turns


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(RowRefusedError) as caught:
        parse_record(raw)
    return str(caught.value)


@pytest.mark.parametrize("key", ["conversations", "messages"])
@pytest.mark.parametrize(
    "given",
    [
        [{"role": "system", "content": "S"}, ASK, SAY],
        [{"from": "system", "value": "S"}, {"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hi."}],
        [{"from": "system", "value": "S"}, {"from": "user", "value": "Hello?"}, {"from": "assistant", "value": "Hi."}],
        [{"role": "system", "content": "S"}, {"role": "human", "content": "Hello?"}, {"from": "gpt", "value": "Hi."}],
    ],
)
def test_both_spellings_of_turns_come_out_the_same(key, given):
    assert turns({key: given}) == ({"role": "system", "content": "S"}, ASK, SAY)


def test_text_and_tokens():
    assert parse_record({"text": "<s>words", "score": 3}) == Text("<s>words")
    record = parse_record({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 0]})
    assert isinstance(record, Tokens)
    assert (list(record.input_ids), record.loss_mask) == ([5, 6, 7, 8], (1, 2, 1))
    starts_with_one = parse_record({"input_ids": [5, 6], "loss_mask": [1, 0]})
    assert isinstance(starts_with_one, Tokens)
    assert starts_with_one.loss_mask == (0, 1, 1)


def test_null_columns_count_as_absent_and_unknown_ones_are_passed_over():
    assert turns({"messages": [ASK, SAY], "text": None, "images": None, "tools": None, "source": {"x": [1.5]}}) == (
        ASK,
        SAY,
    )


def test_parts_of_text_are_put_end_to_end():
    parts = [{"type": "text", "text": "Hel", "image": None}, "lo?"]
    assert turns({"messages": [{"role": "user", "content": parts}, SAY]}) == (ASK, SAY)


def test_a_system_column_becomes_the_first_turn():
    assert turns({"system": "S", "conversations": [ASK, SAY]})[0] == {"role": "system", "content": "S"}
    assert turns({"system": "", "conversations": [ASK, SAY]}) == (ASK, SAY)
    both = {"system": "S", "messages": [{"role": "system", "content": "T"}, ASK, SAY]}
    assert refusal(both) == "wrong_order: turn 2 is 'system' and comes after 'system'"


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_and_tool_calls_come_as_lists_or_as_their_json(as_text):
    tool = {"type": "function", "function": {"name": "add"}}
    call = {"type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 1})}}
    raw = {
        "messages": [
            ASK,
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "Let me add.",
                "tool_calls": json.dumps([call]) if as_text else [call],
            },
            {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
            {"role": "tool", "content": ""},
            SAY,
        ],
        "tools": json.dumps([tool]) if as_text else [tool],
    }
    record = parse_record(raw)
    assert isinstance(record, Conversation)
    assert record.tools == [tool]
    assert record.turns[1] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Let me add.",
        "tool_calls": [CALL],
    }
    assert record.turns[2] == {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"}


def test_arguments_that_are_no_json_object_stay_as_they_are():
    call = {"name": "run", "arguments": "ls -l"}
    raw = {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    assert turns(raw)[1]["tool_calls"] == [call]


@pytest.mark.parametrize(
    ("order", "detail"),
    [
        ("a", "turn 1 is 'assistant' and comes first"),
        ("t", "turn 1 is 'tool' and comes first"),
        ("uu", "turn 2 is 'user' and comes after 'user'"),
        ("uaa", "turn 3 is 'assistant' and comes after 'assistant'"),
        ("usa", "turn 2 is 'system' and comes after 'user'"),
        ("ssu", "turn 2 is 'system' and comes after 'system'"),
        ("sa", "turn 2 is 'assistant' and comes after 'system'"),
        ("ut", "turn 2 is 'tool' and comes after 'user'"),
        ("uatu", "turn 4 is 'user' and comes after 'tool'"),
    ],
)
def test_turns_in_the_wrong_order_are_refused(order, detail):
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    given = [{"role": roles[letter], "content": "words"} for letter in order]
    assert refusal({"messages": given}) == f"wrong_order: {detail}"


@pytest.mark.parametrize("order", ["ua", "sua", "uau", "uata", "uatta", "uat", "uaua"])
def test_orders_that_occur_are_taken(order):
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    assert len(turns({"messages": [{"role": roles[letter], "content": "words"} for letter in order]})) == len(order)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({}, "unknown_shape: the row has none of conversations, messages, text, input_ids"),
        ({"prompt": "x"}, "unknown_shape: the row has none of conversations, messages, text, input_ids"),
        ({"text": "x", "messages": [ASK, SAY]}, "unknown_shape: the row has both messages and text"),
        ({"text": ""}, "empty: text is empty"),
        ({"text": 5}, "wrong_type: text is a number, not text"),
        ({"text": ["x"]}, "wrong_type: text is a list, not text"),
        ({"messages": []}, "empty: messages has no turns"),
        ({"conversations": []}, "empty: conversations has no turns"),
        ({"messages": [{"role": "system", "content": "S"}]}, "empty: messages has a system prompt only"),
        ({"messages": {}}, "wrong_type: messages is an object, not a list"),
        ({"messages": "x"}, "wrong_type: messages is text, not a list"),
        ({"messages": ["x"]}, "wrong_type: messages[0] is text, not an object"),
        ({"messages": [{"content": "x"}]}, "wrong_type: messages[0] needs either role and content, or from and value"),
        (
            {"messages": [{"role": "user", "from": "human", "content": "x"}]},
            "wrong_type: messages[0] needs either role and content, or from and value",
        ),
        (
            {"messages": [{"role": None, "content": "x"}]},
            "wrong_type: messages[0] needs either role and content, or from and value",
        ),
        (
            {"messages": [{"role": "User", "content": "x"}]},
            "unknown_role: messages[0].role is 'User', none of user, human, assistant, gpt, system, tool",
        ),
        ({"messages": [{"role": "user"}]}, "wrong_type: messages[0].content is null, not text"),
        ({"messages": [{"role": "user", "value": "x"}]}, "wrong_type: messages[0].content is null, not text"),
        ({"messages": [{"from": "human", "value": 5}]}, "wrong_type: messages[0].value is a number, not text"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "empty_turn: messages[0] (user) has no words"),
        ({"messages": [ASK, {"role": "assistant", "content": ""}]}, "empty_turn: messages[1] (assistant) has no words"),
        ({"messages": [ASK, {"role": "assistant"}]}, "wrong_type: messages[1].content is null, not text"),
        (
            {"messages": [ASK, SAY | {"reasoning_content": 1}]},
            "wrong_type: messages[1].reasoning_content is a number, not text",
        ),
        ({"messages": [ASK | {"tool_calls": [CALL]}, SAY]}, "wrong_type: messages[0] has tool_calls but is 'user'"),
        ({"messages": [ASK, SAY | {"tool_calls": 5}]}, "wrong_type: messages[1].tool_calls is a number, not a list"),
        (
            {"messages": [ASK, SAY | {"tool_calls": "{bad"}]},
            "wrong_type: messages[1].tool_calls is text but not the JSON of a list: '{bad'",
        ),
        ({"messages": [ASK, SAY], "tools": [5]}, "wrong_type: tools[0] is a number, not an object"),
        ({"messages": [ASK, SAY], "tools": True}, "wrong_type: tools is true or false, not a list"),
        ({"messages": [ASK, SAY], "images": ["a.png"]}, "multimodal: the row has images; only text is extracted"),
        ({"text": "x", "image": "a.png"}, "multimodal: the row has image; only text is extracted"),
        ({"messages": [ASK | {"videos": ["a"]}, SAY]}, "multimodal: messages[0] has videos; only text is extracted"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, SAY]},
            "multimodal: messages[0].content[0] is image_url; only text is extracted",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]}, SAY]},
            "multimodal: messages[0].content[1] is input_audio; only text is extracted",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "file"}]}, SAY]},
            "wrong_type: messages[0].content[0] is a part of type 'file'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}, SAY]},
            "wrong_type: messages[0].content[0].text is null, not text",
        ),
        ({"input_ids": [1]}, "wrong_type: input_ids without loss_mask"),
        ({"loss_mask": [1]}, "unknown_shape: the row has none of conversations, messages, text, input_ids"),
        ({"input_ids": [], "loss_mask": []}, "empty: input_ids is empty"),
        ({"input_ids": "1 2", "loss_mask": [1]}, "wrong_type: input_ids is text, not a list"),
        ({"input_ids": [[1]], "loss_mask": [[1]]}, "wrong_type: input_ids[0] is a list, not a whole number"),
        (
            {"input_ids": [1, True], "loss_mask": [1, 1]},
            "wrong_type: input_ids[1] is true or false, not a whole number",
        ),
        ({"input_ids": [1, 2.0], "loss_mask": [1, 1]}, "wrong_type: input_ids[1] is a number, not a whole number"),
        (
            {"input_ids": [1, 2], "loss_mask": [1, False]},
            "wrong_type: loss_mask[1] is true or false, not a whole number",
        ),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "length_mismatch: 2 input_ids but 1 values of loss_mask"),
        ({"input_ids": [1, -2], "loss_mask": [1, 1]}, "bad_token_id: input_ids has -2"),
        ({"input_ids": [1, 1 << 32], "loss_mask": [1, 1]}, "bad_token_id: input_ids has 4294967296"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "bad_mask: loss_mask has 2, neither 0 nor 1"),
        ({"text": "a\ud800"}, "broken_unicode: half of a surrogate pair, \\ud800"),
        ({"text": "a", "\udfff": 1}, "broken_unicode: half of a surrogate pair, \\udfff"),
        ({"text": "a", "other": [{"deep": ["\udc00"]}]}, "broken_unicode: half of a surrogate pair, \\udc00"),
        ({"text": "a", "other": json.loads("1e999")}, "broken_json: a number is inf"),
        (
            {"messages": [ASK, SAY | {"tool_calls": '[{"name": "\\ud800"}]'}]},
            "broken_unicode: half of a surrogate pair, \\ud800",
        ),
        (
            {"messages": [ASK, SAY | {"tool_calls": [{"name": "f", "arguments": '{"x": NaN}'}]}]},
            "broken_json: a number is nan",
        ),
    ],
)
def test_what_is_refused_and_the_exact_reason(raw, reason):
    assert refusal(raw) == reason


def test_a_pair_of_surrogates_is_one_character():
    assert parse_record(json.loads('{"text": "\\ud83d\\ude00"}')) == Text("😀")


@pytest.mark.parametrize(
    ("given", "taken"),
    [("a/../b", "a/../b"), ("", ""), ("名前 \u0000\u2028", "名前 \u0000\u2028"), (0, "0"), (-7, "-7"), (None, None)],
)
def test_ids_are_any_text_or_whole_number(given, taken):
    assert parse_id({"id": given}) == taken


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (True, "bad_id: id is True, neither text nor a whole number"),
        (1.5, "bad_id: id is 1.5, neither text nor a whole number"),
        (["a"], "bad_id: id is ['a'], neither text nor a whole number"),
        ({"a": 1}, "bad_id: id is {'a': 1}, neither text nor a whole number"),
        ("x" * 4097, "bad_id: id has 4097 characters, more than 4096"),
        ("a\ud800", "broken_unicode: half of a surrogate pair, \\ud800"),
    ],
)
def test_other_ids_are_refused(given, reason):
    with pytest.raises(RowRefusedError) as caught:
        parse_id({"id": given})
    assert str(caught.value) == reason


def test_a_refusal_stays_short_and_can_be_stored_whatever_it_quotes():
    long = refusal({"messages": [ASK, SAY | {"tool_calls": "\n\u2028x" * 10_000}]})
    assert len(long) < 400
    assert "\n" not in long
    assert long.encode()
