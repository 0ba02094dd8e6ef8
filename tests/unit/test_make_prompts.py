"""The demo's prompts: real text, the same each time, in the shapes that people bring."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/make_prompts.py"


def make(path: Path, *options: str) -> list[dict[str, Any]]:
    subprocess.run([sys.executable, SCRIPT, path, *options], check=True, timeout=60)
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return make(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


def test_at_least_sixty_good_rows_and_two_to_refuse(rows: list[dict[str, Any]]):
    good, refused = rows[:-2], rows[-2:]
    assert len(good) >= 60
    assert [row["id"] for row in refused] == ["no turns", "a picture"]
    for row in good:
        texts = [turn.get("content") or turn.get("value") for turn in row["conversations"]]
        assert all(isinstance(text, str) and text.strip() for text in texts), row["id"]
        assert sum(map(len, texts)) < 4000


def test_ids_are_distinct_and_some_are_awkward(rows: list[dict[str, Any]]):
    ids = [row["id"] for row in rows]
    assert len(set(ids)) == len(ids)
    assert {"../../etc/passwd", "Case", "case", "CON", "x" * 300} <= set(ids)


def test_has_both_shapes_and_several_turns(rows: list[dict[str, Any]]):
    turns = [row["conversations"] for row in rows[:-2]]
    assert sum("from" in one[0] for one in turns) > 10
    assert sum("role" in one[0] for one in turns) > 10
    assert sum(len(one) >= 4 for one in turns) > 10


def test_answers_alternate_with_questions(rows: list[dict[str, Any]]):
    for row in rows[:-2]:
        who = [turn.get("role") or turn["from"] for turn in row["conversations"]]
        who = [name for name in who if name != "system"]
        assert len(who) % 2 == 0
        assert set(who[::2]) <= {"user", "human"}
        assert set(who[1::2]) <= {"assistant", "gpt"}


def test_the_same_file_each_time_and_untouched_when_there(tmp_path: Path):
    first = tmp_path / "a.jsonl"
    make(first)
    make(tmp_path / "b.jsonl")
    assert first.read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    before = first.stat()
    make(first)
    assert (first.stat().st_ino, first.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_number_and_length_can_be_chosen(tmp_path: Path):
    rows = make(tmp_path / "few.jsonl", "--rows", "5", "--chars", "200")
    assert len(rows) == 7
    assert all(
        len(turn.get("content") or turn.get("value")) <= 200 for row in rows[:5] for turn in row["conversations"]
    )
