"""Prompts → journal, with a real tokenizer and a real journal."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hsjournal.errors import ExitCode, NoRoomError, PromptsError
from hsjournal.journal.migrate import migrate
from hsjournal.journal.store import Journal
from hsjournal.prompts.forecast import forecast, refuse_too_little
from hsjournal.prompts.ingest import ingest
from hsjournal.prompts.spec import IngestResult, IngestSpec, Progress
from hsjournal.prompts.template import ChatTokenizer, tokenizer_digest
from hsjournal.states import State
from tests.helpers.prompts import RowList, write_jsonl
from tests.helpers.tokenizers import make_tokenizer

ASK = {"role": "user", "content": "Hello, how are you?"}
SAY = {"role": "assistant", "content": "I am fine, thank you."}
TOKENS = {"input_ids": [10, 11, 12, 13], "loss_mask": [0, 0, 1, 1]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("model"), "llama3")


@pytest.fixture
def journal_path(tmp_path):
    migrate(tmp_path / "journal.db")
    return tmp_path / "journal.db"


def spec_of(model: Path | None, *files: Path, **changes: Any) -> IngestSpec:
    given: dict[str, Any] = {"run_id": "abcd", "max_tokens": 107, "vocab_size": 1000} | changes
    return IngestSpec(files=tuple(map(str, files)), model_dir=None if model is None else str(model), **given)


def test_each_kind_of_row_and_each_kind_of_fault_in_one_pass(tmp_path, model, journal_path):
    lines: list[tuple[dict[str, Any] | bytes, str | None]] = [  # the line, and its refusal
        ({"id": "chat", "messages": [ASK, SAY]}, None),
        ({"id": 7, "conversations": [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hi."}]}, None),
        (b"", ""),  # blank: no row
        ({"text": "<|begin_of_text|>The capital\u2028is Paris."}, None),
        ({"id": "tokens", **TOKENS}, None),
        (b'{"id": "broken", "messages": [', "broken_json: Expecting value at character 31"),
        (b'{"text": NaN}', "broken_json: NaN is not JSON"),
        (b'{"text": "a", "text": "b"}', "broken_json: a key stands twice"),
        (b'{"text": "\xff"}', "broken_unicode: not UTF-8: invalid start byte at byte 11"),
        (b'{"id": "half", "text": "\\ud83d"}', "broken_unicode: half of a surrogate pair, \\ud83d"),
        (
            {"prompt": "x"},
            "unknown_shape: the row has none of conversations, messages, text, input_ids",
        ),
        ({"messages": "x"}, "wrong_type: messages is text, not a list"),
        ({"id": "void", "messages": []}, "empty: messages has no turns"),
        ({"messages": [SAY, ASK]}, "wrong_order: turn 1 is 'assistant' and comes first"),
        ({"messages": [ASK]}, "no_loss_tokens: the assistant says nothing"),
        (
            {"input_ids": [1, 2], "loss_mask": [0, 0]},
            "no_loss_tokens: none of 2 tokens counts for the loss",
        ),
        (
            {"id": "long", "input_ids": [1] * 101, "loss_mask": [1] * 101},
            "too_long: 101 tokens, more than 100 (context length 107 - 7)",
        ),
        ({"id": "long", "input_ids": [1, 2] * 50, "loss_mask": [1] * 100}, None),  # the refused one took no id
        ({"id": "chat", **TOKENS}, "duplicate_id: 'chat' is the id of p.jsonl:1 too"),
        ({"id": "7", **TOKENS}, "duplicate_id: '7' is the id of p.jsonl:2 too"),
        ({"id": True, **TOKENS}, "bad_id: id is True, neither text nor a whole number"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "length_mismatch: 2 input_ids but 1 values of loss_mask"),
        (
            {"input_ids": [1, True], "loss_mask": [1, 1]},
            "wrong_type: input_ids[1] is true or false, not a whole number",
        ),
        ({"input_ids": [-1], "loss_mask": [1]}, "bad_token_id: input_ids has -1"),
        (
            {"input_ids": [1, 1000], "loss_mask": [1, 1]},
            "bad_token_id: token id 1000 is outside the vocabulary of 1000",
        ),
        ({"input_ids": [1], "loss_mask": [2]}, "bad_mask: loss_mask has 2, neither 0 nor 1"),
        ({"messages": [ASK, SAY], "images": ["a.png"]}, "multimodal: the row has images; only text is extracted"),
        ({"id": "twice", "text": "<|begin_of_text|><|begin_of_text|>Hello", "unknown": 1}, None),
        ({"input_ids": [0, 0, 5], "loss_mask": [1, 1, 1]}, None),  # 0 is the begin of sequence
        ({"id": "../../etc/passwd", "prompt": "an unknown column", "images": None, **TOKENS}, None),
        ({"id": "", **TOKENS}, None),
        ({"id": "名前 \u0000\u2028", **TOKENS}, None),
        ({"id": "x" * 5000, **TOKENS}, "bad_id: id has 5000 characters, more than 4096"),
        (
            {"messages": [ASK, {"role": "assistant", "content": " "}]},
            "empty_turn: messages[1] (assistant) has no words",
        ),
        (
            {"messages": [ASK, {"role": "robot", "content": "x"}]},
            "unknown_role: messages[1].role is 'robot', none of user, human, assistant, gpt, system, tool",
        ),
        (
            {"messages": [ASK, SAY, {"role": "tool", "content": "x"}, ASK]},
            "wrong_order: turn 4 is 'user' and comes after 'tool'",
        ),
    ]
    file = write_jsonl(tmp_path / "p.jsonl", [line for line, _ in lines])
    wanted = [(n, reason) for n, (_, reason) in enumerate(lines, 1) if reason != ""]
    with Journal(journal_path) as journal:
        result = ingest(journal, spec_of(model, file, batch_rows=4))
        kept = {row["row"]: row for state in (State.PENDING, State.SKIPPED) for row in journal.rows_in(state)}
        assert [(kept[n]["line"], kept[n]["reason"]) for n in range(len(kept))] == wanted
        assert journal.is_ingested
        counts = journal.counts()
        assert (counts[State.PENDING].rows, counts[State.SKIPPED].rows) == (result.usable, sum(result.skipped.values()))
        assert counts[State.PENDING].tokens == result.tokens
        claims = {claim.sample_id: claim for claim in journal.claimable(-1, 100)}
    assert result.rows == len(wanted) == result.usable + sum(result.skipped.values())
    assert result.skipped == {
        "broken_json": 3, "broken_unicode": 2, "wrong_type": 2, "no_loss_tokens": 2, "duplicate_id": 2,
        "bad_token_id": 2, "bad_id": 2, "unknown_shape": 1, "empty": 1, "wrong_order": 2, "too_long": 1,
        "length_mismatch": 1, "bad_mask": 1, "multimodal": 1,
        "empty_turn": 1, "unknown_role": 1,
    }  # fmt: skip
    assert [kept[n]["sample_id"] for n in (0, 1, 2, 3, 4, 8, 11)] == [
        "chat", "7", "p.jsonl:4", "tokens", "p.jsonl:6", "half", "void",
    ]  # fmt: skip
    assert list(claims) == [
        "chat", "7", "p.jsonl:4", "tokens", "long", "twice", "p.jsonl:29", "../../etc/passwd", "", "名前 \u0000\u2028",
    ]  # fmt: skip
    assert (list(claims["tokens"].input_ids), list(claims["tokens"].loss_mask)) == ([10, 11, 12, 13], [2, 2])
    text = ChatTokenizer(model).decode(claims["chat"].input_ids)
    assert text.endswith("<|end_header_id|>\n\nI am fine, thank you.<|eot_id|>")
    assert "\u2028" in ChatTokenizer(model).decode(claims["p.jsonl:4"].input_ids)
    assert result.methods == {"given": 6, "prefix": 2, "whole_text": 2}
    assert result.doubled_bos == 2
    assert result.lengths.longest == 100
    (source,) = result.sources
    assert (source.path, source.nbytes) == (str(file), file.stat().st_size)
    assert source.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert result.tokenizer_sha256 == tokenizer_digest(model)
    assert IngestResult.from_json(result.to_json()) == result


def test_rows_of_several_files_are_numbered_through_and_ids_hold_across_them(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", [TOKENS, {"id": "x", **TOKENS}])
    second = write_jsonl(tmp_path / "b.jsonl", [TOKENS, {"id": "x", **TOKENS}, {"id": "a.jsonl:1", **TOKENS}])
    rows = RowList()
    result = ingest(rows, spec_of(None, first, second))
    assert [(r.row, r.source, r.line, r.sample_id, r.skipped) for r in rows.rows] == [
        (0, "a.jsonl", 1, "a.jsonl:1", None),
        (1, "a.jsonl", 2, "x", None),
        (2, "b.jsonl", 1, "b.jsonl:1", None),
        (3, "b.jsonl", 2, "x", "duplicate_id: 'x' is the id of a.jsonl:2 too"),
        (4, "b.jsonl", 3, "a.jsonl:1", "duplicate_id: 'a.jsonl:1' is the id of a.jsonl:1 too"),
    ]
    assert [Path(s.path).name for s in result.sources] == ["a.jsonl", "b.jsonl"]
    assert result.tokenizer_sha256 == ""  # token ids need none


def test_batches_are_bounded_by_rows_and_by_tokens_and_progress_adds_up(tmp_path):
    file = write_jsonl(tmp_path / "p.jsonl", [TOKENS] * 10)
    for limits, sizes in [({"batch_rows": 4}, [4, 4, 2]), ({"batch_tokens": 8}, [2] * 5), ({}, [10])]:
        seen: list[Progress] = []
        ingest(RowList(), spec_of(None, file, **limits), seen.append)
        assert [p.rows for p in seen] == [sum(sizes[: n + 1]) for n in range(len(sizes))]
        assert (seen[-1].tokens, seen[-1].bytes_read) == (40, seen[-1].bytes_total)


def test_prompts_without_a_usable_line_are_refused_by_name_with_the_counts_and_the_first_reason(tmp_path, model):
    cases: list[tuple[list[dict[str, Any] | bytes], str, str]] = [
        ([b"", b"  "], "has only blank lines", "JSON Lines"),
        (
            [{"a": 1}, b"{", {"b": 1}],
            r"none of the 3 lines of .* can be used \(2 unknown_shape, 1 broken_json\); the first is p.jsonl:1: unknown_shape",
            "Each line needs",
        ),
        ([b"[", b'{"text": "x"},', b"]"], "none of the 3 lines", "jq"),
    ]
    for lines, message, remedy in cases:
        file = write_jsonl(tmp_path / "p.jsonl", lines)
        rows = RowList()
        with pytest.raises(PromptsError, match=message) as caught:
            ingest(rows, spec_of(model, file))
        assert str(file) in caught.value.message
        assert remedy in str(caught.value.remedy)
        assert rows.state != "finished"


def test_words_without_a_model_folder_are_refused_with_a_remedy(tmp_path):
    with pytest.raises(PromptsError, match="no model folder is named"):
        ingest(RowList(), spec_of(None, write_jsonl(tmp_path / "p.jsonl", [{"text": "x"}])))


def test_token_ids_go_in_beside_a_tokenizer_that_cannot_be_read(tmp_path):
    broken = make_tokenizer(tmp_path / "broken", "llama3")
    (broken / "tokenizer.json").write_text("{}")
    file = write_jsonl(tmp_path / "p.jsonl", [{"input_ids": [0, 0], "loss_mask": [0, 1]}])
    assert ingest(RowList(), spec_of(broken, file)).doubled_bos == 0
    with pytest.raises(PromptsError, match="can't be read"):
        ingest(RowList(), spec_of(broken, write_jsonl(tmp_path / "q.jsonl", [TOKENS, {"text": "x"}])))


def test_the_forecast_is_tokens_times_layers_times_hidden_and_the_containers(tmp_path):
    rows = [{"input_ids": [1] * n, "loss_mask": [1] * n} for n in (1, 2, 3, 4, 90)]
    result = ingest(RowList(), spec_of(None, write_jsonl(tmp_path / "p.jsonl", [*rows, b"{"])))
    assert (result.lengths.shortest, result.lengths.p50, result.lengths.p90, result.lengths.longest) == (1, 3, 90, 90)
    assert result.lengths.mean == 20
    expected = 100 * 4 * 7168 * 2
    found = forecast(result, num_aux=3, hidden=7168, dtype="bfloat16", free_bytes=expected)
    assert (found.rows, found.skipped, found.tokens) == (5, {"broken_json": 1}, 100)
    assert expected < found.output_bytes < expected + 100 * 1024
    assert found.largest_dump_bytes == 90 * 4 * 7168 * 2
    with pytest.raises(NoRoomError, match=f"{found.output_bytes - expected:,} missing"):
        refuse_too_little(found.output_bytes, found.free_bytes, [tmp_path])
    refuse_too_little(found.output_bytes, found.output_bytes, [tmp_path])
    assert forecast(result, 3, 7168, "float32", 1 << 40).output_bytes > 2 * expected


# as a child process


def run_child(argument: str, **environment: str) -> tuple[int, list[dict[str, Any]], str]:
    done = subprocess.run(
        [sys.executable, "-m", "hsjournal.prompts.ingest", argument],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_the_child_speaks_json_lines_and_says_what_the_function_returns(tmp_path, model, journal_path):
    rows = [{"id": f"r{n}", "messages": [ASK, SAY]} for n in range(5)]
    spec = spec_of(model, write_jsonl(tmp_path / "p.jsonl", rows), journal=str(journal_path), batch_rows=2)
    (tmp_path / "spec.json").write_text(spec.to_json())
    code, lines, errors = run_child(str(tmp_path / "spec.json"))
    assert (code, errors) == (0, "")
    assert [line["progress"]["rows"] for line in lines[:-1]] == [2, 4, 5]
    assert IngestResult.from_json(json.dumps(lines[-1]["result"])) == ingest(RowList(), spec)
    with Journal(journal_path) as journal:
        assert journal.counts()[State.PENDING].rows == 5
        assert journal.run_id == "abcd"


def test_the_child_ends_every_error_with_one_typed_line_and_no_traceback(tmp_path, model, journal_path):
    good = write_jsonl(tmp_path / "p.jsonl", [{"text": "x"}])
    cases = [
        (spec_of(model, tmp_path / "none.jsonl", journal=str(journal_path)).to_json(), ExitCode.USAGE, "none.jsonl"),
        (spec_of(tmp_path, good, journal=str(journal_path)).to_json(), ExitCode.USAGE, "holds no tokenizer"),
        (spec_of(model, good, journal=str(tmp_path / "no.db")).to_json(), ExitCode.NO_JOURNAL, "no.db"),
        ('{"run_id": "abcd"}', ExitCode.USAGE, "not an ingest spec"),
        ("{bad", ExitCode.USAGE, "not an ingest spec"),
        (str(tmp_path / "no.json"), ExitCode.USAGE, "not an ingest spec"),
    ]
    for argument, exit_code, what in cases:
        code, lines, errors = run_child(argument)
        assert (code, errors) == (exit_code, "")
        assert lines[-1]["exit_code"] == exit_code
        assert what in lines[-1]["error"]


def test_a_child_killed_between_batches_starts_over_and_no_row_is_lost_or_doubled(tmp_path, journal_path):
    rows = [{"id": n, **TOKENS} for n in range(10)]
    spec = spec_of(None, write_jsonl(tmp_path / "p.jsonl", rows), journal=str(journal_path), batch_rows=3)
    code, _, _ = run_child(spec.to_json(), HSJOURNAL_FAULTS="ingest.batch=kill@2")
    assert code == -signal.SIGKILL
    with Journal(journal_path) as journal:
        assert journal.counts()[State.PENDING].rows == 6
        assert not journal.is_ingested
    code, lines, _ = run_child(spec.to_json())
    assert (code, lines[-1]["result"]["usable"]) == (0, 10)
    with Journal(journal_path) as journal:
        assert [claim.sample_id for claim in journal.claimable(-1, 100)] == [str(n) for n in range(10)]
        assert journal.is_ingested
        journal.raise_epoch()
    code, lines, _ = run_child(spec.to_json())
    assert code == ExitCode.ERROR
    assert "already in" in lines[-1]["error"]


def test_a_child_whose_parent_is_gone_ends_quietly(tmp_path, journal_path):
    spec = spec_of(None, write_jsonl(tmp_path / "p.jsonl", [TOKENS] * 4), journal=str(journal_path), batch_rows=1)
    read, write = os.pipe()
    os.close(read)
    child = [sys.executable, "-m", "hsjournal.prompts.ingest", spec.to_json()]
    done = subprocess.run(child, stdout=write, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (ExitCode.ERROR, b"")


def test_the_child_leaves_torch_alone(tmp_path, model, journal_path):
    spec = spec_of(model, write_jsonl(tmp_path / "p.jsonl", [{"text": "x"}]), journal=str(journal_path))
    script = (
        "import sys; from hsjournal.prompts.ingest import main; code = main(sys.argv[1:]);"
        "sys.exit(code or any(name == 'torch' and module for name, module in sys.modules.items()))"
    )
    done = subprocess.run([sys.executable, "-c", script, spec.to_json()], capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
