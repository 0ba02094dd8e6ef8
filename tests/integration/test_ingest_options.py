"""How prompts are read: limits, order, cuts, other templates; and that several processes change nothing but the time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import psutil
import pytest

from hsjournal.errors import HsjournalError, PromptsError
from hsjournal.journal.migrate import migrate
from hsjournal.journal.store import Journal
from hsjournal.prompts import pool
from hsjournal.prompts.ingest import ingest
from hsjournal.prompts.order import drawn
from hsjournal.prompts.spec import IngestSpec, Reading
from hsjournal.prompts.template import ChatTokenizer
from hsjournal.states import State
from tests.helpers.prompts import RowList, write_jsonl
from tests.helpers.templates import make_family

TOKENS = {"input_ids": [10, 11, 12, 13], "loss_mask": [0, 1, 1, 1]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_family(tmp_path_factory.mktemp("model"), "qwen3")


def spec_of(model: Path | None, *files: Path, processes: int = 1, **reading: Any) -> IngestSpec:
    return IngestSpec(
        run_id="abcd", files=tuple(map(str, files)), model_dir=str(model) if model else None, max_tokens=107,
        vocab_size=1000, reading=Reading(**reading), processes=processes,
    )  # fmt: skip


def talk(n: int, thoughts: str | None = None) -> dict[str, Any]:
    answer = {"role": "assistant", "content": f"\n\nanswer {n}" if n % 3 else f"answer {n}"}
    more = {"reasoning_content": thoughts} if thoughts else {}
    ask = {"role": "user", "content": f"question {n}"}
    return {"id": f"t{n}", "messages": [ask, answer, ask, answer | more]}


def mixed(count: int) -> list[dict[str, Any] | bytes]:
    kinds: list[Any] = [
        lambda n: talk(n, "so"), lambda n: TOKENS | {"id": n}, lambda _: b"{broken", lambda n: {"text": f"text {n}"},
        lambda _: talk(0), lambda n: {"input_ids": [n], "loss_mask": [2]}, lambda n: {"input_ids": [n] * 200, "loss_mask": [1] * 200},
    ]  # fmt: skip
    return [kinds[n % len(kinds)](n) for n in range(count)]


# order


def test_limit_takes_the_first_rows_and_the_files_digest_is_still_whole(tmp_path):
    files = [write_jsonl(tmp_path / f"{n}.jsonl", [TOKENS, b"{", TOKENS]) for n in range(2)]
    whole, some = RowList(), RowList()
    everything = ingest(whole, spec_of(None, *files))
    result = ingest(some, spec_of(None, *files, limit=4))
    assert some.rows == whole.rows[:4]
    assert (result.rows, result.usable, everything.rows) == (4, 3, 6)
    assert result.sources == everything.sources


def test_a_seed_puts_the_same_rows_in_an_order_of_its_own(tmp_path):
    file = write_jsonl(tmp_path / "p.jsonl", [{"id": f"r{n}", **TOKENS} for n in range(50)] + [{"id": "r7", **TOKENS}])

    def order(**reading: Any) -> list[str]:
        rows = RowList()
        ingest(rows, spec_of(None, file, **reading))
        assert all(row.line == (51 if row.skipped else int(row.sample_id[1:]) + 1) for row in rows.rows)
        assert sorted(row.row for row in rows.rows) == list(range(len(rows.rows)))
        return [row.sample_id + ("!" if row.skipped else "") for row in sorted(rows.rows, key=lambda row: row.row)]

    plain, one, other = order(), order(shuffle_seed=1), order(shuffle_seed=2)
    assert plain == [f"r{n}" for n in range(50)] + ["r7!"]  # the second one in the file is the one refused
    assert sorted(one) == sorted(other) == sorted(plain)
    assert len({tuple(plain), tuple(one), tuple(other)}) == 3
    assert order(shuffle_seed=1) == one
    few = order(shuffle_seed=2, limit=10)
    assert few == other[:10]
    assert "r7!" not in few, "else its twin would be missing, and it would not be refused"


def test_the_order_of_a_seed_is_fixed_for_ever():
    assert list(drawn(8, 7)) == [5, 4, 6, 7, 0, 3, 1, 2]
    assert drawn(0, 7) == drawn(1, 7)[:0] == array("I")
    assert sorted(drawn(1000, -3)) == list(range(1000))


def test_a_file_that_grows_between_the_two_looks_is_refused(tmp_path, monkeypatch):
    file = write_jsonl(tmp_path / "p.jsonl", [TOKENS] * 3)
    rows = RowList()
    start = rows.start_ingest

    def grow(run_id: str) -> None:
        start(run_id)
        with file.open("a") as more:
            more.write(json.dumps(TOKENS) + "\n")

    monkeypatch.setattr(rows, "start_ingest", grow)
    with pytest.raises(PromptsError, match="changed while they were read"):
        ingest(rows, spec_of(None, file, shuffle_seed=1))
    assert rows.state != "finished"


# cuts and least numbers


def test_too_long_rows_are_refused_or_cut_and_never_in_silence(tmp_path):
    rows = [
        {"id": "fits", "input_ids": [1] * 20, "loss_mask": [1] * 20},
        {"id": "long", "input_ids": list(range(30)), "loss_mask": [0] * 15 + [1] * 15},
        {"id": "late", "input_ids": [1] * 30, "loss_mask": [0] * 25 + [1] * 5},
        {"id": "little", "input_ids": [1] * 30, "loss_mask": [0] * 18 + [1] * 12},
    ]
    file = write_jsonl(tmp_path / "p.jsonl", rows)
    refusing, cutting = RowList(), RowList()
    refused = ingest(refusing, spec_of(None, file, max_tokens=20))
    assert [row.skipped for row in refusing.rows] == [None, *["too_long: 30 tokens, more than 20 (--max-tokens)"] * 3]
    assert (refused.cut, refusing.found["skipped"]) == (0, {"too_long": 3})
    result = ingest(cutting, spec_of(None, file, max_tokens=20, truncate=True, min_loss_tokens=3))
    assert [row.skipped for row in cutting.rows] == [
        None,
        None,
        "no_loss_tokens: none of 20 tokens (cut from 30) counts for the loss",
        "few_loss_tokens: 2 of 20 tokens (cut from 30) count for the loss, fewer than 3",
    ]
    long = cutting.rows[1]
    assert (list(long.input_ids), long.loss_mask, long.cut_from) == (list(range(20)), (15, 5), 30)
    assert (result.cut, cutting.found["cut"], cutting.rows[0].cut_from) == (1, 1, None)


def test_a_larger_wish_than_the_servers_context_changes_nothing(tmp_path):
    file = write_jsonl(tmp_path / "p.jsonl", [TOKENS, {"input_ids": [1] * 101, "loss_mask": [1] * 101}])
    rows = RowList()
    ingest(rows, spec_of(None, file, max_tokens=5000))
    assert rows.rows[1].skipped == "too_long: 101 tokens, more than 100 (context length 107 - 7)"


def test_rows_without_loss_are_kept_on_demand(tmp_path, model):
    silent = {"messages": [{"role": "user", "content": "Hello?"}]}
    file = write_jsonl(tmp_path / "p.jsonl", [silent, {"input_ids": [1, 2], "loss_mask": [0, 0]}, TOKENS])
    kept, refused = RowList(), RowList()
    assert ingest(kept, spec_of(model, file, min_loss_tokens=0)).usable == 3
    assert [sum(row.loss_mask[1::2]) for row in kept.rows] == [0, 0, 3]
    assert ingest(refused, spec_of(model, file)).skipped == {"no_loss_tokens": 2}


# masks and templates


def test_the_method_of_each_row_is_in_the_journal_and_counted(tmp_path, model):
    migrate(tmp_path / "journal.db")
    file = write_jsonl(
        tmp_path / "p.jsonl", [talk(1, "so"), TOKENS, {"text": "x"}, {"messages": talk(3)["messages"][:2]}, b"{"]
    )
    with Journal(tmp_path / "journal.db") as journal:
        result = ingest(journal, spec_of(model, file, truncate=True, max_tokens=30))
        rows = {row["row"]: row for state in (State.PENDING, State.SKIPPED) for row in journal.rows_in(state)}
        (intake,) = journal._connection.execute("SELECT intake FROM run").fetchone()
    assert [rows[n]["mask_method"] for n in range(5)] == ["scan", "given", "whole_text", "prefix", None]
    assert rows[0]["cut_from"] > rows[0]["num_tokens"] == 30
    assert result.methods == json.loads(intake)["methods"] == {"scan": 1, "given": 1, "whole_text": 1, "prefix": 1}
    assert json.loads(intake)["cut"] == result.cut == 2


def test_last_turn_only_and_another_template_reach_the_tokenizer(tmp_path, model):
    file = write_jsonl(tmp_path / "p.jsonl", [talk(1)])
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content|trim|upper + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    (tmp_path / "t.json").write_text(json.dumps({"chat_template": template.read_text()}))
    chat = ChatTokenizer(model)
    for name in ("t.jinja", "t.json"):
        rows = RowList()
        ingest(rows, spec_of(model, file, last_turn_only=True, chat_template=str(tmp_path / name)))
        (row,) = rows.rows
        before, counted, after = row.loss_mask
        assert chat.decode(row.input_ids[before : before + counted]) == "ANSWER 1<|im_end|>"
        assert "ANSWER 1" in chat.decode(row.input_ids[:before])
        assert after == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.jinja", None, "can't be read"),
        ("t.jinja", "  ", "is empty"),
        ("t.jinja", "{% for %}", "no Jinja"),
        ("t.json", '{"template": 1}', "no `chat_template`"),
    ],
)
def test_a_template_file_that_can_not_be_used_is_named(tmp_path, model, name, text, message):
    file = write_jsonl(tmp_path / "p.jsonl", [talk(1)])
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(PromptsError, match=message) as caught:
        ingest(RowList(), spec_of(model, file, chat_template=str(tmp_path / name)))
    assert name in caught.value.message
    assert caught.value.remedy


def test_a_tokenizer_of_the_folders_own_code_needs_trust(tmp_path, model):
    folder = make_family(tmp_path / "m", "qwen3")
    (folder / "tokenization_own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n"
        "    def apply_chat_template(self, conversation, **options):\n"
        "        kind = [m | {'content': m['content'].replace('question', 'Please:')} for m in conversation]\n"
        "        return super().apply_chat_template(kind, **options)\n"
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "unheard_of"}')
    file = write_jsonl(tmp_path / "p.jsonl", [talk(3)])
    with pytest.raises(PromptsError, match="contains custom code") as caught:
        ingest(RowList(), spec_of(folder, file))
    assert "--trust-remote-code" in str(caught.value.remedy)
    rows = RowList()
    ingest(rows, spec_of(folder, file, trust_remote_code=True))
    assert "user\nPlease: 3<|im_end|>" in ChatTokenizer(model).decode(rows.rows[0].input_ids)


# several processes


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(pool, "PIECE_ROWS", 3)


def test_several_processes_enter_the_same_rows_in_the_same_order(tmp_path, model, small_pieces):
    files = [write_jsonl(tmp_path / f"{n}.jsonl", mixed(60)) for n in range(2)]
    alone, together = RowList(), RowList()
    one = ingest(alone, spec_of(model, *files, truncate=True, shuffle_seed=5))
    three = ingest(together, spec_of(model, *files, truncate=True, shuffle_seed=5, processes=3))
    assert together.rows == alone.rows
    assert three == one
    assert not leftovers()


def leftovers() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if any("encoder_child" in word for word in p.cmdline())]


def test_what_no_row_can_do_without_is_said_by_a_child_as_by_the_parent(tmp_path, small_pieces):
    bare = make_family(tmp_path / "m", "qwen3")
    (bare / "chat_template.jinja").unlink()
    file = write_jsonl(tmp_path / "p.jsonl", [talk(n) for n in range(20)])
    said = []
    for processes in (1, 2):
        rows = RowList()
        with pytest.raises(PromptsError) as caught:
            ingest(rows, spec_of(bare, file, processes=processes))
        assert rows.state == "started"
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "no chat template" in said[0]
    assert not leftovers()


def test_a_child_that_is_killed_ends_the_ingestion_in_words(tmp_path, model, small_pieces):
    file = write_jsonl(tmp_path / "p.jsonl", mixed(3000))
    killed = threading.Event()

    def kill() -> None:
        while not killed.is_set():
            for child in leftovers():
                child.send_signal(signal.SIGKILL)
                killed.set()
            time.sleep(0.02)

    thread = threading.Thread(target=kill)
    thread.start()
    rows = RowList()
    try:
        with pytest.raises(HsjournalError, match="was ended") as caught:
            ingest(rows, spec_of(model, file, processes=2))
    finally:
        killed.set()
        thread.join()
    assert "--tokenize-processes 1" in str(caught.value.remedy)
    assert rows.state == "started"
    assert not leftovers()


def test_children_end_with_the_process_that_started_them(tmp_path, model):
    file = write_jsonl(tmp_path / "p.jsonl", [talk(n) | {"id": n} for n in range(60_000)])
    migrate(tmp_path / "journal.db")
    spec = IngestSpec(
        run_id="abcd",
        files=(str(file),),
        model_dir=str(model),
        max_tokens=107,
        journal=str(tmp_path / "journal.db"),
        processes=2,
    )
    parent = subprocess.Popen(
        [sys.executable, "-m", "hsjournal.prompts.ingest", spec.to_json()], stdout=subprocess.DEVNULL, env=os.environ
    )
    try:
        deadline = time.monotonic() + 60
        while len(children := psutil.Process(parent.pid).children()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    with Journal(tmp_path / "journal.db") as journal:
        assert not journal.is_ingested
