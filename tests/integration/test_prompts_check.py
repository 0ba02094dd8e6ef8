"""``prompts check`` and the options that say how prompts are read, through the command line."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from hsjournal.config import Manifest, RunPaths
from hsjournal.prompts.refusal import Refusal
from tests.helpers.cli import REPOSITORY, hsjournal
from tests.helpers.prompts import write_jsonl
from tests.helpers.templates import make_family
from tests.helpers.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_family(tmp_path_factory.mktemp("model"), "qwen3")
    config = {
        "text_config": {"hidden_size": 7168, "vocab_size": 2000, "max_position_embeddings": 107, "dtype": "bfloat16"}
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def talk(n: int) -> dict[str, Any]:
    ask = {"role": "user", "content": f"question {n}"}
    return {"id": f"t{n}", "messages": [ask, {"role": "assistant", "content": f"answer {n}"}]}


def test_all_that_a_run_would_make_of_them(tmp_path, model):
    rows: list[dict[str, Any] | bytes] = [*(talk(n) for n in range(8)), b"{broken", talk(9) | {"images": ["x"]}]
    rows.append({"id": "long", "input_ids": [1500] * 101, "loss_mask": [1] * 101})
    write_jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps(talk(20)).encode()))
    result = hsjournal("prompts", "check", tmp_path / "*.jsonl*", "--model", model, "--tokens-per-s", "5")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "rows       12: 9 usable, 3 refused"
    assert lines[2] == "masks by   prefix 9"
    assert "count for the loss" in lines[1]
    tokens = int(re.findall(r"tokens +(\d+)", lines[1])[0])
    (expected,) = [line for line in lines if line.startswith("expected")]
    seconds = round(tokens / 5)
    shown = f"{seconds} s" if seconds < 60 else f"{seconds // 60} min {seconds % 60:02d} s"
    assert f"(3 aux layers + final, 7,168 wide, bfloat16), {shown} at 5 tokens/s" in expected
    assert f"{tokens * 4 * 7168 * 2 / 1e6:,.0f}"[:2] in expected
    assert [line for line in lines if line.startswith("refused")] == [
        "refused    a.jsonl:9: broken_json: Expecting property name enclosed in double quotes at character 2",
        "refused    a.jsonl:10 (t9): multimodal: the row has images; only text is extracted",
        "refused    a.jsonl:11 (long): too_long: 101 tokens, more than 100 (context length 107 - 7)",
    ]
    samples = result.out.split("\n--- ")[1:]
    assert len(samples) == 5
    for sample in samples:
        (number,) = set(re.findall(r"question (\d+)", sample))
        assert f"<|im_start|>assistant\n[[<think>\n\n</think>\n\nanswer {number}<|im_end|>]]\n" in sample
    assert sum(int(line.split()[3]) for line in lines if re.match(r" +\d+ - +\d+ ", line)) == 9
    assert "\x1b" not in result.out


def test_as_json_every_refused_line_is_listed_and_a_cut_row_is_counted(tmp_path, model):
    words = "word " * 600
    ask, answer = {"role": "user", "content": "Say it."}, {"role": "assistant", "content": words}
    file = write_jsonl(tmp_path / "p.jsonl", [{"messages": [ask, answer]}, *[b"{"] * 40])
    result = hsjournal(
        "prompts", "check", file, "--model", model, "--json", "--max-tokens", "2000", "--truncate", "--samples", "1"
    )
    found = result.json()
    assert (result.code, found["version"], found["result"]["cut"], len(found["refused"])) == (0, 1, 1, 40)
    assert found["refused"][0]["line"] == 2
    (sample,) = found["shown"]
    (before, _), (counts, shown), *_ = sample["pieces"]
    assert (before, counts) == (False, True)
    assert shown.count("word") > 10
    assert sample["tokens"] == 100  # of a context of 107


def test_colours_on_a_terminal_and_brackets_under_no_color(tmp_path, model):
    file = write_jsonl(tmp_path / "p.jsonl", [talk(1)])

    def on_a_terminal(**environment: str) -> str:
        ours, theirs = pty.openpty()
        command = [
            sys.executable,
            "-m",
            "hsjournal.cli.main",
            "prompts",
            "check",
            str(file),
            "--model",
            str(model),
            "--quiet",
        ]
        kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "CI")}
        with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=kept | environment, cwd=REPOSITORY) as child:
            os.close(theirs)
            pieces = []
            try:
                while piece := os.read(ours, 4096):
                    pieces.append(piece)
            except OSError:
                pass  # how Linux says that the other end is closed
        os.close(ours)
        assert child.returncode == 0
        return b"".join(pieces).decode()

    assert "\x1b[1;32m<think>" in on_a_terminal()
    plain = on_a_terminal(NO_COLOR="1")
    assert "[[<think>" in plain
    assert "\x1b" not in plain


def test_without_a_usable_line_all_reasons_are_shown_and_the_exit_code_is_2(tmp_path, model):
    file = write_jsonl(tmp_path / "p.jsonl", [b"{", {"x": 1}])
    result = hsjournal("prompts", "check", file, "--model", model)
    assert result.code == 2
    assert "p.jsonl:2: unknown_shape" in result.out
    assert "none of the 2 lines" in result.err
    assert "Traceback" not in result.err


def test_token_ids_need_no_model(tmp_path):
    file = write_jsonl(tmp_path / "p.jsonl", [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}])
    result = hsjournal("prompts", "check", file)
    assert result.code == 0
    assert "5 [[6 7 ]]" in result.out


# a whole run


def test_a_run_over_a_table_with_options_that_are_frozen(tmp_path, monkeypatch):
    monkeypatch.setenv("HSJOURNAL_SHM", str(tmp_path))
    tiny = make_tiny_model("llama", tmp_path / "tiny")
    rows = [talk(n) for n in range(12)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )
    run = tmp_path / "run"
    asked = ["--prompts", str(tmp_path / "*.parquet"), "--model", str(tiny), "--plain"]
    reading = ["--limit", "6", "--shuffle-seed", "3", "--chat-template", str(template), "--max-tokens", "60"]
    first = hsjournal("run", run, *asked, *reading)
    assert first.code == 0, first
    assert "loss masks found by: 6 scan" in first.out
    manifest = Manifest.load(RunPaths.of(run).manifest)
    kept = {name: value for name, value in manifest.options.items() if name.startswith("prompts.")}
    assert set(kept) == {"prompts.limit", "prompts.shuffle_seed", "prompts.chat_template", "prompts.max_tokens"}
    status = hsjournal("status", run, "--json").json()
    assert status["prompts"]["methods"] == {"scan": 6}
    assert status["counts"]["verified"]["rows"] == 6
    assert "masks by scan 6" in hsjournal("status", run).out
    assert hsjournal("report", run, "--to", tmp_path / "page.html").code == 0
    assert "loss mask by scan" in (tmp_path / "page.html").read_text()
    assert hsjournal("run", run, *asked, *reading).code == 0  # the same again is no drift
    assert hsjournal("run", run, *asked).code == 0  # and nothing said is none either
    template.write_text(template.read_text() + " ")
    others = [
        "--limit",
        "7",
        "--truncate",
        "--min-loss-tokens",
        "2",
        "--shuffle-seed",
        "4",
        "--chat-template",
        str(template),
    ]
    refused = hsjournal("run", run, *asked, *others)
    assert refused.code == 2
    for words in (
        "--limit: the run was made with 6, now asked is 7",
        "--truncate: the run was made with false, now asked is true",
        "--min-loss-tokens: the run was made with 1, now asked is 2",
        "--shuffle-seed: the run was made with 3, now asked is 4",
        "--chat-template: the run was made with",
    ):
        assert words in refused.err


# what the README says


def test_the_readme_has_every_reason():
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("| a row with") : readme.index("\n\n", readme.index("| a row with"))]
    assert set(re.findall(r"`([a-z_]+)`", table)) >= {reason.value for reason in Refusal}


def test_the_readme_has_every_option():
    readme = Path(REPOSITORY / "README.md").read_text(encoding="utf-8")
    for option in (
        "max-tokens",
        "truncate",
        "last-turn-only",
        "min-loss-tokens",
        "limit",
        "shuffle-seed",
        "chat-template",
        "trust-remote-code",
    ):
        assert f"--{option}" in readme
