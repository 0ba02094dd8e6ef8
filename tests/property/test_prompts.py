"""Whatever lies in a prompts file, each line that isn't blank is exactly one row."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsjournal.errors import PromptsError
from hsjournal.journal.migrate import migrate
from hsjournal.journal.store import Journal
from hsjournal.prompts.ingest import ingest
from hsjournal.prompts.readers import JsonLines
from hsjournal.prompts.records import Conversation, Record, Text, Tokens, parse_record
from hsjournal.prompts.refusal import RowRefusedError
from hsjournal.prompts.runs import run_lengths
from hsjournal.prompts.spec import IngestSpec
from hsjournal.prompts.template import ChatTokenizer, Encoded
from tests.helpers.prompts import RowList
from tests.helpers.templates import make_family

TOKENS = {"input_ids": [3, 4], "loss_mask": [0, 1]}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYS = st.sampled_from(
    ["id", "messages", "conversations", "text", "input_ids", "loss_mask", "tools", "system", "images", "role", "from",
     "content", "value", "tool_calls", "reasoning_content", "type", "name", "function", "arguments"]
)  # fmt: skip
WORDS = st.sampled_from(
    ["user", "assistant", "human", "gpt", "system", "tool", "x", "", "text", "image", "[]", '[{"a":1}]']
)
LIKE_ROWS = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 3) | WORDS | st.just(1e308 * 10) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=25,
)


def ingest_bytes(data: bytes) -> RowList:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "p.jsonl"
        file.write_bytes(data)
        rows = RowList()
        try:
            result = ingest(
                rows, IngestSpec(run_id="abcd", files=(str(file),), model_dir=None, max_tokens=100, batch_rows=3)
            )
        except PromptsError:
            assert all(row.skipped for row in rows.rows)
        else:
            assert result.rows == len(rows.rows) == result.usable + sum(result.skipped.values())
            assert result.sources[0].nbytes == len(data)
        return rows


def lines_that_are_not_blank(data: bytes) -> list[int]:
    return [n for n, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1) if line.strip()]


PIECES = st.sampled_from([b"\n", b"\r\n", b"{}", b"{", b'{"input_ids":[1],"loss_mask":[1]}', b" ", b"\xff", b"\xef\xbb\xbf",
                          "\u2028".encode(), b"\x85", b"\x00", b'"\\ud800"', b"NaN", b"[", b"\x0b"])  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.binary(min_size=1, max_size=200) | st.lists(PIECES, min_size=1, max_size=30).map(b"".join))
def test_any_bytes_are_read_without_a_crash_and_the_line_numbers_add_up(data):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "p.jsonl"
        file.write_bytes(data)
        try:
            source = JsonLines(file, "p.jsonl")
        except PromptsError:
            return  # a file of another kind by its first bytes
        assert [line.number for line in source] == lines_that_are_not_blank(data)
        assert source.identity().nbytes == len(data)


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, min_size=1, max_size=30).map(b"".join))
def test_each_line_that_is_not_blank_is_exactly_one_row(data):
    rows = ingest_bytes(b'{"input_ids":[1],"loss_mask":[1]}\n' + data).rows
    assert [row.line for row in rows] == [1, *(n + 1 for n in lines_after(data))]
    assert [row.row for row in rows] == list(range(len(rows)))


def lines_after(data: bytes) -> list[int]:
    return [n for n, line in enumerate(data.split(b"\n"), 1) if line.strip()]


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(KEYS, LIKE_ROWS | JSON, max_size=6))
def test_any_object_is_a_record_or_a_typed_refusal_that_can_be_stored(raw):
    try:
        taken: object = parse_record(raw)
    except RowRefusedError as error:
        taken = error
    assert isinstance(taken, Conversation | Text | Tokens | RowRefusedError)
    if isinstance(taken, RowRefusedError):
        assert str(taken).startswith(f"{taken.reason.value}: ")
        assert str(taken).encode()


@settings(max_examples=25, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=20, unique=True))
def test_any_id_text_survives_into_the_journal(ids):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "p.jsonl"
        file.write_text("".join(json.dumps({"id": i, **TOKENS}) + "\n" for i in ids), encoding="utf-8")
        migrate(Path(folder) / "journal.db")
        with Journal(Path(folder) / "journal.db") as journal:
            ingest(journal, IngestSpec(run_id="abcd", files=(str(file),), model_dir=None, max_tokens=100))
            assert [claim.sample_id for claim in journal.claimable(-1, 100)] == ids


@given(st.lists(st.sampled_from([0, 1]), max_size=60))
def test_run_lengths_give_the_flags_back(flags):
    lengths = run_lengths(flags)
    assert [n % 2 for n, length in enumerate(lengths) for _ in range(length)] == flags
    assert all(lengths[1:])  # only the first may be 0


TALKERS = ("smollm2", "qwen3", "kimi_k2", "phi3")
PART = st.sampled_from(
    [
        "a",
        "Ω",
        "😀",
        " ",
        "\n",
        "\n\n",
        "\t",
        "\u2028",
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "<think>",
        "</think>",
        "word",
    ]
)
CONTENT = st.lists(PART, min_size=1, max_size=8).map("".join).filter(lambda text: text.strip())


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {name: ChatTokenizer(make_family(root / name, name)) for name in TALKERS}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TALKERS), st.lists(CONTENT, min_size=2, max_size=6))
def test_whatever_people_say_a_mask_is_the_answers_and_their_ends_or_the_row_is_refused(chats, family, said):
    chat = chats[family]
    turns = [{"role": ("user", "assistant")[n % 2], "content": words} for n, words in enumerate(said)]
    if len(turns) % 2:
        turns.pop()
    record = parse_record({"messages": turns})
    encoded = encoded_or_refused(chat, record)
    if isinstance(encoded, str):
        assert encoded.startswith("mask_unprovable")
        assert any("<|" in words for words in said), "only a control token in somebody's words can make it so"
        return
    assert encoded.input_ids == chat.tokens(turns, None)
    places, done = [], 0
    for n, length in enumerate(encoded.loss_mask):
        if n % 2:
            places.append(chat.decode(encoded.input_ids[done : done + length]))
        done += length
    answers = [turn["content"] for turn in turns[1::2]]
    assert len(places) == len(answers)
    for place, answer in zip(places, answers, strict=True):
        end = "<|end|>" if family == "phi3" else "<|im_end|>"
        assert place.endswith(end)
        shown, words = place.removesuffix(end), answer
        if family == "qwen3":  # which strips thoughts, and adds an empty one to the last turn
            shown, words = (text.rpartition("</think>")[2].strip() for text in (shown, words))
        assert words.endswith(shown)
        assert not words.removesuffix(shown).strip(), "only white space can be one token with the header"


def encoded_or_refused(chat: ChatTokenizer, record: Record) -> Encoded | str:
    try:
        return chat.encode(record)
    except RowRefusedError as error:
        return str(error)
