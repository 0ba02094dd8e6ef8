"""Parquet files, dataset folders and compressed lines: the same rows as the plain lines, and what is refused as a whole."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from hsjournal.errors import PromptsError
from hsjournal.prompts import tables
from hsjournal.prompts.readers import Source
from hsjournal.prompts.records import Conversation, parse_record
from hsjournal.prompts.refusal import RowRefusedError
from hsjournal.prompts.sources import expand, open_sources, source_of

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ROWS: list[dict[str, Any]] = [
    {
        "id": "one",
        "messages": [{"role": "user", "content": "Hi\u2028?"}, {"role": "assistant", "content": "Ja, 你好."}],
    },
    {
        "id": "two",
        "messages": [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "Two."},
        ],
    },
    {"id": None, "messages": []},
]


def table(**more: Any) -> pa.Table:
    return pa.Table.from_pylist([row | {k: v[n] for k, v in more.items()} for n, row in enumerate(ROWS)])


def save_to_disk(folder: Path, data: pa.Table, pieces: int = 2, **state: Any) -> Path:
    """As ``datasets.Dataset.save_to_disk``: Arrow streams, state.json, dataset_info.json."""
    folder.mkdir(parents=True)
    names = [f"data-{n:05d}-of-{pieces:05d}.arrow" for n in range(pieces)]
    step = -(-data.num_rows // pieces)
    for n, name in enumerate(names):
        part = data.slice(n * step, step)
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, part.schema) as writer:
            writer.write_table(part)
    files = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(files | state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def read(source: Source) -> list[dict[str, Any] | str]:
    found: list[dict[str, Any] | str] = []
    for number, line in enumerate(source, 1):
        assert line.number == number
        try:
            found.append(line.parse())
        except RowRefusedError as error:
            found.append(str(error))
    return found


def only(path: Path) -> Source:
    (source,) = open_sources([str(path)])
    return source


def make(kind: str, tmp_path: Path) -> Path:
    data = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in ROWS)
    path = tmp_path / f"p.{kind}"
    if kind == "jsonl":
        path.write_bytes(data)
    elif kind == "gz":  # two members, as `cat a.gz b.gz` makes them
        path.write_bytes(gzip.compress(data[:50]) + gzip.compress(data[50:]))
    elif kind == "zst":
        path.write_bytes(pa.compress(data[:70], "zstd", asbytes=True) + pa.compress(data[70:], "zstd", asbytes=True))
    elif kind == "parquet":
        parquet.write_table(table(extra=[b"\xff", b"", b"x"]), path, row_group_size=2)
    else:
        save_to_disk(path, table(extra=[1.5, float("nan"), None]))
    return path


KINDS = ("jsonl", "gz", "zst", "parquet", "folder")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_records(tmp_path, kind):
    source = only(make(kind, tmp_path))
    rows = read(source)
    assert len(rows) == source.count() == 3
    first, second = (parse_record(row) for row in rows[:2] if isinstance(row, dict))
    assert first == parse_record(ROWS[0])
    assert isinstance(second, Conversation)
    assert second.turns[1]["tool_calls"] == [CALL]  # no nulls from other rows' columns
    assert [turn["role"] for turn in second.turns] == ["user", "assistant", "tool", "assistant"]
    assert isinstance(rows[2], dict)
    assert rows[2].get("id") is None
    assert source.bytes_read == source.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_the_identity_is_of_the_stored_bytes_and_the_same_by_both_ways(tmp_path, kind):
    path = make(kind, tmp_path)
    source = only(path)
    read(source)
    assert source.identity() == source_of(path)
    before = source_of(path)
    if kind != "folder":
        assert before.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        path.write_bytes(path.read_bytes() + b"\n")
    else:
        name = path / "data-00001-of-00002.arrow"
        name.write_bytes(name.read_bytes() + b"\0")
    assert source_of(path).sha256 != before.sha256


def test_an_arrow_file_in_a_folder_is_read_as_well_as_a_stream(tmp_path):
    folder = save_to_disk(tmp_path / "d", table(), pieces=1)
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table().schema) as out,
    ):
        out.write_table(table())
    assert len(read(only(folder))) == 3


def test_a_text_that_is_not_utf8_refuses_its_row_alone(tmp_path):
    texts = pa.array([b"good", b"bad \xff", b"fine"], pa.binary()).view(pa.string())
    path = tmp_path / "p.parquet"
    parquet.write_table(pa.table({"text": texts}), path)
    assert read(only(path)) == [
        {"text": "good"},
        "broken_unicode: not UTF-8: invalid start byte at byte 5 of a text",
        {"text": "fine"},
    ]


def test_tables_are_read_a_few_rows_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "BATCH_ROWS", 3)
    many = pa.table({"text": [f"t{n}" for n in range(10)]})
    parquet.write_table(many, tmp_path / "p.parquet")
    for path in (tmp_path / "p.parquet", save_to_disk(tmp_path / "d", many)):
        source = only(path)
        seen = [source.bytes_read for _ in source]
        assert len(seen) == 10
        assert seen == sorted(set(seen)), "progress moves with every row"


def test_a_table_without_a_known_column_has_rows_that_say_so(tmp_path):
    parquet.write_table(pa.table({"prompt": ["x"], "answer": ["y"]}), tmp_path / "p.parquet")
    (row,) = read(only(tmp_path / "p.parquet"))
    assert isinstance(row, dict)
    with pytest.raises(RowRefusedError, match="unknown_shape"):
        parse_record(row)


def test_a_table_that_changes_while_it_is_read_is_refused(tmp_path):
    path = make("parquet", tmp_path)
    lines = iter(only(path))
    next(lines)
    path.touch()
    with pytest.raises(PromptsError, match="changed while it was read"):
        list(lines)


@pytest.mark.parametrize("kind", ["gz", "zst", "parquet", "folder"])
def test_a_file_cut_short_ends_with_its_name_and_a_remedy(tmp_path, kind):
    path = make(kind, tmp_path)
    target = path / "data-00000-of-00002.arrow" if kind == "folder" else path
    target.write_bytes(target.read_bytes()[: -20 if kind != "zst" else -8])
    with pytest.raises(PromptsError) as caught:
        read(only(path))
    assert str(path) in caught.value.message
    assert caught.value.remedy


def test_folders_that_are_no_whole_dataset_are_refused_with_what_to_do(tmp_path):
    two = tmp_path / "two"
    for split in ("train", "test"):
        save_to_disk(two / split, table())
    (two / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    chosen = save_to_disk(tmp_path / "chosen", table(), _indices_data_files=[{"filename": "indices.arrow"}])
    outside = save_to_disk(tmp_path / "outside", table(), _data_files=[{"filename": "../../etc/passwd"}])
    broken = save_to_disk(tmp_path / "broken", table())
    (broken / "state.json").write_text("{")
    for folder, message, remedy in [
        (two, "holds 2 splits (test, train)", f"--prompts {two / 'test'}"),
        (chosen, "a selection of rows", "flatten_indices"),
        (outside, "outside the folder", "again"),
        (broken, "is not what save_to_disk writes", "again"),
        (tmp_path, "is a folder, and no dataset", f"{tmp_path}/*.parquet"),
    ]:
        with pytest.raises(PromptsError) as caught:
            open_sources([str(folder)])
        assert message in caught.value.message
        assert remedy in str(caught.value.remedy)
    one = tmp_path / "one"
    save_to_disk(one / "train", table())
    (one / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert len(read(only(one))) == 3


@pytest.mark.parametrize("kind", ["zst", "parquet", "folder"])
def test_without_pyarrow_the_package_is_named(tmp_path, monkeypatch, kind):
    path = make(kind, tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(PromptsError, match="needs the package pyarrow") as caught:
        open_sources([str(path)])
    assert "hsjournal[parquet]" in str(caught.value.remedy)
    assert len(read(only(make("gz", tmp_path)))) == 3  # gzip needs nothing


def test_patterns_are_expanded_in_order_and_one_that_matches_nothing_is_refused(tmp_path):
    for name in ("b/2.jsonl", "b/10.jsonl", "a.jsonl", "[x].jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    root = str(tmp_path)
    assert expand([f"{root}/b/*.jsonl", f"{root}/a.jsonl"]) == [
        f"{root}/b/10.jsonl",
        f"{root}/b/2.jsonl",
        f"{root}/a.jsonl",
    ]
    assert expand([f"{root}/**/*.jsonl"])[-1] == f"{root}/b/2.jsonl"
    assert expand([f"{root}/[x].jsonl"]) == [f"{root}/[x].jsonl"]  # a file of that very name
    assert expand([f"{root}/missing.jsonl"]) == [f"{root}/missing.jsonl"]  # refused by who opens it
    with pytest.raises(PromptsError, match="nothing matches"):
        expand([f"{root}/*.csv"])
